"""The row optimisers' learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A factor of the learning rate: a linear warm-up, then a decay."""

    warmup_steps: int = 0
    """Steps of the rise from 0 to 1, >= 0."""
    decay: Literal["none", "linear", "cosine", "inverse_sqrt"] = "none"
    """Down to ``floor`` over ``decay_steps`` after the warm-up; inverse_sqrt: as
    sqrt(decay_steps / (decay_steps + steps after the warm-up)), for ever."""
    decay_steps: int = 10_000
    """Length of the decay in steps, >= 1."""
    floor: float = 0.0
    """The factor at the end of a linear or cosine decay, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps must be >= 0, got {self.warmup_steps}")
        if self.decay_steps < 1:
            raise ValueError(f"schedule.decay_steps must be >= 1, got {self.decay_steps}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"schedule.floor must be in [0, 1], got {self.floor}")

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
