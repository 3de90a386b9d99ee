"""Rows in C++ tables; same bytes as the store in numpy (tests/oracles/reference).

Locks, versions and trace are those of the servers; the work on rows runs with the interpreter lock
released.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from runtime.data.batch import Batch
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import empty
from runtime.embedding.native.plan import plan_natively
from runtime.embedding.native.rows import open_table
from runtime.embedding.shard import STALENESS_BINS, WholePush
from runtime.embedding.sharded import ShardedStore
from runtime.embedding.store import ABSENT, Handle, Plans


class NativeStore(ShardedStore):
    """Rows in C++ tables, one for each table and shard."""

    @property
    def _native(self) -> list[dict[str, Any]]:
        return [s.rows.tables for s in self.servers if isinstance(s.rows, NativeShard)]

    def __len__(self) -> int:
        return sum(len(table) for shard in self._native for table in shard.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of rows, state, records and index."""
        return sum(table.resident_bytes for shard in self._native for table in shard.values())

    @property
    def counters(self) -> dict[str, int]:
        """Rows created, evicted, expired and refused, and gradients dropped, since the start."""
        names = "created", "evicted", "expired", "not_admitted"
        dropped = "gradients_not_admitted", "gradients_evicted"
        found = [table.counters for shard in self._native for table in shard.values()]
        return {name: sum(getattr(c, name) for c in found) for name in names + dropped}

    @property
    def gradients_dropped(self) -> dict[str, int]:
        """Row gradients that found no row: never admitted, or evicted since the lookup."""
        counters = self.counters
        return {why: counters[f"gradients_{why}"] for why in ("not_admitted", "evicted")}

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; touches no row."""
        tables = list(self.tables.values())
        return self.begin_with(
            rank, step, batch, plan_natively(batch, self.layout.fields, tables, self.shards)
        )

    def begin_with(self, rank: int, step: int, batch: Batch, plans: Plans) -> Handle:
        """As `begin`, where the plan is known."""
        values, slots, writes = {}, {}, {}
        for name, plan in plans.items():
            config = self.tables[name]
            values[name] = empty((len(plan.ids), config.dim), config.dtype)
            slots[name] = empty((len(plan.ids),), "int64")
            writes[name] = empty((len(plan.ids),), "int64")
            slots[name].fill(ABSENT)
            writes[name].fill(0)
        return Handle(rank, step, batch, plans, values, slots, writes)

    def freeze_snapshots(self, *, only_changed: bool, track: bool) -> None:
        """Mark this instant in every table; call inside `consistent_cut`, then `collect_snapshots`.

        Nothing is copied yet: rows are copied when they are about to change, or collected. With
        ``track``, `settle_snapshots` must follow. A caller holds ``saving`` around them all.
        """
        frozen: list[Any] = []
        try:
            for shard in self._native:
                for table in shard.values():
                    table.freeze(only_changed, track)
                    frozen.append(table)
        except BaseException:
            for table in frozen:
                table.settle(False)
            raise

    def collect_snapshots(self) -> list[dict[str, dict[str, Any]]]:
        """Per shard and table, all rows (or the changed ones) as they were when frozen.

        Training may go on meanwhile. Raises MemoryError, and then the snapshots are to be settled
        as not kept.
        """
        try:
            return [{name: t.collect() for name, t in shard.items()} for shard in self._native]
        except MemoryError as error:
            raise MemoryError(f"a snapshot copies rows beside the table: {error}") from None

    def snapshots(self, *, only_changed: bool, track: bool) -> list[dict[str, dict[str, Any]]]:
        """Freeze and collect at once."""
        self.freeze_snapshots(only_changed=only_changed, track=track)
        return self.collect_snapshots()

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

    def _export_shard(self, shard: int, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, values, state = self._native[shard][table].rows()[:3]
        return ids, values, state


class NativeShard:
    """The native tables of one server."""

    def __init__(self, shard: int, tables: Iterable[TableConfig], seed: int, shards: int) -> None:
        self._shard = shard
        self._configs = {t.name: t for t in tables}
        self.tables = {t.name: open_table(t, seed, shards) for t in self._configs.values()}

    def read(self, handle: Handle, create: bool, batch_step: int) -> None:
        """Copy the batch's rows into the handle."""
        for name, plan in handle.plans.items():
            bounds = self._bounds(handle, name)
            arrays = handle.slots[name], handle.values[name], handle.writes[name]
            self.tables[name].read(plan.ids, *bounds, create, batch_step, *arrays)

    def refresh(self, handle: Handle, batch_step: int) -> int:
        """Replace rows written since the handle read them, create absent ones; how many."""
        replaced = 0
        for name, plan in handle.plans.items():
            bounds = self._bounds(handle, name)
            arrays = handle.slots[name], handle.values[name], handle.writes[name]
            replaced += self.tables[name].refresh(plan.ids, *bounds, batch_step, *arrays)
        return replaced

    def lease(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """Per table, the batch's rows with their state as they are; absent ones are left out."""
        return {
            name: table.lease(handle.plans[name].ids, *self._bounds(handle, name))
            for name, table in self.tables.items()
        }

    def update(
        self, pushes: Sequence[WholePush], update: int, step: int, rate: float = 1.0
    ) -> np.ndarray:
        """One optimiser update on each row; rows by updates that they had missed."""
        missed = np.zeros(STALENESS_BINS, np.int64)
        for name, table in self.tables.items():
            parts = []
            for handle, gradients in pushes:
                found = handle.slots[name], handle.writes[name]
                ids, bounds = handle.plans[name].ids, self._bounds(handle, name)
                parts.append((ids, *bounds, *found, np.ascontiguousarray(gradients[name])))
            lr = self._configs[name].optimizer.lr_at(step) * rate
            table.push(parts, update, lr, missed)
        return missed

    def _bounds(self, handle: Handle, table: str) -> tuple[int, int]:
        bounds = handle.plans[table].bounds
        return int(bounds[self._shard]), int(bounds[self._shard + 1])
