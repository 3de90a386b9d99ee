"""What goes wrong in a run, and what is done against it: slow-downs, crashes, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import expm1, inf, log1p, sqrt

import numpy as np

from persia_sim.base.rules import SECONDS, require
from persia_sim.base.schema import hold_choices


class Purpose(IntEnum):
    """What a stream of draws is for."""

    GPU = 1
    SERVER_LOOKUP = 2
    SERVER_UPDATE = 3
    FAULT = 5
    ROWS = 6


def stream(seed: int, purpose: Purpose, entity: int, step: int = 0) -> np.random.Generator:
    """The generator of one entity for one purpose, at its own counter for each step."""
    key = np.array([seed, int(purpose) << 32 | entity], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, step]))


def lognormal_factors(generator: np.random.Generator, cv: float, size: int) -> np.ndarray:
    """Factors of mean 1 and coefficient of variation ``cv``, float64 [size]; ones for cv = 0."""
    if cv == 0:
        return np.ones(size)
    sigma = sqrt(log1p(cv * cv))
    return np.asarray(np.exp(sigma * generator.standard_normal(size) - sigma * sigma / 2))


MOST_S = SECONDS[1]
MOST_FACTOR = 1e4
"""Slowest that a straggler may be, in multiples of its service times."""


class Target(StrEnum):
    """What a disturbance hits."""

    RANK = "rank"
    WORKER = "worker"
    SERVER = "server"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowDown:
    """One process is slower, for a while or throughout."""

    target: Target
    """Kind of process."""
    index: int
    """Which one, from 0."""
    factor: float
    """Service times are multiplied by this, >= 1."""
    start_s: float = 0.0
    """Simulated time at which it begins, >= 0."""
    end_s: float = float("inf")
    """Simulated time at which it ends, > start_s."""

    def __post_init__(self) -> None:
        hold_choices(self)
        ok = 1 <= self.factor <= MOST_FACTOR
        require(ok, "slow-down factor", self.factor, f"must lie in [1, {MOST_FACTOR:g}]")
        require(0 <= self.start_s < self.end_s, "start_s", self.start_s, f"before {self.end_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """One process dies and comes back."""

    target: Target
    """Kind of process. A server or worker loses the pushes it holds; a rank goes back to its last
    checkpoint and does the work since then again, in barrier modes with all others."""
    index: int
    """Which one, from 0."""
    at_s: float
    """Simulated time of the crash, >= 0."""
    detect_s: float
    """Until the others notice, >= 0."""
    restart_s: float
    """Until the process runs again, >= 0; infinite: it never returns."""
    load_s: float = 0.0
    """Until its checkpoint is loaded, >= 0."""
    full: bool = False
    """Server only: all ranks and servers go back to the checkpoint. Else the crashed server alone
    does (partial recovery): nothing is done twice, its updates since then are gone."""

    def __post_init__(self) -> None:
        hold_choices(self)
        for field in ("at_s", "detect_s", "restart_s", "load_s"):
            value = getattr(self, field)
            ok = 0 <= value <= MOST_S or (field == "restart_s" and value == inf)
            require(ok, f"crash {field}", value, f"must lie in [0, {MOST_S:g}]")
        ok = not self.full or self.target is Target.SERVER
        require(ok, "crash full", True, f"a {self.target} does not read it", "drop it")

    @property
    def back_s(self) -> float:
        """Simulated time at which the process serves again."""
        return self.at_s + self.detect_s + self.restart_s + self.load_s


def slow_downs(events: Iterable[SlowDown | Crash], least: float = 1.0) -> list[SlowDown]:
    """The events that slow anything down, by more than a factor."""
    return [event for event in events if isinstance(event, SlowDown) and event.factor > least]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Written at the end of the first step that closes an interval of work."""

    interval_s: float
    """Useful work between two checkpoints, simulated seconds, > 0."""
    write_s: float
    """Training stands still this long for each, >= 0."""

    def __post_init__(self) -> None:
        ok = 0 < self.interval_s <= MOST_S
        require(ok, "checkpoint_every_s", self.interval_s, f"must be > 0 and <= {MOST_S:g}")
        ok = 0 <= self.write_s <= MOST_S
        require(ok, "checkpoint_s", self.write_s, f"must lie in [0, {MOST_S:g}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What a crash costs."""

    mtbf_s: float
    """Mean time between crashes of the whole job (exponential), > 0."""
    checkpoint_s: float
    """Training stands still this long for a checkpoint, > 0."""
    back_s: float
    """Detection, restart and load after a crash, >= 0."""
    partial: bool = False
    """Only the crashed server goes back to its checkpoint and the others go on: no work is done
    twice, but the server's updates since then are lost. Else all go back."""

    def __post_init__(self) -> None:
        for field in ("mtbf_s", "checkpoint_s"):
            require(getattr(self, field) > 0, field, getattr(self, field), "must be > 0")
        require(self.back_s >= 0, "back_s", self.back_s, "must be >= 0")


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Young's first-order best time between checkpoints: sqrt(2 C M).

    >>> young_interval_s(50.0, 10_000.0)
    1000.0
    """
    return sqrt(2 * checkpoint_s * mtbf_s)


def overhead(recovery: Recovery, interval_s: float) -> float:
    """Wall time over useful time, minus one, at this much useful work between checkpoints.

    Full recovery, exponential failures (Daly's exact form): a segment of T + C is repeated until it
    passes whole, which takes M exp(R/M) (exp((T + C)/M) - 1). Partial: nothing is repeated.
    """
    require(interval_s > 0, "interval_s", interval_s, "must be > 0")
    mean = recovery.mtbf_s
    segment = interval_s + recovery.checkpoint_s
    if recovery.partial:
        return segment / interval_s * (1 + recovery.back_s / mean) - 1
    wall = mean * np.exp(recovery.back_s / mean) * expm1(segment / mean)
    return float(wall / interval_s - 1)


def random_crashes(
    mtbf_s: float, until_s: float, ranks: int, back_s: float, seed: int
) -> tuple[Crash, ...]:
    """Crashes of random ranks at exponential distances, for a run of at most this long."""
    draws = stream(seed, Purpose.FAULT, 1)
    crashes = []
    now = 0.0
    while (now := now + float(draws.exponential(mtbf_s))) < until_s:
        rank = int(draws.integers(ranks))
        crashes.append(
            Crash(target=Target.RANK, index=rank, at_s=now, detect_s=0.0, restart_s=back_s)
        )
    return tuple(crashes)


def best_interval_s(recovery: Recovery) -> float:
    """The interval of least overhead, by golden section; unbounded for partial recovery."""
    low = recovery.checkpoint_s / 100
    high = 50 * recovery.mtbf_s
    ratio = (sqrt(5) - 1) / 2
    for _ in range(200):
        a = high - ratio * (high - low)
        b = low + ratio * (high - low)
        if overhead(recovery, a) < overhead(recovery, b):
            high = b
        else:
            low = a
    return (low + high) / 2
