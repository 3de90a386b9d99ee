"""The native engine: the store's verbs over C++ tables, same bytes as the reference.

Locks, versions and trace are those of `EmbeddingStore`; only the work on rows is replaced. It runs
with the interpreter lock released.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from persia_sim.words.trace import TraceRecorder
from runtime.data.batch import Batch, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.cut import PushGate
from runtime.embedding.native.buffers import empty
from runtime.embedding.native.plan import plan_natively
from runtime.embedding.native.rows import open_table
from runtime.embedding.reference.store import EmbeddingStore
from runtime.embedding.store import ABSENT, Handle, RowGradients


class NativeStore(EmbeddingStore):
    """Rows in C++ tables, one for each table and shard."""

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[TableConfig],
        *,
        shards: int = 1,
        seed: int = 0,
        recorder: TraceRecorder | None = None,
    ) -> None:
        super().__init__(layout, tables, shards=shards, seed=seed, recorder=recorder)
        self.seed = seed
        self.last_saved: tuple[str, str] | None = None
        self.saving = threading.Lock()
        self._gate = PushGate(shards)
        self._counting = threading.Lock()

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
        plans = plan_natively(batch, self.layout.fields, list(self.tables.values()), self.shards)
        values, slots, writes = {}, {}, {}
        for name, plan in plans.items():
            config = self.tables[name]
            values[name] = empty((len(plan.ids), config.dim), config.dtype)
            slots[name] = empty((len(plan.ids),), "int64")
            writes[name] = empty((len(plan.ids),), "int64")
            slots[name].fill(ABSENT)
            writes[name].fill(0)
        return Handle(rank, step, batch, plans, values, slots, writes)

    def push(
        self, shard: int, pushes: Sequence[tuple[Handle, RowGradients]], *, merged: bool = False
    ) -> None:
        """As the reference; a consistent cut never falls between the shards of one push."""
        touching = [handle for handle, _ in pushes if handle.touches(shard)]
        if touching:
            with self._gate.pushing(touching, shard):
                super().push(shard, pushes, merged=merged)

    def lose(self, handle: Handle) -> None:
        """Record that the handle's push will never be applied."""
        super().lose(handle)
        self._gate.forget(handle)

    @contextmanager
    def consistent_cut(self) -> Iterator[None]:
        """Hold every shard at an instant at which no push is half applied."""
        with self._gate.cut(), self.frozen():
            yield

    def snapshots(self, *, only_changed: bool, track: bool) -> list[dict[str, dict[str, Any]]]:
        """Per shard and table, all rows (or the changed ones); call inside `consistent_cut`.

        With ``track``, `settle_snapshots` must follow. A caller holds ``saving`` around both.
        """
        return [
            {name: table.snapshot(only_changed, track) for name, table in shard.items()}
            for shard in self._native
        ]

    def settle_snapshots(self, *, kept: bool) -> None:
        """Whether the last snapshots are safe; if not, what they held counts as changed still."""
        for shard in self._native:
            for table in shard.values():
                table.settle(kept)

    def restore(self, table: str, shards: Sequence[dict[str, Any]]) -> None:
        """Put rows of one table back, those of each shard."""
        for tables, arrays in zip(self._native, shards, strict=True):
            tables[table].restore(**arrays)

    def export(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per table all (ids, values, state), sorted by id, whatever the number of shards."""
        tables = {}
        for name in self.tables:
            parts = [shard[name].rows()[:3] for shard in self._native]
            ids, values, state = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(ids)
            tables[name] = (ids[order], values[order], state[order])
        return tables

    def _open_rows(self, seed: int) -> None:
        self._native = [
            {t.name: open_table(t, seed, self.shards) for t in self.tables.values()}
            for _ in range(self.shards)
        ]

    def _copy_rows(self, shard: int, handle: Handle, create: bool) -> None:
        for name, plan in handle.plans.items():
            bounds = int(plan.bounds[shard]), int(plan.bounds[shard + 1])
            arrays = handle.slots[name], handle.values[name], handle.writes[name]
            self._native[shard][name].read(plan.ids, *bounds, create, handle.step, *arrays)

    def _replace_rows(self, shard: int, handle: Handle) -> None:
        for name, plan in handle.plans.items():
            bounds = int(plan.bounds[shard]), int(plan.bounds[shard + 1])
            arrays = handle.slots[name], handle.values[name], handle.writes[name]
            table = self._native[shard][name]
            replaced = table.refresh(plan.ids, *bounds, handle.step, *arrays)
            with self._counting:  # shards have a lock each, the counts are of all
                self.rows_replaced += replaced

    def _update(
        self, shard: int, name: str, pushes: Sequence[tuple[Handle, RowGradients]], step: int
    ) -> None:
        parts = []
        for handle, gradients in pushes:
            plan = handle.plans[name]
            bounds = int(plan.bounds[shard]), int(plan.bounds[shard + 1])
            found = handle.slots[name], handle.writes[name]
            parts.append((plan.ids, *bounds, *found, np.ascontiguousarray(gradients[name])))
        lr = self.tables[name].optimizer.lr_at(step)
        missed = np.zeros(64, np.int64)
        self._native[shard][name].push(parts, step, lr, missed)
        with self._counting:
            self.row_staleness += missed
