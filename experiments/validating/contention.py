"""What threads that run side by side cost each other: cores, memory, the interpreter.

Contention is a mean field: a thread meets the others at the shares of time for which they are busy,
which follow from the stages' seconds and the steps a second; these follow from the stages as they
are then. The seconds of a stage become

    wall = work (1 + memory A) / R + python H + among L + crowded F (K + L)

with work its CPU seconds alone, and python those of them that hold the interpreter; A the cores
that other ranks keep busy (at most all but one; what the threads of one rank cost each other in
memory is not known), R the mean share of a core that is left to it where n threads of c cores are
runnable, min(1, c / n); K and L the seconds of a step for which the rank's other threads and those
of other ranks hold the interpreter, H the share of time for which threads of whom nothing was
measured do, F the share of time for which they keep all cores busy. Threads of one rank take turns,
so that a stage's Python becomes longer by H. Of L a stage waits for a share of its own, `among`.
Where all cores are busy, who is given the lock waits for a core first, and everybody for the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from persia_sim.base.vocabulary import Mode
from runtime.profiling.stage_times import STAGES, Stages

_SWEEPS = 60


@dataclass(frozen=True, slots=True)
class Host:
    """What the threads of this host share."""

    cores: int
    memory: float = 0.0
    """A stage's CPU time grows by this share for each further core that is busy."""
    among: Mapping[str, float] = field(default_factory=dict)
    """By stage: seconds that it waits for each second of a step in which threads of other ranks
    hold the interpreter; where none were measured, they take turns as those of one rank do."""
    crowded: Mapping[str, float] = field(default_factory=dict)
    """By stage: seconds for each second of either kind, to be added where the other threads also
    keep all cores busy."""
    dense_cv: float = 0.0
    """Variation of a rank's forward and backward, which a barrier turns into waiting."""


AT_SERVERS = ("served", "renewed", "push")
"""Stages of rows in server processes, which are threads of their own."""


def threads_of(mode: Mode, served: bool = False) -> tuple[tuple[str, ...], ...]:
    """The stages of a rank's threads; where processes have ``served`` it, theirs behind them."""
    fetch = "load", "read"
    dense = "forward", "backward", "check", "update"
    push, beside = ((), (AT_SERVERS,)) if served else (("push",), ())
    if mode.reads_fresh_rows:
        return (*fetch, "pool", *dense, "scatter", *push), *beside
    if mode.prefetches_rows:
        return fetch, ("refresh", "pool", *dense, "scatter", *push), *beside
    pull = () if mode.has_barrier else ("pull",)
    return (*fetch, "pool"), (*pull, *dense), ("scatter", *push), *beside


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
    """Factor on their CPU seconds: what memory costs."""
    core: float
    """The share of a core that is left to them."""
    rank_s: float
    """Seconds of a step for which the rank's other threads hold the interpreter."""
    others_s: float
    """Seconds of a step for which other ranks' threads hold the interpreter."""
    crowd: float
    """The share of time for which other threads keep all cores busy."""
    held: float = 0.0
    """The share of time for which other threads, those of whom nothing was measured, hold the
    interpreter."""

    @property
    def factor(self) -> float:
        """Seconds by the clock for each CPU second alone, without the interpreter."""
        return self.growth / self.core


def threads(mode: Mode, ranks: int, stages: Stages, python: Stages) -> list[Thread]:
    """The threads of one rank; where ranks share a step, one of them updates the dense weights."""

    def total(of: Stages, names: Sequence[str]) -> float:
        shared = ranks if mode.has_barrier else 1
        return sum(of[name] / (shared if name == "update" else 1) for name in names)

    each = threads_of(mode, served=stages["served"] > 0)
    return [Thread(names, total(stages, names), total(python, names)) for names in each]


def burdens(of_rank: Sequence[Thread], ranks: int, steps_per_s: float, host: Host) -> list[Burden]:
    """The burden of each thread of a rank, where all ranks do so many steps a second."""
    # How long the interpreter is held by the rank's other threads, and by other ranks.
    held = np.array([t.python_s for t in of_rank])
    by_rank = held.sum() - held
    of_others = np.full(len(of_rank), (ranks - 1) * held.sum())

    # How long threads take depends on how busy the others are, and that on how long they take:
    # iterate until both agree.
    work = np.array([t.work_s for t in of_rank])
    factors = np.ones(len(of_rank))
    for _ in range(_SWEEPS):
        busy = np.minimum(1.0, factors * work * steps_per_s)
        beside = [np.delete(np.tile(busy, ranks), number) for number in range(len(of_rank))]
        growth = 1 + host.memory * min(host.cores - 1.0, (ranks - 1) * busy.sum())
        core = np.array([core_share(others, host.cores) for others in beside])
        factors = (factors + growth / core) / 2

    crowd = [all_busy(others, host.cores) for others in beside]
    unmeasured_s = by_rank if host.among else by_rank + of_others
    interpreter = np.minimum(1.0, unmeasured_s * steps_per_s)
    return [
        Burden(float(growth), *map(float, of))
        for of in zip(core, by_rank, of_others, crowd, interpreter, strict=True)
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
    probabilities = np.array([1.0])
    for share in shares:
        probabilities = np.convolve(probabilities, [1 - share, share])
    return probabilities


def burdened(
    stages: Stages,
    of_rank: Sequence[Thread],
    by: Sequence[Burden],
    host: Host,
    python: Stages,
) -> Stages:
    """The stages as a clock sees them; ``python``: their seconds of the interpreter."""
    longer = dict.fromkeys(STAGES, 0.0)
    for thread, burden in zip(of_rank, by, strict=True):
        both_s = burden.rank_s + burden.others_s
        for name in thread.stages:
            waiting_s = host.among.get(name, 0.0) * burden.others_s
            waiting_s += host.crowded.get(name, 0.0) * burden.crowd * both_s
            waiting_s += python[name] * burden.held
            longer[name] = burden.factor * stages[name] + waiting_s
    return longer
