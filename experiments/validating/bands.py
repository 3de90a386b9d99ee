"""Signed errors of predictions, and bands from the errors of other configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SHARE = 0.9
"""Of measurements that a band is to hold."""
GOALS = {
    "throughput_mean": 0.05, "throughput_largest": 0.15, "staleness_mean": 0.05,
    "coverage_least": 0.85, "coverage_most": 0.95,
}  # fmt: skip
DRAWS = 4_000
LEAST_OTHERS = 3


@dataclass(frozen=True, slots=True)
class Band:
    """Where a measurement lies in 90 % of cases, as factors on the prediction."""

    low: float
    high: float

    def holds(self, ratio: float) -> bool:
        """Whether a measurement over its prediction lies inside."""
        return self.low <= ratio <= self.high


def error(predicted: float, measured: float) -> float:
    """Signed: 0.1 says that the prediction is 10 % above what was measured; 0 for 0 against 0.

    >>> round(error(110.0, 100.0), 9), error(0.0, 0.0)
    (0.1, 0.0)
    """
    if predicted == measured:
        return 0.0
    return predicted / measured - 1 if measured else np.inf


def band_of(name: str, ratios: Mapping[str, Sequence[float]], seed: int = 0) -> Band | None:
    """The band of one configuration from the measured ratios (measured / predicted) of all others.

    Each draw takes others with replacement for the mean error of this host's predictions, then one
    more, with its deviation, for this configuration, and one deviation of a run from its own
    configuration's mean. None where there are fewer than three others.
    """
    logs = {n: np.log(np.asarray(values, float)) for n, values in ratios.items() if n != name}
    n = len(logs)
    if n < LEAST_OTHERS:
        return None
    means = np.array([own.mean() for own in logs.values()])
    within = np.concatenate([own - own.mean() for own in logs.values()])
    many = [len(own) / (len(own) - 1) for own in logs.values() if len(own) > 1]
    within = within * np.sqrt(np.mean(many) if many else 1.0)
    random = np.random.default_rng(seed)
    centres = means[random.integers(n, size=(DRAWS, n))].mean(1)
    # A mean of n has taken a part of each deviation with it.
    apart = (means - means.mean())[random.integers(n, size=DRAWS)] * np.sqrt(n / (n - 1))
    drawn = centres + apart + within[random.integers(len(within), size=DRAWS)]
    low, high = np.exp(np.quantile(drawn, [(1 - SHARE) / 2, (1 + SHARE) / 2]))
    return Band(float(low), float(high))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal with what was found."""

    goal: str
    found: float
    met: bool

    def __str__(self) -> str:
        return f"{self.goal}: {self.found:.1%} ({'met' if self.met else 'MISSED'})"


def verdicts(
    rate_errors: Sequence[float], stale_errors: Sequence[float], inside: Sequence[bool]
) -> list[Verdict]:
    """The goals beside errors of configurations and runs inside their bands; those of nothing are
    left out."""
    found = []
    if rate_errors:
        sizes = np.abs(rate_errors)
        mean, most = float(sizes.mean()), float(sizes.max())
        goal, largest = GOALS["throughput_mean"], GOALS["throughput_largest"]
        found.append(Verdict(f"throughput, mean error <= {goal:.0%}", mean, mean <= goal))
        found.append(Verdict(f"throughput, largest <= {largest:.0%}", most, most <= largest))
    if stale_errors:
        mean, goal = float(np.abs(stale_errors).mean()), GOALS["staleness_mean"]
        found.append(Verdict(f"staleness, mean error <= {goal:.0%}", mean, mean <= goal))
    if inside:
        share, low, high = float(np.mean(inside)), GOALS["coverage_least"], GOALS["coverage_most"]
        told = f"90 % bands hold {low:.0%} to {high:.0%} of runs"
        found.append(Verdict(told, share, low <= share <= high))
    return found
