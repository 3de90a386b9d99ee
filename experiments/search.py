"""The one search of learning rates: a grid for sync, and a reason to leave its rates.

`docs/results/plan.md` states the rule. Who searches says how runs are trained and what was tried;
the rule's choice is derived from that alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from experiments.statistics import Interval

ROW_RATES = (0.05, 0.1, 0.2, 0.4)
"""Rates of row-wise Adagrad (source: choice, a doubling each, about the demo's 0.05)."""
DENSE_RATES = (1.25e-4, 3.5e-4, 1e-3)
"""Rates of Adam (source: choice, about the demo's 1e-3)."""
MOST_WIDENINGS = 3
"""Values beyond an edge of the grid that are tried in each direction."""
GAIN_IN_ERRORS = 2.0
"""A late cell leaves sync's rates for a gain of more than so many standard errors."""
LOSS_TO_GO_ON = 20e-3
"""A late cell that loses more goes on to lower dense rates."""
GO_ON_FACTOR = 4.0
MOST_GO_ON = 4
CHANCE_AUC = 0.55
"""A best validation AUC below it is no rate found."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rates:
    """Learning rates of the rows (row-wise Adagrad) and of the dense weights (Adam)."""

    row: float
    dense: float


@dataclass(frozen=True, slots=True)
class Grid:
    """The rates that sync's search crosses, each in ascending order."""

    row: tuple[float, ...]
    dense: tuple[float, ...]

    @property
    def points(self) -> list[Rates]:
        """Every row rate with every dense rate."""
        return [Rates(row=row, dense=dense) for row in self.row for dense in self.dense]


STUDY_GRID = Grid(ROW_RATES, DENSE_RATES)


def grid_around(rates: Rates) -> Grid:
    """The study's grid for somebody who begins at other rates: as far from these as the study's
    lies from 0.05 and 1e-3.

    >>> grid_around(Rates(row=0.05, dense=1e-3)) == STUDY_GRID
    True
    """
    row_factor = rates.row / ROW_RATES[0]
    dense_factor = rates.dense / DENSE_RATES[-1]
    return Grid(
        tuple(float(f"{row * row_factor:.3g}") for row in ROW_RATES),
        tuple(float(f"{dense * dense_factor:.3g}") for dense in DENSE_RATES),
    )


def best_of(tried: Mapping[Rates, float]) -> Rates:
    """The rates with the highest mean validation AUC; runs that diverged (NaN) are none.

    >>> best_of({Rates(row=0.1, dense=1e-3): 0.7, Rates(row=0.2, dense=1e-3): math.nan})
    Rates(row=0.1, dense=0.001)
    """
    return max(tried, key=lambda rates: -math.inf if math.isnan(tried[rates]) else tried[rates])


def to_try_of_sync(tried: Mapping[Rates, float], grid: Grid | None = None) -> list[Rates]:
    """What sync's search wants to know next: the grid (else the study's), then what lies beyond the
    edge on which the best point is; nothing once it lies inside, or after `MOST_WIDENINGS`."""
    # First the grid itself; only then is known on which side of the best point it is too small.
    grid = grid or STUDY_GRID
    if missing := [rates for rates in grid.points if rates not in tried]:
        return missing
    best = best_of(tried)
    result = []
    for name, values_of_grid in (("row", grid.row), ("dense", grid.dense)):
        at = getattr(best, name)
        values = sorted({getattr(rates, name) for rates in tried})
        if len(values_of_grid) < 2:
            continue  # one value has no step to widen by

        # One step of the grid further, where the best value is the outermost that was tried.
        first = values_of_grid[0]
        last = values_of_grid[-1]
        ratio = (last / first) ** (1 / (len(values_of_grid) - 1))
        beyond = []
        if at >= max(values) and at < last * ratio ** (MOST_WIDENINGS - 0.5):
            beyond.append(at * ratio)
        if at <= min(values) and at > first / ratio ** (MOST_WIDENINGS - 0.5):
            beyond.append(at / ratio)
        for value in beyond:
            other = {"row": best.row, "dense": best.dense, name: float(f"{value:.3g}")}
            result.append(Rates(**other))
    return [rates for rates in result if rates not in tried]


def points_of(sync: Rates) -> list[Rates]:
    """The five points of a late cell, sync's rates first."""
    beside = [(0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 0.25)]
    return [sync] + [Rates(row=sync.row * row, dense=sync.dense * dense) for row, dense in beside]


def to_try_of_cell(sync: Rates, tried: Mapping[Rates, float], sync_auc: float) -> list[Rates]:
    """What a late cell's search wants to know next: its five points, then dense rates that are
    lower by 4 each, while the best loses more than `LOSS_TO_GO_ON` against sync."""
    if missing := [rates for rates in points_of(sync) if rates not in tried]:
        return missing
    auc = tried[best_of(tried)]
    lowest = points_of(sync)[-1].dense
    lower = [
        Rates(row=sync.row, dense=lowest / GO_ON_FACTOR**number)
        for number in range(1, MOST_GO_ON + 1)
    ]
    untried = [rates for rates in lower if rates not in tried]
    goes_on = math.isnan(auc) or sync_auc - auc > LOSS_TO_GO_ON
    return untried[:1] if goes_on else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rates of a cell, and why."""

    rates: Rates
    outcome: str
    """"sync's", "of its own" or "no rate found"."""


SYNCS = "sync's"
BETTER = "of its own"
NO_RATE = "no rate found"
BY_SEARCH = "found"
GIVEN = "given"
"""Rates of sync itself: the best of its grid, or not searched."""


def choice_of(
    sync: Rates, tried: Mapping[Rates, float], gain: Callable[[Rates], Interval]
) -> Choice:
    """The rule: sync's rates, unless the best point's paired gain over them exceeds two standard
    errors; none where even the best is at chance.

    ``gain``: AUC at these rates minus that at sync's, over seeds and validation samples.
    """
    best = best_of(tried)
    if math.isnan(tried[best]) or tried[best] < CHANCE_AUC:
        return Choice(rates=best, outcome=NO_RATE)
    if best != sync:
        if math.isnan(tried[sync]):  # diverged: nothing to be paired with
            return Choice(rates=best, outcome=BETTER)
        gained = gain(best)
        if gained.mean > GAIN_IN_ERRORS * error_of(gained):
            return Choice(rates=best, outcome=BETTER)
    return Choice(rates=sync, outcome=SYNCS)


class Searched(Protocol):
    """A setting whose rates are searched."""

    def tried(self) -> Mapping[Rates, float]:
        """Mean validation AUC at all rates that it has been trained at."""
        ...

    def gain(self, rates: Rates, over: Rates) -> Interval:
        """Validation AUC at these rates minus that at others, paired by seed."""
        ...


S = TypeVar("S", bound=Searched)
Train = Callable[[list[tuple[S, Rates]]], bool]
"""Trains each setting at its rates; False where it only counts them, so nothing new is known."""


def search_reference(
    setting: S, train: Train[S], grid: Grid | None = None, trials: int | None = None
) -> Rates | None:
    """Train until the best rates of sync are known, and return them; None where none is tried.

    ``trials``: pairs of rates that it may try, at most.
    """
    while asked := _within(trials, setting, to_try_of_sync(setting.tried(), grid)):
        if not train([(setting, rates) for rates in asked]):
            break
    tried = setting.tried()
    return best_of(tried) if tried else None


def search_late(
    settings: Sequence[S], sync: Rates, sync_auc: float, train: Train[S], trials: int | None = None
) -> None:
    """Train late settings, side by side, until the rule can choose the rates of each.

    ``sync``: the rates around which they are tried, with the validation AUC of sync there.
    """

    def asked_for(setting: S) -> list[Rates]:
        tried = setting.tried()
        return _within(trials, setting, to_try_of_cell(sync, tried, sync_auc))

    while asked := [(setting, rates) for setting in settings for rates in asked_for(setting)]:
        if not train(asked):
            break


def _within(trials: int | None, setting: Searched, asked: list[Rates]) -> list[Rates]:
    return asked if trials is None else asked[: max(0, trials - len(setting.tried()))]


def error_of(interval: Interval) -> float:
    """The standard error of a gap, of seeds and test samples together."""
    parts: Sequence[float] = (interval.seeds_error, interval.rows_error)
    return math.sqrt(sum(part**2 for part in parts if not math.isnan(part)))
