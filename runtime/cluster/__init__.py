"""Runs on a Ray cluster: who is placed where, and who starts again what dies."""
