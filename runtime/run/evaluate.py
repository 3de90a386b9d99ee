"""Exact scores on the test part (or validation), per task, and why an AUC may be 0.5."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from runtime.data.batch import Batch, Layout
from runtime.data.source import Part, Source, rebatch
from runtime.data.synthetic import SyntheticSource
from runtime.embedding.store import ABSENT, Handle
from runtime.embedding.worker import EmbeddingWorker
from runtime.rank.learner import Learner

_EVALUATION_BATCH = 8192  # samples at a time: bounds memory, changes no figure
_KEPT_BATCHES = 128  # a million samples


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
    """Of always predicting the label rate of the test part."""
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
    recall: float = float("nan")
    """Recall@K: the share of a group's clicks among its K best predictions, mean over the groups
    of ``gauc``."""
    ndcg: float = float("nan")
    """NDCG@K of the same groups: clicks discounted by their place, over the best order's."""
    k: int = 0
    """That K; 0 without groups."""
    mse: float = float("nan")
    """Of a regression: the mean squared error."""
    mae: float = float("nan")
    rmse: float = float("nan")
    trivial_mse: float = float("nan")
    """Of always predicting the mean label of the test part."""
    is_regression: bool = False

    @property
    def goodness(self) -> float:
        """What early stopping goes by, the higher the better."""
        return -self.mse if self.is_regression else self.auc

    def figures(self) -> dict[str, Any]:
        """Those that the task has, by name; of groups only where the samples have groups. A
        regression keeps the names of AUC and log-loss, as None."""
        left_out = {"k", "is_regression"}
        if not self.is_regression:
            left_out |= {"mse", "mae", "rmse", "trivial_mse"}
        if not self.k:
            left_out |= {"gauc", "gauc_groups", "gauc_groups_left_out", "recall", "ndcg"}
        renamed = {"recall": f"recall@{self.k}", "ndcg": f"ndcg@{self.k}"}
        found = asdict(self).items()
        return {renamed.get(name, name): value for name, value in found if name not in left_out}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores and the predictions behind them."""

    tasks: dict[str, TaskScore]
    predictions: np.ndarray
    """float64 [n, T]: probabilities (of a regression, numbers), in the order of the test part."""
    labels: np.ndarray
    """float32 [n, T]"""
    warnings: list[str]
    """Why the figures may mean nothing, in plain words; empty when healthy."""
    groups: np.ndarray | None = None
    """uint64 [n]: whose samples they are (a user's); None where the data set names no group."""
    weights: np.ndarray | None = None
    """float64 [n]: what each sample counts; None where all count the same."""
    ids_with_row: dict[str, float] = dataclass_field(default_factory=dict)
    """Field -> the share of its ids that have a row; empty where server processes hold the rows."""

    def without_predictions(self) -> Evaluation:
        """The scores alone, for a curve of many points."""
        nothing = self.predictions[:0].copy(), self.labels[:0].copy()
        return replace(self, predictions=nothing[0], labels=nothing[1], groups=None, weights=None)


class HeldOut:
    """The test part (or validation), or its first rows, in the source's order, any number of times.

    A part of usual size is kept between evaluations; a larger one is streamed anew each time. To
    stream a part that is empty or weighs nothing raises ValueError at its end.
    """

    def __init__(self, source: Source, rows: int | None = None, part: Part = "test") -> None:
        self._source, self._rows, self._part = source, rows, part
        self._kept: list[Batch] = []
        self._complete = False

    def __iter__(self) -> Iterator[Batch]:
        if self._complete:
            yield from self._kept
            return
        kept: list[Batch] | None = []
        for batch in self._stream():
            if kept is not None:
                kept.append(batch)
                kept = kept if len(kept) <= _KEPT_BATCHES else None
            yield batch
        if kept is not None:
            self._kept, self._complete = kept, True

    def read_first(self) -> None:
        """Before anything is trained: read what is kept, or the first rows of a larger part, so
        that a fault in them costs no training. Raises ValueError."""
        for _ in islice(self, _KEPT_BATCHES + 1):
            pass

    def _stream(self) -> Iterator[Batch]:
        left = self._rows if self._rows is not None else 2**62
        tasks = len(self._source.layout.tasks)
        is_empty = weighs_nothing = True
        for batch in rebatch(self._source.chunks(self._part), _EVALUATION_BATCH):
            first = batch.rows(0, min(left, batch.size))
            weights = first.labels[:, tasks:]
            weighs_nothing = weighs_nothing and weights.size > 0 and not weights.any()
            is_empty = False
            yield first
            left -= batch.size
            if left <= 0:
                break
        if is_empty:
            raise ValueError(self._told_empty())
        if weighs_nothing:
            raise ValueError(
                f"every row of the {self._part} part that is evaluated has weight 0; correct the"
                " weights, or leave them out"
            )

    def _told_empty(self) -> str:
        if self._part == "test":
            name = self._source.provenance().name
            return f"data set {name} gave no test sample; is its split right?"
        return (
            "part validation needs a validation part, and this data set has none; give the"
            " share of the training rows that it takes: --data.validation-fraction 0.1"
        )


def evaluate(
    learner: Learner, model: nn.Module, worker: EmbeddingWorker, held_out: Iterable[Batch]
) -> Evaluation:
    """Score ``model`` with the rows as they are; creates no row and draws no random number.

    Every module is evaluated in its eval mode, and afterwards is in the mode in which it was.
    """
    layout, found = learner.layout, _RowsFound(learner.layout)
    scored = []
    with _evaluating(model):
        for batch in held_out:
            ticket = worker.store.peek(batch)
            found.note(ticket)
            predicted = learner.predict(model, batch, worker.pool(ticket))
            scored.append((predicted, batch.labels, layout.groups(batch)))
    predictions, labels, groups = _columns(scored)
    labels, weights = np.split(labels, [len(layout.tasks)], axis=1)
    weight = weights[:, 0].astype(np.float64) if weights.shape[1] else None
    tasks = {}
    for k, name in enumerate(layout.tasks):
        if name in layout.regression:
            tasks[name] = regression_score(labels[:, k], predictions[:, k], weight)
        else:
            top = learner.config.evaluation.top
            tasks[name] = score(labels[:, k], predictions[:, k], groups, weight, top)
    health = _health(worker, tasks, predictions)
    return Evaluation(tasks, predictions, labels, health, groups, weight, found.shares())


class _RowsFound:
    """How many of each field's ids have a row."""

    def __init__(self, layout: Layout) -> None:
        self._fields = [field.name for field in layout.fields]
        self._ids = self._found = np.zeros(len(self._fields), np.int64)
        self._known = True

    def note(self, ticket: Handle) -> None:
        """The ids of one batch; rows in other processes do not say where they lie."""
        batch, width = ticket.batch, len(self._fields)
        self._known = self._known and ticket.slots is not None
        if not self._known or ticket.slots is None:
            return
        has_row = np.zeros(len(batch.ids), bool)
        for name, plan in ticket.plans.items():
            has_row[plan.occurrences] = ticket.slots[name][plan.inverse] != ABSENT
        field = np.tile(np.arange(width), batch.size)
        if batch.offsets is not None:
            bounds = batch.offsets[: batch.size * width + 1]
            field = np.repeat(field, np.diff(bounds))
            has_row = has_row[bounds[0] : bounds[-1]]
        self._ids = self._ids + np.bincount(field, minlength=width)
        self._found = self._found + np.bincount(field[has_row], minlength=width)

    def shares(self) -> dict[str, float]:
        """By field; of those that had an id."""
        if not self._known:
            return {}
        counts = zip(self._fields, self._found, self._ids, strict=True)
        return {name: float(found / ids) for name, found, ids in counts if ids}


def told_of_rows(shares: Mapping[str, float], part: str) -> list[str]:
    """Lines about the shares of ids that have a row, the smallest first, for a person."""
    if not shares:
        return []
    rising = sorted(shares, key=shares.__getitem__)
    said = ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in rising[:_MOST_TOLD])
    if len(rising) > _MOST_TOLD:
        next_one = 100 * shares[rising[_MOST_TOLD]]
        said += f", {len(rising) - _MOST_TOLD} more from {next_one:.0f} % on"
    lines = [f"ids of the {part} part with a row: {said}"]
    rare = [name for name in rising if shares[name] < _HALF]
    if rare:
        names = ", ".join(rare[:_MOST_TOLD]) + (", ..." if len(rare) > _MOST_TOLD else "")
        lines.append(
            f"warning: fewer than half of the ids of {names} have a row, the others are read as"
            " fresh ones: are they written as those of the training part?"
        )
    return lines


_MOST_TOLD, _HALF = 8, 0.5


def _columns(
    scored: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Predictions, labels and groups of all batches as one of each."""
    predictions, labels, groups = zip(*scored, strict=True)
    known = [batch for batch in groups if batch is not None]
    return (
        np.concatenate(predictions),
        np.concatenate(labels),
        np.concatenate(known) if known else None,
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """A user may keep a part of the model in eval mode (a frozen norm): each has its own flag."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def best_reachable_auc(source: Source, rows: int | None, part: Part = "test") -> float | None:
    """AUC of the true probabilities on the evaluated rows, where the truth is planted."""
    if not isinstance(source, SyntheticSource):
        return None
    truth = source.true_probabilities(part)[:rows]
    labels = np.concatenate([b.labels[:, 0] for b in HeldOut(source, rows, part)])
    return score(labels, truth).auc


def regression_score(
    labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray | None = None
) -> TaskScore:
    """The figures of a task whose labels are numbers; ``weights`` [n]: what each sample counts."""
    labels = labels.astype(np.float64)
    mean, errors = float(np.average(labels, weights=weights)), predictions - labels
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


def score(
    labels: np.ndarray,
    predictions: np.ndarray,
    groups: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    top: int = 10,
) -> TaskScore:
    """The figures of one task; ``groups`` [n]: whose samples they are, for GAUC, Recall and NDCG
    at ``top``; ``weights`` [n]: what each sample counts."""
    rate = float(np.average(labels, weights=weights))
    if rate in (0.0, 1.0):  # always saying the only label there is loses nothing
        return TaskScore(float("nan"), float("nan"), rate, 0.0)
    trivial = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    if not np.isfinite(predictions).all():
        return TaskScore(float("nan"), float("nan"), rate, float(trivial))
    loss = log_loss(labels, predictions, weights)
    found = TaskScore(
        auc=auc(labels, predictions, weights),
        log_loss=loss,
        label_rate=rate,
        trivial_log_loss=float(trivial),
        normalized_entropy=float(loss / trivial),
        calibration=calibration(labels, predictions, weights),
    )
    if groups is None:
        return found
    within = group_auc(labels, predictions, groups)
    recall, ndcg = at_top(labels, predictions, groups, top)
    return replace(
        found,
        recall=recall,
        ndcg=ndcg,
        k=top,
        gauc=within.gauc,
        gauc_groups=within.groups,
        gauc_groups_left_out=within.groups_left_out,
    )


def _health(
    worker: EmbeddingWorker,
    tasks: dict[str, TaskScore],
    predictions: np.ndarray,
) -> list[str]:
    found = []
    if not np.isfinite(predictions).all():
        found.append("predictions are not finite: lower the learning rates")
    for k, (name, figures) in enumerate(tasks.items()):
        if figures.is_regression:
            if figures.mse > 1.05 * figures.trivial_mse:
                found.append(
                    f"{name}: MSE {figures.mse:.4g} is worse than that of the mean label"
                    f" ({figures.trivial_mse:.4g}): are labels far from 0 and 1? bring them there"
                )
        elif figures.label_rate in (0.0, 1.0):
            found.append(f"{name}: the test part holds only the label {figures.label_rate:.0f}")
        elif float(np.std(predictions[:, k])) < 1e-6:
            found.append(
                f"{name}: all predictions are equal; the model has learned nothing:"
                " is a learning rate 0, or does the MLP end in dead ReLUs?"
            )
        elif abs(figures.auc - 0.5) < 0.01:
            found.append(
                f"{name}: AUC {figures.auc:.3f} is chance; are the labels joined to the right rows,"
                " and does the test part share ids with the training part?"
            )
        elif figures.log_loss > 1.05 * figures.trivial_log_loss:
            found.append(
                f"{name}: log-loss {figures.log_loss:.4f} is worse than that of the label rate"
                f" ({figures.trivial_log_loss:.4f}): overfitted, or learning rates too high"
            )
    if not len(worker.store):
        found.append("no row was created: no training batch was looked up")
    elif not worker.has_live_rows():  # first: a product of zeros has no gradient either
        found.append("all rows are zero: with initial_scale 0 a product of rows never starts")
    elif not worker.row_gradient_seen:
        found.append("no gradient has reached the rows: does the model use the embeddings?")
    return found


LEAST_PROBABILITY = 1e-15
"""Probabilities nearer to 0 or 1 count as this, so that no loss is infinite."""


def auc(labels: np.ndarray, predictions: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The share of pairs of a 1 and a 0 in which the 1 is predicted higher; a tie is half a pair.

    A pair counts as the product of its ``weights``. Without them all is counted in whole numbers,
    so nothing is rounded before the one division. Both labels must occur, and predictions be
    finite.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8]))
    0.875
    """
    order = np.argsort(predictions)
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


def at_top(
    labels: np.ndarray, predictions: np.ndarray, groups: np.ndarray, top: int
) -> tuple[float, float]:
    """Recall and NDCG at ``top``: means over the groups with both labels, each counts once.

    Equal predictions share the places that they take together, as in scikit-learn.

    >>> at_top(np.array([0, 1, 1]), np.array([0.9, 0.5, 0.4]), np.array([7, 7, 7]), top=2)
    (0.5, 0.38685280723454163)
    """
    order = np.lexsort((-predictions, groups))
    ranked, grouped, ones = predictions[order], groups[order], labels[order] > 0
    new_group = np.append(True, grouped[1:] != grouped[:-1])
    firsts = np.flatnonzero(new_group)
    sizes = np.diff(np.append(firsts, len(order)))
    places = np.arange(len(order)) - np.repeat(firsts, sizes)
    seen = places < top
    gains = np.where(seen, 1 / np.log2(places + 2.0), 0.0)
    runs = np.flatnonzero(new_group | np.append(True, ranked[1:] != ranked[:-1]))
    share = np.add.reduceat(ones, runs, dtype=float) / np.diff(np.append(runs, len(order)))
    share = np.repeat(share, np.diff(np.append(runs, len(order))))  # of a 1, at each place
    clicks = np.add.reduceat(ones, firsts, dtype=np.int64)
    best = np.append(0.0, np.cumsum(1 / np.log2(np.arange(top) + 2.0)))[np.minimum(clicks, top)]
    hit = (clicks > 0) & (clicks < sizes)  # where all are clicked any order is the best
    if not hit.any():
        return math.nan, math.nan
    recall = np.add.reduceat(share * seen, firsts)[hit] / clicks[hit]
    ndcg = np.add.reduceat(share * gains, firsts)[hit] / best[hit]
    return float(recall.mean()), float(ndcg.mean())


def calibration(
    labels: np.ndarray, probabilities: np.ndarray, weights: np.ndarray | None = None
) -> float:
    """Mean prediction over label rate: above 1 promises too many clicks. A click must occur.

    >>> calibration(np.array([0, 1]), np.array([0.5, 0.75]))
    1.25
    """
    promised, came = (
        np.average(of.astype(np.float64), weights=weights) for of in (probabilities, labels)
    )
    return float(promised / came)
