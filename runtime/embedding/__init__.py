"""Embedding servers and workers in one process: rows, their optimisers, lookup, pooling, push."""
