"""What goes wrong in a run, and what is done against it: slow-downs, crashes, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import inf, log1p, sqrt

import numpy as np

from persia_sim.base.rules import SECONDS, require
from persia_sim.base.schema import hold_choices


class Purpose(IntEnum):
    """What a stream of draws is for."""

    GPU = 1
    SERVER_LOOKUP = 2
    SERVER_UPDATE = 3
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
