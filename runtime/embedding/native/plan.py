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
from runtime.embedding.native.buffers import empty
from runtime.embedding.native.extension import native
from runtime.embedding.store import TablePlan

_VALUE_MASK = np.uint64(2**VALUE_BITS - 1)


def plan_natively(
    batch: Batch, fields: Sequence[Field], tables: Sequence[TableConfig], shards: int
) -> dict[str, TablePlan]:
    """As `runtime.embedding.reference.plan.plan_tables`, with int32 inverses.

    The inverse of a table with a hash stack has one entry for each round of each occurrence.
    """
    if len(tables) == 1:
        return {tables[0].name: _plan(batch.ids, slice(None), tables[0], shards)}
    names = [table.name for table in tables]
    table_of_id = _table_of_id(batch, [names.index(f.table) for f in fields])
    plans = {}
    for number, table in enumerate(tables):
        where = np.flatnonzero(table_of_id == number)
        plans[table.name] = _plan(batch.ids[where], where, table, shards)
    return plans


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


def _table_of_id(batch: Batch, table_of_field: list[int]) -> np.ndarray:
    bag_count = len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1
    table_of_bag = np.tile(np.array(table_of_field, np.int16), bag_count // len(table_of_field))
    if batch.offsets is None:
        return table_of_bag
    return np.repeat(table_of_bag, np.diff(batch.offsets))


def _plan(
    ids: np.ndarray, occurrences: np.ndarray | slice, table: TableConfig, shards: int
) -> TablePlan:
    if table.share_rows:
        ids = ids & _VALUE_MASK
    if table.hash_stack.rounds:
        ids = stacked(ids, table.hash_stack)
    inverse = empty((len(ids),), "int32")
    distinct, bounds = native.plan(np.ascontiguousarray(ids), shards, inverse)
    return TablePlan(distinct, bounds, inverse, occurrences)
