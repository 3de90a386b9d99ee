"""What a batch's stages cost on this host, in any mode, by laws that its profile was fitted to.

A law is one for all configurations of this host, fitted to the profiled ones: seconds = fixed + per
item + per item and float of its row; for the dense network fixed + per input + per operation + per
weight. The fixed part is Python's: it does not grow with the batch, and the interpreter's lock is
held meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from persia_sim.base.vocabulary import Mode, Stage
from runtime.embedding.server import READ, REFRESH
from runtime.profiling.laws import LinearLaw
from runtime.profiling.stage_times import OF_A_MODE, STAGES, Stages, TimedSpan, TimedSpans

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


def fixed_s(law: LinearLaw) -> float:
    """Seconds of a law that do not grow with the batch, of one server."""
    return sum(law.terms.get(name, 0.0) for name in ("one", "shards"))


@dataclass(frozen=True, slots=True)
class Costs:
    """The stages of one rank's batch alone on a core."""

    stages: Stages
    python: Stages
    """Fixed parts of the stages, in which the interpreter's lock is held."""


def costs_by_law(
    laws: Mapping[str, LinearLaw],
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
    if mode.prefetches_rows:
        names |= {"refresh": "read"} | ({"renewed": "served"} if served else {})
    if mode.has_dense_server:
        names |= {"pull": "pull"}

    # The laws at this batch; their fixed parts hold the interpreter.
    nothing = dict.fromkeys(STAGES, 0.0)
    seconds = nothing | {stage: laws[name](at) for stage, name in names.items()}
    python = nothing | {s: fixed_s(laws[n]) for s, n in names.items() if s not in LOCKLESS}

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
