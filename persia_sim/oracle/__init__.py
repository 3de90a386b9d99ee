"""Answers without simulation: a max-plus recursion and closed forms."""
