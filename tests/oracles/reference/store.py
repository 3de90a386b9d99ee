"""The reference store: rows in numpy, the oracle that the native engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from runtime.data.batch import Batch, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.shard import STALENESS_BINS, WholePush
from runtime.embedding.sharded import ShardedStore
from runtime.embedding.store import ABSENT, Handle
from runtime.embedding.verbs import TableSnapshot
from tests.oracles.reference.plan import plan_tables
from tests.oracles.reference.rows import Rows


class ReferenceStore(ShardedStore):
    """Rows in numpy arrays: plain tables with sgd, adagrad or adam and uniform initial values."""

    def __init__(self, layout: Layout, tables: Sequence[TableConfig], **others: Any) -> None:
        for table in tables:
            _refuse_features(table)
        super().__init__(layout, tables, **others)

    _frozen: Sequence[dict[str, TableSnapshot]] = ()

    def __len__(self) -> int:
        return sum(len(rows) for shard in self._shards() for rows in shard.tables.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of values and optimiser state of all rows."""
        return sum(
            len(rows)
            * np.dtype(rows.config.dtype).itemsize
            * (rows.config.dim + rows.config.optimizer.state_floats(rows.config.dim))
            for shard in self._shards()
            for rows in shard.tables.values()
        )

    @property
    def counters(self) -> dict[str, int]:
        """Rows created; nothing leaves or refuses a row here."""
        none = "evicted", "expired", "not_admitted", "gradients_not_admitted", "gradients_evicted"
        return {"created": len(self)} | dict.fromkeys(none, 0)

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

    def freeze_snapshots(self, *, only_changed: bool, track: bool) -> None:
        """Copy all rows; call inside `consistent_cut`."""
        if only_changed or track:
            raise ValueError("the reference engine does not know which rows changed; save them all")
        self._frozen = [
            {name: rows.snapshot() for name, rows in shard.tables.items()}
            for shard in self._shards()
        ]

    def collect_snapshots(self) -> list[dict[str, TableSnapshot]]:
        """What was frozen."""
        return list(self._frozen)

    def settle_snapshots(self, *, kept: bool) -> None:
        """Forget the copies."""
        self._frozen = ()

    def restore(
        self, table: str, shards: Sequence[Mapping[str, Any]], *, keep_present: bool = False
    ) -> None:
        """Put rows of one table back, those of each shard."""
        for shard, arrays in zip(self._shards(), shards, strict=True):
            shard.tables[table].restore(arrays, keep_present=keep_present)

    def _open_rows(self, shard: int) -> ReferenceShard:
        return ReferenceShard(shard, self.tables.values(), self.seed)

    def _shards(self) -> list[ReferenceShard]:
        return [s.rows for s in self.servers if isinstance(s.rows, ReferenceShard)]

    def _export_shard(self, shard: int, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._shards()[shard].tables[table].export()


def _refuse_features(table: TableConfig) -> None:
    """What was asked for must not be ignored in silence."""
    plain = TableConfig(
        name=table.name,
        dim=table.dim,
        optimizer=table.optimizer,
        initial_scale=table.initial_scale,
        dtype=table.dtype,
    )
    rule = table.optimizer
    if table != plain or rule.kind in ("adam_row", "ftrl") or rule.momentum or rule.weight_decay:
        raise ValueError(f"table {table.name} asks for features that the reference does not have")


class ReferenceShard:
    """The rows of all tables at one server."""

    def __init__(self, shard: int, tables: Iterable[TableConfig], seed: int) -> None:
        self._shard = shard
        self.tables = {t.name: Rows(t, seed) for t in tables}

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
                now = rows.write_counts(slots[present])
                stale[present] = now != handle.writes[name][part][present]
            where = np.flatnonzero(stale) + part.start
            found = rows.read(plan.ids[where], create=True)
            handle.slots[name][where], handle.values[name][where] = found[0], found[1]
            handle.writes[name][where] = found[2]
            replaced += len(where)
        return replaced

    def lease(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """Not in the reference: `LeasedRows` refuses it before anything starts."""
        raise NotImplementedError("the reference engine leases no rows")

    def update(
        self, pushes: Sequence[WholePush], update: int, step: int, rate: float = 1.0
    ) -> np.ndarray:
        """One optimiser update on each row; rows by updates that they had missed."""
        missed = np.zeros(STALENESS_BINS, np.int64)
        for name in self.tables:
            missed += self._update(name, pushes, update, step, rate)
        return missed

    def _update(
        self, name: str, pushes: Sequence[WholePush], update: int, step: int, rate: float
    ) -> np.ndarray:
        rows = self.tables[name]
        lr = rows.config.optimizer.lr_at(step) * rate
        parts = [(h, h.plans[name].part(self._shard), g[name]) for h, g in pushes]
        slots = np.concatenate([h.slots[name][part] for h, part, _ in parts])
        if not len(slots):
            return np.zeros(STALENESS_BINS, np.int64)
        read_at = np.concatenate([h.writes[name][part] for h, part, _ in parts])
        late = np.minimum(rows.write_counts(slots) - read_at, STALENESS_BINS - 1)
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
