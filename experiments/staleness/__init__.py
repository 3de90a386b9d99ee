"""What late rows do, measured: against the convergence bound, by frequency of ids, as drift."""
