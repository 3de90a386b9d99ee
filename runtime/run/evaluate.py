"""Exact AUC and log-loss on the test part, per task, and why an AUC may be 0.5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from runtime.data.batch import Batch
from runtime.data.source import Source, rebatch
from runtime.data.synthetic import SyntheticSource
from runtime.embedding.worker import EmbeddingWorker
from runtime.rank.learner import Learner
from runtime.run.scores import auc, log_loss

_EVALUATION_BATCH = 8192  # samples at a time: bounds memory, changes no figure
_KEPT_BATCHES = 128  # a million samples


@dataclass(frozen=True, slots=True)
class TaskScore:
    """How well one behaviour is predicted."""

    auc: float
    """Area under the ROC curve; NaN when the test part holds one class only."""
    log_loss: float
    label_rate: float
    trivial_log_loss: float
    """Of always predicting the label rate of the test part."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores and the predictions behind them."""

    tasks: dict[str, TaskScore]
    predictions: np.ndarray
    """float64 [n, T]: probabilities, in the order of the test part."""
    labels: np.ndarray
    """float32 [n, T]"""
    warnings: list[str]
    """Why the figures may mean nothing, in plain words; empty when healthy."""

    def without_predictions(self) -> Evaluation:
        """The scores alone, for a curve of many points."""
        return replace(self, predictions=self.predictions[:0].copy(), labels=self.labels[:0].copy())


class HeldOut:
    """The test part, or its first rows, in the source's order, any number of times.

    A part of usual size is kept between evaluations; a larger one is streamed anew each time.
    """

    def __init__(self, source: Source, rows: int | None = None) -> None:
        self._source, self._rows = source, rows
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

    def _stream(self) -> Iterator[Batch]:
        left = self._rows if self._rows is not None else 2**62
        for batch in rebatch(self._source.chunks("test"), _EVALUATION_BATCH):
            yield batch.rows(0, min(left, batch.size))
            left -= batch.size
            if left <= 0:
                return


def evaluate(
    learner: Learner, model: nn.Module, worker: EmbeddingWorker, held_out: Iterable[Batch]
) -> Evaluation:
    """Score ``model`` with the rows as they are; creates no row and draws no random number.

    Every module is evaluated in its eval mode, and afterwards is in the mode in which it was.
    """
    with _evaluating(model):
        scored = [(learner.predict(model, b, worker.peek(b)), b.labels) for b in held_out]
    predictions, labels = (np.concatenate(column) for column in zip(*scored, strict=True))
    tasks = {
        name: score(labels[:, k], predictions[:, k]) for k, name in enumerate(learner.layout.tasks)
    }
    return Evaluation(tasks, predictions, labels, _health(worker, tasks, predictions))


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


def best_reachable_auc(source: Source, rows: int | None) -> float | None:
    """AUC of the true probabilities on the evaluated test rows, where the truth is planted."""
    if not isinstance(source, SyntheticSource):
        return None
    truth = source.true_probabilities("test")[:rows]
    labels = np.concatenate([b.labels[:, 0] for b in HeldOut(source, rows)])
    return score(labels, truth).auc


def score(labels: np.ndarray, predictions: np.ndarray) -> TaskScore:
    """The figures of one task."""
    rate = float(labels.mean())
    if rate in (0.0, 1.0):  # always saying the only label there is loses nothing
        return TaskScore(float("nan"), float("nan"), rate, 0.0)
    trivial = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    if not np.isfinite(predictions).all():
        return TaskScore(float("nan"), float("nan"), rate, float(trivial))
    return TaskScore(auc(labels, predictions), log_loss(labels, predictions), rate, float(trivial))


def _health(
    worker: EmbeddingWorker,
    tasks: dict[str, TaskScore],
    predictions: np.ndarray,
) -> list[str]:
    found = []
    if not np.isfinite(predictions).all():
        found.append("predictions are not finite: lower the learning rates")
    for k, (name, figures) in enumerate(tasks.items()):
        if figures.label_rate in (0.0, 1.0):
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
