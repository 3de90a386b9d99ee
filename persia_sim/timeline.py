"""A window of a run as a Chrome trace: one process a rank, one track a resource, arrows for rows.

Open the file in Perfetto. The runtime writes the same track and span names, so a real and a
simulated run can be laid side by side.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from persia_sim.cluster import require
from persia_sim.simulate import Run
from persia_sim.stamps import Mark
from persia_sim.vocabulary import Stage

_SPANS = (
    ("lookup", str(Stage.LOOKUP), Mark.LOOKUP, Mark.ROWS),
    ("copy to GPU", "copy_in", Mark.COPY_IN, Mark.ON_GPU),
    ("GPU", "forward_backward", Mark.START, Mark.BACKWARD_END),
    ("dense", str(Stage.DENSE_SYNC), Mark.BACKWARD_END, Mark.UPDATED),
    ("copy from GPU", "copy_out", Mark.COPY_OUT, Mark.COPIED_OUT),
    ("push", str(Stage.PUSH), Mark.PUSH, Mark.APPLIED),
)


def spans(run: Run, first_step: int, last_step: int) -> list[dict[str, Any]]:
    """Complete events ("X") of the steps in [first_step, last_step], in microseconds.

    Overlapping lookups (and pushes) of a rank are laid on as many lanes as they need.
    """
    steps = run.scenario.steps
    require(
        0 <= first_step <= last_step < steps, "timeline steps", (first_step, last_step),
        f"must be a range inside [0, {steps - 1}]",
    )  # fmt: skip
    events: list[dict[str, Any]] = []
    for r in range(run.stamps.shape[1]):
        name = {"name": f"rank {r}"}
        events.append({"ph": "M", "name": "process_name", "pid": r, "args": name})
        for kind, (track, stage, start, end) in enumerate(_SPANS):
            lanes: list[float] = []
            for s in range(first_step, last_step + 1):
                began, ended = float(run.stamps[start, r, s]), float(run.stamps[end, r, s])
                lane = next((k for k, free in enumerate(lanes) if free <= began), len(lanes))
                lanes[lane : lane + 1] = [ended]
                events.append(
                    {
                        "ph": "X", "name": stage, "cat": track, "pid": r, "tid": 100 * kind + lane,
                        "ts": began * 1e6, "dur": (ended - began) * 1e6, "args": {"step": s},
                    }
                )  # fmt: skip
            for lane in range(len(lanes)):
                args = {"name": track if lane == 0 else f"{track} {lane}"}
                tid = 100 * kind + lane
                events.append(
                    {"ph": "M", "name": "thread_name", "pid": r, "tid": tid, "args": args}
                )
    return events


def write_timeline(run: Run, path: Path, first_step: int, last_step: int) -> int:
    """Write the window (compressed when the name ends in .gz); returns the number of spans."""
    events = spans(run, first_step, last_step)
    document = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(document.encode(), mtime=0))
    else:
        path.write_text(document)
    return sum(event["ph"] == "X" for event in events)
