"""How the ranks keep rows and dense weights up to date: the group `sync`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Literal

from persia_sim.base.schema import Checked, ReadBy, Within
from persia_sim.base.vocabulary import DEFAULT_AHEAD, DEFAULT_TAU, Mode

MOST_STEPS = 2**31
MOST_DENSE_LAG = 1_000
"""Each step of such a lag keeps a copy of all dense gradients."""


def of_executor(name: str) -> ReadBy:
    """Read by one executor."""
    return ReadBy(lambda run: run.engine.executor == name, f"the {name} executor")


def _in_modes(modes: Callable[[Mode], bool], where: str, executor: str = "") -> ReadBy:
    """Read in some modes, and there by every executor or by one."""
    where += f" with the {executor} executor" if executor else ""
    return ReadBy(lambda run: modes(run.sync.mode) and executor in ("", run.engine.executor), where)


_late = attrgetter("reads_late_rows")
_shared = attrgetter("has_barrier")
_LATE_MODES = "modes that read late rows (hybrid, async, ...)"
LATE = _in_modes(_late, _LATE_MODES)
LATE_CONCURRENT = _in_modes(_late, f"{_LATE_MODES},", "concurrent")
CONCURRENT = of_executor("concurrent")
FETCHES_CONCURRENT = _in_modes(
    lambda mode: not mode.reads_fresh_rows, "every mode but sync,", "concurrent"
)
_SUMS = _in_modes(_shared, "modes with a common step, whose ranks' gradients add up")
_DELAYS = _in_modes(
    _shared, "modes with a common step; in async dense weights are late by themselves"
)
_ASYNC = _in_modes(lambda mode: not mode.has_barrier, "modes async and async_averaging")
_MERGES = _in_modes(
    lambda mode: mode.may_merge, "modes raw_hybrid and hybrid; sync always merges, async never"
)
_FRESH = _in_modes(
    lambda mode: mode.may_merge, "modes raw_hybrid and hybrid; other modes have no late rows beside"
)
_STARTS = ReadBy(
    lambda run: run.sync.mode.may_merge and run.engine.executor != "replay",
    "modes raw_hybrid and hybrid, where tau 0 is synchronous; a replay has its order",
)
_AHEAD = _in_modes(lambda mode: mode.prefetches_rows, "mode lookahead")
_AHEAD_CONCURRENT = _in_modes(lambda mode: mode.prefetches_rows, "mode lookahead", "concurrent")
_AVERAGES = _in_modes(lambda mode: mode.averages_replicas, "mode async_averaging", "constant_lag")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig(Checked):
    """Who waits for whom."""

    mode: Mode = Mode.SYNC
    """How rows and dense weights are kept up to date; see the table of modes in docs/words.md."""
    ranks: Annotated[int, Within(1, 4096)] = 1
    """The ranks W, which train the dense network: 1 to 4096."""
    tau: Annotated[int | None, Within(0, MOST_STEPS), LATE] = DEFAULT_TAU
    """Bound: a lookup may miss the pushes of at most tau steps. 0 is synchronous, None unbounded.
    Only of modes that read late rows."""
    permits: Annotated[int | None, Within(1, MOST_STEPS), LATE_CONCURRENT] = None
    """Another bound, the original's: batches in flight per rank, from lookup to applied push. Of
    the concurrent executor; None is unlimited."""
    ahead: Annotated[int, Within(1, MOST_STEPS), _AHEAD] = DEFAULT_AHEAD
    """Steps that lookahead prefetches, >= 1."""
    lookahead: Annotated[Literal["reread", "forwarded"], _AHEAD_CONCURRENT] = "reread"
    """How lookahead with the concurrent executor brings stale rows up to date: they are read
    again before they are used (reread), or the worker has the rows of its window on lease and
    applies every step's gradients to them itself (forwarded). Both give the bytes of sync."""
    merge_pushes: Annotated[bool, _MERGES] = True
    """One optimiser step per row and step from all ranks' gradients; else one per rank, on arrival.
    Only a choice for raw_hybrid and hybrid."""
    match: Annotated[Literal["update", "global"], _ASYNC] = "update"
    """What a batch of async holds: as many samples as a dense update of the other modes
    (update), or a rank's share of it (global)."""
    fresh: Annotated[tuple[str, ...], _FRESH] = ()
    """Fields or tables of raw_hybrid and hybrid whose rows are exact, while all others are up to
    tau steps late; a field means its table, and all is every table. Their rows are brought up to
    date before a step, and their gradients always merged."""
    row_gradients: Annotated[Literal["mean", "sum"], _SUMS] = "mean"
    """Row gradients are those of the global mean loss (mean), or W times these (sum, the
    original's)."""
    sync_steps: Annotated[int, Within(0, MOST_STEPS), _STARTS] = 0
    """First steps of raw_hybrid and hybrid that run with tau 0: a synchronous start."""
    dense_lag: Annotated[int, Within(0, MOST_DENSE_LAG), _DELAYS] = 0
    """Steps by which the dense update of a step is late, in modes with a common step; up to
    1,000."""
    delay_compensation: Annotated[float, Within(0, 1e9), LATE] = 0.0
    """Strength lambda, >= 0, in modes that read late rows, of g + lambda g^2 (row now - row
    read) on every row's gradient g. It goes by the gradient of a mean: about ``batch`` times
    what it would be for single samples. 0 is off."""
    lr_by_staleness: Annotated[bool, LATE] = False
    """Whether modes that read late rows apply a push whose lookup missed k steps with the rows'
    learning rate divided by max(1, k)."""
    wire: Literal["full", "half"] = "full"
    """How rows and their gradients travel between servers and who pools them: half is float16 with
    a scale for each row (the paper's lossy compression), which rounds them in every engine."""
    average_every_steps: Annotated[int, Within(1, MOST_STEPS), _AVERAGES] = 32
    """Steps of a rank between two averagings, in async_averaging with the executor constant_lag;
    concurrent averages every half second."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        # A mode without late rows has tau 0 anyway: to say so is true, and changes nothing.
        if not self.mode.reads_late_rows and self.tau == 0:
            object.__setattr__(self, "tau", DEFAULT_TAU)

    @property
    def half(self) -> bool:
        """Whether rows are rounded as they travel."""
        return self.wire == "half"

    @property
    def workers_may_return(self) -> bool:
        """Whether the death of an embedding worker is not that of the run: what it holds is late
        anyway, and can be lost; rows of fresh tables it could not bring up to date."""
        return self.mode.reads_late_rows and not self.fresh

    @property
    def window(self) -> int | None:
        """The bound tau in force; None is unbounded."""
        return self.mode.window(self.tau)

    @property
    def merges(self) -> bool:
        """Whether a row takes one optimiser step per step of all ranks."""
        return self.mode.merges(self.merge_pushes)
