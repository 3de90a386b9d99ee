"""Which distinct rows a batch needs, by table and by shard: the pure part of a lookup."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.embedding.shard import shard_of
from runtime.embedding.store import TablePlan


def plan_tables(
    batch: Batch, fields: Sequence[Field], tables: Sequence[str], shards: int
) -> dict[str, TablePlan]:
    """Merge duplicates and split by shard, for each table."""
    if len(tables) == 1:
        return {tables[0]: _plan(batch.ids, slice(None), shards)}
    table_of_field = np.array([tables.index(f.table) for f in fields])
    bag_count = len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1
    table_of_id = np.tile(table_of_field, bag_count // len(fields))
    if batch.offsets is not None:
        table_of_id = np.repeat(table_of_id, np.diff(batch.offsets))
    plans = {}
    for number, name in enumerate(tables):
        where = np.flatnonzero(table_of_id == number)
        plans[name] = _plan(batch.ids[where], where, shards)
    return plans


def _plan(ids: np.ndarray, occurrences: np.ndarray | slice, shards: int) -> TablePlan:
    distinct, inverse = np.unique(ids, return_inverse=True)
    if shards == 1:
        return TablePlan(distinct, np.array([0, len(distinct)]), inverse, occurrences)
    shard = shard_of(distinct, shards)
    order = np.argsort(shard, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    bounds = np.searchsorted(shard[order], np.arange(shards + 1))
    return TablePlan(distinct[order], bounds, place[inverse], occurrences)
