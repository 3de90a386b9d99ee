"""One training run: from its config to its figures, and the folder that it leaves."""
