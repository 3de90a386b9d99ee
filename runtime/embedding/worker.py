"""The embedding worker: looks rows up, pools them to vectors, scatters gradients back to rows.

A batch at the worker is a `Handle`: distinct ids, the rows as they were read, and
where they lie. The dense side knows vectors only. Pooling does not depend on whose rows the handle
holds: those of the servers, or, in lookahead `forwarded`, the worker's own copies on lease.

A prefetch then brings rows with their optimiser state. Until the window has passed them, the copies
are the rows that count: the worker applies every step's gradients to them at once, with the same
kernels in the same order, so the next step reads them without asking a server. The servers get the
same lookups and pushes later, in the same order, and so end with the same bytes; nobody waits for
them but the prefetch of ``ahead`` steps on (law 15).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from persia_sim.base.trace import TraceRecorder
from persia_sim.base.vocabulary import ALL
from runtime.embedding.batch_rows import (
    Allocate,
    ByTable,
    FieldVectors,
    Handle,
    RankPush,
    VectorGradients,
)
from runtime.embedding.half import rounded
from runtime.embedding.native.plan import Pooling
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import EmbeddingStore, Lease
from runtime.stop import Stop


class RowOverflowError(ValueError):
    """Finite gradients of vectors whose sum over a row's occurrences is not."""


_NOTICED = ("row_gradient_seen", "_live_row_seen", "_all_rows_looked_at")


class EmbeddingWorker:
    """Between one process's ranks and the embedding servers; safe for threads."""

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        dims = {name: table.dim for name, table in store.tables.items()}
        self._pooling = Pooling(store.layout.fields, dims)
        self.row_gradient_seen = False
        """Whether any gradient other than zero has reached the rows so far."""
        self._live_row_seen = False
        self._all_rows_looked_at = False

    def state_dict(self) -> dict[str, bool]:
        """What was noticed of the rows so far; plain JSON."""
        return {name: getattr(self, name) for name in _NOTICED}

    def load_state_dict(self, noticed: Mapping[str, bool]) -> None:
        """Take up what `state_dict` gave."""
        for name in _NOTICED:
            setattr(self, name, noticed[name])

    def pool(self, handle: Handle, allocate: Allocate | None = None) -> FieldVectors:
        """The fields' vectors from the handle's rows, where ``allocate`` wants them."""
        return self.pool_as(self._pooling, handle, allocate)

    def pool_as(
        self, pooling: Pooling, handle: Handle, allocate: Allocate | None = None
    ) -> FieldVectors:
        """The same of the fields of one pooling, perhaps some alone."""
        if not self._live_row_seen:
            self._live_row_seen = bool(handle.values.flat.any())
        where = {} if allocate is None else {"allocate": allocate}
        rows = handle.values
        if self.store.half and handle.rank != ALL:  # an evaluation reads rows as they are
            rows = rows.of(rounded(rows.flat, handle.plans.row_sizes()))
        return pooling.forward(handle.batch, handle.plans, rows, **where)

    def scatter(self, handle: Handle, gradients: VectorGradients | None) -> ByTable:
        """Gradients of the handle's rows, duplicates summed; None is of a batch without samples.

        Raises `RowOverflowError` when a sum leaves the range of its numbers.
        """
        if gradients is None:
            return handle.values.of(np.zeros_like(handle.values.flat))

        # Sum the vectors' gradients onto distinct rows, once they have come from the device.
        with gradients.held:
            gradients.arrived()
            rows = self._pooling.backward(
                handle.batch, handle.plans, gradients.vectors, handle.gradients
            )

        # Of the sum over ranks where that is asked for; rounded as the rows are on their way.
        if gradients.factor != 1.0:
            rows = rows.of((rows.flat * gradients.factor).astype(rows.flat.dtype))
        if self.store.half:
            rounded(rows.flat, handle.plans.row_sizes(), out=rows.flat)

        # Notice whether rows learn at all, and refuse what no number can hold.
        if not self.row_gradient_seen:
            self.row_gradient_seen = bool(rows.flat.any())
        with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is an answer here
            total = float(rows.flat.sum())
        if not (math.isfinite(total) or np.isfinite(rows.flat).all()):
            raise RowOverflowError(
                f"the gradient of a row, summed over its occurrences at rank {handle.rank}, step"
                f" {handle.step}, is not finite; lower --model.lr or --rows.optimizer.lr"
            )
        return rows

    def give_back(self, handle: Handle, gradients: VectorGradients | None) -> None:
        """Scatter the gradients and give every server its rows' part."""
        self.store.give((handle, self.scatter(handle, gradients)))

    def give_up(self, handle: Handle, gradients: VectorGradients | None) -> None:
        """Close the handle's step at every server without its gradients."""
        if gradients is not None:
            gradients.held.close()
        self.store.give((handle, None))

    def has_live_rows(self) -> bool:
        """Whether any row was ever seen with a value other than zero.

        What batches looked up says so at no cost. Only while they saw nothing but zeros is the
        whole store looked at, and that once: a copy of it may take seconds.
        """
        if not self._live_row_seen and not self._all_rows_looked_at:
            self._all_rows_looked_at = True
            self._live_row_seen = any(bool(v.any()) for _, v, _ in self.store.export().values())
        return self._live_row_seen


class LeasedRows(NativeStore):
    """The copies of one embedding worker, which serves all ranks of a process."""

    def __init__(
        self, store: EmbeddingStore, ranks: int, ahead: int, recorder: TraceRecorder, stop: Stop
    ) -> None:
        # A row that a server may drop by itself cannot be held beside it as if it stayed.
        tables = list(store.tables.values())
        limited = (t for t in tables if t.depends_on_lookup_order or t.capacity.expire_after_steps)
        if forgetful := sorted(t.name for t in limited):
            raise ValueError(
                f"lookahead forwarded needs tables that keep every row, but tables {forgetful}"
                " evict, expire or refuse rows; use --lookahead reread"
            )

        # The copies follow the rules of sync: no lateness, one merged update a step.
        self._ranks = ranks
        self._ahead = ahead
        self._rules = ServerRules(ranks=ranks, tau=0, merges=True)
        super().__init__(
            store.layout,
            tables,
            shards=store.shards,
            seed=store.seed,
            recorder=recorder,
            rules=self._rules,
            stop=stop,
        )

        # Which rows each step of the window holds, and how many ranks have given its gradients.
        self._held: dict[int, dict[str, list[np.ndarray]]] = {}
        self._given: Counter[int] = Counter()
        self._lock = threading.Lock()

    def begin_leg_behind(
        self, first_steps: Sequence[int], counters: Sequence[Mapping[str, Any]]
    ) -> None:
        """Ranks begin with these steps, on rows whose servers have counted so many updates."""
        self.resume_run(self._rules, counters)
        self.begin_leg(first_steps)

    def take_in(self, handle: Handle, lease: Lease) -> None:
        """A prefetch has arrived: keep its rows, but for those that are here and so newer."""
        with self._lock:
            held = self._held.setdefault(handle.step, {name: [] for name in handle.plans})
            for name, plan in handle.plans.items():
                held[name].append(plan.ids)
                rows = [tables[name] for tables in lease]
                self.restore(name, rows, keep_present=True)
        self.look_up_ahead(handle)

    def give(self, push: RankPush) -> None:
        """A rank's gradients; the last rank's have them applied, and end old leases."""
        super().give(push)
        step = push[0].step
        with self._lock:
            self._given[step] += 1
            if self._given[step] == self._ranks:
                del self._given[step]
                self._release(step - self._ahead)

    def _release(self, step: int) -> None:
        """Drop the rows of a step that no later step of the window holds.

        All prefetches that the window let read before this step's push was applied are here.
        """
        held = self._held.pop(step, None)
        if held is None:
            return
        for name, parts in held.items():
            later = [ids for tables in self._held.values() for ids in tables[name]]
            gone = np.setdiff1d(np.concatenate(parts), np.concatenate([*later, parts[0][:0]]))
            self.forget(name, gone)
