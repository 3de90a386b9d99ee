"""One module a study: it runs points, prints a table, draws a figure."""
