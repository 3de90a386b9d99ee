"""Dense networks: (dense features, embeddings) -> one logit per task."""
