"""Data before a run: download them, guess their schema, hold them against it."""
