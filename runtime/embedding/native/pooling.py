"""Rows -> one vector per field (forward), and its transpose (backward), by the native kernels.

Sums run in the order of samples, whatever the number of threads (law 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.data.batch import Batch, Field
from runtime.embedding.native.extension import empty, native
from runtime.embedding.store import FieldVectors, TablePlan

_OTHER_TABLE = -1
_KINDS = {"sum": 0, "mean": 1, "sqrtn": 2, "sequence": 3}
_NO_OFFSETS = np.empty(0, np.int64)
_NO_MASK = np.empty((0, 0), np.uint8)


class Pooling:
    """Pools the rows of one batch by the layout's fields."""

    def __init__(self, fields: Sequence[Field], dims: dict[str, int]) -> None:
        self._fields = fields
        self._dims = [dims[f.table] for f in fields]
        self._tables = list(dict.fromkeys(f.table for f in fields))
        pooled = [0 if f.pooling == "sequence" else dims[f.table] for f in fields]
        self._columns = [sum(pooled[:n]) for n in range(len(fields))]
        self._width = sum(pooled)
        self._has_sequences = any(f.pooling == "sequence" for f in fields)
        self._one_table = len(self._tables) == 1 and not self._has_sequences
        self._without_arrays = {table: self._kinds(table) for table in self._tables}

    def forward(
        self, batch: Batch, plans: dict[str, TablePlan], values: dict[str, np.ndarray]
    ) -> FieldVectors:
        """The fields' vectors from the distinct rows of each table."""
        dtype = next(iter(values.values())).dtype
        out = FieldVectors(empty((batch.size, self._width), dtype), {}, {})
        for field, dim in zip(self._fields, self._dims, strict=True):
            if field.pooling == "sequence":
                places = batch.size, field.max_length
                out.sequences[field.name] = empty((*places, dim), dtype)
                out.masks[field.name] = np.empty(places, bool)
        offsets = _NO_OFFSETS if batch.offsets is None else batch.offsets
        copy = self._one_table and batch.offsets is None
        for table in self._tables:
            calls = self._calls(table, out, with_masks=True)
            plan = plans[table]
            rounds = _rounds(batch, plan)
            found = plan.inverse, rounds, out.pooled, values[table]
            native.pool(calls, batch.size, offsets, *found, copy and rounds == 1)
        return out

    def backward(
        self,
        batch: Batch,
        plans: dict[str, TablePlan],
        gradients: FieldVectors,
        into: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Per table the gradients of the distinct rows, [U, d]; duplicates summed.

        They are written ``into`` the arrays given, where those hold numbers of the same kind.
        """
        pooled = np.ascontiguousarray(gradients.pooled)
        sequences = {n: np.ascontiguousarray(g) for n, g in gradients.sequences.items()}
        given = FieldVectors(pooled, sequences, {})
        offsets = _NO_OFFSETS if batch.offsets is None else batch.offsets
        totals = {}
        for table in self._tables:
            dim = self._dims[[f.table for f in self._fields].index(table)]
            there = into[table] if into is not None else None
            if there is None or there.dtype != pooled.dtype:
                there = empty((len(plans[table].ids), dim), pooled.dtype)
            totals[table] = there
            calls = self._calls(table, given, with_masks=False)
            plan = plans[table]
            found = plan.inverse, _rounds(batch, plan), pooled, totals[table]
            native.scatter(calls, batch.size, offsets, *found)
        return totals

    def _calls(
        self, table: str, vectors: FieldVectors, with_masks: bool
    ) -> list[tuple[int, int, int, np.ndarray, np.ndarray]]:
        """One entry per field: kind, first column, places, array of a sequence, its mask."""
        kinds, pooled = self._without_arrays[table], vectors.pooled
        if not self._has_sequences:
            return [(kind, column, places, pooled, _NO_MASK) for kind, column, places in kinds]
        calls = []
        for field, (kind, column, places) in zip(self._fields, kinds, strict=True):
            array, mask = pooled, _NO_MASK
            if kind == _KINDS["sequence"]:
                array = vectors.sequences[field.name]
                if with_masks:
                    mask = vectors.masks[field.name].view(np.uint8)
            calls.append((kind, column, places, array, mask))
        return calls

    def _kinds(self, table: str) -> list[tuple[int, int, int]]:
        """Of every field, as one table's rows are pooled: kind, first column, places."""
        kinds = [_KINDS[f.pooling] if f.table == table else _OTHER_TABLE for f in self._fields]
        places = [f.max_length for f in self._fields]
        return list(zip(kinds, self._columns, places, strict=True))


def _rounds(batch: Batch, plan: TablePlan) -> int:
    """Rows that each occurrence is made of: 1 but for a hash stack."""
    whole = isinstance(plan.occurrences, slice)
    occurrences = len(batch.ids) if whole else len(plan.occurrences)  # type: ignore[arg-type]
    return len(plan.inverse) // occurrences if occurrences else 1
