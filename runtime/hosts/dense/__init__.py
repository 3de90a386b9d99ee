"""Dense weights of ranks that are processes: all-reduced, averaged, or served by rank 0."""
