"""Paired comparisons: over seeds, over test samples, and over both at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval.

    The interval of a gap of AUC may be over seeds and test samples at once: seeds are readers and
    test samples cases of a multi-reader multi-case comparison, the variance is that of Obuchowski
    and Rockette (Commun. Stat. Simul. 24, 1995) with the degrees of freedom of Hillis (Stat. Med.
    26, 2007), for two modalities.
    """

    mean: float
    half_width: float
    """NaN with fewer than two values."""
    n: int
    """How many values: of a gap, seeds."""
    seeds_error: float = math.nan
    """Standard error of a mean gap that comes from seeds alone."""
    rows_error: float = math.nan
    """What test samples add, as a standard error: what the gaps of all seeds have in common on
    them, which no further seed takes away."""


def _t(share: float, freedom: float) -> float:
    """The quantile of Student's t."""
    from scipy.special import stdtrit  # late; `scipy.stats`' own, at a tenth of its price

    return float(stdtrit(freedom, share))


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean and t interval of independent values (of paired differences: one per seed)."""
    n = len(values)
    if n < 2:
        return Interval(float(np.mean(values)) if n else math.nan, math.nan, n)
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Interval(float(np.mean(values)), _t(0.5 + confidence / 2, n - 1) * error, n)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of paired ratios with its 95 % t interval, on the scale of logarithms."""

    mean: float
    low: float
    high: float
    """NaN, as ``low``, with fewer than two pairs."""
    pairs: int
    clean: bool
    """Whether nothing else loaded the machine meanwhile."""

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(values: Sequence[float], base: Sequence[float], clean: bool = True) -> Ratio:
    """The ratio values / base over pairs; all NaN where a value is not > 0.

    >>> paired_ratio([2.0, 2.0], [4.0, 4.0])
    Ratio(mean=0.5, low=0.5, high=0.5, pairs=2, clean=True)
    """
    if min(*values, *base, math.inf) <= 0:
        return Ratio(math.nan, math.nan, math.nan, len(values), clean)
    logs = t_interval(np.log(np.asarray(values) / np.asarray(base)).tolist())
    ends = (logs.mean, logs.mean - logs.half_width, logs.mean + logs.half_width)
    return Ratio(*(float(np.exp(x)) for x in ends), logs.n, clean)


def contrast(
    labels: np.ndarray,
    scores: Sequence[Sequence[np.ndarray]],
    signs: Sequence[int] = (-1, 1),
    clusters: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> Interval:
    """Mean over seeds of a sum of AUCs with ``signs``, which sum to 0; over seeds and test samples.

    ``labels`` [n] are 0 or 1; ``scores`` hold those [n] of one seed each for every sign, paired by
    place; ``clusters`` [n]: rows of one value come together; ``weights`` [n]: what a row counts.
    """
    shares = np.array([[placements(labels, one, weights) for one in side] for side in scores])
    differences = np.tensordot(signs, shares, 1)
    gaps = differences[:, labels > 0.5].mean(axis=1)
    return over_seeds_and_rows(gaps, covariance_over_rows(labels, differences, clusters))


def over_seeds_and_rows(gaps: np.ndarray, over_rows: np.ndarray) -> Interval:
    """Mean of the gaps [seeds] of paired seeds, whose covariance over test samples is ``over_rows``
    [seeds, seeds], with its interval over both."""
    mean = float(gaps.mean())
    seeds = len(gaps)
    if seeds < 2:
        return Interval(mean, math.nan, seeds)

    # The mean covariance of two seeds is what test samples add: no further seed takes it away.
    shared = (over_rows.sum() - np.trace(over_rows)) / (seeds * (seeds - 1))
    of_seeds = float(gaps.var(ddof=1)) / seeds
    of_rows = max(0.0, float(shared))
    half_width = half_width_of(of_seeds, of_rows, seeds)
    return Interval(mean, half_width, seeds, math.sqrt(of_seeds), math.sqrt(of_rows))


def half_width_of(of_seeds: float, of_rows: float, seeds: int, confidence: float = 0.95) -> float:
    """Half width of the interval of a mean with these two variances, by ``seeds`` >= 2 seeds."""
    freedom = 1e9 if of_seeds == 0 else (seeds - 1) * ((of_seeds + of_rows) / of_seeds) ** 2
    return _t(0.5 + confidence / 2, freedom) * math.sqrt(of_seeds + of_rows)


def placements(
    labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """The share of the other label's rows that each row is right against, float64 [n].

    Their mean over the rows of either label is the AUC (ties count half). With ``weights`` [n], as
    much as a row adds to the weighted AUC: its distance from it, times its weight over the mean.
    """
    # An error of an AUC is a variance over each label's rows.
    positive = labels > 0.5
    m = int(positive.sum())
    n = int((~positive).sum())
    if m < 2 or n < 2:
        raise ValueError(f"an AUC's error needs two samples of each label, got {m} and {n}")

    # How much of the other label scores below each row, by the scores that occur; ties are half.
    counts = np.ones(len(scores)) if weights is None else weights
    values, place = np.unique(scores, return_inverse=True)
    shares = np.empty(len(scores))
    for rows in (positive, ~positive):
        others = np.bincount(place[~rows], counts[~rows], len(values))
        shares[rows] = (np.cumsum(others) - others / 2)[place[rows]] / others.sum()

    # A negative row is right against those above it.
    shares[~positive] = 1 - shares[~positive]

    # A heavy row moves the AUC by more: stretch its distance from the mean.
    if weights is not None:
        auc = np.average(shares[positive], weights=weights[positive])
        for rows in (positive, ~positive):
            shares[rows] = auc + weights[rows] / weights[rows].mean() * (shares[rows] - auc)
    return shares


def covariance_over_rows(
    labels: np.ndarray, shares: np.ndarray, clusters: np.ndarray | None = None
) -> np.ndarray:
    """Covariance [k, k] over test samples of k AUCs (or gaps) from their placements [k, n].

    The method is DeLong's; with ``clusters`` [n] that of Obuchowski (Biometrics 53, 1997), who sums
    the placements of a cluster's rows first.
    """
    positive = labels > 0.5
    if clusters is None:
        return sum(
            np.cov(shares[:, rows], ddof=1).reshape(len(shares), -1) / rows.sum()
            for rows in (positive, ~positive)
        )
    return covariance_of_sums(cluster_sums(labels, shares, clusters))


def cluster_sums(labels: np.ndarray, shares: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """What each cluster of test samples adds to k AUCs beyond its mean [k, clusters], from their
    placements [k, n]; in the order of the clusters' values."""
    positive = labels > 0.5
    _, owner = np.unique(clusters, return_inverse=True)
    count = int(owner.max()) + 1
    centred = shares - shares[:, positive].mean(axis=1, keepdims=True)
    sums = np.zeros((len(shares), count))
    for rows in (positive, ~positive):
        for line, values in zip(sums, centred, strict=True):
            line += np.bincount(owner[rows], values[rows], count) / rows.sum()
    return sums


def covariance_of_sums(sums: np.ndarray) -> np.ndarray:
    """Covariance [k, k] over test samples of k AUCs (or gaps) from their `cluster_sums`."""
    clusters = sums.shape[1]
    return sums @ sums.T * clusters / (clusters - 1)
