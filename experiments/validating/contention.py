"""What threads that run side by side cost each other: cores, the interpreter's lock, memory.

Mean field: a thread meets the others at the shares of time for which they are busy, which follow
from the stages' seconds and the steps a second; these follow from the stages as they are then. The
seconds of a stage become

    wall = work (1 + memory A) / R + meeting K + among L + crowded F (K + L)

with work its CPU seconds alone; A the cores that other ranks keep busy (at most all but one; what
the threads of one rank cost each other in memory is in the laws of runs of one rank), R the mean
share of a core that is left to it where n threads of c cores are runnable, min(1, c / n); K and L
the seconds of a step for which the rank's other threads and those of other ranks hold the
interpreter, F the share of time for which they keep all cores busy. Of K a stage waits for a share
of its own, `meeting`: a thread whose operations are short keeps the lock from one to the next,
while a thread that begins because another one has handed it a batch finds that one at the lock,
however long the step is. Other ranks hand it nothing; of L it waits for another share, `among`.
Where all cores are busy, who is given the lock waits for a core first, and everybody for the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.validating.stages import Stages
from persia_sim.words.vocabulary import Mode

_SWEEPS = 60


@dataclass(frozen=True, slots=True)
class Host:
    """What its threads share."""

    cores: int
    memory: float = 0.0
    """A stage's CPU time grows by this share for each further core that is busy."""
    meeting: Mapping[str, float] = field(default_factory=dict)
    """By stage: seconds that it waits for each second of a step in which the rank's other threads
    hold the interpreter; none of a stage that is not named."""
    among: Mapping[str, float] = field(default_factory=dict)
    """The same for threads of other ranks."""
    crowded: Mapping[str, float] = field(default_factory=dict)
    """The same for all of them, to be added where they also keep all cores busy."""
    dense_cv: float = 0.0
    """Of a rank's forward and backward: what a barrier turns into waiting."""


def threads_of(mode: Mode) -> tuple[tuple[str, ...], ...]:
    """The stages of a rank's threads."""
    fetch, dense = ("load", "read"), ("forward", "backward", "check", "update")
    if mode is Mode.SYNC:
        return ((*fetch, "pool", *dense, "scatter", "push"),)
    if mode is Mode.LOOKAHEAD:
        return fetch, ("refresh", "pool", *dense, "scatter", "push")
    pull = () if mode.has_barrier else ("pull",)
    return (*fetch, "pool"), (*pull, *dense), ("scatter", "push")


@dataclass(frozen=True, slots=True)
class Thread:
    """Seconds of one thread in a step."""

    stages: tuple[str, ...]
    work_s: float
    python_s: float


@dataclass(frozen=True, slots=True)
class Burden:
    """How much longer the stages of one thread take."""

    growth: float
    """Of their CPU seconds: what memory costs."""
    core: float
    """The share of a core that is left to them."""
    own_s: float
    """Seconds of a step for which the rank's other threads hold the interpreter."""
    others_s: float
    """The same of other ranks' threads."""
    crowd: float
    """The share of time for which other threads keep all cores busy."""

    @property
    def factor(self) -> float:
        """Seconds by the clock for each CPU second alone, without the interpreter."""
        return self.growth / self.core


def threads(mode: Mode, ranks: int, stages: Stages, python: Stages) -> list[Thread]:
    """Of one rank; where ranks share a step, one of them updates the dense weights."""

    def total(of: Stages, names: Sequence[str]) -> float:
        shared = ranks if mode.has_barrier else 1
        return sum(of[name] / (shared if name == "update" else 1) for name in names)

    return [Thread(own, total(stages, own), total(python, own)) for own in threads_of(mode)]


def burdens(own: Sequence[Thread], ranks: int, steps_per_s: float, host: Host) -> list[Burden]:
    """Of each thread of a rank, where all ranks do so many steps a second."""
    held = np.array([t.python_s for t in own])
    beside_own, of_others = held.sum() - held, np.full(len(own), (ranks - 1) * held.sum())
    work = np.array([t.work_s for t in own])
    factors = np.ones(len(own))
    for _ in range(_SWEEPS):
        busy = np.minimum(1.0, factors * work * steps_per_s)
        beside = [np.delete(np.tile(busy, ranks), number) for number in range(len(own))]
        growth = 1 + host.memory * min(host.cores - 1.0, (ranks - 1) * busy.sum())
        core = np.array([core_share(others, host.cores) for others in beside])
        factors = (factors + growth / core) / 2
    crowd = [all_busy(others, host.cores) for others in beside]
    return [
        Burden(float(growth), *map(float, of))
        for of in zip(core, beside_own, of_others, crowd, strict=True)
    ]


def core_share(others: Sequence[float] | np.ndarray, cores: int) -> float:
    """Mean of min(1, cores / runnable threads) beside others that are busy for these shares.

    >>> core_share([1.0], 1), core_share([0.5], 1), core_share([1.0], 2)
    (0.5, 0.75, 1.0)
    """
    runnable = _runnable(others)
    shares = np.minimum(1.0, cores / np.arange(1, len(runnable) + 1))
    return float(runnable @ shares)


def all_busy(others: Sequence[float] | np.ndarray, cores: int) -> float:
    """The share of time for which threads that are busy for these shares want all cores.

    >>> all_busy([0.5, 0.5], 2), all_busy([0.5, 0.5], 1), all_busy([1.0], 2)
    (0.25, 0.75, 0.0)
    """
    return float(_runnable(others)[cores:].sum())


def _runnable(shares: Sequence[float] | np.ndarray) -> np.ndarray:
    """Probabilities that 0, 1, ... of threads are, which are for these shares of time."""
    found = np.array([1.0])
    for share in shares:
        found = np.convolve(found, [1 - share, share])
    return found


def burdened(stages: Stages, own: Sequence[Thread], by: Sequence[Burden], host: Host) -> Stages:
    """The stages as a clock sees them."""
    seconds = {
        f"{name}_s": burden.factor * stages[name] + waiting_s(name, burden, host)
        for thread, burden in zip(own, by, strict=True)
        for name in thread.stages
    }
    return Stages(**{"refresh_s": 0.0, **seconds})


def waiting_s(stage: str, by: Burden, host: Host) -> float:
    """Seconds of a step that a stage waits for the interpreter."""
    own_s = host.meeting.get(stage, 0.0) * by.own_s
    others_s = host.among.get(stage, 0.0) * by.others_s
    return own_s + others_s + host.crowded.get(stage, 0.0) * by.crowd * (by.own_s + by.others_s)


def most_steps_per_s(own: Sequence[Thread], ranks: int, host: Host) -> float:
    """What the cores can do at all."""
    return host.cores / max(1e-12, ranks * sum(t.work_s for t in own))
