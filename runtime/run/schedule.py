"""When the legs of a run end: every so many steps or seconds, or as soon as somebody asks."""

from __future__ import annotations

import time

from runtime.config import TrainConfig
from runtime.run.ending import Ending


class Schedule:
    """Says of each leg where it ends; cuts by steps are the same in every run of a config."""

    def __init__(self, config: TrainConfig, ending: Ending) -> None:
        every = config.checkpoint.every_steps
        self._batches = None if every is None else every * config.dense_updates_per_step
        self._every_s, self._ending = config.checkpoint.every_s, ending
        self._due_s = float("inf")

    def begin_leg(self, number: int) -> int | None:
        """A leg begins with this batch; gives the one before which it ends, if that is known."""
        if self._every_s is not None:
            self._due_s = time.monotonic() + self._every_s
        return None if self._batches is None else (number // self._batches + 1) * self._batches

    def ends_now(self) -> bool:
        """Whether the leg ends as soon as it can."""
        return bool(self._ending) or time.monotonic() >= self._due_s
