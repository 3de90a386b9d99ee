"""Rows in C++ tables; same bytes as the store in numpy (tests/oracles/reference).

Locks, versions and trace are those of the servers; the work on rows runs with the interpreter lock
released.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from persia_sim.base.rules import require
from persia_sim.base.schema import Within, fit
from runtime.data.batch import Batch
from runtime.embedding.batch_rows import (
    STALENESS_BINS,
    BatchPlan,
    Handle,
    WholePush,
)
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.memory import allowed_bytes
from runtime.embedding.native.plan import Planner, empty, open_handle
from runtime.embedding.sharded import ShardedStore
from runtime.embedding.store import TableSnapshot

_OPTIMIZERS = {"rowwise_adagrad": "adagrad_row", "rowwise_adam": "adam_row"}
"""Kinds that the kernels call otherwise."""
_INDEX_BYTES_PER_ROW = 8 / 0.75  # a bucket has 8 bytes, three of four are full (kernels/index.hpp)
_COUNTERS = (
    "created",
    "evicted",
    "expired",
    "not_admitted",
    "gradients_not_admitted",
    "gradients_evicted",
)

MOST_THREADS = 1024


class NativeStore(ShardedStore):
    """Rows in C++ tables, one for each table and shard."""

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.layout.fields, self.tables.values(), self.shards)

    @property
    def _native(self) -> list[dict[str, Any]]:
        return [s.rows.tables for s in self.servers if isinstance(s.rows, NativeShard)]

    def begin(self, rank: int, step: int, batch: Batch, plan: BatchPlan | None = None) -> Handle:
        """Merge duplicates and plan the shards, unless the plan is known; touches no row."""
        plan = self._planner.plan(batch) if plan is None else plan
        dtype = next(iter(self.tables.values())).dtype
        return open_handle(rank, step, batch, plan, empty((plan.elements(),), dtype))

    def freeze_snapshots(self) -> None:
        """Mark this instant in every table; rows are copied when they are about to change, or
        collected."""
        freeze([t for tables in self._native for t in tables.values()])

    def drop_snapshots(self) -> None:
        """Forget what was remembered, and not collected."""
        for shard in self._native:
            for table in shard.values():
                table.drop_snapshot()

    def restore(
        self, table: str, shards: Sequence[Mapping[str, Any]], *, keep_present: bool = False
    ) -> None:
        """Put rows of one table back, those of each shard; ``keep_present``: absent ones only."""
        for tables, arrays in zip(self._native, shards, strict=True):
            tables[table].restore(**arrays, keep_present=keep_present)

    def forget(self, table: str, ids: np.ndarray) -> None:
        """Drop these rows, values and state, as if they had never been."""
        for tables in self._native:
            tables[table].forget(ids)

    def _open_rows(self) -> list[NativeShard]:
        tables = self.tables.values()
        return [NativeShard(k, tables, self.seed, self.shards) for k in range(self.shards)]


def use_threads(count: int) -> None:
    """Let one call of the native kernels use this many threads, for the whole process.

    The bytes do not depend on it. One is right where other threads compute meanwhile (hybrid,
    async, several ranks), the number of cores where nothing else does (sync with one rank).
    """
    fit(count, Annotated[int, Within(1, MOST_THREADS)], "threads of the native kernels")
    native.set_threads(count)


def freeze(tables: Iterable[Any]) -> None:
    """Freeze all of these native tables, or none."""
    frozen: list[Any] = []
    try:
        for table in tables:
            table.freeze()
            frozen.append(table)
    except BaseException:
        for table in frozen:
            table.drop_snapshot()
        raise


class NativeShard:
    """The native tables of one server; one call of a kernel serves all of them."""

    def __init__(self, shard: int, tables: Iterable[TableConfig], seed: int, shards: int) -> None:
        configs = list(tables)
        self.shard = shard
        self.shards = shards
        self.seed = seed
        self.configs = {t.name: t for t in configs}
        dtypes = {t.dtype for t in configs}
        if len(dtypes) > 1:
            given = ", ".join(f"{t.name} {t.dtype}" for t in configs)
            raise ValueError(f"tables of a store have one dtype, got {given}; give all the same")
        self._optimizers = list(dict.fromkeys(t.optimizer for t in configs))
        self._optimizer_of = [self._optimizers.index(t.optimizer) for t in configs]
        self.tables = {t.name: open_table(t, seed, shards) for t in configs}
        self._all = list(self.tables.values())
        self._numbers: list[int] | None = None  # of the tables here, where they are not all

    def of_tables(self, names: Collection[str], inside: bool) -> NativeShard:
        """The same rows, of these tables alone, or of all but these."""
        result = copy.copy(self)
        numbers = [k for k, name in enumerate(self.tables) if (name in names) is inside]
        result._numbers = numbers
        result._all = [self._all[k] for k in numbers]
        result._optimizer_of = [self._optimizer_of[k] for k in numbers]
        return result

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
        counters = [table.counters for table in self._all]
        return {
            "rows": sum(len(table) for table in self._all),
            "resident_bytes": sum(table.resident_bytes for table in self._all),
            "counters": {name: sum(getattr(c, name) for c in counters) for name in _COUNTERS},
        }

    def export(self, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, values and state of all rows of a table, in any order."""
        return self.tables[table].rows()

    def collect(self) -> dict[str, TableSnapshot]:
        """Per table, all rows as they were when frozen. Raises MemoryError, and then they are to be
        dropped."""
        try:
            return {name: table.collect() for name, table in self.tables.items()}
        except MemoryError as error:
            raise MemoryError(f"a snapshot copies rows beside the table: {error}") from None

    def update(self, pushes: Sequence[WholePush], update: int, rate: float = 1.0) -> np.ndarray:
        """One optimiser update on each row; rows by updates that they had missed."""
        missed = np.zeros(STALENESS_BINS, np.int64)
        parts = [
            (*self._places(handle), handle.values.filled(gradients).flat)
            for handle, gradients in pushes
        ]
        lrs = [rule.lr * rate for rule in self._optimizers]
        native.push(self._all, parts, update, [lrs[k] for k in self._optimizer_of], missed)
        return missed

    def _places(self, handle: Handle) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, the spans of those here, and what was found of their rows."""
        plan = handle.plans
        slots = handle.slots
        writes = handle.writes
        assert slots is not None and writes is not None, "of a handle that rows here were read into"
        spans = plan.spans_of(self.shard)
        if self._numbers is not None:
            spans = spans[self._numbers]
        return plan.ids, spans, slots.flat, writes.flat


def open_table(config: TableConfig, seed: int, shards: int) -> native.Table:
    """An empty native table: the part of the rows that one of ``shards`` shards owns."""
    # The optimiser, and how wide rows are.
    rule = config.optimizer
    options = native.Options()
    options.dim = config.dim
    options.wide = config.dtype == "float64"
    kind = _OPTIMIZERS.get(rule.kind, rule.kind)
    options.optimizer = getattr(native.OptimizerKind, kind)
    options.initial_accumulator = rule.initial_accumulator
    options.eps = rule.epsilon
    options.l1 = rule.l1
    options.l2 = rule.l2

    # Initial values are a function of (seed, table, id) alone (law 10): this is the key of their
    # hash.
    key = hashlib.blake2b(f"{seed}/{config.name}".encode(), digest_size=8)
    options.key = int.from_bytes(key.digest(), "little")
    initial = "uniform" if config.initial_file else config.initial
    options.initial = getattr(native.Initial, initial)
    options.initial_scale = config.initial_scale

    # Who gets a row, and when it expires.
    options.admission_probability = config.admission.probability
    options.expire_after_steps = config.capacity.expire_after_steps or 0

    # How many rows may be here at once, of all shards together.
    native.set_memory_limit(allowed_bytes())
    _check_memory(config, options.row_bytes)
    if config.capacity.rows is not None:
        options.eviction = native.Eviction.lru
        options.capacity_rows = max(1, config.capacity.rows // shards)
    return native.Table(options)


def _overhead_bytes_per_row(config: TableConfig) -> float:
    """Bytes that a row of a full table costs beside its values and state."""
    record_bytes = 16 + 4 * (config.capacity.expire_after_steps is not None)
    if config.capacity.limited:
        record_bytes += 8
    return record_bytes + _INDEX_BYTES_PER_ROW


def _check_memory(config: TableConfig, row_bytes: int) -> None:
    """What the table asks for must be there when it is full, not only at the start."""
    rows = config.capacity.rows
    if rows is None:
        return
    allowed = allowed_bytes()
    needed = int(rows * (row_bytes + _overhead_bytes_per_row(config)))
    rule = f"needs {needed / 1e9:,.3g} GB, and this process may use {allowed / 1e9:,.3g} GB"
    require(needed <= allowed, f"table {config.name}: capacity.rows", rows, rule, "lower it")
