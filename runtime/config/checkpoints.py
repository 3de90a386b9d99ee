"""When a run is saved, and which checkpoints stay: the group `checkpoint`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within, check_fields
from persia_sim.base.vocabulary import ENDLESS

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
    keep_checkpoints: Annotated[int, Within(1, 1_000_000)] = 2
    """Checkpoints that stay, the newest ones, >= 1."""
    keep_best: Literal["goodness", "auc", "gauc", "recall", "ndcg", "log_loss", "mse"] | None = None
    """Judge each checkpoint on the validation part by this score of the first task, keep the best
    one beside the newest, and let evaluate, predict and export take it. With
    --evaluate-every-steps each evaluation is a checkpoint, too. goodness: what --stop-after goes
    by, the AUC, or the MSE of a regression; --stop-after asks for it by itself."""

    def __post_init__(self) -> None:
        check_fields(self)

        # A whole number is steps, `10min` a time, `end` the end.
        every = self.checkpoint_every
        if isinstance(every, str) and every.isdecimal():
            object.__setattr__(self, "checkpoint_every", int(every))
            every = int(every)
        if isinstance(every, str) and every != END and not 0 < _seconds_of(every) <= _MOST_S:
            raise Refused(
                "checkpoint_every",
                "must be steps (500), a time (30s, 10min, 2h; above 0, a year at most) or end,"
                f" got {every!r}",
            )
        if isinstance(every, int) and not 1 <= every <= ENDLESS:
            raise Refused("checkpoint_every", f"must be >= 1 step, got {every}")

        if self.keep_best is not None and every is None:
            raise Refused(
                "keep_best",
                "is of checkpoints, and the run is to write none: add --checkpoint-every, as"
                " --checkpoint-every end",
            )

    @property
    def every_steps(self) -> int | None:
        """Steps between two checkpoints; None where they do not go by steps."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None

    @property
    def every_s(self) -> float | None:
        """Seconds between two checkpoints; None where they do not go by time."""
        every = self.checkpoint_every
        return (_seconds_of(every) or None) if isinstance(every, str) else None

    @property
    def at_end(self) -> bool:
        """Whether the state at the end of training is a checkpoint."""
        return self.checkpoint_every is not None


def _seconds_of(text: str) -> float:
    """Seconds of a time such as 10min; 0 of what is no time."""
    match = _TIME.fullmatch(text)
    return 0.0 if match is None else float(match[1]) * _UNITS_S[match[2]]
