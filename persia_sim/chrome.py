"""Chrome trace JSON (opens in Perfetto): one process a rank, one track a resource, lanes as needed.

The simulator and the runtime both write it, so a real and a simulated run can be laid side by side.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """One stage of one (rank, step) on one track."""

    rank: int
    track: str
    stage: str
    step: int
    start_s: float
    end_s: float


_LANES_PER_TRACK = 1000  # thread ids of a track: more lanes than batches can overlap


def chrome_events(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds; overlapping ones of a track lie on lanes of it."""
    tracks: dict[str, int] = {}
    lanes: dict[tuple[int, str], list[float]] = {}
    spans: list[dict[str, Any]] = []
    for interval in sorted(intervals, key=lambda i: (i.start_s, i.rank, i.step)):
        number = tracks.setdefault(interval.track, len(tracks))
        free = lanes.setdefault((interval.rank, interval.track), [])
        lane = next((k for k, end in enumerate(free) if end <= interval.start_s), len(free))
        free[lane : lane + 1] = [interval.end_s]
        spans.append(
            {
                "ph": "X",
                "name": interval.stage,
                "cat": interval.track,
                "pid": interval.rank,
                "tid": _LANES_PER_TRACK * number + lane,
                "ts": interval.start_s * 1e6,
                "dur": (interval.end_s - interval.start_s) * 1e6,
                "args": {"step": interval.step},
            }
        )
    names = [
        _name("process_name", rank, 0, f"rank {rank}") for rank in sorted({r for r, _ in lanes})
    ]
    for (rank, track), free in lanes.items():
        for lane in range(len(free)):
            thread = _LANES_PER_TRACK * tracks[track] + lane
            names.append(_name("thread_name", rank, thread, f"{track} {lane}" if lane else track))
    return names + spans


def write_chrome_trace(path: Path, events: list[dict[str, Any]]) -> int:
    """Write the events (compressed when the name ends in .gz); returns the number of spans."""
    document = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(document, mtime=0) if path.suffix == ".gz" else document)
    return sum(event["ph"] == "X" for event in events)


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
