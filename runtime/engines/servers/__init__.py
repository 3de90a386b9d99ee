"""Processes that others ask: embedding servers, the dense server, loaders; and who starts them."""
