"""The reference store: rows in numpy, the oracle that the native engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from runtime.data.batch import Batch, Field, Layout
from runtime.embedding.batch_rows import (
    ABSENT,
    STALENESS_BINS,
    BatchPlan,
    Handle,
    TablePlan,
    WholePush,
    shard_of,
)
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import open_handle
from runtime.embedding.sharded import ShardedStore
from tests.oracles.reference import optimizers
from tests.oracles.reference.initial import table_key, uniform_rows


class ReferenceStore(ShardedStore):
    """Rows in numpy arrays: plain tables with sgd, adagrad or adam and uniform initial values."""

    def __init__(self, layout: Layout, tables: Sequence[TableConfig], **others: Any) -> None:
        for table in tables:
            _refuse_features(table)
        super().__init__(layout, tables, **others)

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; touches no row."""
        plans = _plan_tables(batch, self.layout.fields, list(self.tables), self.shards)
        plan = side_by_side(plans, {name: table.dim for name, table in self.tables.items()})
        dtype = next(iter(self.tables.values())).dtype
        return open_handle(rank, step, batch, plan, np.empty(plan.elements(), dtype))

    def _not_here(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the reference has rows, and no copies of them")

    freeze_snapshots = drop_snapshots = _not_here

    def _open_rows(self) -> list[ReferenceShard]:
        return [ReferenceShard(k, self.tables.values(), self.seed) for k in range(self.shards)]


def _state_floats(table: TableConfig) -> int:
    """Floats of optimiser state beside a row."""
    per_kind = {"sgd": 0, "adagrad": table.dim, "rowwise_adagrad": 1, "adam": 2 * table.dim}
    return per_kind[table.optimizer.kind]


def _refuse_features(table: TableConfig) -> None:
    """What was asked for must not be ignored in silence."""
    plain = TableConfig(
        name=table.name,
        dim=table.dim,
        optimizer=table.optimizer,
        initial_scale=table.initial_scale,
        dtype=table.dtype,
    )
    if table != plain or table.optimizer.kind in ("rowwise_adam", "ftrl"):
        raise ValueError(f"table {table.name} asks for features that the reference does not have")


class ReferenceShard:
    """The rows of all tables at one server."""

    def __init__(self, shard: int, tables: Iterable[TableConfig], seed: int) -> None:
        self._shard = shard
        self.tables = {t.name: Rows(t, seed) for t in tables}

    def status(self) -> dict[str, Any]:
        """How many rows there are; nothing else is counted."""
        return {"rows": sum(len(rows.slots) for rows in self.tables.values())}

    def export(self, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, values and state of one table."""
        return self.tables[table].export()

    def read(self, handle: Handle, create: bool, batch_step: int) -> None:
        """Copy the batch's rows into the handle."""
        for name, plan in handle.plans.items():
            part = plan.part(self._shard)
            slots, values, writes = self.tables[name].read(plan.ids[part], create)
            handle.slots[name][part], handle.values[name][part] = slots, values
            handle.writes[name][part] = writes

    def refresh(self, handle: Handle, batch_step: int) -> int:
        """Replace rows written since the handle read them, create absent ones; how many."""
        replaced = 0
        for name, plan in handle.plans.items():
            part = plan.part(self._shard)
            rows, slots = self.tables[name], handle.slots[name][part]
            stale = slots == ABSENT
            present = ~stale
            if present.any():
                now = rows.writes[slots[present]]
                stale[present] = now != handle.writes[name][part][present]
            where = np.flatnonzero(stale) + part.start
            found = rows.read(plan.ids[where], create=True)
            handle.slots[name][where], handle.values[name][where] = found[0], found[1]
            handle.writes[name][where] = found[2]
            replaced += len(where)
        return replaced

    def update(self, pushes: Sequence[WholePush], update: int, rate: float = 1.0) -> np.ndarray:
        """One optimiser update on each row; rows by updates that they had missed."""
        missed = np.zeros(STALENESS_BINS, np.int64)
        for name in self.tables:
            missed += self._update(name, pushes, update, rate)
        return missed

    def _update(
        self, name: str, pushes: Sequence[WholePush], update: int, rate: float
    ) -> np.ndarray:
        rows = self.tables[name]
        lr = rows.config.optimizer.lr * rate
        parts = [(h, h.plans[name].part(self._shard), g[name]) for h, g in pushes]
        slots = np.concatenate([h.slots[name][part] for h, part, _ in parts])
        if not len(slots):
            return np.zeros(STALENESS_BINS, np.int64)
        read_at = np.concatenate([h.writes[name][part] for h, part, _ in parts])
        late = np.minimum(rows.writes[slots] - read_at, STALENESS_BINS - 1)
        missed = np.bincount(late, minlength=STALENESS_BINS)
        if len(parts) == 1:
            rows.update(slots, parts[0][2][parts[0][1]], update, lr)
            return missed
        distinct, inverse = np.unique(slots, return_inverse=True)
        total = np.zeros((len(distinct), rows.config.dim), rows.config.dtype)
        start = 0
        for _, part, gradients in parts:
            stop = start + part.stop - part.start
            total[inverse[start:stop]] += gradients[part]  # ids of one batch are distinct
            start = stop
        rows.update(distinct, total, update, lr)
        return missed


class Rows:
    """The rows of one table that one shard owns, in the order in which they were created."""

    def __init__(self, config: TableConfig, seed: int) -> None:
        self.config = config
        self._key = table_key(seed, config.name)
        self.slots: dict[int, int] = {}
        """Id -> place in the arrays."""
        self._values = np.empty((0, config.dim), config.dtype)
        self._state = np.empty((0, _state_floats(config)), config.dtype)
        self.writes = np.empty(0, np.int64)
        """How many optimiser steps each row has taken."""

    def read(self, ids: np.ndarray, create: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of distinct ids: slots [n], values [n, d], write counts [n].

        An absent id is created, or (``create=False``) gives its initial value, slot ABSENT and
        count 0, and leaves no trace.
        """
        config = self.config
        slots = np.array([self.slots.get(i, ABSENT) for i in ids.tolist()], np.int64)
        values = uniform_rows(self._key, ids, config.dim, config.initial_scale, config.dtype)
        writes = np.zeros(len(ids), np.int64)
        known, fresh = slots != ABSENT, slots == ABSENT
        values[known], writes[known] = self._values[slots[known]], self.writes[slots[known]]
        if create and fresh.any():
            slots[fresh] = len(self.slots) + np.arange(fresh.sum())
            self.slots |= zip(ids[fresh].tolist(), slots[fresh].tolist(), strict=True)
            self._values = np.concatenate([self._values, values[fresh]])
            state = np.full(
                (fresh.sum(), self._state.shape[1]),
                config.optimizer.initial_accumulator,
                config.dtype,
            )
            self._state = np.concatenate([self._state, state])
            self.writes = np.concatenate([self.writes, writes[fresh]])
        return slots, values, writes

    def update(self, slots: np.ndarray, gradients: np.ndarray, step: int, lr: float) -> None:
        """One optimiser step on distinct rows; ``step`` counts the run's steps from 1."""
        values, state = self._values[slots], self._state[slots]
        optimizers.apply(self.config.optimizer, values, state, gradients, lr, step)
        self._values[slots], self._state[slots] = values, state
        self.writes[slots] += 1

    def export(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All ids [n], values [n, d] and state [n, k], sorted by id: what equality means."""
        ids = np.array(list(self.slots), np.uint64)
        order = np.argsort(ids)
        return ids[order], self._values[order], self._state[order]


def _plan_tables(
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


def side_by_side(plans: Mapping[str, TablePlan], dims: Mapping[str, int]) -> BatchPlan:
    """The plans of a batch's tables as the engine keeps them."""
    every = list(plans.values())
    rows = np.array([len(plan.ids) for plan in every])
    wide = np.array([dims[name] for name in plans])
    spans = np.stack([np.cumsum(rows) - rows, rows, np.cumsum(rows * wide) - rows * wide], 1)
    where = [np.r_[0:0] if isinstance(p.occurrences, slice) else p.occurrences for p in every]
    inverse = [plan.inverse.astype(np.int32) for plan in every]
    counts = list(map(len, inverse))
    return BatchPlan(
        {name: number for number, name in enumerate(plans)},
        wide,
        np.concatenate([plan.ids for plan in every]),
        spans,
        np.stack([plan.bounds for plan in every]),
        np.concatenate(inverse),
        np.concatenate(where),
        np.pad(np.cumsum(counts), (1, 0)),
    )
