"""A window of a run as a Chrome trace: one process a rank, one track a resource, arrows for rows.

Open the file in Perfetto. Stages have the names of `Stage` where they have one, so a real and a
simulated run can be laid side by side.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.engine.simulate import Run
from persia_sim.model.cluster import require
from persia_sim.model.stamps import Mark
from persia_sim.words.vocabulary import Stage

Json = dict[str, Any]

_SPANS = (
    ("lookup", str(Stage.LOOKUP), Mark.LOOKUP, Mark.ROWS),
    ("copy to GPU", "copy_in", Mark.COPY_IN, Mark.ON_GPU),
    ("GPU", "forward_backward", Mark.START, Mark.BACKWARD_END),
    ("dense", str(Stage.DENSE_SYNC), Mark.BACKWARD_END, Mark.UPDATED),
    ("copy from GPU", "copy_out", Mark.COPY_OUT, Mark.COPIED_OUT),
    ("push", str(Stage.PUSH), Mark.PUSH, Mark.APPLIED),
)
_LANES = 100  # track numbers kept for the lanes of one kind of span


def timeline(run: Run, first_step: int, last_step: int) -> list[Json]:
    """Events of the steps in [first_step, last_step], in microseconds.

    Spans ("X"), an arrow from each batch's lookup to its push ("s", "f"), and the number of
    batches in flight of each rank ("C"). Lookups (and pushes) of a rank that overlap are laid on as
    many lanes as they need.
    """
    steps = run.scenario.steps
    inside = 0 <= first_step <= last_step < steps
    window = (first_step, last_step)
    require(inside, "timeline steps", window, f"must be a range inside [0, {steps - 1}]")
    events: list[Json] = []
    for r in range(run.stamps.shape[1]):
        name = {"name": f"rank {r}"}
        events.append({"ph": "M", "name": "process_name", "pid": r, "args": name})
        for kind in range(len(_SPANS)):
            events += _track(run, r, kind, range(first_step, last_step + 1))
        events += _in_flight(run, r, first_step, last_step)
    return events


def _track(run: Run, r: int, kind: int, steps: range) -> list[Json]:
    track, stage, start, end = _SPANS[kind]
    lanes: list[float] = []
    events: list[Json] = []
    for s in steps:
        began, ended = float(run.stamps[start, r, s]), float(run.stamps[end, r, s])
        lane = next((k for k, free in enumerate(lanes) if free <= began), len(lanes))
        lanes[lane : lane + 1] = [ended]
        place = {"name": stage, "cat": track, "pid": r, "tid": _LANES * kind + lane}
        duration = (ended - began) * 1e6
        events.append(place | {"ph": "X", "ts": began * 1e6, "dur": duration, "args": {"step": s}})
        arrow = place | {"name": "batch", "cat": "rows", "id": f"{r}/{s}"}
        if stage == Stage.LOOKUP:
            events.append(arrow | {"ph": "s", "ts": began * 1e6})
        elif stage == Stage.PUSH:
            events.append(arrow | {"ph": "f", "bp": "e", "ts": began * 1e6})
    for lane in range(len(lanes)):
        label = {"name": track if lane == 0 else f"{track} {lane}"}
        tid = _LANES * kind + lane
        events.append({"ph": "M", "name": "thread_name", "pid": r, "tid": tid, "args": label})
    return events


def _in_flight(run: Run, r: int, first_step: int, last_step: int) -> list[Json]:
    """A counter track: batches of the rank between start of lookup and applied push."""
    starts, ends = run.stamps[Mark.LOOKUP, r], run.stamps[Mark.APPLIED, r]
    begin, end = float(starts[first_step]), float(ends[last_step])
    times = np.concatenate([ends, starts])  # at one instant the ends count first
    change = np.repeat([-1, 1], len(starts))
    order = np.argsort(times, kind="stable")
    numbers = np.cumsum(change[order])
    return [
        {"ph": "C", "name": "in flight", "pid": r, "ts": t * 1e6, "args": {"batches": int(n)}}
        for t, n in zip(times[order].tolist(), numbers.tolist(), strict=True)
        if begin <= t <= end
    ]


def write_timeline(run: Run, path: Path, first_step: int, last_step: int) -> int:
    """Write the window (compressed when the name ends in .gz); returns the number of spans."""
    events = timeline(run, first_step, last_step)
    document = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(document.encode(), mtime=0))
    else:
        path.write_text(document)
    return sum(event["ph"] == "X" for event in events)
