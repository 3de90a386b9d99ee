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


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of the delay with the length of the run, over all snapshots."""

    a_doubling: float
    """Share by which it grows when the run is twice as long; 0 where it is constant."""
    low: float
    high: float
    """As of `Delay`."""


def delays(
    updates: Sequence[int], sync: np.ndarray, late: np.ndarray, seed: int = 0
) -> tuple[list[Delay], Growth]:
    """The delay at each snapshot, and its growth; ``sync`` and ``late`` [seeds, snapshots] are
    AUCs, paired.

    Curves are means over seeds; sync's is made to rise (its running maximum) and read backwards,
    linear between snapshots and from (0 updates, 0.5) on. The growth leaves the first snapshot out.
    """
    draw = np.random.default_rng(seed)
    picked = draw.integers(0, len(sync), (RESAMPLES, len(sync)))
    drawn = np.array([behind(updates, sync[k].mean(0), late[k].mean(0)) for k in picked])
    found = []
    for number, (count, middle) in enumerate(
        zip(updates, behind(updates, sync.mean(0), late.mean(0)), strict=True)
    ):
        low, high = _ends(drawn[:, number])
        gap = float(late[:, number].mean() - sync[:, number].mean())
        found.append(Delay(updates=count, behind=float(middle), low=low, high=high, gap=gap))
    slopes = [doubling_slope(updates[1:], line[1:]) for line in drawn]
    low, high = _ends(np.array(slopes))
    whole = doubling_slope(updates[1:], [d.behind for d in found[1:]])
    return found, Growth(a_doubling=whole, low=low, high=high)


def _ends(drawn: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of what was drawn; NaN where too much of it is not known."""
    known = drawn[np.isfinite(drawn)]
    if len(known) <= 0.95 * RESAMPLES:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


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


def doubling_slope(updates: Sequence[int], behind: Sequence[float]) -> float:
    """By what factor, minus 1, the delay grows when a run is twice as long (least squares of the
    logarithms over the snapshots); NaN with fewer than two positive delays."""
    known = [(count, lag) for count, lag in zip(updates, behind, strict=True) if lag > 0]
    if len(known) < 2:
        return float("nan")
    counts, lags = np.log2(np.array(known)).T
    return float(2 ** np.polyfit(counts, lags, 1)[0] - 1)
