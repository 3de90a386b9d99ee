"""What lateness costs, measured fairly: data sets, rates tuned per mode, the table, decisions."""
