"""The embedding store: sharded tables behind four verbs, begin, read, refresh and push.

A shard is the unit of locking: a read or a push of one batch takes effect at one shard in one
instant, which the trace records under the shard's lock. This is the reference store, in numpy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from persia_sim.words.trace import ALL, Kind, TraceRecorder
from runtime.data.batch import Batch, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.reference.plan import plan_tables
from runtime.embedding.reference.rows import Rows
from runtime.embedding.store import ABSENT, Handle, RowGradients


class _Shard:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 0


class EmbeddingStore:
    """Rows of every table, partitioned over shards by a hash of the id.

    Safe for threads. ``row_staleness`` counts, over all rows pushed, how many optimiser steps of
    others each had missed (row staleness of the glossary).
    """

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[TableConfig],
        *,
        shards: int = 1,
        seed: int = 0,
        recorder: TraceRecorder | None = None,
    ) -> None:
        if shards < 1:
            raise ValueError(f"shards must be >= 1, got {shards}")
        known = {t.name for t in tables}
        unknown = sorted({f.table for f in layout.fields} - known)
        if unknown:
            raise ValueError(
                f"fields use tables {unknown}, but only {sorted(known)} are configured"
            )
        used = {f.table for f in layout.fields}
        self.layout = layout
        self.tables = {t.name: t for t in tables if t.name in used}
        self.shards = shards
        self._shards = [_Shard() for _ in range(shards)]
        self._open_rows(seed)
        self._recorder = recorder or TraceRecorder()
        self.rows_replaced = 0
        self.row_staleness = np.zeros(64, np.int64)

    def __len__(self) -> int:
        return sum(len(rows) for shard in self._rows for rows in shard.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of values and optimiser state of all rows."""
        return sum(
            len(rows) * np.dtype(t.dtype).itemsize * (t.dim + t.optimizer.state_floats(t.dim))
            for shard in self._rows
            for t, rows in ((rows.config, rows) for rows in shard.values())
        )

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; touches no row."""
        plans = plan_tables(batch, self.layout.fields, list(self.tables), self.shards)
        values, slots, writes = {}, {}, {}
        for name, plan in plans.items():
            config = self.tables[name]
            values[name] = np.empty((len(plan.ids), config.dim), config.dtype)
            slots[name] = np.full(len(plan.ids), ABSENT, np.int64)
            writes[name] = np.zeros(len(plan.ids), np.int64)
        return Handle(rank, step, batch, plans, values, slots, writes)

    def read(self, handle: Handle, shard: int, *, create: bool = True) -> None:
        """Read the batch's rows of one shard into the handle, in one instant.

        ``create=False`` (a prefetch of lookahead) has no side effect.
        """
        if not handle.touches(shard):
            return
        owner = self._shards[shard]
        with owner.lock:
            self._recorder.record(Kind.LOOKUP, handle.rank, handle.step, shard, owner.version)
            handle.version[shard] = owner.version
            self._copy_rows(shard, handle, create)

    def refresh(self, handle: Handle, shard: int) -> None:
        """Bring prefetched rows up to date: re-read those written since, create absent ones."""
        if not handle.touches(shard):
            return
        owner = self._shards[shard]
        with owner.lock:
            self._recorder.record(Kind.REFRESH, handle.rank, handle.step, shard, owner.version)
            handle.version[shard] = owner.version
            self._replace_rows(shard, handle)

    def push(
        self, shard: int, pushes: Sequence[tuple[Handle, RowGradients]], *, merged: bool = False
    ) -> None:
        """Apply the gradients of one shard's rows, in one instant and one optimiser step per row.

        ``merged``: these are the pushes of all ranks of a step; a row's gradients are summed in the
        given order, which must be that of the ranks (law 6).
        """
        touching = [(h, g) for h, g in pushes if h.touches(shard)]
        if not touching:
            return
        owner = self._shards[shard]
        rank = ALL if merged else touching[0][0].rank
        step = touching[0][0].step
        with owner.lock:
            self._recorder.record(Kind.PUSH, rank, step, shard, owner.version)
            owner.version += len(touching)
            for name in self.tables:
                self._update(shard, name, touching, step + 1)

    def lose(self, handle: Handle) -> None:
        """Record that the handle's push will never be applied."""
        for shard, owner in enumerate(self._shards):
            if handle.touches(shard):
                with owner.lock:
                    record = (Kind.LOST_PUSH, handle.rank, handle.step, shard, owner.version)
                    self._recorder.record(*record)

    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""
        handle = self.begin(ALL, ALL, batch)
        for shard, owner in enumerate(self._shards):
            with owner.lock:
                handle.version[shard] = owner.version
                self._copy_rows(shard, handle, create=False)
        return handle

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold every shard, so that a snapshot can be evaluated while other threads wait."""
        for owner in self._shards:
            owner.lock.acquire()
        try:
            yield
        finally:
            for owner in reversed(self._shards):
                owner.lock.release()

    def export(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per table all (ids, values, state), sorted by id, whatever the number of shards."""
        tables = {}
        for name in self.tables:
            parts = [shard[name].export() for shard in self._rows]
            ids, values, state = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(ids)
            tables[name] = (ids[order], values[order], state[order])
        return tables

    # The rest is what another engine replaces; all but `_open_rows` runs under the shard's lock.

    def _open_rows(self, seed: int) -> None:
        tables = self.tables.values()
        self._rows = [{t.name: Rows(t, seed) for t in tables} for _ in range(self.shards)]

    def _copy_rows(self, shard: int, handle: Handle, create: bool) -> None:
        for name, plan in handle.plans.items():
            part = plan.part(shard)
            slots, values, writes = self._rows[shard][name].read(plan.ids[part], create)
            handle.slots[name][part], handle.values[name][part] = slots, values
            handle.writes[name][part] = writes

    def _replace_rows(self, shard: int, handle: Handle) -> None:
        for name, plan in handle.plans.items():
            part = plan.part(shard)
            rows, slots = self._rows[shard][name], handle.slots[name][part]
            stale = slots == ABSENT
            present = ~stale
            if present.any():
                now = rows.write_counts(slots[present])
                stale[present] = now != handle.writes[name][part][present]
            where = np.flatnonzero(stale) + part.start
            found = rows.read(plan.ids[where], create=True)
            handle.slots[name][where], handle.values[name][where] = found[0], found[1]
            handle.writes[name][where] = found[2]
            self.rows_replaced += len(where)

    def _update(
        self, shard: int, name: str, pushes: Sequence[tuple[Handle, RowGradients]], step: int
    ) -> None:
        rows = self._rows[shard][name]
        parts = [(h, h.plans[name].part(shard), g[name]) for h, g in pushes]
        slots = np.concatenate([h.slots[name][part] for h, part, _ in parts])
        if not len(slots):
            return
        missed = rows.write_counts(slots) - np.concatenate(
            [h.writes[name][part] for h, part, _ in parts]
        )
        self.row_staleness += np.bincount(np.minimum(missed, 63), minlength=64)
        lr = self.tables[name].optimizer.lr_at(step)
        if len(parts) == 1:
            rows.update(slots, parts[0][2][parts[0][1]], step, lr)
            return
        distinct, inverse = np.unique(slots, return_inverse=True)
        total = np.zeros((len(distinct), rows.config.dim), rows.config.dtype)
        start = 0
        for _, part, gradients in parts:
            stop = start + part.stop - part.start
            total[inverse[start:stop]] += gradients[part]  # ids of one batch are distinct
            start = stop
        rows.update(distinct, total, step, lr)
