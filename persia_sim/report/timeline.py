"""A window of a run as a Chrome trace, in the words of the runtime's own timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from persia_sim.base.chrome import Json, Level, Span, chrome_events, write_chrome_trace
from persia_sim.base.rules import require
from persia_sim.base.vocabulary import Stage
from persia_sim.bounds.transfers import Transfers
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.simulate import Run


def timeline(run: Run, first_step: int, last_step: int) -> list[Json]:
    """Events of the steps in [first_step, last_step]: spans with an arrow from each batch's lookup
    to its push, and the number of batches in flight of each rank."""
    steps = run.scenario.steps
    inside = 0 <= first_step <= last_step < steps
    window = (first_step, last_step)
    require(inside, "timeline steps", window, f"must be a range inside [0, {steps - 1}]")
    return chrome_events(
        _spans(run, range(first_step, last_step + 1)),
        levels=_in_flight(run, first_step, last_step),
    )


def write_timeline(run: Run, path: Path, first_step: int, last_step: int) -> int:
    """Write the window (compressed when the name ends in .gz); returns the number of spans."""
    return write_chrome_trace(path, timeline(run, first_step, last_step))


def _spans(run: Run, steps: range) -> Iterator[Span]:
    """The stages of each batch. Forward ends at its share of the compute time, as without noise;
    loading lasts from delivery back as long as it takes where nothing is shared."""
    mode = run.scenario.mode
    at = run.stamps
    loaded = at[Mark.LOADED]
    alone = Transfers(run.scenario, run.need)
    load_s = run.need.load_s + alone.load_s() + alone.input_s()

    # Stages that every mode has before it computes.
    parts = [
        ("load", Stage.LOAD, np.maximum(loaded - load_s, 0.0), loaded),
        ("lookup", Stage.LOOKUP, at[Mark.LOOKUP], at[Mark.ROWS]),
        ("copy in", Stage.COPY_IN, at[Mark.COPY_IN], at[Mark.ON_GPU]),
    ]

    # What the mode adds.
    if run.scenario.brings_up_to_date:
        since = run.legs[Leg.ASKED_AGAIN]
        parts.append(("lookup", Stage.REFRESH, since, at[Mark.REFRESHED]))
    if mode.has_dense_server:
        parts.append(("dense", Stage.DENSE_PULL, at[Mark.REFRESHED], at[Mark.START]))

    # Computing, and the way back.
    start = at[Mark.START]
    end = at[Mark.BACKWARD_END]
    forward_end = start + (end - start) * (run.need.forward_s / run.need.compute_s)
    parts += [
        ("dense", Stage.FORWARD, start, forward_end),
        ("dense", Stage.BACKWARD, forward_end, end),
    ]
    if mode.has_barrier:
        parts.append(("dense", Stage.DENSE_SYNC, end, at[Mark.UPDATED]))
    parts += [
        ("copy out", Stage.COPY_OUT, at[Mark.COPY_OUT], at[Mark.COPIED_OUT]),
        ("push", Stage.PUSH, at[Mark.PUSH], at[Mark.APPLIED]),
    ]
    for r in range(at.shape[1]):
        for track, stage, began, ended in parts:
            for s in steps:
                yield Span(r, track, stage, s, float(began[r, s]), float(ended[r, s]))


def _in_flight(run: Run, first_step: int, last_step: int) -> Iterator[Level]:
    """Batches of each rank between start of lookup and applied push."""
    for r in range(run.stamps.shape[1]):
        starts = run.stamps[Mark.LOOKUP, r]
        ends = run.stamps[Mark.APPLIED, r]
        begin = float(starts[first_step])
        end = float(ends[last_step])
        times = np.concatenate([ends, starts])  # at one instant the ends count first
        change = np.repeat([-1, 1], len(starts))
        order = np.argsort(times, kind="stable")
        numbers = np.cumsum(change[order])
        for t, n in zip(times[order].tolist(), numbers.tolist(), strict=True):
            if begin <= t <= end:
                yield Level(r, "in flight", t, int(n))
