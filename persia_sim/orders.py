"""Orders without a clock: the constant lag, in which every lookup misses exactly tau steps.

The deterministic executor of the runtime executes any `Trace`; the ones made here are the cheapest
to read and reach the bound exactly from step tau on.
"""

from __future__ import annotations

from persia_sim.trace import ALL, Event, Kind, Trace
from persia_sim.vocabulary import Mode


def constant_lag(
    mode: Mode,
    *,
    ranks: int,
    steps: int,
    tau: int = 0,
    ahead: int = 1,
    merge_pushes: bool = True,
    average_every: int = 0,
) -> Trace:
    """The order of a run in which pushes of step s are applied after the updates of step s + tau.

    ``steps`` counts steps of all ranks in barrier modes; in async it counts batches, which rank
    ``k mod ranks`` takes in turn, so that ``ranks`` batches are always in flight and a dense update
    misses the ``ranks - 1`` others. ``average_every`` is the batches a rank trains between two
    averagings of async_averaging.
    """
    events: list[Event] = []
    if mode is Mode.LOOKAHEAD:
        _lookahead(events, ranks, steps, ahead)
    elif mode.has_barrier:
        lag = tau if mode.reads_late_rows else 0
        _barrier(events, ranks, steps, lag, merge_pushes or not mode.reads_late_rows)
    else:
        _round_robin(events, ranks, steps, tau, average_every, mode)
    return Trace.of(events, mode=str(mode), ranks=ranks, steps=steps, tau=tau, order="constant_lag")


def _push(events: list[Event], ranks: int, step: int, merged: bool) -> None:
    for rank in (ALL,) if merged else range(ranks):
        events.append(Event(Kind.PUSH, rank, step))


def _barrier(events: list[Event], ranks: int, steps: int, lag: int, merged: bool) -> None:
    for step in range(steps):
        events += [Event(Kind.LOOKUP, rank, step) for rank in range(ranks)]
        events.append(Event(Kind.DENSE_UPDATE, ALL, step))
        if step >= lag:
            _push(events, ranks, step - lag, merged)
    for step in range(max(0, steps - lag), steps):
        _push(events, ranks, step, merged)


def _lookahead(events: list[Event], ranks: int, steps: int, ahead: int) -> None:
    for step in range(-ahead, steps):
        if step + ahead < steps:
            events += [Event(Kind.LOOKUP, rank, step + ahead) for rank in range(ranks)]
        if step >= 0:
            events += [Event(Kind.REFRESH, rank, step) for rank in range(ranks)]
            events.append(Event(Kind.DENSE_UPDATE, ALL, step))
            _push(events, ranks, step, merged=True)


def _round_robin(
    events: list[Event], ranks: int, batches: int, tau: int, average_every: int, mode: Mode
) -> None:
    """Rank r starts batch r, r + ranks, ...; it finishes one just before it starts the next."""

    def finish(rank: int, step: int) -> None:
        events.append(Event(Kind.DENSE_PUSH, rank, step))
        if step >= tau:
            events.append(Event(Kind.PUSH, rank, step - tau))

    averaging = mode is Mode.ASYNC_AVERAGING
    for batch in range(batches + ranks):
        rank, step = batch % ranks, batch // ranks
        if step > 0 and (step - 1) * ranks + rank < batches:
            finish(rank, step - 1)
            if averaging and average_every and step % average_every == 0 and rank == ranks - 1:
                round_ = step // average_every - 1
                for kind in (Kind.AVERAGE_READ, Kind.AVERAGE_WRITE):
                    events += [Event(kind, r, step - 1, ALL, round_) for r in range(ranks)]
        if batch < batches:
            if not averaging:
                events.append(Event(Kind.DENSE_PULL, rank, step))
            events.append(Event(Kind.LOOKUP, rank, step))
    for rank in range(ranks):
        own_steps = len(range(rank, batches, ranks))
        for step in range(max(0, own_steps - tau), own_steps):
            events.append(Event(Kind.PUSH, rank, step))
