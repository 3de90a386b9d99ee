"""Which distinct rows a batch needs, found by the native hash de-duplication.

The distinct ids of a shard stand in the order of first appearance in the batch: that is the order
in which a lookup uses them, so it decides what a full table evicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.data.ids import VALUE_BITS, mix64
from runtime.embedding.config import TableConfig
from runtime.embedding.features import HashStack
from runtime.embedding.native.extension import native
from runtime.embedding.store import BatchPlan

_VALUE_MASK = np.uint64(2**VALUE_BITS - 1)
_NO_OFFSETS = np.empty(0, np.int64)


class Planner:
    """Merges the duplicates of batches within each table, and splits distinct ids by shard."""

    def __init__(self, fields: Sequence[Field], tables: Iterable[TableConfig], shards: int) -> None:
        every = list(tables)
        self._numbers = {table.name: number for number, table in enumerate(every)}
        self._dims, self._shards = np.array([t.dim for t in every]), shards
        self._shapes = [
            (t.dim, t.share_rows, t.hash_stack.rounds, t.hash_stack.rows_per_round) for t in every
        ]
        self._table_of_field = np.array([self._numbers[f.table] for f in fields], np.int32)

    def plan(self, batch: Batch) -> BatchPlan:
        """The inverse of a table with a hash stack has one entry for each round of each
        occurrence."""
        found = native.plan_tables(
            np.ascontiguousarray(batch.ids),
            _NO_OFFSETS if batch.offsets is None else batch.offsets,
            self._table_of_field,
            self._shapes,
            int(_VALUE_MASK),
            self._shards,
        )
        return BatchPlan(self._numbers, self._dims, *found, 0 if self._shards == 1 else None)


def stacked(ids: np.ndarray, stack: HashStack) -> np.ndarray:
    """uint64 [N * rounds]: the rows that each id is made of, in the order of rounds.

    The field's number stays in the top bits, so every field has a small table of its own.
    """
    rows = np.uint64(stack.rows_per_round)
    parts = np.empty((len(ids), stack.rounds), np.uint64)
    hashes = ids
    for number in range(stack.rounds):
        hashes = mix64(hashes + np.uint64(1))
        parts[:, number] = (ids & ~_VALUE_MASK) | (hashes % rows + np.uint64(number) * rows)
    return parts.ravel()
