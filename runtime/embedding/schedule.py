"""A learning rate as a function of the step, of rows and of dense weights alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from persia_sim.words.schema import Positive, ReadBy, Within, check_fields, refuse_unread

Decay = Literal["none", "linear", "cosine", "step", "inverse_sqrt"]
_DECAYS = ReadBy(lambda schedule: schedule.decay != "none", "a decay")
_ENDS = ReadBy(lambda schedule: schedule.decay in ("linear", "cosine"), "decay linear or cosine")
_FALLS = ReadBy(lambda schedule: schedule.decay == "step", "decay step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A factor of the learning rate: a linear warm-up, then a decay."""

    warmup_steps: Annotated[int, Within(0, 2**63 - 1)] = 0
    """Steps of the rise from 0 to 1, >= 0."""
    decay: Decay = "none"
    """Down to ``floor`` over ``decay_steps`` after the warm-up; step: times ``step_factor`` after
    every ``decay_steps``; inverse_sqrt: as sqrt(decay_steps / (decay_steps + steps after the
    warm-up)), for ever."""
    decay_steps: Annotated[Positive, _DECAYS] = 10_000
    """Length of the decay, or of each stair, in steps, >= 1."""
    floor: Annotated[float, Within(0, 1), _ENDS] = 0.0
    """The factor at the end of a linear or cosine decay, in [0, 1]."""
    step_factor: Annotated[float, Within(0, 1), _FALLS] = 0.1
    """Of decay step: what each fall multiplies the rate by, in [0, 1]."""

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unread(self)

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
        if self.decay == "step":
            return float(self.step_factor ** (after // self.decay_steps))
        if self.decay == "inverse_sqrt":
            return math.sqrt(self.decay_steps / (self.decay_steps + after))
        return 1.0
