"""How the ranks keep rows and dense weights up to date: the group `sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from persia_sim.words.fields import check_fields
from persia_sim.words.vocabulary import (
    DEFAULT_AHEAD,
    DEFAULT_AVERAGE_EVERY_S,
    DEFAULT_TAU,
    Mode,
)
from runtime.config.bounds import above_zero, within

MOST_RANKS = 4096
MOST_STEPS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Who waits for whom."""

    mode: Mode = Mode.SYNC
    """How rows and dense weights are kept up to date; see the README's table."""
    ranks: int = 1
    """NN workers W, 1 to 4096."""
    tau: int | None = DEFAULT_TAU
    """Bound: a lookup may miss the pushes of at most tau steps. 0 is synchronous, None unbounded.
    Only of modes that read late rows."""
    permits: int | None = None
    """Another bound, the original's: batches in flight per rank, from lookup to applied push. Of
    the concurrent executor; None is unlimited."""
    ahead: int = DEFAULT_AHEAD
    """Of lookahead: steps that are prefetched, >= 1."""
    lookahead: Literal["reread", "forwarded"] = "reread"
    """Of lookahead with the concurrent executor: stale rows are read again before they are used
    (reread), or the worker has the rows of its window on lease and applies every step's gradients
    to them itself (forwarded). Both give the bytes of sync."""
    merge_pushes: bool = True
    """One optimiser step per row and step from all ranks' gradients; else one per rank, on arrival.
    Only a choice for raw_hybrid and hybrid."""
    match: Literal["update", "global"] = "update"
    """Of async: a batch holds as many samples as a dense update of the other modes (update), or a
    rank's share of it (global)."""
    row_gradients: Literal["mean", "sum"] = "mean"
    """Of the global mean loss, or W times that (the original's)."""
    average_every_steps: int = 32
    """Of async_averaging with the lag executor: steps of a rank between averagings."""
    average_every_s: float = DEFAULT_AVERAGE_EVERY_S
    """Of async_averaging with the concurrent executor (source: the original's 500 ms)."""

    def __post_init__(self) -> None:
        check_fields(self)
        within(self, 1, MOST_RANKS, "ranks")
        within(self, 0, MOST_STEPS, "tau")
        within(self, 1, MOST_STEPS, "permits", "ahead", "average_every_steps")
        above_zero(self, 86_400, "average_every_s")

    @property
    def window(self) -> int | None:
        """The bound tau in force; None is unbounded."""
        return self.tau if self.mode.reads_late_rows else 0

    @property
    def merges(self) -> bool:
        """Whether a row takes one optimiser step per step of all ranks."""
        return self.mode.merges(self.merge_pushes)
