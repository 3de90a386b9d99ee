"""Answers without simulation: closed forms."""
