"""Chrome trace JSON (opens in Perfetto): one process a rank, one track a resource, lanes as needed.

The simulator and the runtime both write it, so a real and a simulated run can be laid side by side.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One stage of one (rank, step) on one track."""

    rank: int
    track: str
    stage: str
    step: int
    start_s: float
    end_s: float


_LANES_PER_TRACK = 1000  # thread ids of a track: more lanes than batches can overlap


def chrome_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Complete events ("X") in microseconds; overlapping ones of a track lie on lanes of it."""
    tracks: dict[str, int] = {}
    lanes: dict[tuple[int, str], list[float]] = {}
    events: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda i: (i.start_s, i.rank, i.step)):
        number = tracks.setdefault(span.track, len(tracks))
        free = lanes.setdefault((span.rank, span.track), [])
        lane = next((k for k, end in enumerate(free) if end <= span.start_s), len(free))
        free[lane : lane + 1] = [span.end_s]
        events.append(
            {
                "ph": "X",
                "name": span.stage,
                "cat": span.track,
                "pid": span.rank,
                "tid": _LANES_PER_TRACK * number + lane,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"step": span.step},
            }
        )
    names = [
        _name("process_name", rank, 0, f"rank {rank}") for rank in sorted({r for r, _ in lanes})
    ]
    for (rank, track), free in lanes.items():
        for lane in range(len(free)):
            thread = _LANES_PER_TRACK * tracks[track] + lane
            names.append(_name("thread_name", rank, thread, f"{track} {lane}" if lane else track))
    return names + events


def write_chrome_trace(path: Path, events: list[dict[str, Any]]) -> int:
    """Write the events (compressed when the name ends in .gz); returns the number of spans."""
    document = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(document, mtime=0) if path.suffix == ".gz" else document)
    return sum(event["ph"] == "X" for event in events)


def _name(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
