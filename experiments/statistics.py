"""Paired comparisons: over seeds (a t interval), and of two fitted models (DeLong)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % t interval."""

    mean: float
    half_width: float
    """NaN with fewer than two values."""
    n: int


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and t interval of independent values (of paired differences: one per seed)."""
    from scipy.stats import t  # late: a second to import

    n = len(values)
    if n < 2:
        return Interval(float(np.mean(values)) if n else math.nan, math.nan, n)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(float(np.mean(values)), float(t.ppf(0.5 + confidence / 2, n - 1)) * error, n)


def half_width_ratio(n: int, family: int, confidence: float = 0.95) -> float:
    """How much wider t intervals of ``n`` values are that hold in all of a family at once.

    Bonferroni's inequality; n >= 2.

    >>> round(half_width_ratio(5, 10), 2)
    2.02
    """
    from scipy.stats import t  # late: a second to import

    tail = (1 - confidence) / 2
    return float(t.ppf(1 - tail / family, n - 1) / t.ppf(1 - tail, n - 1))


@dataclass(frozen=True, slots=True)
class DeLong:
    """Two models' AUCs on the same test rows, and what other test rows would change."""

    auc: tuple[float, float]
    standard_error: tuple[float, float]
    difference_standard_error: float

    @property
    def p_value(self) -> float:
        """Two-sided, of equal AUCs in the population of test rows."""
        difference = self.auc[0] - self.auc[1]
        if self.difference_standard_error == 0:
            return 1.0
        return math.erfc(abs(difference) / self.difference_standard_error / math.sqrt(2))


def delong(labels: np.ndarray, first: np.ndarray, second: np.ndarray) -> DeLong:
    """DeLong's test of two correlated ROC curves (Biometrics 44, 1988), by midranks.

    ``labels`` [n] are 0 or 1, the others [n] scores. It answers for these two fitted models on new
    samples; seeds answer for the training procedure.
    """
    positive = labels > 0.5
    m, n = int(positive.sum()), int((~positive).sum())
    if m < 2 or n < 2:
        raise ValueError(f"DeLong needs two samples of each label, got {m} and {n}")
    aucs, over_positive, over_negative = [], [], []
    for scores in (first, second):
        ranks = _midranks(scores)
        own_positive, own_negative = _midranks(scores[positive]), _midranks(scores[~positive])
        over_positive.append((ranks[positive] - own_positive) / n)
        over_negative.append(1 - (ranks[~positive] - own_negative) / m)
        aucs.append(float(over_positive[-1].mean()))
    covariance = np.cov(over_positive) / m + np.cov(over_negative) / n
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    return DeLong(
        (aucs[0], aucs[1]),
        (math.sqrt(covariance[0, 0]), math.sqrt(covariance[1, 1])),
        math.sqrt(max(0.0, variance)),
    )


def _midranks(values: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    ranks: np.ndarray = rankdata(values)
    return ranks
