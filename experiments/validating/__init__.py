"""Predictions of runs on this host: from laws of its stages, through the simulator's schedule."""
