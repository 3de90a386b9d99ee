"""Stages of a few steps as bars in time, of a recorded run and of a simulated one alike.

A bar lasts from when its work or its message begins until its result is there: a lookup until the
rows are at the rank, a push until they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from persia_sim.engine.run import Run
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.chrome import Span
from persia_sim.words.vocabulary import Mode, Stage
from runtime.embedding.server import READ, REFRESH, UPDATE


class Bar(NamedTuple):
    """One stage of one batch; seconds since any instant."""

    rank: int
    step: int
    stage: str
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """The bars of the steps that are shown, and the mean time between steps."""

    bars: list[Bar]
    step_s: float

    @classmethod
    def of_lists(cls, bars: list[list[int | str | float]], step_s: float) -> Timeline:
        """As it comes back from JSON."""
        return cls([Bar(*bar) for bar in bars], step_s)  # type: ignore[arg-type]


def recorded_bars(spans: Sequence[Span], steps: range, latency_s: float) -> Iterator[Bar]:
    """What a recording says of these steps.

    ``latency_s`` was added to each message: a lookup lasts from the read of the rows until they are
    at the rank, a push from the end of the rank's step until the rows are written.
    """
    by_batch: dict[tuple[int, int], list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        by_batch.setdefault((span.rank, span.step), []).append(span)
    for (rank, step), own in sorted(by_batch.items()):
        if step not in steps:
            continue
        reads = [s.start_s for s in own if s.stage in (READ, REFRESH)]
        pooled = [s.end_s for s in own if s.stage == Stage.LOOKUP]
        for start_s, end_s in zip(reads, pooled, strict=False):
            yield Bar(rank, step, Stage.LOOKUP, start_s, end_s + latency_s)
        trained_s = 0.0
        for span in own:
            if span.track == "dense":
                trained_s = max(trained_s, span.end_s)
            if span.stage == Stage.PUSH:
                yield Bar(rank, step, Stage.PUSH, trained_s, span.end_s)
            elif span.stage not in (Stage.LOOKUP, READ, REFRESH, UPDATE):
                yield Bar(rank, step, span.stage, span.start_s, span.end_s)


def simulated_bars(found: Run, ranks: int, steps: range, loads: bool) -> Iterator[Bar]:
    """The first ranks' stages in these steps; ``loads``: its workers also load the batch.

    An all-reduce that overlaps the backward pass begins when every rank has the gradients of the
    first bucket; copies to and from a GPU are left out.
    """
    mode, need, at, legs = found.scenario.mode, found.need, found.stamps, found.legs
    start, end = at[Mark.START], at[Mark.BACKWARD_END]
    forward_end = start + (end - start) * (need.forward_s / need.compute_s)
    summed = end
    if mode.overlaps_dense_sync and need.buckets:
        ready = forward_end + need.buckets[0].ready_share * (end - forward_end)
        summed = np.broadcast_to(ready.max(0), end.shape)
    load_s = need.fetch.worker_forward_s if loads else 0.0
    latency_s = found.scenario.cluster.link.latency_s
    parts = [
        (Stage.LOAD, at[Mark.LOOKUP], at[Mark.LOOKUP] + load_s),
        (Stage.LOOKUP, at[Mark.LOOKUP] + load_s, at[Mark.ROWS]),
        (Stage.FORWARD, start, forward_end),
        (Stage.BACKWARD, forward_end, end),
        (Stage.PUSH, at[Mark.COPY_OUT], at[Mark.APPLIED]),
    ]
    if need.refresh is not None:
        asked = legs[Leg.ASKED_AGAIN] - need.refresh.worker_forward_s - 2 * latency_s
        parts.append((Stage.LOOKUP, asked, at[Mark.REFRESHED]))
    if mode is Mode.ASYNC:
        parts.append((Stage.DENSE_PULL, at[Mark.REFRESHED], start))
    if mode.has_barrier:
        parts.append((Stage.DENSE_SYNC, summed, at[Mark.UPDATED]))
    for rank in range(ranks):
        for stage, begun, ended in parts:
            for step in steps:
                bar = Bar(rank, step, stage, float(begun[rank, step]), float(ended[rank, step]))
                if bar.end_s > bar.start_s:
                    yield bar


def mean_step_s(starts: np.ndarray) -> float:
    """Seconds between steps of a rank, without the first third of the run and its last steps.

    ``starts``: [ranks, steps], when each began to compute.

    >>> mean_step_s(np.array([[9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 99.0]]))
    1.0
    """
    steps = starts.shape[1]
    inside = starts[:, steps // 3 : steps - steps // 8]
    return float(np.diff(inside, axis=1).mean())
