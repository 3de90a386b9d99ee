"""Who runs the ranks: threads of one process."""
