"""A model judged on the test part (or validation), per task, and why an AUC may be 0.5."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from itertools import islice

import numpy as np
import torch
from torch import nn

from persia_sim.base.vocabulary import ENDLESS
from runtime.checkpoint.lineage import Overlap, TrainedOn
from runtime.checkpoint.whole import Checkpoint
from runtime.config import EngineConfig
from runtime.data.batch import Batch
from runtime.data.files import files_of
from runtime.data.fingerprints import NO_ROWS, RowSet, Sketch
from runtime.data.ids import VALUE_MASK, mix64
from runtime.data.source import Part, Source, parsed_by, rebatch
from runtime.data.synthetic import SyntheticSource
from runtime.embedding.batch_rows import ABSENT, Handle
from runtime.embedding.worker import EmbeddingWorker
from runtime.models.networks import batch_warnings, in_parts
from runtime.rank.learner import Learner
from runtime.run.scores import TaskScore, regression_score, score

_EVALUATION_BATCH = 8192  # samples at a time: bounds memory, changes no figure
_BATCHES_IN_MEMORY = 128  # a million samples


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores and the predictions behind them."""

    tasks: dict[str, TaskScore]
    predictions: np.ndarray
    """float64 [n, T]: probabilities (of a regression, numbers), in the order of the test part."""
    labels: np.ndarray
    """float32 [n, T]; NaN where an optional label is absent"""
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
        self.source = source
        self.rows = rows
        self.part = part
        self._in_memory: list[Batch] | None = None
        self._sketch: RowSet | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._in_memory is not None:
            yield from self._in_memory
            return
        in_memory: list[Batch] | None = []
        notes = self._sketch is None and files_of(self.source) is not None
        sketch = Sketch() if notes else None
        for batch in self._stream():
            if in_memory is not None:
                in_memory.append(batch)
                in_memory = in_memory if len(in_memory) <= _BATCHES_IN_MEMORY else None
            if sketch is not None:
                sketch.add_samples(batch)
            yield batch
        self._in_memory = in_memory
        self._sketch = self._sketch if sketch is None else sketch.rows()

    def sketch(self) -> RowSet:
        """The rows by what they hold; reads them, unless they were read to their end before."""
        if self._sketch is None:
            for _ in self:
                pass
        assert self._sketch is not None
        return self._sketch

    def read_first(self) -> None:
        """Before anything is trained: read what is kept, or the first rows of a larger part, so
        that a fault in them costs no training. Raises ValueError."""
        for _ in islice(self, _BATCHES_IN_MEMORY + 1):
            pass

    def _stream(self) -> Iterator[Batch]:
        # In large batches, up to the rows that are asked for.
        left = self.rows if self.rows is not None else ENDLESS
        tasks = len(self.source.layout.tasks)
        is_empty = weighs_nothing = True
        for batch in rebatch(self.source.chunks(self.part), _EVALUATION_BATCH):
            first = batch.rows(0, min(left, batch.size))
            weights = first.labels[:, tasks:]
            weighs_nothing = weighs_nothing and weights.size > 0 and not weights.any()
            is_empty = False
            yield first
            left -= batch.size
            if left <= 0:
                break

        # A score of nothing is no score: say what is wrong with the part.
        if is_empty and self.part == "test":
            name = self.source.provenance().name
            raise ValueError(f"data set {name} gave no test sample; is its split right?")
        if is_empty:
            raise ValueError(
                "part validation needs a validation part, and this data set has none; give the"
                " share of the training samples that it takes: --data.validation-fraction 0.1"
            )
        if weighs_nothing:
            raise ValueError(
                f"every row of the {self.part} part that is evaluated has weight 0; correct the"
                " weights, or leave them out"
            )


@contextmanager
def threads_of(engine: EngineConfig) -> Iterator[None]:
    """Compute with so many threads of torch; afterwards the caller has again those that he had."""
    before = torch.get_num_threads()
    torch.set_num_threads(engine.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluate(
    learner: Learner, model: nn.Module, worker: EmbeddingWorker, held_out: Iterable[Batch]
) -> Evaluation:
    """Score ``model`` with the rows as they are; creates no row and draws no random number.

    Every module is evaluated in its eval mode, and afterwards is in the mode in which it was.
    """
    # Batch by batch, with the rows as they are now.
    layout = learner.layout
    scored = []
    counts = []
    first: Batch | None = None
    with evaluating(model), closing(worker.store.peek_all(held_out)) as handles:
        for handle in handles:
            batch = handle.batch
            first = batch if first is None else first
            counts.append(_ids_and_rows(handle, len(layout.fields)))
            predicted = learner.predict(model, batch, worker.pool(handle))
            scored.append((predicted, batch.labels, layout.groups(batch)))

    # All samples in one array a column; weights stand behind the labels.
    predictions, labels = (np.concatenate([batch[k] for batch in scored]) for k in (0, 1))
    grouped = [ids for _, _, ids in scored if ids is not None]
    groups = np.concatenate(grouped) if grouped else None

    # Who is not known is nobody else: a group of one sample each, of which no list can be judged.
    known_groups = None
    if groups is not None and layout.absent_group is not None:
        known_groups = groups & VALUE_MASK != np.uint64(layout.absent_group)
        groups = np.where(known_groups, groups, mix64(np.arange(len(groups), dtype=np.uint64)))
    labels, weights = np.split(labels, [len(layout.tasks)], axis=1)
    weight = weights[:, 0].astype(np.float64) if weights.shape[1] else None
    # A task is judged by the samples that have its label.
    tasks = {}
    for k, name in enumerate(layout.tasks):
        known = ~np.isnan(labels[:, k])
        of_task = labels[:, k][known]
        predicted = predictions[:, k][known]
        of_weight, of_groups, of_known = (
            None if a is None else a[known] for a in (weight, groups, known_groups)
        )
        if name in layout.regression:
            tasks[name] = regression_score(of_task, predicted, of_weight)
        else:
            tasks[name] = score(of_task, predicted, of_groups, of_weight, of_known)

    # What looks wrong, and how many ids had a row.
    health = _health(worker, tasks, predictions)
    if first is not None:
        health += by_its_batch(learner, model, worker, first, predictions)
    of_fields = zip(layout.fields, np.sum(counts, axis=0).tolist(), strict=True)
    have_row = {field.name: rows / ids for field, (ids, rows) in of_fields if ids}
    return Evaluation(tasks, predictions, labels, health, groups, weight, have_row)


def by_its_batch(
    learner: Learner,
    model: nn.Module,
    worker: EmbeddingWorker,
    first: Batch,
    predictions: np.ndarray | None = None,
) -> list[str]:
    """A warning where a network of somebody's own predicts a sample otherwise in another batch.

    ``predictions``: float [n, T], what is known already of the samples of ``first``.
    """
    name = learner.config.model.name
    parts = in_parts(name, first)
    if not parts:
        return []
    if predictions is None:
        parts = [first, *parts]
    # Who draws in its forward pass shall not draw otherwise later.
    with (
        evaluating(model),
        torch.random.fork_rng(),
        closing(worker.store.peek_all(parts)) as handles,
    ):
        apart = [learner.predict(model, t.batch, worker.pool(t)) for t in handles]
    if predictions is None:
        predictions, *apart = apart
    precision = learner.config.engine.precision
    return batch_warnings(name, precision, first.size, predictions, apart)


def overlap_with(trained: TrainedOn, held_out: HeldOut) -> Overlap:
    """What is known of the rows that judge; those that were not read yet are read."""
    judged = NO_ROWS if files_of(held_out.source) is None else held_out.sketch()
    return trained.overlap(held_out.source, held_out.part, held_out.rows, judged)


def refuse_trained_on(
    origin: Checkpoint,
    trained: TrainedOn,
    held_out: HeldOut,
    on_warning: Callable[[str], None],
) -> None:
    """Raise ValueError where a run that begins with a model would be judged by rows that
    ``trained`` it; ``on_warning`` is told where nobody knows them."""
    overlap = overlap_with(trained, held_out)
    for text in overlap.sentences():
        on_warning(text)
    if not overlap.trained:
        return
    before = [one.run for one in trained.lineage.origins[1:]]
    names = ", ".join([*before[:_MOST_NAMED], *["..."] * (len(before) > _MOST_NAMED)])
    others = f", or by what it was started from ({names})" if before else ""
    raise ValueError(
        f"{overlap.amount} samples of the {held_out.part} part were trained on by"
        f" {origin.folder}{others}: a sample that has trained must not judge, whatever its file is"
        " called; give a split that leaves those out, or another model"
    )


def _ids_and_rows(handle: Handle, fields: int) -> np.ndarray:
    """int64 [F, 2]: of each field, the ids of a batch, and how many of them have a row; zeros where
    the rows are in other processes, which do not say where they lie."""
    batch = handle.batch
    if handle.slots is None:
        return np.zeros((fields, 2), np.int64)
    has_row = np.zeros(len(batch.ids), bool)
    for name, plan in handle.plans.items():
        there = (handle.slots[name] != ABSENT)[plan.inverse]
        if count := len(has_row[plan.occurrences]):  # of a hash stack, all rows of an id
            has_row[plan.occurrences] = there.reshape(count, -1).all(1)
    field = batch.field_of_ids()
    counted = (np.bincount(of, minlength=fields) for of in (field, field[has_row]))
    return np.stack(list(counted), axis=1)


_MOST_NAMED = 8
_HALF = 0.5


def row_share_lines(shares: Mapping[str, float], part: str) -> list[str]:
    """Lines about the shares of ids that have a row, the smallest first, for a person."""
    if not shares:
        return []

    # The fields whose ids are best unknown come first: there the model guesses.
    rising = sorted(shares, key=shares.__getitem__)
    per_cent = {name: f"{100 * shares[name]:.3g} %" for name in rising}
    listed = ", ".join(f"{name} {per_cent[name]}" for name in rising[:_MOST_NAMED])
    if len(rising) > _MOST_NAMED:
        listed += f", {len(rising) - _MOST_NAMED} more at least {per_cent[rising[_MOST_NAMED]]}"
    lines = [f"ids of the {part} part with a row: {listed}"]

    # Mostly unknown ids are usually a mistake in the data.
    rare = [name for name in rising if shares[name] < _HALF]
    if rare:
        names = ", ".join(rare[:_MOST_NAMED]) + (", ..." if len(rare) > _MOST_NAMED else "")
        lines.append(
            f"warning: fewer than half of the ids of {names} have a row, the others are read as"
            " fresh ones: are they written as those of the training part?"
        )
    return lines


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and afterwards as they were. A user may keep a part of the model in
    eval mode (a frozen norm): each has its own flag."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def best_reachable_auc(source: Source, rows: int | None, part: Part = "test") -> float | None:
    """AUC of the true probabilities on the evaluated rows, where the truth is planted."""
    source = parsed_by(source)
    if not isinstance(source, SyntheticSource):
        return None
    drawn: list[tuple[np.ndarray, np.ndarray]] = []
    for batch, truth in source.chunks_with_truth(part):
        drawn.append((batch.labels[:, 0], truth))
        if rows is not None and sum(len(labels) for labels, _ in drawn) >= rows:
            break  # what is not evaluated need not be drawn
    of_labels, truths = (np.concatenate(arrays)[:rows] for arrays in zip(*drawn, strict=True))
    return score(of_labels, truths).auc


def _health(
    worker: EmbeddingWorker, tasks: dict[str, TaskScore], predictions: np.ndarray
) -> list[str]:
    # What makes each task's score meaningless, the likeliest cause first.
    result = []
    if not np.isfinite(predictions).all():
        result.append("predictions are not finite: lower the learning rates")
    for k, (name, figures) in enumerate(tasks.items()):
        if np.isnan(figures.label_rate):
            result.append(f"{name}: no sample that is evaluated has this label")
        elif figures.is_regression:
            if figures.mse > 1.05 * figures.trivial_mse:
                result.append(
                    f"{name}: MSE {figures.mse:.4g} is worse than that of the mean label"
                    f" ({figures.trivial_mse:.4g}): are labels far from 0 and 1? bring them there"
                )
        elif figures.label_rate in (0.0, 1.0):
            result.append(
                f"{name}: what is evaluated holds only the label {figures.label_rate:.0f}"
            )
        elif float(np.std(predictions[:, k])) < 1e-6:
            result.append(
                f"{name}: all predictions are equal; the model has learned nothing:"
                " is a learning rate 0, is a numeric column without `log` far from 1,"
                " or does the MLP end in dead ReLUs?"
            )
        elif abs(figures.auc - 0.5) < 0.01:
            result.append(
                f"{name}: AUC {figures.auc:.3f} is chance; are the labels joined to the right rows,"
                " and does what is evaluated share ids with the training part?"
            )
        elif figures.log_loss > 1.05 * figures.trivial_log_loss:
            why = "overfitted, or learning rates too high"
            if not 0.5 <= figures.calibration <= 2:  # far from the rate itself
                mean = figures.calibration * figures.label_rate
                why = f"predictions are {mean:.3g} on average, labels {figures.label_rate:.3g}:"
                why += " too few steps to learn the rate, or learning rates too high"
            result.append(
                f"{name}: log-loss {figures.log_loss:.4f} is worse than that of the label rate"
                f" ({figures.trivial_log_loss:.4f}): {why}"
            )

    # Whether the rows have learned at all: the dense part alone may look well.
    if not len(worker.store):
        result.append("no row was created: no training batch was looked up")
    elif not worker.has_live_rows():  # first: a product of zeros has no gradient either
        result.append("all rows are zero: with initial_scale 0 a product of rows never starts")
    elif not worker.row_gradient_seen:
        result.append("no gradient has reached the rows: does the model use the embeddings?")
    return result
