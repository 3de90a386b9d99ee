"""Throughput of a run without its start, with an interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from persia_sim.engine.run import Run
from persia_sim.model.stamps import Mark

_WINDOWS = 8
_BLOCKS = 600
_T_975 = 2.179  # Student's t for 1.5 x 8 = 12 degrees of freedom


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95 % interval."""

    mean: float
    half_width: float
    values: int
    """Steps (or other values) behind it."""

    @property
    def relative(self) -> float:
        """Half width over mean."""
        return self.half_width / self.mean if self.mean else inf


def mean_interval(values: np.ndarray) -> Estimate:
    """Mean of a stationary series with a 95 % interval that knows its autocorrelation.

    The variance of the mean is the spectrum at zero, estimated from the autocovariances at lags
    below n / 8, whole up to n / 16 and fading from there; about 12 degrees of freedom. A series
    whose deviations cancel gets the narrow interval that it deserves, a drifting one a wide one.
    """
    n = len(values)
    mean = float(values.mean())
    if n < 2 * _WINDOWS:
        return Estimate(mean, inf, n)
    if n > 2 * _BLOCKS:  # block means keep the spectrum at zero
        size = n // _BLOCKS
        few = mean_interval(values[: size * _BLOCKS].reshape(_BLOCKS, size).mean(1))
        return Estimate(mean, few.half_width, n)
    window = n // _WINDOWS
    off = values - mean
    spectrum = float(off @ off)
    for lag in range(1, window):
        spectrum += 2 * min(1.0, 2 - 2 * lag / window) * float(off[lag:] @ off[:-lag])
    spectrum /= 1 - 1.5 * window / n  # the mean was taken from the same values
    least = float(off @ off) / n  # never below what one of n values is worth
    return Estimate(mean, _T_975 * sqrt(max(spectrum, least)) / n, n)


def warm_up(durations: np.ndarray) -> int:
    """Steps to drop by MSER-5: where the standard error of the rest's mean is least."""
    blocks = len(durations) // 5
    if blocks < 4:
        return len(durations) // 4
    means = durations[: blocks * 5].reshape(blocks, 5).mean(1)
    rest = [float(means[k:].var() / (blocks - k)) for k in range(max(1, blocks // 3))]
    return 5 * int(np.argmin(rest))


def step_durations(run: Run) -> np.ndarray:
    """Seconds between the ends of consecutive steps, float64 [steps - 1].

    In async each rank has steps of its own. The ranks' rates add up, so the series is the ranks'
    durations weighted such that its mean is the step time of the sum of rates.
    """
    ended = run.stamps[Mark.UPDATED]
    if run.scenario.mode.has_barrier:
        return np.diff(ended[0])
    durations = np.diff(ended, axis=1)
    rates = 1 / durations.mean(1)
    weights = rates**2 * len(rates) / rates.sum() ** 2
    weighted: np.ndarray = (durations * weights[:, None]).sum(0)
    return weighted


def step_time(run: Run) -> Estimate:
    """Seconds a step in the steady state."""
    durations = step_durations(run)
    fill = (run.scenario.window or 0) + 5
    start = max(warm_up(durations), min(fill, len(durations) // 2))
    return mean_interval(durations[start:])


def throughput(run: Run) -> Estimate:
    """Samples per second of all ranks in the steady state."""
    step = step_time(run)
    samples = run.scenario.batch
    mean = samples / step.mean
    return Estimate(mean, mean * step.relative, step.values)
