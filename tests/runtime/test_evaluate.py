"""AUC and log-loss, and the sentences that say why an AUC is 0.5."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.config import DataConfig, TrainConfig
from runtime.run.evaluate import HeldOut, best_reachable_auc, evaluate, score
from runtime.run.session import train
from tests.runtime.worlds import ArraySource, config, run


def test_auc_is_the_share_of_pairs_in_the_right_order():
    labels, predictions = np.array([0, 0, 1, 1, 0]), np.array([0.1, 0.4, 0.4, 0.9, 0.3])
    pairs = [(p > n) + 0.5 * (p == n) for p in predictions[labels == 1]
             for n in predictions[labels == 0]]  # fmt: skip
    found = score(labels, predictions)
    assert found.auc == pytest.approx(np.mean(pairs))
    assert found.label_rate == 0.4
    assert found.trivial_log_loss == pytest.approx(-(0.4 * math.log(0.4) + 0.6 * math.log(0.6)))


def test_one_class_gives_no_auc_and_a_warning():
    source = ArraySource(100)
    source._all.labels[:, 1] = 1
    world = run(config(), source)
    found = evaluate(world.learner, world.learner.model, world.store, HeldOut(source))
    assert math.isnan(found.tasks["buy"].auc)
    assert any("buy: the test part holds only the label 1" in w for w in found.warnings)


class Constant(torch.nn.Module):
    """Learns nothing."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(shape.tasks))

    def forward(self, dense, embeddings):
        return self.bias.expand(len(dense), -1) + 0 * embeddings.pooled.sum()


def test_health_checks_say_why_an_auc_is_a_half():
    from runtime.config import ModelConfig

    source = ArraySource(200)
    constant = config(model=ModelConfig(name="tests.runtime.test_evaluate:Constant"))
    world = run(constant, source)
    held_out = HeldOut(source)
    found = evaluate(world.learner, world.learner.model, world.store, held_out)
    assert any("all predictions are equal" in w for w in found.warnings)
    assert any("no gradient has reached the rows" in w for w in found.warnings)
    flat = config()
    flat = replace(flat, rows=replace(flat.rows, initial_scale=0.0), steps=1)
    world = run(flat, source, order=[])
    found = evaluate(world.learner, world.learner.model, world.store, held_out)
    assert any("no row was created" in w for w in found.warnings)


def test_test_rows_limits_the_test_part():
    assert sum(b.size for b in HeldOut(ArraySource(100), 30)) == 30


def test_a_curve_evaluates_snapshots_and_the_last_figure_is_drained():
    from persia_sim.words.vocabulary import Mode

    synthetic = TrainConfig(
        data=DataConfig(name="synthetic"),
        steps=30,
        test_rows=500,
        mode=Mode.HYBRID,
        tau=8,
        evaluate_every_steps=10,
    )
    outcome = train(synthetic)
    assert [(p.updates, p.samples) for p in outcome.curve] == [(10, 1280), (20, 2560), (30, 3840)]
    # The last snapshot has all dense updates, but not the last 8 steps' rows.
    assert outcome.curve[-1].evaluation.tasks["click"] != outcome.final.tasks["click"]
    again = train(replace(synthetic, evaluate_every_steps=None))
    assert again.final.tasks == outcome.final.tasks, "evaluating changed the training"


def test_the_best_reachable_auc_is_above_every_trained_one():
    from runtime.data.open import open_source

    source = open_source("synthetic")
    best = best_reachable_auc(source, 20_000)
    assert 0.75 < best < 0.85
    assert best_reachable_auc(ArraySource(10), 5) is None
