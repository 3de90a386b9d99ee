"""Chrome trace JSON (opens in Perfetto): one process a rank, one track a resource, lanes as needed.

The simulator and the runtime both write it, so a real and a simulated run can be laid side by side:
spans carry the names of `Stage` and lie on the tracks ``load``, ``lookup``, ``copy in``, ``dense``,
``copy out`` and ``push``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from persia_sim.base.files import GZIP, atomic_write, open_regular
from persia_sim.base.vocabulary import Stage

Json = dict[str, Any]


class Span(NamedTuple):
    """One stage of one (rank, step) on one track."""

    rank: int
    track: str
    stage: str
    step: int
    start_s: float
    end_s: float


class Moment(NamedTuple):
    """Something that happened to a rank at one instant; to all of them if ``rank`` is None."""

    rank: int | None
    name: str
    at_s: float


class Level(NamedTuple):
    """A count of a rank, valid from this instant on."""

    rank: int
    name: str
    at_s: float
    value: int


_LANES_PER_TRACK = 1000  # thread ids of a track: more lanes than batches can overlap


def chrome_events(
    spans: Iterable[Span], moments: Iterable[Moment] = (), levels: Iterable[Level] = ()
) -> list[Json]:
    """Events in microseconds: names ("M"), spans ("X"), arrows ("s", "f"), marks ("i") and
    counters ("C").

    Spans of a track that overlap lie on lanes of it. An arrow leads from each batch's first lookup
    to its push.
    """
    # Spans: the first free lane of their track takes each.
    tracks: dict[str, int] = {}
    lanes: dict[tuple[int, str], list[float]] = {}
    events: list[Json] = []
    for span in sorted(spans, key=lambda i: (i.start_s, i.rank, i.step)):
        number = tracks.setdefault(span.track, len(tracks))
        free = lanes.setdefault((span.rank, span.track), [])
        lane = next((k for k, end in enumerate(free) if end <= span.start_s), len(free))
        free[lane : lane + 1] = [span.end_s]
        events.append(
            {
                "ph": "X",
                "name": str(span.stage),
                "cat": span.track,
                "pid": span.rank,
                "tid": _LANES_PER_TRACK * number + lane,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"step": span.step},
            }
        )

    # Names of the processes (ranks) and threads (lanes) that the viewer shows.
    names = [
        _name("process_name", rank, 0, f"rank {rank}") for rank in sorted({r for r, _ in lanes})
    ]
    for (rank, track), free in lanes.items():
        for lane in range(len(free)):
            thread = _LANES_PER_TRACK * tracks[track] + lane
            names.append(_name("thread_name", rank, thread, f"{track} {lane}" if lane else track))

    # Instants and counters.
    marks = [
        {
            "ph": "i",
            "name": m.name,
            "pid": m.rank or 0,
            "tid": 0,
            "ts": m.at_s * 1e6,
            "s": "g" if m.rank is None else "p",
        }
        for m in moments
    ]
    counters = [
        {"ph": "C", "name": v.name, "pid": v.rank, "ts": v.at_s * 1e6, "args": {v.name: v.value}}
        for v in levels
    ]
    return [*names, *events, *_arrows(events), *marks, *counters]


_BEGIN = b'{"traceEvents": ['


def write_chrome_trace(path: Path, events: list[Json]) -> int:
    """Write the events (compressed when the name ends in .gz); returns the number of spans."""
    document = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(gzip.compress(document, mtime=0) if path.suffix == ".gz" else document)
    return sum(event["ph"] == "X" for event in events)


def is_chrome_trace(path: Path) -> bool:
    """Whether a regular file begins as what `write_chrome_trace` writes."""
    try:
        with open_regular(path) as file:
            packed = file.peek(2).startswith(GZIP)
            begin = (gzip.GzipFile(fileobj=file) if packed else file).read(len(_BEGIN))
    except (OSError, EOFError, zlib.error):
        return False
    return begin == _BEGIN


def _arrows(spans: list[Json]) -> Iterator[Json]:
    """Both ends of each batch whose lookup and push are among the spans."""
    lookups: dict[tuple[int, int], Json] = {}
    for span in spans:
        batch = span["pid"], span["args"]["step"]
        if span["name"] == Stage.LOOKUP:
            lookups.setdefault(batch, span)
        elif span["name"] == Stage.PUSH and batch in lookups:
            for phase, end in (("s", lookups.pop(batch)), ("f", span)):
                place = {key: end[key] for key in ("pid", "tid", "ts")}
                arrow = {"name": "rows", "cat": "rows", "id": f"{batch[0]}/{batch[1]}"}
                yield {"ph": phase, **arrow, **place} | ({"bp": "e"} if phase == "f" else {})


def _name(what: str, rank: int, thread: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
