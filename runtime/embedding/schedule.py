"""The row optimisers' learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from persia_sim.words.rules import require
from runtime.embedding.rules import (
    MOST_INT64,
    require_finite,
    require_one_of,
    require_used,
    require_whole,
)

Decay = Literal["none", "linear", "cosine", "inverse_sqrt"]
_DEFAULT_DECAY_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A factor of the learning rate: a linear warm-up, then a decay."""

    warmup_steps: int = 0
    """Steps of the rise from 0 to 1, >= 0."""
    decay: Decay = "none"
    """Down to ``floor`` over ``decay_steps`` after the warm-up; inverse_sqrt: as
    sqrt(decay_steps / (decay_steps + steps after the warm-up)), for ever."""
    decay_steps: int = _DEFAULT_DECAY_STEPS
    """Length of the decay in steps, >= 1."""
    floor: float = 0.0
    """The factor at the end of a linear or cosine decay, in [0, 1]."""

    def __post_init__(self) -> None:
        at_least_0, at_least_1 = "must be >= 0 and fit 64 bits", "must be >= 1 and fit 64 bits"
        require_whole("schedule.warmup_steps", self.warmup_steps, 0, MOST_INT64, at_least_0)
        require_one_of("schedule.decay", self.decay, get_args(Decay))
        require_whole("schedule.decay_steps", self.decay_steps, 1, MOST_INT64, at_least_1)
        require_finite("schedule.floor", self.floor)
        require(0 <= self.floor <= 1, "schedule.floor", self.floor, "must be in [0, 1]")
        decays, ends = self.decay != "none", self.decay in ("linear", "cosine")
        default = _DEFAULT_DECAY_STEPS
        require_used("schedule.decay_steps", self.decay_steps, default, decays, "a schedule.decay")
        require_used("schedule.floor", self.floor, 0.0, ends, "schedule.decay linear or cosine")

    def factor(self, step: int) -> float:
        """The factor at a step, counted from 1.

        >>> [Schedule(warmup_steps=2).factor(step) for step in (1, 2, 3)]
        [0.5, 1.0, 1.0]
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        after = step - self.warmup_steps
        share = min(after / self.decay_steps, 1.0)
        if self.decay == "linear":
            return 1.0 - (1.0 - self.floor) * share
        if self.decay == "cosine":
            return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * share))
        if self.decay == "inverse_sqrt":
            return math.sqrt(self.decay_steps / (self.decay_steps + after))
        return 1.0
