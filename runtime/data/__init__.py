"""Batches of clicks: from files through a schema, or from the synthetic stream."""
