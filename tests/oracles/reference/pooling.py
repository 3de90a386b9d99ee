"""Rows -> one vector per field (forward), and its transpose (backward).

Sums run in the order of samples, whatever the number of threads (law 6). The backward scatter is a
sparse product whose matrix has one entry per occurrence: scipy walks it in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from runtime.data.batch import Batch, Field
from runtime.embedding.batch_rows import BatchPlan, ByTable, FieldVectors, TablePlan


class Pooling:
    """Pools the rows of one batch by the layout's fields."""

    def __init__(self, fields: Sequence[Field], dims: dict[str, int]) -> None:
        self._fields = fields
        self._dims = [dims[f.table] for f in fields]

    def forward(
        self, batch: Batch, plans: Mapping[str, TablePlan], values: Mapping[str, np.ndarray]
    ) -> FieldVectors:
        """The fields' vectors from the distinct rows of each table."""
        sequences = any(field.pooling == "sequence" for field in self._fields)
        if batch.offsets is None and len(plans) == 1 and not sequences:
            ((table, plan),) = plans.items()  # a row as it is, -0.0 too: nothing is summed
            pooled = values[table].take(plan.inverse, axis=0)
            return FieldVectors(pooled.reshape(batch.size, -1), {}, {})
        dtype = next(iter(values.values())).dtype
        pooled_parts: list[np.ndarray] = []
        found: dict[str, np.ndarray] = {}
        masks: dict[str, np.ndarray] = {}
        for number, field in enumerate(self._fields):
            matrix, mask = self._one_field(batch, plans, number, dtype)
            picked = matrix @ values[field.table]
            if field.pooling == "sequence":
                shape = (batch.size, field.max_length, self._dims[number])
                found[field.name] = picked.reshape(shape)
                masks[field.name] = mask
            else:
                pooled_parts.append(picked)
        empty = np.zeros((batch.size, 0), dtype)
        return FieldVectors(np.concatenate([empty, *pooled_parts], axis=1), found, masks)

    def backward(
        self, batch: Batch, plans: BatchPlan, gradients: FieldVectors, into: Any = None
    ) -> ByTable:
        """Per table the gradients of the distinct rows, [U, d]; duplicates summed.

        ``into`` is for engines that can write them where they are wanted; this one makes new ones.
        """
        found = self._totals(batch, plans, gradients)
        return ByTable(np.concatenate([found[name].ravel() for name in plans]), plans, wide=True)

    def _totals(
        self, batch: Batch, plans: Mapping[str, TablePlan], gradients: FieldVectors
    ) -> dict[str, np.ndarray]:
        dtype = gradients.pooled.dtype
        totals = {
            table: np.zeros((len(plans[table].ids), dim), dtype)
            for table, dim in zip((f.table for f in self._fields), self._dims, strict=True)
        }
        column = 0
        for number, field in enumerate(self._fields):
            dim = self._dims[number]
            matrix, _ = self._one_field(batch, plans, number, dtype)
            if field.pooling == "sequence":
                gradient = gradients.sequences[field.name].reshape(-1, dim)
            else:
                gradient = gradients.pooled[:, column : column + dim]
                column += dim
            totals[field.table] += matrix.T @ np.ascontiguousarray(gradient)
        return totals

    def _one_field(
        self, batch: Batch, plans: Mapping[str, TablePlan], number: int, dtype: np.dtype
    ) -> tuple[csr_matrix, np.ndarray]:
        """Of one field the weight of each distinct id in each bag, [B, U], or a row per
        place of a sequence; and a sequence's mask."""
        field = self._fields[number]
        plan = plans[field.table]
        inverse = np.empty(len(batch.ids), np.int64)
        inverse[plan.occurrences] = plan.inverse
        count = len(self._fields)
        if batch.offsets is None:
            starts = np.arange(number, len(batch.ids), count)
            lengths = np.ones(batch.size, np.int64)
        else:
            starts = batch.offsets[:-1][number::count]
            lengths = np.diff(batch.offsets)[number::count]
        mask = np.zeros((batch.size, 0), bool)
        if field.pooling == "sequence":
            lengths = np.minimum(lengths, field.max_length)
            mask = np.arange(field.max_length) < lengths[:, None]
        bag_bounds = np.concatenate([[0], np.cumsum(lengths)])
        occurrences = np.repeat(starts - bag_bounds[:-1], lengths) + np.arange(bag_bounds[-1])
        weights = np.repeat(_weights(field, lengths), lengths).astype(dtype)
        bounds = np.concatenate([[0], np.cumsum(mask.ravel())]) if mask.size else bag_bounds
        shape = (len(bounds) - 1, len(plan.ids))
        return csr_matrix((weights, inverse[occurrences], bounds), shape=shape), mask


def _weights(field: Field, lengths: np.ndarray) -> np.ndarray:
    """The weight of each id in a bag of ``lengths`` ids."""
    safe = np.maximum(lengths, 1)
    if field.pooling == "mean":
        safe = safe.astype(np.float64)
    elif field.pooling == "sqrtn":
        safe = np.sqrt(safe)
    else:
        return np.ones(len(lengths))
    weights: np.ndarray = 1.0 / safe
    return weights
