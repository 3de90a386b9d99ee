"""A one-table store seen through lists of ids and one gradient for all elements of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.checkpoint.rows import take
from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.batch_rows import Handle
from runtime.embedding.config import TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.store import EmbeddingStore, TableSnapshot

LAYOUT = Layout(fields=(Field(name="a"),))


def batch_of(ids: Sequence[int] | np.ndarray) -> Batch:
    column = np.asarray(ids, np.uint64)
    size = len(column)
    return Batch(column, None, np.zeros((size, 0), np.float32), np.zeros((size, 1), np.float32))


class OneTable:
    def __init__(self, shards: int = 1, seed: int = 0, **config: Any) -> None:
        self.config = TableConfig(**config)
        self.store = NativeStore(LAYOUT, [self.config], shards=shards, seed=seed)

    def look_up(
        self, ids: Sequence[int] | np.ndarray, step: int = 0, create: bool = True
    ) -> Handle:
        handle = self.store.begin(0, step, batch_of(ids))
        for shard in range(self.store.shards):
            self.store.servers[shard].read(handle, create=create)
        return handle

    def push(self, handle: Handle, gradient: float | np.ndarray = 1.0) -> None:
        values = handle.values["rows"]
        gradients = np.broadcast_to(np.asarray(gradient, values.dtype), values.shape)
        for shard in range(self.store.shards):
            self.store.servers[shard].updates = handle.step  # as if all earlier steps were here
            self.store.servers[shard].apply([(handle, {"rows": np.ascontiguousarray(gradients)})])

    def values(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rows as evaluation sees them, in the order of ``ids``."""
        handle = self.store.peek(batch_of(ids))
        rows: np.ndarray = handle.values["rows"][handle.plans["rows"].inverse]
        return rows

    def resident(self) -> set[int]:
        return {int(i) for i in self.store.export()["rows"][0]}


def collected(store: NativeStore) -> list[dict[str, TableSnapshot]]:
    """Per shard and table what was frozen."""
    return [server.rows.collect() for server in store.servers]


def snapshots(store: NativeStore) -> list[dict[str, TableSnapshot]]:
    """Freeze and collect at once."""
    store.freeze_snapshots()
    return collected(store)


def save(store: EmbeddingStore, path: Path) -> None:
    """Take the rows and write them."""
    take(store).write(path)


@pytest.fixture
def one_table() -> type[OneTable]:
    return OneTable
