"""Second ways to the same answers, which only tests ask."""
