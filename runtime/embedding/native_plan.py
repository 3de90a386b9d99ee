"""Which distinct rows a batch needs, found by the native hash de-duplication.

The distinct ids of a shard stand in the order of first appearance in the batch: that is the order
in which a lookup uses them, so it decides what a full table evicts, for any number of shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.embedding.extension import native
from runtime.embedding.plan import TablePlan


def plan_natively(
    batch: Batch, fields: Sequence[Field], tables: Sequence[str], shards: int
) -> dict[str, TablePlan]:
    """As `runtime.embedding.plan.plan_tables`, with int32 inverses."""
    if len(tables) == 1:
        return {tables[0]: _plan(batch.ids, slice(None), shards)}
    table_of_id = _table_of_id(batch, [tables.index(f.table) for f in fields])
    plans = {}
    for number, name in enumerate(tables):
        where = np.flatnonzero(table_of_id == number)
        plans[name] = _plan(batch.ids[where], where, shards)
    return plans


def _table_of_id(batch: Batch, table_of_field: list[int]) -> np.ndarray:
    bag_count = len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1
    table_of_bag = np.tile(np.array(table_of_field, np.int16), bag_count // len(table_of_field))
    if batch.offsets is None:
        return table_of_bag
    return np.repeat(table_of_bag, np.diff(batch.offsets))


def _plan(ids: np.ndarray, occurrences: np.ndarray | slice, shards: int) -> TablePlan:
    inverse = np.empty(len(ids), np.int32)
    distinct, bounds = native.plan(np.ascontiguousarray(ids), shards, inverse)
    return TablePlan(distinct, bounds, inverse, occurrences)
