"""The store in numpy: the oracle, file by file beside `native`."""
