"""What is told of a run while it trains, to who watches it: the metrics of `live.toml`.

A process that is watched writes what they are made of into a pipe that it was given: a line of JSON
each `SENT_EVERY_S`, and one at the end.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.files import table_beside

if TYPE_CHECKING:
    from runtime.run.training import Training  # loads torch

WATCHED = "PERSIA_TESTBED_WATCHED"
"""In the environment, the number of the pipe's descriptor. Without it nobody watches."""
SENT_EVERY_S = 2.0
LABELS = {
    "run": (),
    "server": ("server",),
    "lateness": ("server", "le"),
    "rank": ("rank", "server"),
}
_BINS = {"0": 1, "1": 2, "3": 4, "7": 8, "15": 16, "31": 32, "62": 63, "+Inf": None}
"""How many bins of a server's rows by lateness each bucket holds; the last one has all later."""


class Metric(NamedTuple):
    """A line of `live.toml`, which says what its words mean."""

    of: str
    key: str
    kind: str
    help: str

    def values(self, figures: Mapping[str, Any]) -> Iterator[tuple[Sequence[Any], int, float]]:
        """Labels, the life of the server that has counted it, and the value, where it was said."""
        if self.of == "run" and self.key in figures["run"]:
            yield (), 0, figures["run"][self.key]
        elif self.of == "rank":
            yield from (((rank, server), 0, s) for rank, server, s in figures.get("waited", ()))
        for shard, server in enumerate(figures.get("servers", ())):
            if self.of == "server":
                yield (shard,), server["incarnation"], server[self.key]
            elif self.of == "lateness":
                rows = server[self.key]
                yield from (((shard, le), 0, sum(rows[:bins])) for le, bins in _BINS.items())


@cache
def metrics() -> dict[str, Metric]:
    """By name."""
    groups = table_beside(__file__).items()
    return {name: Metric(of, **line) for of, lines in groups for name, line in lines.items()}


class Totals:
    """What metrics come to over restarts: no count falls, and nothing is counted twice."""

    def __init__(self) -> None:
        self._by_incarnation: dict[tuple[Any, ...], dict[Any, float]] = {}

    def add(
        self, figures: Mapping[str, Any], attempt: int = 0
    ) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of what a process of this ``attempt`` has said."""
        for name, metric in metrics().items():
            for labels, incarnation, value in metric.values(figures):
                by_incarnation = self._by_incarnation.setdefault((name, *labels), {})
                which = (attempt, incarnation) if metric.kind == "anew" else None
                by_incarnation[which] = (
                    value if metric.kind == "now" else max(value, by_incarnation.get(which, 0))
                )
                named = zip(LABELS[metric.of], map(str, labels), strict=True)
                yield name, dict(named), float(sum(by_incarnation.values()))


def tell(figures: Mapping[str, Any]) -> None:
    """Tell who watches this process, if anybody does; what is not told again still holds."""
    if WATCHED in os.environ:
        os.write(int(os.environ[WATCHED]), json.dumps(figures).encode() + b"\n")


@contextmanager
def telling(training: Training, total: int | None = None) -> Iterator[None]:
    """While this process trains, tell who watches it, if anybody does. ``total``: the samples that
    the run will train, where they are known."""
    # Nobody watches most runs: then nothing is done.
    if WATCHED not in os.environ:
        yield
        return
    if total is not None:
        tell({"total": total})

    # What this process knows: the leading one all figures, any other its own waits.
    parts = training.parts
    over = threading.Event()

    # Read anew each time: the figures of training as it goes on.
    def figures_now() -> dict[str, Any]:
        waits = [(*who, seconds) for who, seconds in parts.store.waited_s.items()]
        waits_here = [wait for wait in waits if wait[0] in parts.process.ranks]
        if not training.leads:
            return {"run": {}, "waited": waits_here}
        restarted = training.failover.notices if training.failover else ()
        run = asdict(training.figures(training.wall_s())) | {"servers_back": len(restarted)}
        return {"run": run, "waited": waits_here, "servers": parts.store.statuses()}

    # A thread of its own, so that training waits for no reader; the last figures come at the end.
    def tell_all() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(SENT_EVERY_S)
            with suppress(Exception):  # what is wrong is told by who trains
                tell(figures_now())

    # Training happens here; then the thread tells once more and ends.
    thread = threading.Thread(target=tell_all, name="live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
    thread.join()
