"""Exact scores of predictions: of probabilities, of numbers, within groups, and by weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class TaskScore:
    """How well one behaviour is predicted; NaN for what a task does not have.

    Weights of samples count in all figures but those within groups, where each counts once.
    """

    auc: float
    """Area under the ROC curve; NaN when the test part holds one class only."""
    log_loss: float
    label_rate: float
    """The mean label; of a regression, too."""
    trivial_log_loss: float
    """Log-loss of always predicting the label rate of the test part."""
    normalized_entropy: float = float("nan")
    """Log-loss over ``trivial_log_loss`` (He et al., ADKDD 2014): below 1 is better than the
    rate."""
    calibration: float = float("nan")
    """Mean prediction over label rate: 1 when as many clicks are promised as come."""
    gauc: float = float("nan")
    """AUC within the samples of one group (a user), weighted by them; NaN without groups."""
    gauc_groups: int = 0
    """Groups that it is of: those that hold both labels."""
    gauc_groups_left_out: int = 0
    """Groups that hold one label only."""
    without_group: int = 0
    """Samples that are in no group, as their user is not known: no figure within groups has
    them."""
    recall: float = float("nan")
    """Recall@K: the share of a group's clicks among its K best predictions, mean over the groups
    of ``gauc``."""
    ndcg: float = float("nan")
    """NDCG@K of the same groups: clicks discounted by their place, over the best order's."""
    k: int = 0
    """That K; 0 without groups."""
    mse: float = float("nan")
    """Mean squared error of a regression."""
    mae: float = float("nan")
    rmse: float = float("nan")
    trivial_mse: float = float("nan")
    """Mean squared error of always predicting the mean label of the test part."""
    is_regression: bool = False

    @property
    def goodness(self) -> float:
        """What early stopping goes by, the higher the better."""
        return -self.mse if self.is_regression else self.auc

    def figures(self) -> dict[str, Any]:
        """The task's scores by name; of groups only where the samples have groups. A regression has
        the names of AUC and log-loss, too, as None."""
        left_out = {"k", "is_regression"}
        if not self.is_regression:
            left_out |= {"mse", "mae", "rmse", "trivial_mse"}
        if not self.k:
            left_out |= {"gauc", "gauc_groups", "gauc_groups_left_out", "recall", "ndcg"}
            left_out.add("without_group")
        renamed = {name: f"group_{name}@{self.k}" for name in ("recall", "ndcg")}
        items = asdict(self).items()
        return {renamed.get(name, name): value for name, value in items if name not in left_out}


_NOTHING = TaskScore(auc=math.nan, log_loss=math.nan, label_rate=math.nan, trivial_log_loss=0.0)
"""Score of a task that no sample has a label of."""


def _weighs(labels: np.ndarray, weights: np.ndarray | None) -> bool:
    return len(labels) > 0 and (weights is None or bool(weights.any()))


def regression_score(
    labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray | None = None
) -> TaskScore:
    """The figures of a task whose labels are numbers; ``weights`` [n]: what each sample counts."""
    # Nothing to judge gives no figure.
    if not _weighs(labels, weights):
        return replace(_NOTHING, is_regression=True)

    # Means over the samples, each as it weighs; beside them the error of the mean label.
    labels = labels.astype(np.float64)
    mean = float(np.average(labels, weights=weights))
    errors = predictions - labels
    mse = float(np.average(errors**2, weights=weights))
    return TaskScore(
        auc=math.nan,
        log_loss=math.nan,
        label_rate=mean,
        trivial_log_loss=math.nan,
        mse=mse,
        mae=float(np.average(np.abs(errors), weights=weights)),
        rmse=math.sqrt(mse),
        trivial_mse=float(np.average((labels - mean) ** 2, weights=weights)),
        is_regression=True,
    )


TOP = 10
"""K of Recall@K and NDCG@K."""


def score(
    labels: np.ndarray,
    predictions: np.ndarray,
    groups: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    grouped: np.ndarray | None = None,
) -> TaskScore:
    """The figures of one task; ``groups`` [n]: whose samples they are, for GAUC, Recall and NDCG
    at `TOP`; ``weights`` [n]: what each sample counts; ``grouped`` [n]: whether it is in any
    group, None where all are."""
    # What cannot be scored: no label, one class only, predictions that are no numbers.
    if not _weighs(labels, weights):
        return _NOTHING
    rate = float(np.average(labels, weights=weights))
    if rate in (0.0, 1.0):  # always saying the only label there is loses nothing
        return TaskScore(float("nan"), float("nan"), rate, 0.0)
    trivial = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    if not np.isfinite(predictions).all():
        return TaskScore(float("nan"), float("nan"), rate, float(trivial))

    # Figures of all rows.
    loss = log_loss(labels, predictions, weights)
    promised, came = (
        np.average(of.astype(np.float64), weights=weights) for of in (predictions, labels)
    )
    rising = np.argsort(predictions)  # once: sorting is most of the work
    result = TaskScore(
        auc=auc(labels, predictions, weights, rising),
        log_loss=loss,
        label_rate=rate,
        trivial_log_loss=float(trivial),
        normalized_entropy=float(loss / trivial),
        calibration=float(promised / came),
    )
    if groups is None:
        return result

    # Figures within groups.
    if grouped is not None:
        rising = rising[grouped[rising]]
    if not len(rising):
        return replace(result, k=TOP, without_group=len(labels))
    in_groups = rising[np.argsort(groups[rising], kind="stable")]
    gauc, gauc_groups, left_out = group_auc(labels, predictions, groups, in_groups)
    recall, ndcg = at_top(labels, predictions, groups, TOP, in_groups)
    return replace(
        result,
        recall=recall,
        ndcg=ndcg,
        k=TOP,
        gauc=gauc,
        gauc_groups=gauc_groups,
        gauc_groups_left_out=left_out,
        without_group=len(labels) - len(rising),
    )


LEAST_PROBABILITY = 1e-15
"""Probabilities nearer to 0 or 1 count as this, so that no loss is infinite."""


def auc(
    labels: np.ndarray,
    predictions: np.ndarray,
    weights: np.ndarray | None = None,
    order: np.ndarray | None = None,
) -> float:
    """The share of pairs of a 1 and a 0 in which the 1 is predicted higher; a tie is half a pair.

    A pair counts as the product of its ``weights``. Without them all is counted in whole numbers,
    so nothing is rounded before the one division. Both labels must occur, and predictions be
    finite. ``order``: that of rising predictions, where it is known.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
    0.875
    """
    order = np.argsort(predictions) if order is None else order
    ranked = predictions[order]
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # the last of equal ones
    counts = np.ones(len(labels), np.int64) if weights is None else weights[order]
    ones_so_far = np.cumsum(counts * (labels[order] > 0))[ends]
    ones = np.diff(ones_so_far, prepend=0)
    zeros = np.diff(np.cumsum(counts)[ends] - ones_so_far, prepend=0)
    zeros_below = np.cumsum(zeros) - zeros
    half_wins = np.dot(ones, 2 * zeros_below + zeros).item()
    return float(half_wins / (2 * ones.sum().item() * zeros.sum().item()))


def log_loss(
    labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """The mean of -ln of the probability that was given to what happened.

    >>> round(log_loss(np.array([0, 1]), np.array([0.5, 0.25])), 6)
    1.039721
    """
    of_one = np.clip(probabilities.astype(np.float64), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return float(np.average(-np.log(np.where(labels > 0, of_one, 1 - of_one)), weights=weights))


def group_auc(
    labels: np.ndarray, predictions: np.ndarray, groups: np.ndarray, order: np.ndarray | None = None
) -> tuple[float, int, int]:
    """GAUC: how well the samples of one user (one group) are ordered among themselves; and how many
    groups hold both labels, and one only.

    As in Zhou et al. (KDD 2018, DIN), the mean weighted by impressions; in groups with one label no
    pair can be in order, and they are left out of mean and weights alike: NaN where all are.
    ``order``: by group and rising prediction, where it is known.

    >>> labels, groups = np.array([0, 1, 1, 0, 1]), np.array([7, 7, 8, 8, 9])
    >>> group_auc(labels, np.array([0.1, 0.4, 0.3, 0.3, 0.9]), groups)
    (0.75, 2, 1)
    """
    # Sort by group and prediction; runs of equal predictions end where either changes.
    order = np.lexsort((predictions, groups)) if order is None else order
    ranked = predictions[order]
    grouped = groups[order]
    ones = labels[order] > 0
    new_group = grouped[1:] != grouped[:-1]
    ends = np.flatnonzero(np.append(new_group | (ranked[1:] != ranked[:-1]), True))

    # In each run, how many 1s and 0s, and how many 0s of the group lie below it.
    ones_here = np.diff(np.cumsum(ones)[ends], prepend=0)  # of each run of equal predictions
    zeros_here = np.diff(ends + 1, prepend=0) - ones_here
    zeros_before = np.cumsum(zeros_here) - zeros_here
    firsts = np.flatnonzero(np.insert(new_group[ends[:-1]], 0, True))  # first run of each group
    members = np.diff(np.append(firsts, len(ends)))
    zeros_below = zeros_before - np.repeat(zeros_before[firsts], members)

    # Pairs in order, of which equal predictions win half, summed by group.
    half_wins = np.add.reduceat(ones_here * (2 * zeros_below + zeros_here), firsts)
    of_one, of_zero = (np.add.reduceat(counts, firsts) for counts in (ones_here, zeros_here))

    # Groups with both labels, weighted by their impressions.
    both = (of_one > 0) & (of_zero > 0)
    if not both.any():
        return math.nan, 0, len(firsts)
    aucs = half_wins[both] / (2 * of_one[both] * of_zero[both])
    weights = (of_one + of_zero)[both]
    return float(np.average(aucs, weights=weights)), int(both.sum()), int((~both).sum())


def at_top(
    labels: np.ndarray,
    predictions: np.ndarray,
    groups: np.ndarray,
    top: int,
    order: np.ndarray | None = None,
) -> tuple[float, float]:
    """Recall and NDCG at ``top``: means over the groups with both labels, each counts once.

    Equal predictions share the places that they take together, as in scikit-learn. ``order`` as in
    `group_auc`.

    >>> at_top(np.array([0, 1, 1]), np.array([0.9, 0.5, 0.4]), np.array([7, 7, 7]), top=2)
    (0.5, 0.38685280723454163)
    """
    # The best prediction of each group first, and each sample's place in its group.
    order = (np.lexsort((predictions, groups)) if order is None else order)[::-1]
    ranked = predictions[order]
    grouped = groups[order]
    ones = labels[order] > 0
    new_group = np.append(True, grouped[1:] != grouped[:-1])
    firsts = np.flatnonzero(new_group)
    sizes = np.diff(np.append(firsts, len(order)))
    places = np.arange(len(order)) - np.repeat(firsts, sizes)

    # What a 1 gains at each place.
    seen = places < top
    gains = np.where(seen, 1 / np.log2(places + 2.0), 0.0)

    # Equal predictions share what their places hold.
    runs = np.flatnonzero(new_group | np.append(True, ranked[1:] != ranked[:-1]))
    share = np.add.reduceat(ones, runs, dtype=float) / np.diff(np.append(runs, len(order)))
    share = np.repeat(share, np.diff(np.append(runs, len(order))))  # of a 1, at each place

    # The best that any order could reach, in groups where the order matters.
    clicks = np.add.reduceat(ones, firsts, dtype=np.int64)
    best = np.append(0.0, np.cumsum(1 / np.log2(np.arange(top) + 2.0)))[np.minimum(clicks, top)]
    hit = (clicks > 0) & (clicks < sizes)  # where all are clicked any order is the best
    if not hit.any():
        return math.nan, math.nan
    recall = np.add.reduceat(share * seen, firsts)[hit] / clicks[hit]
    ndcg = np.add.reduceat(share * gains, firsts)[hit] / best[hit]
    return float(recall[::-1].mean()), float(ndcg[::-1].mean())  # in the order of groups
