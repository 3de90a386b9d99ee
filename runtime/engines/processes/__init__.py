"""Embedding servers as processes of one host: rows travel through shared memory."""
