"""Carrying out a given order of reads and writes: constant lag, recorded, or simulated."""
