"""Exact figures of predictions: AUC, also within groups, log-loss, and calibration."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

LEAST_PROBABILITY = 1e-15
"""Probabilities nearer to 0 or 1 count as this, so that no loss is infinite."""


def auc(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The share of pairs of a 1 and a 0 in which the 1 is predicted higher; a tie is half a pair.

    Counted in whole numbers, so nothing is rounded before the one division. Both labels must occur,
    and predictions be finite.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
    0.875
    """
    order = np.argsort(predictions)
    ranked = predictions[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # the last of equal ones
    ones_so_far = np.cumsum(labels[order] > 0)[ends]
    ones = np.diff(ones_so_far, prepend=0)
    zeros = np.diff(ends + 1 - ones_so_far, prepend=0)
    zeros_below = np.cumsum(zeros) - zeros
    half_wins = int(np.dot(ones, 2 * zeros_below + zeros))
    return half_wins / (2 * int(ones.sum()) * int(zeros.sum()))


def log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """The mean of -ln of the probability that was given to what happened.

    >>> round(log_loss(np.array([0, 1]), np.array([0.5, 0.25])), 6)
    1.039721
    """
    of_one = np.clip(probabilities.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return float(-np.log(np.where(labels > 0, of_one, 1 - of_one)).mean())


class GroupAuc(NamedTuple):
    """AUC within groups, and of how many groups it is."""

    gauc: float
    """Mean AUC of the groups, weighted by their samples; NaN when none holds both labels."""
    groups: int
    """Groups that hold both labels."""
    groups_left_out: int
    """Groups that hold one label only: no pair of theirs can be in order."""


def group_auc(labels: np.ndarray, predictions: np.ndarray, groups: np.ndarray) -> GroupAuc:
    """GAUC: how well the samples of one user (one group) are ordered among themselves.

    As in Zhou et al. (KDD 2018, DIN), weighted by impressions; groups with one label are left out
    of mean and weights alike.

    >>> labels, groups = np.array([0, 1, 1, 0, 1]), np.array([7, 7, 8, 8, 9])
    >>> group_auc(labels, np.array([0.1, 0.4, 0.3, 0.3, 0.9]), groups)
    GroupAuc(gauc=0.75, groups=2, groups_left_out=1)
    """
    order = np.lexsort((predictions, groups))
    ranked, grouped, ones = predictions[order], groups[order], labels[order] > 0
    new_group = grouped[1:] != grouped[:-1]
    ends = np.flatnonzero(np.append(new_group | (ranked[1:] != ranked[:-1]), True))
    ones_here = np.diff(np.cumsum(ones)[ends], prepend=0)  # of each run of equal predictions
    zeros_here = np.diff(ends + 1, prepend=0) - ones_here
    zeros_before = np.cumsum(zeros_here) - zeros_here
    firsts = np.flatnonzero(np.insert(new_group[ends[:-1]], 0, True))  # first run of each group
    members = np.diff(np.append(firsts, len(ends)))
    zeros_below = zeros_before - np.repeat(zeros_before[firsts], members)
    half_wins = np.add.reduceat(ones_here * (2 * zeros_below + zeros_here), firsts)
    of_one, of_zero = (np.add.reduceat(counts, firsts) for counts in (ones_here, zeros_here))
    both = (of_one > 0) & (of_zero > 0)
    if not both.any():
        return GroupAuc(math.nan, 0, len(firsts))
    aucs = half_wins[both] / (2 * of_one[both] * of_zero[both])
    weights = (of_one + of_zero)[both]
    return GroupAuc(float(np.average(aucs, weights=weights)), int(both.sum()), int((~both).sum()))


def calibration(labels: np.ndarray, probabilities: np.ndarray) -> float:
    """Mean prediction over label rate: above 1 promises too many clicks. A click must occur.

    >>> calibration(np.array([0, 1]), np.array([0.5, 0.75]))
    1.25
    """
    return float(probabilities.astype(np.float64).mean() / labels.astype(np.float64).mean())
