"""Which distinct rows a batch needs, found by the native hash de-duplication.

The distinct ids of a shard stand in the order of first appearance in the batch: that is the order
in which a lookup uses them, so it decides what a full table evicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.data.ids import VALUE_BITS, mix64
from runtime.embedding.config import TableConfig
from runtime.embedding.features import HashStack
from runtime.embedding.native.extension import native
from runtime.embedding.store import TablePlan

_VALUE_MASK = np.uint64(2**VALUE_BITS - 1)
_NO_OFFSETS = np.empty(0, np.int64)


def plan_natively(
    batch: Batch, fields: Sequence[Field], tables: Sequence[TableConfig], shards: int
) -> dict[str, TablePlan]:
    """Per table, duplicates merged and split by shard.

    The inverse of a table with a hash stack has one entry for each round of each occurrence.
    """
    names = [table.name for table in tables]
    shapes = [
        (
            t.share_rows,
            t.hash_stack.rounds,
            t.hash_stack.rows_per_round if t.hash_stack.rounds else 1,
        )
        for t in tables
    ]
    parts = native.plan_tables(
        np.ascontiguousarray(batch.ids),
        _NO_OFFSETS if batch.offsets is None else batch.offsets,
        np.array([names.index(field.table) for field in fields], np.int32),
        shapes,
        int(_VALUE_MASK),
        shards,
    )
    whole = len(tables) == 1
    return {
        name: TablePlan(ids, bounds, inverse, slice(None) if whole else occurrences)
        for name, (ids, bounds, inverse, occurrences) in zip(names, parts, strict=True)
    }


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
