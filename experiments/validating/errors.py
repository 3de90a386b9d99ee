"""Errors of predictions, their bands, and the goals beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

SHARE = 0.9
"""Share of measurements that a band is to hold."""
GOALS = {
    "throughput_mean": 0.05,
    "throughput_largest": 0.15,
    "staleness_mean": 0.05,
    "coverage_least": 0.85,
    "coverage_most": 0.95,
}
GOALS_APART = GOALS | {"throughput_mean": 0.08, "throughput_largest": 0.20}
"""Goals where servers are on another host."""
DRAWS = 4_000
LEAST_OTHERS = 3
Band = tuple[float, float]
"""Where a measurement lies in 90 % of cases, as factors on the prediction."""


def error(predicted: float, measured: float) -> float:
    """The signed error: 0.1 where the prediction is 10 % above the measurement; 0 for 0 against 0.

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
    # The other configurations' errors are logarithms of ratios.
    logs = {n: np.log(np.asarray(values, float)) for n, values in ratios.items() if n != name}
    n = len(logs)
    if n < LEAST_OTHERS:
        return None

    # Their means, and deviations of runs from these, which took a part of each deviation along.
    means = np.array([of_case.mean() for of_case in logs.values()])
    within = np.concatenate([of_case - of_case.mean() for of_case in logs.values()])
    many = [len(of_case) / (len(of_case) - 1) for of_case in logs.values() if len(of_case) > 1]
    within = within * np.sqrt(np.mean(many) if many else 1.0)

    # Draw what a run of this configuration may be.
    random = np.random.default_rng(seed)
    centres = means[random.integers(n, size=(DRAWS, n))].mean(1)
    # A mean of n has taken a part of each deviation with it.
    apart = (means - means.mean())[random.integers(n, size=DRAWS)] * np.sqrt(n / (n - 1))
    drawn = centres + apart + within[random.integers(len(within), size=DRAWS)]
    low, high = np.exp(np.quantile(drawn, [(1 - SHARE) / 2, (1 + SHARE) / 2]))
    return float(low), float(high)


def verdicts(
    rate_errors: Sequence[float],
    stale_errors: Sequence[float],
    inside: Sequence[bool],
    goals: Mapping[str, float] = GOALS,
) -> list[str]:
    """The goals beside errors of configurations and runs inside their bands; those of nothing are
    left out."""
    # Each goal with its statistic, its values and its bounds.
    rates = np.abs(rate_errors)
    low = goals["coverage_least"]
    high = goals["coverage_most"]
    rows = (
        ("throughput, mean error <= {:.0%}", np.mean, rates, 0.0, goals["throughput_mean"]),
        ("throughput, largest <= {:.0%}", np.max, rates, 0.0, goals["throughput_largest"]),
        (
            "staleness, mean error <= {:.0%}",
            np.mean,
            np.abs(stale_errors),
            0.0,
            goals["staleness_mean"],
        ),
        (f"90 % bands hold {low:.0%} to {{:.0%}} of runs", np.mean, inside, low, high),
    )

    # Met or missed; of no values nothing is said.
    return [
        f"{goal.format(most)}: {value:.1%} ({'met' if least <= value <= most else 'MISSED'})"
        for goal, of, values, least, most in rows
        if len(values)
        for value in (of(values),)
    ]
