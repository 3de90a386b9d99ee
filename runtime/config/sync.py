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
from runtime.config.options import above_zero, within

MOST_RANKS = 4096
MOST_STEPS = 2**31
MOST_DENSE_LAG = 1_000
"""Each step of lag keeps a copy of all dense gradients."""


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
    sync_steps: int = 0
    """Of raw_hybrid and hybrid: the first steps run with tau 0, a synchronous start."""
    dense_lag: int = 0
    """Of modes with a common step: the dense update of a step is applied so many steps late, up to
    1,000."""
    delay_compensation: float = 0.0
    """Of modes that read late rows: strength lambda, >= 0, of g + lambda g^2 (row now - row read)
    on every row's gradient g. It goes by the gradient of a mean: about ``batch`` times what it
    would be for single samples. 0 is off."""
    lr_by_staleness: bool = False
    """Of modes that read late rows: a push whose lookup missed k steps is applied with the rows'
    learning rate divided by max(1, k)."""
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
        within(self, 0, MOST_STEPS, "sync_steps")
        within(self, 0, MOST_DENSE_LAG, "dense_lag")
        within(self, 0, 1e9, "delay_compensation")

    @property
    def window(self) -> int | None:
        """The bound tau in force; None is unbounded."""
        return self.tau if self.mode.reads_late_rows else 0

    @property
    def merges(self) -> bool:
        """Whether a row takes one optimiser step per step of all ranks."""
        return self.mode.merges(self.merge_pushes)
