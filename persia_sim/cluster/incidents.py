"""What is random in a run, and what goes wrong: slow-downs, and servers that stand still."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import log1p, sqrt
from typing import ClassVar

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
class Outage:
    """One server stands still for a while: it starts no request meanwhile, and loses none."""

    target: ClassVar[Target] = Target.SERVER
    index: int
    """Which one, from 0."""
    at_s: float
    """Simulated time at which it begins, >= 0."""
    for_s: float
    """How long it lasts, seconds, >= 0."""

    def __post_init__(self) -> None:
        for field in ("at_s", "for_s"):
            value = getattr(self, field)
            require(0 <= value <= MOST_S, f"outage {field}", value, f"must lie in [0, {MOST_S:g}]")


def slow_downs(events: Iterable[SlowDown | Outage], least: float = 1.0) -> list[SlowDown]:
    """The events that slow anything down, by more than a factor."""
    return [event for event in events if isinstance(event, SlowDown) and event.factor > least]
