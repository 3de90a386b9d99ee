"""Rows of embedding servers that are processes: the ranks' end and the server's."""
