"""AUC and log-loss, and the sentences that say why an AUC is 0.5."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.batch import Batch
from runtime.embedding.batch_rows import Handle
from runtime.executors.given_order import OrderedRun, constant_lag_order
from runtime.rank.components import assemble
from runtime.run import evaluate as evaluate_module
from runtime.run.evaluate import HeldOut, best_reachable_auc, evaluate, row_share_lines
from runtime.run.session import train
from tests.runtime.worlds import ArraySource, changed, config, run


def auc_by_ranks(labels, predictions) -> float:
    """Mann and Whitney's U over the number of pairs: another library, another road."""
    from scipy.stats import mannwhitneyu

    positive, negative = predictions[labels == 1], predictions[labels == 0]
    return float(mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative)))


def log_loss_by_torch(labels, predictions) -> float:
    pair = (torch.from_numpy(np.asarray(a, np.float64)) for a in (predictions, labels))
    return float(torch.nn.functional.binary_cross_entropy(*pair))


class Constant(torch.nn.Module):
    """Learns nothing."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(shape.tasks))

    def forward(self, dense, embeddings):
        return self.bias.expand(len(dense), -1) + 0 * embeddings.pooled.sum()


def test_health_checks_say_why_an_auc_is_a_half():
    source = ArraySource(200)
    constant = config(model=ModelConfig(name="tests.runtime.test_evaluate:Constant"))
    world = run(constant, source)
    held_out = HeldOut(source)
    found = evaluate(world.learner, world.learner.model, world.worker, held_out)
    assert any("a numeric column without `log` far from 1" in w for w in found.warnings)
    assert any("no gradient has reached the rows" in w for w in found.warnings)
    flat = config()
    flat = replace(flat, rows=replace(flat.rows, initial_scale=0.0), steps=1)
    world = run(flat, source, order=[])
    found = evaluate(world.learner, world.learner.model, world.worker, held_out)
    assert any("no row was created" in w for w in found.warnings)


def test_a_curve_evaluates_snapshots_and_the_last_figure_is_drained():
    synthetic = TrainConfig(
        data=DataConfig(name="synthetic"),
        steps=30,
        sync=SyncConfig(mode=Mode.HYBRID, tau=8),
        evaluation=EvaluationConfig(test_rows=500, evaluate_every_steps=10),
    )
    outcome = train(synthetic)
    assert [(p.updates, p.samples) for p in outcome.curve] == [(10, 1280), (20, 2560), (30, 3840)]
    # By repr: a score may hold NaN, which in a dataclass equals itself only before Python 3.13.
    # The last snapshot has all dense updates, but not the last 8 steps' rows.
    assert repr(outcome.curve[-1].evaluation.tasks["click"]) != repr(outcome.final.tasks["click"])
    again = train(changed(synthetic, evaluate_every_steps=None))
    assert repr(again.final.tasks) == repr(outcome.final.tasks), "evaluating changed the training"


class Dropped(torch.nn.Module):
    """Dropout before the last layer, and a part that its user keeps in eval mode."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.first = torch.nn.Linear(shape.width, 12)
        self.drop = torch.nn.Dropout(0.5)
        self.kept = torch.nn.Dropout(0.5)
        self.last = torch.nn.Linear(12, shape.tasks)
        self.kept.eval()

    def forward(self, dense, embeddings):
        hidden = self.first(torch.cat([embeddings.pooled, dense], 1))
        return self.last(self.kept(self.drop(hidden)))


DROPPED = ModelConfig(name="tests.runtime.test_evaluate:Dropped", lr=0.01)


def by_hand(world, batch) -> np.ndarray:
    """Pool the rows and go through the layers with numpy, without dropout."""
    handle = world.store.peek(batch)
    rows = handle.values["rows"][handle.plans["rows"].inverse]
    bags = np.repeat(np.arange(3 * batch.size), np.diff(batch.offsets))
    pooled = np.zeros((3 * batch.size, rows.shape[1]))
    np.add.at(pooled, bags, rows)
    pooled /= np.maximum(np.diff(batch.offsets), 1)[:, None]
    inputs = np.hstack([pooled.reshape(batch.size, -1), batch.dense])
    for layer in (world.model.first, world.model.last):
        weight, bias = (p.detach().double().numpy() for p in layer.parameters())
        inputs = inputs @ weight.T + bias
    return 1 / (1 + np.exp(-inputs))


def test_every_task_is_scored_with_its_own_predictions_and_without_dropout():
    source = ArraySource(300)
    world = run(config(model=DROPPED), source)
    found = evaluate(world.learner, world.model, world.worker, HeldOut(source))
    expected = by_hand(world, source._all)
    assert np.abs(found.predictions - expected).max() < 1e-5
    assert np.array_equal(found.labels, source._all.labels)
    for k, name in enumerate(("click", "buy")):
        labels = source._all.labels[:, k]
        assert found.tasks[name].auc == pytest.approx(auc_by_ranks(labels, expected[:, k]),
                                                      abs=1e-4)  # fmt: skip
        assert found.tasks[name].log_loss == pytest.approx(
            log_loss_by_torch(labels, expected[:, k]), abs=1e-5
        )
        assert found.tasks[name].label_rate == pytest.approx(labels.mean())
    assert found.tasks["click"] != found.tasks["buy"]


class Product(torch.nn.Module):
    """The product of two fields: with zeros for rows it has no gradient."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.width, self.bias = shape.pooled_dims[0], torch.nn.Parameter(torch.zeros(2))

    def forward(self, dense, embeddings):
        first, second = embeddings.pooled[:, : self.width], embeddings.pooled[:, self.width :]
        together = (first * second[:, : self.width]).sum(1, keepdim=True)
        return together + self.bias + dense  # dense, so that predictions differ


def test_rows_that_never_leave_zero_are_told_and_the_whole_store_is_copied_once(monkeypatch):
    product = config(model=ModelConfig(name="tests.runtime.test_evaluate:Product"))
    product = replace(product, rows=replace(product.rows, initial_scale=0.0))
    source = ArraySource(200)
    world = run(product, source)
    copies, export = [], world.store.export
    monkeypatch.setattr(world.store, "export", lambda: copies.append(1) or export())
    for _ in range(3):
        found = evaluate(world.learner, world.model, world.worker, HeldOut(source))
        assert any("all rows are zero" in w for w in found.warnings)
    assert copies == [1]


@pytest.mark.parametrize("kept", [128, 1], ids=["kept", "streamed anew"])
@pytest.mark.parametrize("rows", [1, 16, 30, 77, 100, None])
def test_the_first_rows_of_the_test_part_come_in_order_every_time(monkeypatch, kept, rows):
    monkeypatch.setattr(evaluate_module, "_EVALUATION_BATCH", 16)
    monkeypatch.setattr(evaluate_module, "_BATCHES_IN_MEMORY", kept)
    source = ArraySource(100)
    expected = source._all.dense[:rows]
    held_out = HeldOut(source, rows)
    for _ in range(2):
        batches = list(held_out)
        assert np.array_equal(np.concatenate([b.dense for b in batches]), expected)
        assert max(b.size for b in batches) <= 16


def test_a_snapshot_has_the_rows_that_were_applied_and_the_weights_of_the_update():
    """The curve's point after 4 updates of lag 2: pushes 0 and 1 are in, 2 and 3 are not."""
    source = ArraySource(300)
    chosen = config(mode=Mode.HYBRID, tau=2, ranks=2, evaluate_every_steps=4)
    curve = train(chosen, source).curve
    components = assemble(chosen, source)
    components.meter.start()
    events = list(constant_lag_order(chosen, components.feed))
    update = next(k for k, e in enumerate(events) if e.kind == Kind.DENSE_UPDATE and e.step == 3)
    half = assemble(chosen, source)
    half.meter.start()
    with pytest.raises(ValueError, match="cut short"):
        OrderedRun(half).run(events[: update + 1])
    found = evaluate(half.learner, half.learner.model, half.worker, HeldOut(source, 64))
    assert curve[0].updates == 4
    assert curve[0].evaluation.predictions.tobytes() == found.predictions.tobytes()
    final = train(changed(chosen, evaluate_every_steps=None), source).final
    assert curve[-1].evaluation.predictions.tobytes() != final.predictions.tobytes()


def test_a_snapshot_in_sync_has_the_weights_of_its_update_and_the_rows_of_the_one_before():
    """It is taken between the dense update of a step and the push of its rows."""
    source = ArraySource(300)
    curve = train(config(ranks=2, evaluate_every_steps=5), source).curve
    assert [(p.updates, p.samples) for p in curve] == [(5, 120), (10, 240)]
    for point in curve:
        ended = run(config(ranks=2, steps=point.updates), source)
        before = run(config(ranks=2, steps=point.updates - 1), source)
        found = evaluate(ended.learner, ended.model, before.worker, HeldOut(source, 64))
        assert found.predictions.tobytes() == point.evaluation.predictions.tobytes()


def test_the_best_reachable_auc_is_that_of_the_planted_probabilities():
    from runtime.data.open import open_source

    source = open_source("synthetic")
    truth, labels = [], []
    for batch, probability in source.chunks_with_truth("test"):
        truth.append(probability)
        labels.append(batch.labels[:, 0])
        if sum(map(len, truth)) >= 3000:
            break
    expected = auc_by_ranks(np.concatenate(labels)[:3000], np.concatenate(truth)[:3000])
    assert best_reachable_auc(source, 3000) == pytest.approx(expected, abs=1e-12)
    assert best_reachable_auc(SimpleNamespace(parsed=source), 3000) is not None, "by loaders, too"
    assert best_reachable_auc(ArraySource(10), 5) is None


class Oracle:
    """A learner that predicts what it is told to, of one sample after another, over and over."""

    def __init__(self, predictions):
        self.layout, self._predictions = ArraySource(4).layout, predictions
        self.config = config()
        self._next = 0

    def predict(self, model, batch, vectors):
        mine = np.arange(self._next, self._next + batch.size) % len(self._predictions)
        self._next += batch.size
        return self._predictions[mine]


class Healthy:
    """A worker whose rows are alive and have had gradients."""

    row_gradient_seen = True

    def __init__(self):
        self.store = self

    def __len__(self):
        return 1

    def peek_all(self, batches):
        for batch in batches:
            yield Handle(0, 0, batch, None, None)  # as from server processes

    def pool(self, handle):
        return None

    def has_live_rows(self):
        return True


HALF = np.tile([0.0, 1.0], 200)
CLEAR = np.where(HALF == 1, 0.9, 0.1)
CHANCE = np.tile([0.4, 0.4, 0.6, 0.6], 100)
"""As often high for a click as for none."""
SURE = np.where(np.arange(400) % 5 == 0, 1 - HALF, HALF).clip(1e-6, 1 - 1e-6)
"""Right four times of five, and certain each time."""


@pytest.mark.parametrize(
    ("predictions", "labels", "warnings"),
    [
        (CLEAR, HALF, []),
        (CHANCE, HALF, ["buy: AUC 0.500 is chance"]),
        (SURE, HALF, ["buy: log-loss 2.7631 is worse than that of the label rate (0.6931)"]),
        (CLEAR / 2 + 0.01, HALF * (np.arange(400) % 5 == 0),
         ["buy: log-loss 0.3551 is worse than that of the label rate (0.3251): predictions are 0.26"
          " on average, labels 0.1: too few steps to learn the rate, or learning rates too high"]),
        (np.full(400, 0.5), HALF, ["buy: all predictions are equal"]),
        (CLEAR, np.zeros(400), ["buy: what is evaluated holds only the label 0"]),
        (np.where(HALF == 1, np.nan, 0.1), HALF, ["predictions are not finite"]),
    ],
    ids=["healthy", "chance", "overfitted", "another rate", "constant", "one class", "not finite"],
)  # fmt: skip
def test_each_reason_for_a_bad_figure_is_told_for_its_task(predictions, labels, warnings):
    both = np.column_stack([CLEAR, predictions])
    dense = np.zeros((400, 2), np.float32)
    batch = Batch(np.zeros(1200, np.uint64), np.arange(1201), dense,
                  np.column_stack([HALF, labels]).astype(np.float32))  # fmt: skip
    found = evaluate(Oracle(both), torch.nn.Linear(1, 1), Healthy(), [batch]).warnings
    assert len(found) >= len(warnings)
    for sentence, beginning in zip(found, warnings, strict=False):
        assert sentence.startswith(beginning)
    assert not [w for w in found if w.startswith("click")]
    if not warnings:
        assert found == []


def test_ids_of_the_evaluated_part_with_a_row_are_counted_by_field():
    """By hand: the ids that training has seen against those that are evaluated, bag by bag."""
    seen, other = ArraySource(96, ids_per_field=40), ArraySource(200, seed=1, ids_per_field=80)
    world = run(config(steps=4), seen)
    known = set(np.concatenate([b.ids for b in seen.chunks("train")]).tolist())
    counts = np.zeros((3, 2), int)
    for batch in other.chunks("test"):
        for bag in range(3 * batch.size):
            ids = batch.ids[batch.offsets[bag] : batch.offsets[bag + 1]].tolist()
            counts[bag % 3] += sum(i in known for i in ids), len(ids)
    found = evaluate(world.learner, world.model, world.worker, HeldOut(other)).ids_with_row
    assert found == {n: a / b for n, (a, b) in zip(("user", "item", "tags"), counts, strict=True)}
    assert min(found.values()) > 0.2 and max(found.values()) < 0.8
    everything = evaluate(world.learner, world.model, world.worker, HeldOut(seen)).ids_with_row
    assert everything == dict.fromkeys(("user", "item", "tags"), 1.0)


def test_few_ids_with_a_row_are_warned_of():
    lines = row_share_lines({"user": 0.001, "item": 0.97, "tags": 0.5}, "test")
    assert lines[0] == "ids of the test part with a row: user 0.1 %, tags 50 %, item 97 %"
    assert len(lines) == 2 and "fewer than half of the ids of user have a row" in lines[1]
    assert len(row_share_lines({"user": 0.5}, "test")) == 1
    assert row_share_lines({}, "test") == []
    many = row_share_lines({f"f{n}": 0.6 + n / 100 for n in range(12)}, "validation")[0]
    assert many.startswith("ids of the validation part") and many.endswith("4 more at least 68 %")
