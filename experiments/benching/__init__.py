"""Speeds as ratios of interleaved runs, with the machine's load beside them."""
