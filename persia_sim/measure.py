"""Throughput of a run without its start, with an interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from persia_sim.simulate import Run
from persia_sim.stamps import Mark

_T_975 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
    2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95 % interval."""

    mean: float
    half_width: float
    samples: int
    """Independent values behind it (batch means)."""

    @property
    def relative(self) -> float:
        """Half width over mean."""
        return self.half_width / self.mean if self.mean else np.inf


def mean_interval(values: np.ndarray, batches: int = 10) -> Estimate:
    """Mean of a stationary series with an interval from batch means (Student's t)."""
    batches = min(batches, len(values))
    if batches < 2:
        return Estimate(float(values.mean()), np.inf, batches)
    size = len(values) // batches
    cut = values[len(values) - batches * size :]
    means = cut.reshape(batches, size).mean(1)
    spread = float(means.std(ddof=1))
    width = _T_975[min(batches - 1, len(_T_975)) - 1] * spread / batches**0.5
    return Estimate(float(cut.mean()), width, batches)


def warm_up(durations: np.ndarray) -> int:
    """Steps to drop by MSER-5: where the standard error of the rest's mean is least."""
    blocks = len(durations) // 5
    if blocks < 4:
        return min(len(durations) // 4, 5)
    means = durations[: blocks * 5].reshape(blocks, 5).mean(1)
    rest = [float(means[k:].var() / (blocks - k)) for k in range(blocks // 2)]
    return 5 * int(np.argmin(rest))


def step_durations(run: Run) -> np.ndarray:
    """Seconds between the ends of consecutive steps, float64 [steps - 1].

    In async a step is as many trained batches as there are ranks, whoever trained them; the tail in
    which some ranks have run out of batches is left out.
    """
    ended = run.stamps[Mark.UPDATED]
    if run.scenario.mode.has_barrier:
        return np.diff(ended[0])
    ranks = ended.shape[0]
    ends = np.sort(ended.ravel())
    ends = ends[ends <= ended.max(1).min()]
    return np.diff(ends[ranks - 1 :: ranks])


def step_time(run: Run) -> Estimate:
    """Seconds a step in the steady state."""
    durations = step_durations(run)
    fill = (run.scenario.window or 0) + 5
    start = max(warm_up(durations), min(fill, len(durations) // 2))
    return mean_interval(durations[start:])


def throughput(run: Run) -> Estimate:
    """Samples per second of all ranks in the steady state."""
    step = step_time(run)
    samples = run.scenario.cluster.ranks * run.scenario.workload.batch
    mean = samples / step.mean
    return Estimate(mean, mean * step.relative, step.samples)
