"""Rows and optimiser state on disk: atomic, checksummed."""
