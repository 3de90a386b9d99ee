"""Figures from tables: CSV in, matplotlib figure out; imports none of the other packages."""
