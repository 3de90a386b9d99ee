"""Trained models put to use: evaluated again, and exported."""
