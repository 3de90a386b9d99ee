"""The window rule: the one definition of the staleness bound tau; and the order that reaches it.

Pure Python, shared by the runtime's gate and the simulator's. A lookup of step ``s`` may start only
when all pushes of all steps ``< s - tau`` are closed (applied, or lost and counted). ``tau = 0`` is
synchronous, ``None`` has no bound. In barrier modes the pushes of all ranks count, in async only
the rank's own (paper, section 3; the original bounds batches in flight instead: `Permits`
beside the runtime's stages).

The deterministic executor of the runtime executes any order of events; `constant_lag`, in which
every lookup misses exactly tau steps, is the simplest to read, and needs no clock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from persia_sim.base.vocabulary import (
    ALL,
    ENDLESS,
    KNOWN_MODES,
    Event,
    Kind,
    Mode,
    refuse_unless_carried,
)


def steps_to_close(step: int, tau: int) -> int:
    """How many leading steps must be closed before a lookup of ``step`` may start."""
    return max(0, step - tau)


class UpdatesMissed(NamedTuple):
    """Dense updates whose gradients a batch does not see, from the moment that the lag is full.

    The measure in which modes are compared: tau counts common steps in hybrid, but a rank's own
    steps in async.
    """

    rows: int | None
    """Updates of rows; None without a bound."""
    dense: int | None
    """Updates of dense weights; None where replicas are averaged and no update is missed whole."""


def updates_missed(mode: Mode, tau: int | None, *, ranks: int, dense_lag: int = 0) -> UpdatesMissed:
    """What a batch misses under the constant lag, where ranks take their turns.

    >>> updates_missed(Mode.HYBRID, 4, ranks=8), updates_missed(Mode.ASYNC, 4, ranks=8)
    (UpdatesMissed(rows=4, dense=0), UpdatesMissed(rows=39, dense=7))

    In async the window holds back pushes of rows only: dense weights are pulled just before a batch
    is computed on, and miss what the other ranks push until its own push (law 16).
    """
    if mode.has_barrier:
        return UpdatesMissed(mode.window(tau), dense_lag)
    rows = None if tau is None else (tau + 1) * ranks - 1
    return UpdatesMissed(rows, None if mode.averages_replicas else ranks - 1)


class Watermarks:
    """Per rank and for all of them, how many leading steps have their push closed.

    >>> marks = Watermarks(ranks=2)
    >>> marks.close(0, 0), marks.may_start(0, 1, tau=0), marks.may_start(0, 1, tau=1)
    (None, False, True)

    A run that goes on starts with all steps before ``first`` (one a rank) closed.
    """

    def __init__(self, ranks: int, first: Sequence[int] | None = None) -> None:
        self._closed = list(first) if first else [0] * ranks
        self._early: list[set[int]] = [set() for _ in range(ranks)]
        self._steps: list[int | None] = [None] * ranks
        self._through: set[int] = set()  # ranks that hold nobody up any more
        self._ends: list[int] = []  # their steps, sorted
        self._by_all = least = min(self._closed)
        # Open steps: how many ranks have closed them.
        self._passed = {
            step: sum(closed > step for closed in self._closed)
            for step in range(least, max(self._closed))
        }

    def close(self, rank: int, step: int) -> None:
        """The push of (rank, step) is applied or lost; pushes may close out of order."""
        early = self._early[rank]
        if self.has_closed(rank, step):
            raise ValueError(f"push of rank {rank}, step {step} is already closed")
        early.add(step)
        while (now := self._closed[rank]) in early:
            early.remove(now)
            self._passed[now] = self._passed.get(now, 0) + 1
            self._closed[rank] = now + 1
        self._move(rank)

    def has_closed(self, rank: int, step: int) -> bool:
        """Whether the push of (rank, step) is applied or lost."""
        return step < self._closed[rank] or step in self._early[rank]

    def closed(self, rank: int) -> list[int]:
        """The number of leading steps closed by the rank, then those closed out of order."""
        return [self._closed[rank], *sorted(self._early[rank])]

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: once they are closed it holds nobody up."""
        self._steps[rank] = steps
        self._move(rank)

    def _move(self, rank: int) -> None:
        """Count the leading steps that every rank has closed, or does not have."""
        ranks = len(self._closed)
        if rank not in self._through and self.closed_steps(rank) == ENDLESS:
            self._through.add(rank)
            insort(self._ends, self._closed[rank])
        if len(self._ends) == ranks:
            self._by_all = ENDLESS
        while self._by_all < ENDLESS:
            without = bisect_right(self._ends, self._by_all) if self._ends else 0
            if self._passed.get(self._by_all, 0) + without < ranks:
                return
            self._passed.pop(self._by_all, None)
            self._by_all += 1

    def closed_steps(self, rank: int | None = None) -> int:
        """Leading steps closed by ``rank``, or by all; endless for a rank that is through."""
        if rank is None:
            return self._by_all
        steps = self._steps[rank]
        return ENDLESS if steps is not None and self._closed[rank] >= steps else self._closed[rank]

    def may_start(self, rank: int, step: int, tau: int | None, per_rank: bool = False) -> bool:
        """Whether the lookup of (rank, step) lies inside the window."""
        if tau is None:
            return True
        return self.closed_steps(rank if per_rank else None) >= steps_to_close(step, tau)


CARRIES = KNOWN_MODES
"""The modes whose order of events is known here."""
HasBatch = Callable[[int], bool]
"""Whether the stream has a k-th batch (of a dense update); asked for k = 0, 1, 2, ... in turn."""


def constant_lag(
    mode: Mode,
    *,
    ranks: int,
    has_batch: HasBatch,
    tau: int = 0,
    ahead: int = 1,
    merge_pushes: bool = True,
    average_every: int | None = None,
    first: int = 0,
    sync_steps: int = 0,
    fresh: bool = False,
) -> Iterator[Event]:
    """Yield the events of a run whose pushes of step s are applied after the updates of s + tau.

    ``first`` is the batch that it begins with, nothing being in flight: the lag rises anew.
    ``sync_steps``: before that step of hybrid or raw_hybrid nothing lags; behind it the lag rises
    as behind a start.

    In barrier modes a batch is a step of all ranks. In async, rank ``k mod ranks`` takes batch k,
    so that ``ranks`` batches are always in flight and a dense update misses the ``ranks - 1``
    others; there tau counts the rank's own steps. ``average_every`` is the steps that a rank
    trains between two averagings of async_averaging. ``fresh``: some tables are fresh, and so their
    rows are brought up to date before each step, and written behind it.
    """
    refuse_unless_carried(mode, CARRIES, "the order of the constant lag", fresh=fresh)
    if mode.has_barrier:
        return _common_step(
            ranks,
            has_batch,
            ahead=ahead if mode.prefetches_rows else 0,
            lag=tau if mode.reads_late_rows else 0,
            merged=mode.merges(merge_pushes),
            refreshes=mode.prefetches_rows or fresh,
            fresh=fresh,
            first=first,
            sync_steps=sync_steps,
        )
    if mode.averages_replicas and not average_every:
        raise ValueError("async_averaging needs average_every >= 1 steps")
    return _round_robin(ranks, has_batch, tau, average_every, first)


def _push(ranks: int, step: int, merged: bool) -> Iterator[Event]:
    for rank in (ALL,) if merged else range(ranks):
        yield Event(Kind.PUSH, rank, step)


def _common_step(
    ranks: int,
    has_batch: HasBatch,
    *,
    ahead: int,
    lag: int,
    merged: bool,
    refreshes: bool,
    fresh: bool,
    first: int,
    sync_steps: int,
) -> Iterator[Event]:
    """All ranks train a step together; rows are read ``ahead`` steps before it, brought up to date
    (``refreshes``) before it is computed, and written ``lag`` steps behind it."""
    step = looked_up = first
    begins = max(first, sync_steps)  # the first step whose push may wait
    while has_batch(step):
        while looked_up <= step + ahead and has_batch(looked_up):
            for rank in range(ranks):
                yield Event(Kind.LOOKUP, rank, looked_up)
            looked_up += 1
        for rank in range(ranks) if refreshes else ():
            yield Event(Kind.REFRESH, rank, step)
        yield Event(Kind.DENSE_UPDATE, ALL, step)
        if fresh:
            yield Event(Kind.FRESH_PUSH, ALL, step)
        if step < begins:
            yield from _push(ranks, step, merged)
        elif step - begins >= lag:
            yield from _push(ranks, step - lag, merged)
        step += 1
    for waiting in range(max(begins, step - lag), step):
        yield from _push(ranks, waiting, merged)


def first_step(first: int, rank: int, ranks: int) -> int:
    """The first step of a rank in async when batch ``first`` is the next to be trained.

    >>> [first_step(5, rank, 3) for rank in range(3)]
    [2, 2, 1]
    """
    return (first - rank + ranks - 1) // ranks


def _round_robin(
    ranks: int, has_batch: HasBatch, tau: int, average_every: int | None, first: int
) -> Iterator[Event]:
    """Rank r starts batch r, r + ranks, ...; it finishes one just before it starts the next."""
    first_of = [first_step(first, rank, ranks) for rank in range(ranks)]
    steps_of = list(first_of)
    batch = first

    # Each turn: the rank finishes its last batch, pulls, and starts the next.
    while has_batch(batch):
        rank = batch % ranks
        done = steps_of[rank]
        if done > first_of[rank]:
            yield from _finish(rank, done - 1, done - first_of[rank] > tau, tau)
        if average_every and rank == ranks - 1 and done and done % average_every == 0:
            yield from _average(ranks, done, average_every)
        if not average_every:
            yield Event(Kind.DENSE_PULL, rank, steps_of[rank])
        yield Event(Kind.LOOKUP, rank, steps_of[rank])
        steps_of[rank] += 1
        batch += 1

    # The stream is over: every rank finishes what it has begun.
    for rank in (k % ranks for k in range(batch, batch + ranks)):
        done = steps_of[rank]
        if done > first_of[rank]:
            yield from _finish(rank, done - 1, done - first_of[rank] > tau, tau)

    # Pushes that tau held back.
    for late in range(max(first, batch - tau * ranks), batch):  # in the order of the stream
        yield Event(Kind.PUSH, late % ranks, late // ranks)


def _finish(rank: int, step: int, pushes: bool, tau: int) -> Iterator[Event]:
    yield Event(Kind.DENSE_PUSH, rank, step)
    if pushes:
        yield Event(Kind.PUSH, rank, step - tau)


def _average(ranks: int, steps: int, average_every: int) -> Iterator[Event]:
    """Every rank enters the round at one instant and leaves it at the next."""
    round_ = steps // average_every - 1
    for kind in (Kind.AVERAGE_READ, Kind.AVERAGE_WRITE):
        for rank in range(ranks):
            yield Event(kind, rank, steps - 1, ALL, round_)
