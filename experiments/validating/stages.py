"""Seconds that the stages of one rank's batch take: by law, or as spans of a run measured them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import inf, pi, sqrt
from typing import Any, NamedTuple

from persia_sim.words.vocabulary import Stage
from runtime.embedding.server import READ, REFRESH, UPDATE
from runtime.rank.progress import SpanRecorder


class TimedSpan(NamedTuple):
    """One stage of one (rank, step), by the clock and by its thread's CPU clock."""

    rank: int
    stage: str
    step: int
    thread: int
    start_s: float
    end_s: float
    cpu_start_s: float
    cpu_end_s: float

    @property
    def wall_s(self) -> float:
        """By the clock."""
        return self.end_s - self.start_s

    @property
    def cpu_s(self) -> float:
        """Of a core."""
        return self.cpu_end_s - self.cpu_start_s


class TimedSpans(SpanRecorder):
    """Notes every span with CPU times."""

    def __init__(self) -> None:
        super().__init__(enabled=True)
        self.timed: list[TimedSpan] = []

    @contextmanager
    def span(self, track: str, stage: str, rank: int, step: int) -> Iterator[None]:
        """As the recorder's."""
        start_s, cpu_start_s = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            cpu_end_s, end_s = time.thread_time(), time.perf_counter()
            thread = threading.get_ident()
            self.timed.append(
                TimedSpan(rank, stage, step, thread, start_s, end_s, cpu_start_s, cpu_end_s)
            )


class TimedCalls:
    """A store whose rows are elsewhere; a call for rows is noted as their reading."""

    def __init__(self, store: Any, spans: TimedSpans) -> None:
        self._store, self._spans = store, spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def look_up(self, handle: Any) -> None:
        """As the store's."""
        with self._spans.span("rows", READ, handle.rank, handle.step):
            self._store.look_up(handle)


OF_ROWS = (READ, REFRESH, UPDATE)


def of_rows(spans: Sequence[TimedSpan], first: int) -> tuple[dict[str, float], dict[str, float]]:
    """Wall and CPU seconds of the work on rows in the steps >= ``first``, of all ranks and shards:
    within the stages that ask for it."""
    wall, cpu = (dict.fromkeys(OF_ROWS, 0.0) for _ in range(2))
    for span in spans:
        if span.stage in OF_ROWS and span.step >= first:
            wall[span.stage] += span.wall_s
            cpu[span.stage] += span.cpu_s
    return wall, cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Means over batches, without waiting for other steps or ranks.

    What a thread does between two stages (queues, the window's books) is in the one that follows.
    """

    load_s: float
    """Cut the batch out of the samples, merge duplicates, ask for the rows."""
    read_s: float
    """Copy the rows out of the store."""
    pool_s: float
    forward_s: float
    backward_s: float
    check_s: float
    """See whether all gradients are finite."""
    update_s: float
    """Once a step: sum the ranks' dense gradients and apply them; async: a rank applies its own."""
    scatter_s: float
    """Gradients of vectors to gradients of rows."""
    push_s: float
    """Update the rows."""
    refresh_s: float = 0.0
    """Lookahead: replace the rows that were written since they were read."""
    pull_s: float = 0.0
    """Async: copy the dense weights; with averaging, enter or leave a round."""

    def parts(self) -> dict[str, float]:
        """As a table shows them."""
        return {
            "load": self.load_s,
            "lookup": self.read_s + self.refresh_s + self.pool_s,
            "dense": self.pull_s + self.forward_s + self.backward_s + self.check_s + self.update_s,
            "push": self.scatter_s + self.push_s,
        }

    def __getitem__(self, stage: str) -> float:
        """Seconds of a stage by its name."""
        return float(getattr(self, f"{stage}_s"))

    def times(self, factor: float) -> Stages:
        """Every stage so many times as long."""
        return Stages(**{f"{stage}_s": factor * self[stage] for stage in STAGES})


OF_A_MODE = ("refresh", "pull")
"""Stages that one mode has and the others have not."""
STAGES = tuple(field.name.removesuffix("_s") for field in fields(Stages))


@dataclass(frozen=True, slots=True)
class Measured:
    """The stages of one run."""

    wall: Stages
    """As a clock sees them: with waiting for a core, for the interpreter, for memory."""
    cpu: Stages
    """What a core did for them."""
    dense_cv: float
    """Of a rank's forward and backward, as `spread_of` says."""


def measured_stages(spans: Sequence[TimedSpan], first: int, prefetches: bool) -> Measured:
    """From spans of the steps >= ``first``, those of the rows' own work apart.

    Between two spans a thread may wait, so of that only the CPU time counts, but for the checking
    behind a backward pass. The wall time of a dense update is what the last rank of a step sees of
    it: the others' spans hold their waiting. With ``prefetches`` the first lookup of a batch holds
    the read of its rows, else the read lies before it.
    """
    wall: dict[str, float] = defaultdict(float)
    cpu: dict[str, float] = defaultdict(float)
    updates: dict[int, float] = defaultdict(lambda: inf)
    computed: dict[tuple[int, int], float] = defaultdict(float)
    before: dict[int, TimedSpan] = {}
    stages = [span for span in spans if span.stage not in OF_ROWS]
    for span in sorted(stages, key=lambda s: s.start_s):
        last = before.get(span.thread)
        before[span.thread] = span
        if span.step < first or last is None:
            continue
        stage, between_s = str(span.stage), max(0.0, span.cpu_start_s - last.cpu_end_s)
        if prefetches and stage == Stage.LOOKUP and last.stage == Stage.LOAD:
            stage = "ahead"
        if stage in (Stage.DENSE_SYNC, Stage.DENSE_PUSH):
            wall["check"] += span.start_s - last.end_s
            cpu["check"] += between_s
            if stage == Stage.DENSE_SYNC:
                updates[span.step] = min(updates[span.step], span.wall_s)
            else:
                wall[stage] += span.wall_s
        else:
            before_it = "asked" if stage == Stage.LOOKUP and not prefetches else stage
            wall[before_it] += between_s
            cpu[before_it] += between_s
            wall[stage] += span.wall_s
        cpu[stage] += span.cpu_s
        if stage in (Stage.FORWARD, Stage.BACKWARD):
            computed[span.rank, span.step] += span.wall_s
    batches = max(1, len(computed))
    ranks = max(1, len({rank for rank, _ in computed}))
    wall_rows, cpu_rows = (
        {stage: total / batches for stage, total in own.items()} for own in of_rows(spans, first)
    )
    wall = {stage: total / batches for stage, total in wall.items()}
    cpu = {stage: total / batches for stage, total in cpu.items()}
    if Stage.DENSE_PUSH not in cpu:
        wall[Stage.DENSE_SYNC] = sum(updates.values()) / max(1, len(updates))
        cpu[Stage.DENSE_SYNC] = cpu.get(Stage.DENSE_SYNC, 0.0) * ranks
    return Measured(
        # What surrounds the rows' own work is CPU time in both.
        _stages(wall, wall_rows, cpu_rows, prefetches),
        _stages(cpu, cpu_rows, cpu_rows, prefetches),
        spread_of(computed),
    )


def spread_of(times: Mapping[tuple[int, int], float]) -> float:
    """The coefficient of variation of normal times that differ by as much on average.

    Those of a step between its ranks, or where there is one, of a step and the next: a few very
    long steps are no more than that to a barrier, and a standard deviation makes much of them.

    >>> round(spread_of({(0, 0): 1.0, (1, 0): 2.0, (0, 1): 3.0, (1, 1): 3.0}), 3)
    0.197
    """
    if not times:
        return 0.0
    many = len({rank for rank, _ in times}) > 1
    other = {(r, s): (r + 1, s) if many else (r, s + 1) for r, s in times}
    apart = [abs(times[other[key]] - own) for key, own in times.items() if other[key] in times]
    mean = sum(times.values()) / len(times)
    return sqrt(pi) / 2 * sum(apart) / max(1, len(apart)) / mean


def _stages(
    own: dict[str, float], rows: dict[str, float], between: dict[str, float], prefetches: bool
) -> Stages:
    def of(stage: str) -> float:
        return own.get(stage, 0.0)

    def rest(seconds: float) -> float:
        return max(0.0, seconds)

    if prefetches:
        asked_s = rest(of("ahead") - rows["read"])
        pool_s = rest(of(Stage.LOOKUP) - between["refresh"])
    else:
        asked_s, pool_s = rest(of("asked") - between["read"]), of(Stage.LOOKUP)
    return Stages(
        load_s=of(Stage.LOAD) + asked_s,
        read_s=rows["read"],
        pool_s=pool_s,
        forward_s=of(Stage.FORWARD),
        backward_s=of(Stage.BACKWARD),
        check_s=of("check"),
        update_s=of(Stage.DENSE_SYNC) + of(Stage.DENSE_PUSH),
        scatter_s=rest(of(Stage.PUSH) - rows["update"]),
        push_s=rows["update"],
        refresh_s=rows["refresh"],
        pull_s=of(Stage.DENSE_PULL) + of(Stage.AVERAGE),
    )
