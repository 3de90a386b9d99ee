"""Rates of a cell's own: uphill on a grid of doublings, until no neighbour is better."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.lateness.streams import Rates

MOST_ROUNDS = 8
"""Of a climb: a doubling each; 256 times the rate it began with is no rate to look for."""
DENSE_LINE = tuple(range(-4, 3))
"""Dense rates that are tried in any case where the line itself is shown (in doublings)."""


def best_of(tried: Mapping[Rates, float]) -> Rates:
    """The rates with the highest validation AUC; a run that diverged (NaN) is none; of equals the
    one nearest to the baselines' rates.

    >>> best_of({Rates(): 0.7, Rates(dense=1): 0.7, Rates(row=1): math.nan})
    Rates(row=0, dense=0)
    """

    def order(rates: Rates) -> tuple[float, int]:
        auc = tried[rates]
        return (-math.inf if math.isnan(auc) else auc, -abs(rates.row) - abs(rates.dense))

    return max(tried, key=order)


def to_try(tried: Mapping[Rates, float], start: Rates, line: bool = False) -> list[Rates]:
    """What a climb wants to know next; nothing, once the best has four neighbours that are worse.

    So the grid widens by itself: the best is never at its edge, but for `MOST_ROUNDS`. ``line``:
    every dense rate of `DENSE_LINE` beside the start is tried first.
    """
    if not tried:
        dense = {start.dense, *((start.dense + k for k in DENSE_LINE) if line else ())}
        return [Rates(row=start.row, dense=place) for place in sorted(dense)]
    best = best_of(tried)
    if max(abs(best.row - start.row), abs(best.dense - start.dense)) >= MOST_ROUNDS:
        return []
    return [rates for rates in best.neighbours() if rates not in tried]


def is_inside(tried: Mapping[Rates, float]) -> bool:
    """Whether all four neighbours of the best were tried."""
    return all(rates in tried for rates in best_of(tried).neighbours())
