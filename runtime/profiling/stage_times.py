"""Seconds that the stages of one rank's batch take in a run.

Stages timed alone in a loop are up to ten times too fast: their rows and vectors lie in the cache
and nobody else wants the interpreter. So they are timed where they are, as spans of a run, by the
clock and by the CPU clock of their thread.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import inf, pi, sqrt
from typing import Any, NamedTuple, cast

import numpy as np

from persia_sim.base.vocabulary import Stage
from runtime.data.batch import Batch
from runtime.data.source import Part, Source
from runtime.embedding.server import READ, REFRESH, UPDATE
from runtime.executors.threads import ConcurrentRun
from runtime.rank.components import Components
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
        """Seconds by the clock."""
        return self.end_s - self.start_s

    @property
    def cpu_s(self) -> float:
        """Seconds of a core."""
        return self.cpu_end_s - self.cpu_start_s


class TimedSpans(SpanRecorder):
    """A recorder that notes every span with CPU times."""

    def __init__(self) -> None:
        super().__init__(enabled=True)
        self.timed: list[TimedSpan] = []

    @contextmanager
    def span(self, track: str, stage: str, rank: int, step: int) -> Iterator[None]:
        """Record one stage as the base class does, by both clocks."""
        start_s = time.perf_counter()
        cpu_start_s = time.thread_time()
        try:
            yield
        finally:
            cpu_end_s = time.thread_time()
            end_s = time.perf_counter()
            thread = threading.get_ident()
            self.timed.append(
                TimedSpan(rank, stage, step, thread, start_s, end_s, cpu_start_s, cpu_end_s)
            )


OF_ROWS = (READ, REFRESH, UPDATE)
"""Work on rows, of all ranks and shards: within the stages that ask for it."""
Stages = dict[str, float]
"""Mean seconds of each of `STAGES` over batches, without waiting for other steps or ranks.

What a thread does between two stages (queues, the window's books) is in the one that follows.
"""
PARTS = {
    "load": ("load",),  # cut the batch out of the samples, merge duplicates, ask for the rows
    # Copy the rows out of the store; lookahead: replace those that were written since; pool. Where
    # processes have the rows, these are the rank's own work on the calls, and served and renewed
    # are the rest on a link without limit: messages, and the server's work (in sync, and in a
    # refresh, also that on the push before). Push is then what else servers need of a core.
    "lookup": ("read", "served", "refresh", "renewed", "pool"),
    # async: copy the dense weights (with averaging, enter or leave a round); check: are all
    # gradients finite; update: once a step, sum the ranks' and apply them (async: a rank its own).
    "dense": ("pull", "forward", "backward", "check", "update"),
    "push": ("scatter", "push"),  # gradients of vectors to those of rows; update the rows
}
"""The stages as a table shows them together."""
STAGES = tuple(stage for part in PARTS.values() for stage in part)
OF_A_MODE = ("refresh", "pull", "served", "renewed")
"""Stages that one mode or engine has and the others have not."""


def parts_of(stages: Stages) -> dict[str, float]:
    """Seconds of each of `PARTS`."""
    return {part: sum(stages[name] for name in names) for part, names in PARTS.items()}


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The stages of one run."""

    wall: Stages
    """Seconds by the clock: with waiting for a core, for the interpreter, for memory."""
    cpu: Stages
    """Seconds of a core."""
    dense_cv: float
    """Coefficient of variation of a rank's forward and backward, by `spread_of`."""


def measured_stages(spans: Sequence[TimedSpan], first: int, prefetches: bool) -> StageTimes:
    """Stage times from spans of the steps >= ``first``, those of the rows' own work apart.

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

    # Walk each thread's spans in order: what lies between two of them is in one of the two.
    stages = [span for span in spans if span.stage not in OF_ROWS]
    for span in sorted(stages, key=lambda s: s.start_s):
        last = before.get(span.thread)
        before[span.thread] = span
        if span.step < first or last is None:
            continue
        stage = str(span.stage)
        between_s = max(0.0, span.cpu_start_s - last.cpu_end_s)
        if prefetches and stage == Stage.LOOKUP and last.stage == Stage.LOAD:
            stage = "ahead"

        # Behind a backward pass gradients are checked; else a stage's preparation is before it.
        if stage in (Stage.DENSE_SYNC, Stage.DENSE_PUSH):
            wall["check"] += span.start_s - last.end_s
            cpu["check"] += between_s
            if stage == Stage.DENSE_SYNC:
                updates[span.step] = min(updates[span.step], span.wall_s)
            else:
                wall[stage] += span.wall_s
        else:
            before_it = "requested" if stage == Stage.LOOKUP and not prefetches else stage
            wall[before_it] += between_s
            cpu[before_it] += between_s
            wall[stage] += span.wall_s
        cpu[stage] += span.cpu_s
        if stage in (Stage.FORWARD, Stage.BACKWARD):
            computed[span.rank, span.step] += span.wall_s

    # The rows' own work, which lies within those stages.
    for span in (s for s in spans if s.stage in OF_ROWS and s.step >= first):
        wall[span.stage] += span.wall_s
        cpu[span.stage] += span.cpu_s

    # Means over batches; a common dense update is what the last rank of a step sees of it.
    batches = max(1, len(computed))
    ranks = max(1, len({rank for rank, _ in computed}))
    for times in (wall, cpu):
        times.update({stage: total / batches for stage, total in times.items()})
    if Stage.DENSE_PUSH not in cpu:
        wall[Stage.DENSE_SYNC] = sum(updates.values()) / max(1, len(updates))
        cpu[Stage.DENSE_SYNC] *= ranks

    # What surrounds the rows' own work is CPU time in both.
    return StageTimes(
        wall=_stages(wall, cpu, prefetches),
        cpu=_stages(cpu, cpu, prefetches),
        dense_cv=spread_of(computed),
    )


def spread_of(times: Mapping[tuple[int, int], float]) -> float:
    """The coefficient of variation of normal times that differ by as much on average.

    Compared are the times of a step between its ranks, or where there is one, of a step and the
    next: a few very long steps are no more than that to a barrier, and a standard deviation makes
    much of them.

    >>> round(spread_of({(0, 0): 1.0, (1, 0): 2.0, (0, 1): 3.0, (1, 1): 3.0}), 3)
    0.197
    """
    if not times:
        return 0.0
    many = len({rank for rank, _ in times}) > 1
    apart = []
    for (rank, step), seconds in times.items():
        neighbour = (rank + 1, step) if many else (rank, step + 1)
        if neighbour in times:
            apart.append(abs(times[neighbour] - seconds))
    mean = sum(times.values()) / len(times)
    return sqrt(pi) / 2 * sum(apart) / max(1, len(apart)) / mean


def _stages(times: Mapping[str, float], cpu: Mapping[str, float], prefetches: bool) -> Stages:
    # A prefetch reads the rows behind the loading; else the lookup waits for them before it.
    if prefetches:
        request_s = times["ahead"]
        pool_s = times[Stage.LOOKUP] - cpu[REFRESH]
    else:
        request_s = times["requested"]
        pool_s = times[Stage.LOOKUP]
    within = times[READ] if prefetches else cpu[READ]
    return {
        "load": times[Stage.LOAD] + max(0.0, request_s - within),
        "read": times[READ],
        "served": 0.0,
        "refresh": times[REFRESH],
        "renewed": 0.0,
        "pool": max(0.0, pool_s),
        "pull": times[Stage.DENSE_PULL] + times[Stage.AVERAGE],
        "forward": times[Stage.FORWARD],
        "backward": times[Stage.BACKWARD],
        "check": times["check"],
        "update": times[Stage.DENSE_SYNC] + times[Stage.DENSE_PUSH],
        "scatter": max(0.0, times[Stage.PUSH] - times[UPDATE]),
        "push": times[UPDATE],
    }


# What is timed.


class Drawn:
    """A source whose first training samples are drawn already, so that no rank draws while it is
    timed; where it has too few, they come again."""

    def __init__(self, source: Source, samples: int) -> None:
        self._source = source
        self._chunks: list[Any] = []
        for chunk in chain.from_iterable(source.chunks("train") for _ in repeat(None)):
            self._chunks.append(chunk)
            samples -= chunk.size
            if samples <= 0:
                break

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def chunks(self, part: Part) -> Any:
        """Chunks as the source has them; the training part ends with what is drawn."""
        return iter(self._chunks) if part == "train" else self._source.chunks(part)


def timed_run(components: Components) -> list[TimedSpan]:
    """Train and return all spans."""
    spans = TimedSpans()
    components = replace(components, spans=spans)
    cast(Any, components.store).record_spans(spans.span)
    components.meter.start()
    ConcurrentRun(components).run()
    return spans.timed


class IdCounts(NamedTuple):
    """Ids of each batch of a stream, int64 [batches] each."""

    occurrences: np.ndarray
    distinct: np.ndarray
    """Each field's counted once."""
    created: np.ndarray
    """Those in no batch before, so that their rows are made."""


def count_ids(batches: Iterable[Batch]) -> IdCounts:
    """Count them; nothing is timed."""
    ids = []
    occurrences = []
    for batch in batches:
        ids.append(np.unique(batch.ids))
        occurrences.append(len(batch.ids))
    distinct = np.array([len(of_batch) for of_batch in ids])
    first = np.unique(np.concatenate(ids), return_index=True)[1]
    batch_of_first = np.searchsorted(distinct.cumsum(), first, side="right")
    created = np.bincount(batch_of_first, minlength=len(ids))
    return IdCounts(np.array(occurrences), distinct, created)
