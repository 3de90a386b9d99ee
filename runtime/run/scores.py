"""Exact figures of predictions: the area under the ROC curve, and the log-loss."""

from __future__ import annotations

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
