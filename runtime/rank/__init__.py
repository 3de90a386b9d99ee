"""What one rank does with a batch: load, look up, train, push."""
