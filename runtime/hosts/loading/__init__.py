"""Loaders that are processes: the end that trains, and the end that reads and parses."""
