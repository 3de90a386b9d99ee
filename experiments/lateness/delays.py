"""How many updates a late run lies behind a synchronous one, from their curves of AUC.

The synchronous mean curve is smoothed by a - b t^-c (from its third snapshot on: a power does not
follow its first steps). The delay D is what shifts the smooth curve
onto the late one: over the last third of the snapshots the gaps are, in the mean of least squares,
smooth(t - D) - smooth(t). What all curves share beside the smooth cancels in the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

RESAMPLES = 400
_POWERS = np.linspace(0.02, 3.0, 150)
"""Powers c that are tried; the curve is linear in a and b for each."""
FIRST_SMOOTHED = 2
"""Snapshots at the beginning that the smooth curve does not follow."""
_DELAYS = 601
"""Delays that are tried, evenly, on either side of 0."""


@dataclass(frozen=True, slots=True)
class Delay:
    """In updates, with its 95 % interval over draws; negative where the late run is ahead."""

    delay: float
    low: float
    high: float
    slope: float
    """AUC that sync gains an update at the end."""


@dataclass(frozen=True, slots=True)
class Smooth:
    """The curve a - b t^-c."""

    a: float
    b: float
    c: float

    def __call__(self, updates: np.ndarray) -> np.ndarray:
        """AUC after so many updates."""
        return self.a - self.b * updates**-self.c


@cache
def _bases(updates: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[powers, snapshots, 2]: the columns 1 and -t^-c of each power, and the same made orthonormal,
    so that a curve's error is what it has beside them."""
    times = np.array(updates)
    columns = np.stack(
        [np.stack([np.ones(len(times)), -(times ** -float(c))], axis=1) for c in _POWERS]
    )
    return columns, np.linalg.qr(columns)[0]


def smooth(updates: np.ndarray, aucs: np.ndarray) -> Smooth:
    """The curve of least squares through a mean curve [snapshots]."""
    columns, orthonormal = _bases(tuple(updates.tolist()))
    along = orthonormal.transpose(0, 2, 1) @ aucs
    best = int(np.argmax(np.square(along).sum(1)))
    (a, b), *_ = np.linalg.lstsq(columns[best], aucs, rcond=None)
    return Smooth(float(a), float(b), float(_POWERS[best]))


def delay_of(updates: np.ndarray, sync: np.ndarray, late: np.ndarray) -> tuple[float, float]:
    """The delay between two mean curves [snapshots], and sync's slope at the end."""
    curve = smooth(updates[FIRST_SMOOTHED:], sync[FIRST_SMOOTHED:])
    last = slice(-(-2 * len(updates) // 3), None)
    times = updates[last]
    gaps = (late - sync)[last]
    # A shift may be as long as the run up to the last third, one way or the other.
    shifts = np.linspace(-0.9, 0.9, _DELAYS) * times[0]
    moved = curve(times - shifts[:, None]) - curve(times)
    errors = np.square(gaps - moved).sum(1)
    at = int(np.argmin(errors))
    slope = curve.b * curve.c * float(updates[-1]) ** (-curve.c - 1)
    return float(shifts[at] + _vertex(shifts, errors, at)), slope


def _vertex(shifts: np.ndarray, errors: np.ndarray, at: int) -> float:
    """How far the parabola through the least error and its neighbours has its vertex beside it."""
    if not 0 < at < len(shifts) - 1:
        return 0.0
    before, here, after = errors[at - 1 : at + 2]
    bend = before - 2 * here + after
    return 0.5 * (before - after) / bend * (shifts[1] - shifts[0]) if bend > 0 else 0.0


def delays(updates: Sequence[int], sync: np.ndarray, late: np.ndarray, seed: int = 0) -> Delay:
    """The delay of paired curves [draws, snapshots]; its interval by resampling draws, each of
    which has a data order of its own (expanded percentiles of Hesterberg, Am. Stat. 69, 2015)."""
    from scipy.special import ndtr, stdtrit  # late, as in `statistics`

    times = np.asarray(updates, float)
    count = len(sync)
    delay, slope = delay_of(times, sync.mean(0), late.mean(0))
    draw = np.random.default_rng(seed)
    picked = draw.integers(0, count, (RESAMPLES, count))
    drawn = [delay_of(times, sync[k].mean(0), late[k].mean(0))[0] for k in picked]
    tail = float(ndtr(stdtrit(count - 1, 0.025) * math.sqrt(count / (count - 1))))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Delay(delay, float(low), float(high), float(slope))
