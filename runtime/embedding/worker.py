"""The two halves of a step at the embedding worker, one call each."""

from __future__ import annotations

from runtime.data.batch import Batch
from runtime.embedding.reference.pooling import Pooling
from runtime.embedding.sharded import EmbeddingStore
from runtime.embedding.store import FieldVectors, Handle


def look_up(
    store: EmbeddingStore, pooling: Pooling, rank: int, step: int, batch: Batch
) -> tuple[Handle, FieldVectors]:
    """Ids of a batch -> distinct ids -> rows -> pooled vectors; the handle is for the push."""
    handle = store.begin(rank, step, batch)
    for shard in range(store.shards):
        store.read(handle, shard)
    return handle, pooling.forward(batch, handle.plans, handle.values)


def push(store: EmbeddingStore, pooling: Pooling, handle: Handle, gradients: FieldVectors) -> None:
    """Gradients of the pooled vectors -> gradients of rows -> one optimiser step on each."""
    rows = pooling.backward(handle.batch, handle.plans, gradients)
    for shard in range(store.shards):
        store.push(shard, [(handle, rows)])
