"""A gap as a delay: the updates by which a late run lies behind a synchronous one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Of one cell after ``updates`` updates, over the seeds."""

    updates: int
    behind: float
    """Updates; NaN where sync never was so low, or the late run is above all of sync's curve."""
    low: float
    high: float
    """Of the 95 % interval over seeds (bootstrap of pairs)."""
    gap: float
    """Mean AUC minus that of sync."""


def delays(
    updates: Sequence[int], sync: np.ndarray, late: np.ndarray, seed: int = 0
) -> list[Delay]:
    """The delay at each snapshot; ``sync`` and ``late`` [seeds, snapshots] are AUCs, paired.

    Curves are means over seeds; sync's is made to rise (its running maximum) and read backwards,
    linear between snapshots and from (0 updates, 0.5) on.
    """
    draw = np.random.default_rng(seed)
    picked = draw.integers(0, len(sync), (RESAMPLES, len(sync)))
    middle = behind(updates, sync.mean(0), late.mean(0))
    drawn = np.array([behind(updates, sync[k].mean(0), late[k].mean(0)) for k in picked])
    found = []
    for number, count in enumerate(updates):
        known = drawn[:, number][np.isfinite(drawn[:, number])]
        enough = len(known) > 0.95 * RESAMPLES
        low, high = np.quantile(known, [0.025, 0.975]) if enough else (np.nan, np.nan)
        found.append(
            Delay(
                updates=count,
                behind=float(middle[number]),
                low=float(low),
                high=float(high),
                gap=float(late[:, number].mean() - sync[:, number].mean()),
            )
        )
    return found


def behind(updates: Sequence[int], sync: np.ndarray, late: np.ndarray) -> np.ndarray:
    """[snapshots] updates that ``late`` lies behind ``sync``, two mean curves.

    >>> behind([10, 20, 40], np.array([0.6, 0.7, 0.8]), np.array([0.55, 0.65, 0.75]))
    array([ 5.,  5., 10.])
    """
    times = np.array([0, *updates], float)
    rising = np.maximum.accumulate([0.5, *sync])
    reached = np.interp(late, rising, times, left=np.nan, right=np.nan)
    # A flat stretch of sync's curve has many times of one AUC: the first is meant.
    first = np.array([times[np.argmax(rising >= auc)] if auc in rising else np.nan for auc in late])
    return np.asarray(updates, float) - np.where(np.isnan(first), reached, first)


def doubling_slope(found: Sequence[Delay]) -> float:
    """By what factor, minus 1, the delay grows when a run is twice as long (least squares of the
    logarithms over the snapshots); NaN with fewer than two positive delays."""
    known = [(d.updates, d.behind) for d in found if d.behind > 0]
    if len(known) < 2:
        return float("nan")
    updates, lags = np.log2(np.array(known)).T
    return float(2 ** np.polyfit(updates, lags, 1)[0] - 1)
