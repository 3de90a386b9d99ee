"""The connection between two processes: whole messages, each once and in order."""
