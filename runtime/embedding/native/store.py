"""Rows in C++ tables; same bytes as the store in numpy (tests/oracles/reference).

Locks, versions and trace are those of the servers; the work on rows runs with the interpreter lock
released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from runtime.data.batch import Batch
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import empty, native
from runtime.embedding.native.plan import Planner
from runtime.embedding.native.rows import open_table
from runtime.embedding.shard import STALENESS_BINS, WholePush
from runtime.embedding.sharded import ShardedStore
from runtime.embedding.store import ABSENT, BatchPlan, ByTable, Handle
from runtime.embedding.verbs import TableSnapshot

_COUNTERS = (
    "created", "evicted", "expired", "not_admitted",
    "gradients_not_admitted", "gradients_evicted",
)  # fmt: skip


class NativeStore(ShardedStore):
    """Rows in C++ tables, one for each table and shard."""

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.layout.fields, self.tables.values(), self.shards)

    @property
    def _native(self) -> list[dict[str, Any]]:
        return [s.rows.tables for s in self.servers if isinstance(s.rows, NativeShard)]

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; touches no row."""
        return self.begin_with(rank, step, batch, self._planner.plan(batch))

    def begin_with(self, rank: int, step: int, batch: Batch, plan: BatchPlan) -> Handle:
        """As `begin`, where the plan is known."""
        dtype = next(iter(self.tables.values())).dtype
        return open_handle(rank, step, batch, plan, empty((plan.elements(),), dtype))

    def freeze_snapshots(self, *, only_changed: bool, track: bool) -> None:
        """Mark this instant in every table; call inside `consistent_cut`, then collect them.

        Nothing is copied yet: rows are copied when they are about to change, or collected. With
        ``track``, `settle_snapshots` must follow. A caller holds ``saving`` around them all.
        """
        freeze([t for tables in self._native for t in tables.values()], only_changed, track)

    def settle_snapshots(self, *, kept: bool) -> None:
        """Whether the last snapshots are safe; if not, what they held counts as changed still."""
        for shard in self._native:
            for table in shard.values():
                table.settle(kept)

    def restore(
        self, table: str, shards: Sequence[Mapping[str, Any]], *, keep_present: bool = False
    ) -> None:
        """Put rows of one table back, those of each shard; ``keep_present``: absent ones only."""
        for tables, arrays in zip(self._native, shards, strict=True):
            tables[table].restore(**arrays, keep_present=keep_present)

    def forget(self, table: str, ids: np.ndarray) -> None:
        """Drop these rows, values and state, as if they had never been."""
        none = np.zeros(0, np.uint32)
        for tables in self._native:
            rows = np.zeros((0, 0), np.uint8)
            tables[table].restore(ids[:0], none, none, rows, ids, np.zeros(0, np.uint8), 0)

    def _open_rows(self, shard: int) -> NativeShard:
        return NativeShard(shard, self.tables.values(), self.seed, self.shards)


def open_handle(rank: int, step: int, batch: Batch, plan: BatchPlan, values: np.ndarray) -> Handle:
    """A handle whose rows will be read into ``values`` [elements of the plan]."""
    slots, writes = empty(plan.ids.shape, "int64"), empty(plan.ids.shape, "int64")
    slots.fill(ABSENT)
    writes.fill(0)
    rows = ByTable(values, plan, wide=True)
    found = ByTable(slots, plan, wide=False), ByTable(writes, plan, wide=False)
    return Handle(rank, step, batch, plan, rows, *found)


def freeze(tables: Iterable[Any], only_changed: bool, track: bool) -> None:
    """Freeze all of these native tables, or none."""
    frozen: list[Any] = []
    try:
        for table in tables:
            table.freeze(only_changed, track)
            frozen.append(table)
    except BaseException:
        for table in frozen:
            table.settle(False)
        raise


class NativeShard:
    """The native tables of one server; one call of a kernel serves all of them."""

    def __init__(self, shard: int, tables: Iterable[TableConfig], seed: int, shards: int) -> None:
        configs, self.shard, self.shards, self.seed = list(tables), shard, shards, seed
        self.configs = {t.name: t for t in configs}
        dtypes = {t.dtype for t in configs}
        if len(dtypes) > 1:
            found = ", ".join(f"{t.name} {t.dtype}" for t in configs)
            raise ValueError(f"tables of a store have one dtype, got {found}; give all the same")
        self._optimizers = list(dict.fromkeys(t.optimizer for t in configs))
        self._optimizer_of = [self._optimizers.index(t.optimizer) for t in configs]
        self.tables = {t.name: open_table(t, seed, shards) for t in configs}
        self._all = list(self.tables.values())

    def read(self, handle: Handle, create: bool, batch_step: int) -> None:
        """Copy the batch's rows into the handle."""
        native.read(self._all, *self._places(handle), handle.values.flat, create, batch_step)

    def refresh(self, handle: Handle, batch_step: int) -> int:
        """Replace rows written since the handle read them, create absent ones; how many."""
        return native.refresh(self._all, *self._places(handle), handle.values.flat, batch_step)

    def lease(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """Per table, the batch's rows with their state as they are; absent ones are left out."""
        plan = handle.plans
        spans = zip(self.tables.items(), plan.spans_of(self.shard), strict=True)
        return {
            name: table.lease(plan.ids, first, first + rows)
            for (name, table), (first, rows, _) in spans
        }

    def status(self) -> dict[str, Any]:
        """Rows, the bytes that they take, and counters since the start."""
        found = [table.counters for table in self._all]
        return {
            "rows": sum(len(table) for table in self._all),
            "resident_bytes": sum(table.resident_bytes for table in self._all),
            "counters": {name: sum(getattr(c, name) for c in found) for name in _COUNTERS},
        }

    def export(self, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, values and state of all rows of a table, in any order."""
        ids, values, state = self.tables[table].rows()[:3]
        return ids, values, state

    def collect(self) -> dict[str, TableSnapshot]:
        """Per table, all rows (or the changed ones) as they were when frozen. Raises MemoryError,
        and then they are to be settled as not kept."""
        try:
            return {name: table.collect() for name, table in self.tables.items()}
        except MemoryError as error:
            raise MemoryError(f"a snapshot copies rows beside the table: {error}") from None

    def update(
        self, pushes: Sequence[WholePush], update: int, step: int, rate: float = 1.0
    ) -> np.ndarray:
        """One optimiser update on each row; rows by updates that they had missed."""
        missed = np.zeros(STALENESS_BINS, np.int64)
        parts = [
            (*self._places(handle), handle.values.filled(gradients).flat)
            for handle, gradients in pushes
        ]
        lrs = [rule.lr_at(step) * rate for rule in self._optimizers]
        native.push(self._all, parts, update, [lrs[k] for k in self._optimizer_of], missed)
        return missed

    def _places(self, handle: Handle) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, the spans of those here, and what was found of their rows."""
        plan, slots, writes = handle.plans, handle.slots, handle.writes
        assert slots is not None and writes is not None, "of a handle that rows here were read into"
        return plan.ids, plan.spans_of(self.shard), slots.flat, writes.flat
