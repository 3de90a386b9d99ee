"""Faults for real: processes that are killed, and what is left of their run."""
