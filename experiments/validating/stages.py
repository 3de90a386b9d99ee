"""Seconds that the stages of one rank's batch take: as spans of a run measured them, and by law.

A law is one for all configurations of this host, fitted to the profiled ones: seconds = fixed + per
item + per item and float of its row; for the dense network fixed + per input + per operation + per
weight. The fixed part is Python's: it does not grow with the batch, and the interpreter's lock is
held meanwhile. Every law says how well it fits.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from persia_sim.base.vocabulary import Mode, Stage
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


STAGE_OF_CALL = {"look_up": READ, "look_up_ahead": READ, "bring_up_to_date": REFRESH}


class TimedCalls:
    """A store whose rows are elsewhere; a call for rows is noted as their reading."""

    def __init__(self, store: Any, spans: TimedSpans) -> None:
        self._store = store
        self._spans = spans

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def timed(handle: Any) -> None:
            with self._spans.span("rows", STAGE_OF_CALL[name], handle.rank, handle.step):
                call(handle)

        return timed if name in STAGE_OF_CALL else call


class Hindered:
    """A server's work on rows, each piece of which takes longer, or before one of which it stands
    still: it is its only one meanwhile, so requests queue behind it."""

    def __init__(self, span: Any, slow_s: float, dead_s: float, dead_at: int) -> None:
        self._span = span
        self._slow_s = slow_s
        self._dead_s = dead_s
        self._dead_at = dead_at if dead_s else inf

    @contextmanager
    def span(self, track: str, stage: str, rank: int, step: int) -> Iterator[None]:
        """The work with what hinders it, timed as one."""
        with self._span(track, stage, rank, step):
            if step >= self._dead_at:
                self._dead_at = inf
                time.sleep(self._dead_s)
            if self._slow_s:
                time.sleep(self._slow_s)
            yield


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


def shares_of(missing_steps: np.ndarray) -> tuple[float, ...]:
    """The shares of lookups that missed 0, 1, 2, ... steps.

    >>> shares_of(np.array([0, 2, 2, 2]))
    (0.25, 0.0, 0.75)
    """
    return tuple((np.bincount(missing_steps) / max(1, len(missing_steps))).tolist())


def step_durations_of(spans: Sequence[TimedSpan], first: int) -> np.ndarray:
    """Seconds from the end of each rank's dense update to that of its next, steps >= ``first``."""
    ends: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        if span.stage in (Stage.DENSE_SYNC, Stage.DENSE_PUSH) and span.step >= first - 1:
            ends[span.rank].append(span.end_s)
    return np.concatenate([np.diff(np.sort(of_rank)) for of_rank in ends.values()] or [np.zeros(0)])


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


TERMS = {
    "load": ("one", "shards", "occurrences"),
    "read": ("one", "shards", "distinct", "distinct_floats", "created"),
    "served": ("one", "shards", "distinct", "distinct_floats", "created"),
    "servers": ("one", "shards", "distinct", "distinct_floats"),
    "pool": ("one", "occurrences", "occurrence_floats"),
    "forward": ("one", "inputs", "flops"),
    "backward": ("one", "inputs", "flops", "dense_params"),
    "check": ("one", "inputs", "dense_params"),
    "update": ("one", "dense_params"),
    "scatter": ("one", "shards", "occurrences", "occurrence_floats"),
    "push": ("one", "shards", "distinct", "distinct_floats"),
    "add_gradient": ("one", "dense_params"),
    "half": ("one", "distinct_floats"),
    "pull": ("one", "dense_params"),
    "sleep": ("one", "asked_s"),
}
"""By law: the quantities that it is linear in. ``servers`` is all that server processes need of a
core for a batch; the others that are no stage are timed in a loop (`loops`)."""
LOCKLESS = ("backward", "served", "renewed")
"""Stages whose fixed part holds no rank's interpreter: the whole backward pass is one call that has
let go of it, and servers that are processes have their own."""


@dataclass(frozen=True, slots=True)
class LawPoint:
    """One measurement: quantities (`TERMS`), and the seconds at them."""

    at: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class HostLaw:
    """A linear law with non-negative terms."""

    terms: Mapping[str, float]
    spread: float
    """Standard deviation of (law / measured - 1)."""

    def __call__(self, at: Mapping[str, float]) -> float:
        """Seconds at these quantities."""
        return sum(each * at[name] for name, each in self.terms.items())

    @property
    def fixed_s(self) -> float:
        """Seconds that do not grow with the batch, of one server."""
        return sum(self.terms.get(name, 0.0) for name in ("one", "shards"))


def fit_law(name: str, points: Sequence[LawPoint]) -> HostLaw:
    """The law that is nearest, relative to each measurement."""
    from scipy.optimize import nnls  # late: half a second

    # Every row is divided by its seconds, so that the law is sought whose ratio to them is 1.
    seconds = np.maximum([p.seconds for p in points], 1e-9)
    table = np.array([[p.at[term] for term in TERMS[name]] for p in points]) / seconds[:, None]
    scale = np.maximum(table.max(0), 1e-30)
    weights, _ = nnls(table / scale, np.ones(len(points)))
    off = table / scale @ weights - 1
    terms = dict(zip(TERMS[name], (weights / scale).tolist(), strict=True))
    return HostLaw(terms, float(off.std()))


@dataclass(frozen=True, slots=True)
class Costs:
    """The stages of one rank's batch alone on a core."""

    stages: Stages
    python: Stages
    """Fixed parts of the stages, in which the interpreter's lock is held."""


def costs_by_law(
    laws: Mapping[str, HostLaw],
    at: Mapping[str, float],
    mode: Mode,
    ranks: int,
    half: bool = False,
) -> Costs:
    """What a batch that holds ``at`` costs one of so many ranks; ``half``: rows travel so.

    What a stage costs in sync it costs in every mode; a prefetch, and bringing it up to date, cost
    what reading costs. Where the laws were measured with server processes, the rows are at those.
    """
    # Which law each stage has here.
    served = "served" in laws
    names = {stage: stage for stage in STAGES if stage not in OF_A_MODE}
    if served:  # what a call of sync waits for has the servers' work in it, updates too
        names |= {"served": "served"}
        del names["push"]
    if mode is Mode.LOOKAHEAD:
        names |= {"refresh": "read"} | ({"renewed": "served"} if served else {})
    if mode is Mode.ASYNC:
        names |= {"pull": "pull"}

    # The laws at this batch; their fixed parts hold the interpreter.
    nothing = dict.fromkeys(STAGES, 0.0)
    seconds = nothing | {stage: laws[name](at) for stage, name in names.items()}
    python = nothing | {s: laws[n].fixed_s for s, n in names.items() if s not in LOCKLESS}

    # What comes on top: the rest of the servers' work, which no call of a late mode waits for,
    # further ranks' gradients, and rounding of rows.
    if served and mode.reads_late_rows:
        seconds["push"] = max(0.0, laws["servers"](at) - seconds["served"])
    if ranks > 1 and mode.has_barrier:
        seconds["update"] += (ranks - 1) * laws["add_gradient"](at)
    if half:  # rounded here, and on each way half of that at one end and half at the other
        for stage in ("pool", "scatter", "read", "push"):
            seconds[stage] += laws["half"](at)
    return Costs(seconds, python)
