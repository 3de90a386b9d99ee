"""What can be proved of training with late rows, as pure functions."""
