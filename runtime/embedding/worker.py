"""The embedding worker: looks rows up, pools them to vectors, scatters gradients back to rows.

A batch at the worker is a ticket (its `Handle`): distinct ids, the rows as they were read, and
where they lie. The dense side knows vectors only. Pooling does not depend on whose rows the ticket
holds: those of the servers, or the worker's own copies on lease.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from runtime.data.batch import Batch
from runtime.embedding.open import open_pooling
from runtime.embedding.store import Allocate, ByTable, FieldVectors, Handle, VectorGradients
from runtime.embedding.verbs import EmbeddingStore


class RowOverflowError(ValueError):
    """Finite gradients of vectors whose sum over a row's occurrences is not."""


_NOTICED = ("row_gradient_seen", "_live_row_seen", "_all_rows_looked_at")


class EmbeddingWorker:
    """Between one process's ranks and the embedding servers; safe for threads."""

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        dims = {name: table.dim for name, table in store.tables.items()}
        self._pooling = open_pooling(store.layout.fields, dims)
        self.row_gradient_seen = False
        """Whether any gradient other than zero has reached the rows so far."""
        self._live_row_seen = False
        self._all_rows_looked_at = False

    def noticed(self) -> dict[str, bool]:
        """What was noticed of the rows so far; plain JSON."""
        return {name: getattr(self, name) for name in _NOTICED}

    def go_on(self, noticed: Mapping[str, bool]) -> None:
        """Take up what `noticed` gave."""
        for name in _NOTICED:
            setattr(self, name, noticed[name])

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """A ticket: duplicates merged, shards planned, no row touched."""
        return self.store.begin(rank, step, batch)

    def pool(self, ticket: Handle, allocate: Allocate | None = None) -> FieldVectors:
        """The fields' vectors from the ticket's rows, where ``allocate`` wants them."""
        if not self._live_row_seen:
            self._live_row_seen = bool(ticket.values.flat.any())
        where = {} if allocate is None else {"allocate": allocate}
        return self._pooling.forward(ticket.batch, ticket.plans, ticket.values, **where)

    def scatter(self, ticket: Handle, gradients: VectorGradients | None) -> ByTable:
        """Gradients of the ticket's rows, duplicates summed; None is of a batch without samples.

        Raises `RowOverflowError` when a sum leaves the range of its numbers.
        """
        if gradients is None:
            return ticket.values.of(np.zeros_like(ticket.values.flat))
        with gradients.held:
            gradients.arrived()
            into = self.store.gradient_arrays(ticket)
            rows = self._pooling.backward(ticket.batch, ticket.plans, gradients.vectors, into)
        if gradients.factor != 1.0:
            rows = rows.of((rows.flat * gradients.factor).astype(rows.flat.dtype))
        if not self.row_gradient_seen:
            self.row_gradient_seen = bool(rows.flat.any())
        _refuse_overflow(ticket, rows.flat)
        return rows

    def give_back(self, ticket: Handle, gradients: VectorGradients | None) -> None:
        """Scatter the gradients and give every server its rows' part."""
        self.store.give((ticket, self.scatter(ticket, gradients)))

    def give_up(self, ticket: Handle, gradients: VectorGradients | None) -> None:
        """Close the ticket's step at every server without its gradients."""
        if gradients is not None:
            gradients.held.close()
        self.store.give((ticket, None))

    def peek(self, batch: Batch) -> FieldVectors:
        """The vectors of rows as they are now, for evaluation: creates and records nothing."""
        return self.pool(self.store.peek(batch))

    def has_live_rows(self) -> bool:
        """Whether any row was ever seen with a value other than zero.

        What batches looked up says so at no cost. Only while they saw nothing but zeros is the
        whole store looked at, and that once: a copy of it may take seconds.
        """
        if not self._live_row_seen and not self._all_rows_looked_at:
            self._all_rows_looked_at = True
            self._live_row_seen = any(bool(v.any()) for _, v, _ in self.store.export().values())
        return self._live_row_seen


def _refuse_overflow(ticket: Handle, gradients: np.ndarray) -> None:
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is an answer here
        total = float(gradients.sum())
    if math.isfinite(total) or bool(np.isfinite(gradients).all()):
        return
    raise RowOverflowError(
        f"the gradient of a row, summed over its occurrences at rank {ticket.rank}, step"
        f" {ticket.step}, is not finite; lower --model.lr or --rows.optimizer.lr"
    )
