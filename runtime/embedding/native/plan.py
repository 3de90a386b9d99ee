"""What the kernels do for a batch: which distinct rows it needs, and the pooling of their values;
and arrays from the kernels' pool of memory.

The distinct ids of a shard stand in the order of first appearance in the batch: that is the order
in which a lookup uses them, so it decides what a full table evicts. Sums run in the order of
samples, whatever the number of threads (law 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.data.ids import VALUE_MASK
from runtime.embedding.batch_rows import (
    ABSENT,
    Allocate,
    BatchPlan,
    ByTable,
    FieldVectors,
    Handle,
)
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import native

_BY_NAME: dict[str, Callable[[int, int], np.ndarray]] = {
    "float32": native.empty_float32,
    "float64": native.empty_float64,
    "int64": native.empty_int64,
}
# Asking a dtype for its name takes numpy longer than making the array.
_MAKERS = _BY_NAME | {np.dtype(name): maker for name, maker in _BY_NAME.items()}


def empty(shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> np.ndarray:
    """An uninitialised array whose memory returns to a pool when its last view is gone."""
    rows, columns = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (shape[0], 1)
    array: np.ndarray = _MAKERS[dtype](rows, columns).reshape(shape)
    return array


_KINDS = {"sum": 0, "mean": 1, "sqrtn": 2, "sequence": 3}
_VALUE_MASK = int(VALUE_MASK)
_NO_OFFSETS = np.empty(0, np.int64)
_NO_MASK = np.empty((0, 0), np.uint8)


class Planner:
    """Merges the duplicates of batches within each table, and splits distinct ids by shard."""

    def __init__(self, fields: Sequence[Field], tables: Iterable[TableConfig], shards: int) -> None:
        every = list(tables)
        self._numbers = {table.name: number for number, table in enumerate(every)}
        self._widths = [t.dim for t in every]
        self._dims = np.array(self._widths)
        self._shards = shards
        self._table_of_field = np.array([self._numbers[f.table] for f in fields], np.int32)

    def plan(self, batch: Batch) -> BatchPlan:
        """Distinct ids, table by table, and which of them each occurrence is."""
        ids, spans, bounds, inverse, occurrences, starts, apart = native.plan_tables(
            np.ascontiguousarray(batch.ids),
            _NO_OFFSETS if batch.offsets is None else batch.offsets,
            self._table_of_field,
            self._widths,
            _VALUE_MASK,
            self._shards,
        )
        # As pooling and servers take it; in a single shard nothing has to be looked up.
        return BatchPlan(
            self._numbers,
            self._dims,
            ids,
            spans,
            bounds,
            inverse,
            occurrences,
            starts,
            only_shard=0 if self._shards == 1 else None,
            apart=tuple(apart),
        )


class Pooling:
    """Distinct rows of each table -> one vector for each field and sample (forward), and the
    transpose (backward); one call of a kernel for all tables."""

    def __init__(
        self, fields: Sequence[Field], dims: dict[str, int], of: Collection[str] | None = None
    ) -> None:
        """``dims`` by table, in the order of a plan's tables; ``of``: only fields of these tables
        have vectors, and any other is to the kernel as a sequence that has no place."""
        shapes = [
            (f, f.pooling, f.max_length) if of is None or f.table in of else (f, "sequence", 0)
            for f in fields
        ]
        self._sequences = [
            (f.name, places, dims[f.table]) for f, kind, places in shapes if kind == "sequence"
        ]
        self._left_out = {f.name for f in fields if of is not None and f.table not in of}
        tables = list(dims)
        entries = []
        self._width = 0
        for f, kind, places in shapes:
            table = tables.index(f.table)
            entries.append((table, _KINDS[kind], self._width, places))
            if kind != "sequence":
                self._width += dims[f.table]
        self._layout = native.PoolLayout(entries, list(dims.values()))

    def forward(
        self, batch: Batch, plan: BatchPlan, values: ByTable, allocate: Allocate = empty
    ) -> FieldVectors:
        """The fields' vectors from the distinct rows of each table, in memory from ``allocate``."""
        samples = batch.size
        dtype = values.flat.dtype
        out = FieldVectors(allocate((samples, self._width), dtype), {}, {})
        arrays = []
        for name, length, dim in self._sequences:
            if name in self._left_out:
                arrays.append(
                    (np.empty((samples, 0, dim), dtype), np.empty((samples, 0), np.uint8))
                )
                continue
            array = out.sequences[name] = allocate((samples, length, dim), dtype)
            mask = out.masks[name] = np.empty((samples, length), bool)
            arrays.append((array, mask.view(np.uint8)))
        places = _places(batch, plan)
        native.pool(self._layout, samples, *places, values.flat, out.pooled, arrays)
        return out

    def backward(
        self, batch: Batch, plan: BatchPlan, gradients: FieldVectors, into: ByTable | None = None
    ) -> ByTable:
        """Per table the gradients of the distinct rows, [U, d]; duplicates summed.

        They are written ``into`` the arrays given, where those hold numbers of the same kind.
        """
        pooled = np.ascontiguousarray(gradients.pooled)
        if into is None or into.flat.dtype != pooled.dtype:
            into = ByTable(empty((plan.elements(),), pooled.dtype), plan, wide=True)
        arrays = [
            (np.ascontiguousarray(gradients.sequences[name]), _NO_MASK)
            for name, _, _ in self._sequences
        ]
        places = _places(batch, plan)
        native.scatter(self._layout, len(pooled), *places, into.flat, pooled, arrays, plan.apart)
        return into


def _places(batch: Batch, plan: BatchPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """Where the samples' bags start, and where their rows are."""
    offsets = _NO_OFFSETS if batch.offsets is None else batch.offsets
    return offsets, plan.spans, plan.starts, plan.inverse


def open_handle(rank: int, step: int, batch: Batch, plan: BatchPlan, values: np.ndarray) -> Handle:
    """A handle whose rows will be read into ``values`` [elements of the plan]."""
    slots = empty(plan.ids.shape, "int64")
    writes = empty(plan.ids.shape, "int64")
    slots.fill(ABSENT)
    writes.fill(0)
    rows = ByTable(values, plan, wide=True)
    by_table = ByTable(slots, plan, wide=False), ByTable(writes, plan, wide=False)
    return Handle(rank, step, batch, plan, rows, *by_table)
