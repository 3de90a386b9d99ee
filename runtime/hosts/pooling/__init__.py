"""Embedding workers that are processes: the ranks' end of the conversation and the worker's."""
