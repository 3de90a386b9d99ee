"""Orders without a clock: the constant lag, in which every lookup misses exactly tau steps.

The deterministic executor of the runtime executes any order of events; the ones made here are the
simplest to read, and reach the bound exactly from step tau on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from persia_sim.words.events import ALL, Event, Kind
from persia_sim.words.vocabulary import Mode

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
) -> Iterator[Event]:
    """Yield the events of a run whose pushes of step s are applied after the updates of s + tau.

    ``first`` is the batch that it begins with, nothing being in flight: the lag rises anew.
    ``sync_steps``: before that step of hybrid or raw_hybrid nothing lags; behind it the lag rises
    as behind a start.

    In barrier modes a batch is a step of all ranks. In async, rank ``k mod ranks`` takes batch k,
    so that ``ranks`` batches are always in flight and a dense update misses the ``ranks - 1``
    others; there tau counts the rank's own steps. ``average_every`` is the steps that a rank
    trains between two averagings of async_averaging.
    """
    if mode is Mode.LOOKAHEAD:
        return _lookahead(ranks, has_batch, ahead, first)
    if mode.has_barrier:
        if not mode.reads_late_rows:
            tau, merge_pushes = 0, True
        return _barrier(ranks, has_batch, tau, merge_pushes, first, sync_steps)
    if mode is Mode.ASYNC_AVERAGING and not average_every:
        raise ValueError("async_averaging needs average_every >= 1 steps")
    return _round_robin(ranks, has_batch, tau, average_every, first)


def _push(ranks: int, step: int, merged: bool) -> Iterator[Event]:
    for rank in (ALL,) if merged else range(ranks):
        yield Event(Kind.PUSH, rank, step)


def _barrier(
    ranks: int, has_batch: HasBatch, lag: int, merged: bool, first: int, sync_steps: int
) -> Iterator[Event]:
    step = first
    begins = max(first, sync_steps)  # the first step whose push may wait
    while has_batch(step):
        for rank in range(ranks):
            yield Event(Kind.LOOKUP, rank, step)
        yield Event(Kind.DENSE_UPDATE, ALL, step)
        if step < begins:
            yield from _push(ranks, step, merged)
        elif step - begins >= lag:
            yield from _push(ranks, step - lag, merged)
        step += 1
    for waiting in range(max(begins, step - lag), step):
        yield from _push(ranks, waiting, merged)


def _lookahead(ranks: int, has_batch: HasBatch, ahead: int, first: int) -> Iterator[Event]:
    step = fetched = first
    while has_batch(step):
        while fetched <= step + ahead and has_batch(fetched):
            for rank in range(ranks):
                yield Event(Kind.LOOKUP, rank, fetched)
            fetched += 1
        for rank in range(ranks):
            yield Event(Kind.REFRESH, rank, step)
        yield Event(Kind.DENSE_UPDATE, ALL, step)
        yield from _push(ranks, step, merged=True)
        step += 1


def first_step(first: int, rank: int, ranks: int) -> int:
    """In async, the first step of a rank when batch ``first`` is the next to be trained.

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
    for rank in (k % ranks for k in range(batch, batch + ranks)):
        done = steps_of[rank]
        if done > first_of[rank]:
            yield from _finish(rank, done - 1, done - first_of[rank] > tau, tau)
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
