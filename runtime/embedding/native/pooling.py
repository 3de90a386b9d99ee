"""Rows -> one vector per field (forward), and its transpose (backward), by the native kernels.

Sums run in the order of samples, whatever the number of threads (law 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.embedding.native.extension import empty, native
from runtime.embedding.store import Allocate, BatchPlan, ByTable, FieldVectors

_KINDS = {"sum": 0, "mean": 1, "sqrtn": 2, "sequence": 3}
_NO_OFFSETS = np.empty(0, np.int64)
_NO_MASK = np.empty((0, 0), np.uint8)


class Pooling:
    """Pools the rows of one batch by the layout's fields; one call of a kernel for all tables."""

    def __init__(self, fields: Sequence[Field], dims: dict[str, int]) -> None:
        """``dims`` by table, in the order of a plan's tables."""
        self._sequences = [(f.name, f.max_length, dims[f.table]) for f in fields
                           if f.pooling == "sequence"]  # fmt: skip
        tables, entries, self._width = list(dims), [], 0
        for f in fields:
            kind, table = _KINDS[f.pooling], tables.index(f.table)
            entries.append((table, kind, self._width, f.max_length))
            if f.pooling != "sequence":
                self._width += dims[f.table]
        self._layout = native.PoolLayout(entries, list(dims.values()))

    def forward(
        self, batch: Batch, plan: BatchPlan, values: ByTable, allocate: Allocate = empty
    ) -> FieldVectors:
        """The fields' vectors from the distinct rows of each table, in memory from ``allocate``."""
        dtype = values.flat.dtype
        out = FieldVectors(allocate((batch.size, self._width), dtype), {}, {})
        arrays = []
        for name, places, dim in self._sequences:
            array = out.sequences[name] = allocate((batch.size, places, dim), dtype)
            mask = out.masks[name] = np.empty((batch.size, places), bool)
            arrays.append((array, mask.view(np.uint8)))
        native.pool(self._layout, *_places(batch, plan), values.flat, out.pooled, arrays)
        return out

    def backward(
        self,
        batch: Batch,
        plan: BatchPlan,
        gradients: FieldVectors,
        into: ByTable | None = None,
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
        native.scatter(self._layout, *_places(batch, plan), into.flat, pooled, arrays)
        return into


def _places(batch: Batch, plan: BatchPlan) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, Any]:
    """Samples, where their bags start, and where their rows are."""
    offsets = _NO_OFFSETS if batch.offsets is None else batch.offsets
    return batch.size, offsets, plan.spans, plan.starts, plan.inverse
