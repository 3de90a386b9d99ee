"""What late rows do, measured against the convergence bound; how often ids occur."""
