"""AUC and log-loss against scikit-learn and against counting pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from runtime.run.scores import auc, log_loss


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=2, max_size=40))
def test_auc_is_the_share_of_pairs_in_the_right_order(samples):
    labels = np.array([one for one, _ in samples], np.float32)
    predictions = np.array([p for _, p in samples]) / 7
    if labels.min() == labels.max():
        return
    won = [
        1.0 if p > q else 0.5 if p == q else 0.0
        for p in predictions[labels == 1]
        for q in predictions[labels == 0]
    ]
    assert auc(labels, predictions) == pytest.approx(np.mean(won), abs=1e-15)


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
