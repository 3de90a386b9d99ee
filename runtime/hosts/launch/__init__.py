"""Processes that serve a run: started, watched and ended, on this host and on others."""
