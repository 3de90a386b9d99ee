"""When a run writes itself down, and how much of that stays: the group `checkpoint`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from persia_sim.words.fields import check_fields
from runtime.config.bounds import within

_UNITS_S = {"s": 1, "min": 60, "h": 3600}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_MOST_S = 365 * 86_400
END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of the whole run, in its folder; `train --resume RUN` goes on from the newest."""

    checkpoint_every: int | str | None = None
    """Steps (times ``batch`` samples) from one to the next, or a time: 30s, 10min, 2h; end: only
    when training ends. None: only when a signal ends the run."""
    keep: int = 2
    """Checkpoints that stay, the newest ones, >= 1."""
    checkpoint_incremental: bool = False
    """Write only rows that changed since the checkpoint before (native kernels); each still holds
    all rows, by links to files that it shares with others."""

    def __post_init__(self) -> None:
        check_fields(self)
        within(self, 1, 1_000_000, "keep")
        every = self.checkpoint_every
        if isinstance(every, str) and every.isdecimal():
            object.__setattr__(self, "checkpoint_every", int(every))
            every = int(every)
        if isinstance(every, str) and every != END:
            found = _TIME.fullmatch(every)
            if found is None or not 0 < self._seconds(found) <= _MOST_S:
                raise ValueError(
                    f"checkpoint_every must be steps (500), a time (30s, 10min, 2h; above 0, a year"
                    f" at most) or end, got {every!r}"
                )
        if isinstance(every, int) and not 1 <= every <= 2**62:
            raise ValueError(f"checkpoint_every must be >= 1 step, got {every}")
        if self.checkpoint_incremental and every is None:
            raise ValueError("checkpoint_incremental is used with checkpoint_every; add it")

    @property
    def every_steps(self) -> int | None:
        """Steps between two checkpoints; None where they do not go by steps."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def every_s(self) -> float | None:
        """Seconds between two checkpoints; None where they do not go by time."""
        every = self.checkpoint_every
        found = _TIME.fullmatch(every) if isinstance(every, str) else None
        return None if found is None else self._seconds(found)

    @property
    def at_end(self) -> bool:
        """Whether the state at the end of training is a checkpoint."""
        return self.checkpoint_every is not None

    @staticmethod
    def _seconds(found: re.Match[str]) -> float:
        return float(found[1]) * _UNITS_S[found[2]]
