"""Scores against scikit-learn, against counting pairs, and against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from runtime.run.scores import (
    at_top,
    auc,
    group_auc,
    log_loss,
    regression_score,
    score,
)


@pytest.mark.parametrize("distinct", [5, 10**9])
def test_both_figures_are_those_of_scikit_learn(distinct):
    draw = np.random.default_rng(3)
    labels = (draw.random(20_000) < 0.3).astype(np.float32)
    predictions = np.clip((draw.integers(0, distinct, 20_000) + labels) / distinct, 0, 1)
    assert auc(labels, predictions) == pytest.approx(
        metrics.roc_auc_score(labels, predictions), abs=1e-12
    )
    clipped = np.clip(predictions, 1e-15, 1 - 1e-15)
    assert log_loss(labels, predictions) == pytest.approx(metrics.log_loss(labels, clipped))
    assert 0.4 < auc(labels, predictions) < 0.9


def test_weighted_figures_are_those_of_scikit_learn():
    draw = np.random.default_rng(4)
    labels = (draw.random(2_000) < 0.3).astype(np.float32)
    guesses, weights = draw.integers(1, 20, 2_000) / 20, draw.integers(0, 4, 2_000).astype(float)
    found = score(labels, guesses, weights=weights)
    whole = {"sample_weight": weights}
    assert found.auc == pytest.approx(metrics.roc_auc_score(labels, guesses, **whole), abs=1e-12)
    assert found.log_loss == pytest.approx(metrics.log_loss(labels, guesses, **whole))
    assert found.label_rate == pytest.approx(np.repeat(labels, weights.astype(int)).mean())
    numbers = draw.normal(size=2_000)
    errors = regression_score(numbers.astype(np.float32), guesses, weights)
    told = numbers.astype(np.float32)
    assert errors.mse == pytest.approx(metrics.mean_squared_error(told, guesses, **whole))
    assert errors.mae == pytest.approx(metrics.mean_absolute_error(told, guesses, **whole))
    assert errors.rmse == pytest.approx(errors.mse**0.5)
    assert errors.figures()["auc"] is not None and np.isnan(errors.auc)


@pytest.mark.parametrize("top", [1, 3, 50])
def test_ndcg_is_that_of_scikit_learn_and_recall_counts_hits(top):
    draw = np.random.default_rng(5)
    groups = draw.integers(0, 40, 400)
    labels = (draw.random(400) < 0.2).astype(np.float32)
    coarse = draw.integers(0, 6, 400) / 6  # many are equal
    fine = draw.random(400)
    labels[groups == 7] = 1.0  # any order of these is the best: they tell nothing
    own_labels = (labels[groups == g] for g in range(40))
    both = [0 < own.sum() < len(own) for own in own_labels]
    clicked = [np.flatnonzero(groups == g) for g in range(40) if both[g]]
    for guesses in (coarse, fine):
        expected = [metrics.ndcg_score([labels[own]], [guesses[own]], k=top) for own in clicked]
        assert at_top(labels, guesses, groups, top)[1] == pytest.approx(np.mean(expected))
    hits = [labels[own][np.argsort(-fine[own])[:top]].sum() / labels[own].sum() for own in clicked]
    assert at_top(labels, fine, groups, top)[0] == pytest.approx(np.mean(hits))


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=60
    )
)
def test_gauc_is_the_mean_of_the_groups_own_aucs(samples):
    labels = np.array([one for one, _, _ in samples], np.float32)
    predictions = np.array([p for _, p, _ in samples]) / 6
    groups = np.array([g for _, _, g in samples], np.uint64)
    own = {g: (labels[groups == g], predictions[groups == g]) for g in set(groups.tolist())}
    both = {g: pair for g, pair in own.items() if 0 < pair[0].mean() < 1}
    gauc, *counts = group_auc(labels, predictions, groups)
    assert counts == [len(both), len(own) - len(both)]
    if not both:
        assert math.isnan(gauc)
    else:
        sizes = [len(pair[0]) for pair in both.values()]
        want = np.average([metrics.roc_auc_score(*pair) for pair in both.values()], weights=sizes)
        assert gauc == pytest.approx(want, abs=1e-12)


def test_normalised_entropy_and_calibration_by_hand():
    labels, predictions = np.array([1, 0, 0, 0]), np.array([0.5, 0.5, 0.25, 0.25])
    loss = -(2 * math.log(0.5) + 2 * math.log(0.75)) / 4
    of_the_rate = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    found = score(labels, predictions)
    assert found.normalized_entropy == pytest.approx(loss / of_the_rate)
    assert found.calibration == pytest.approx(0.375 / 0.25)
    assert math.isnan(found.gauc), "nobody said whose samples they are"
    assert (found.gauc_groups, found.gauc_groups_left_out) == (0, 0)


def test_one_class_or_broken_predictions_have_no_score_beside_that_of_the_label_rate():
    for labels, first in ((np.ones(3), 0.1), (np.array([0, 1, 1]), np.nan)):
        found = score(labels, np.array([first, 0.2, 0.3]), np.array([1, 1, 1]))
        figures = found.auc, found.normalized_entropy, found.calibration, found.gauc
        assert all(map(math.isnan, figures))
    assert math.isnan(found.log_loss)
    assert found.trivial_log_loss == pytest.approx(-(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3)
