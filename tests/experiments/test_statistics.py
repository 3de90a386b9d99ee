"""Intervals and DeLong against formulas and simulations that do not share their code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from experiments.statistics import delong, t_interval


def test_t_interval_of_a_known_sample():
    """t quantile 2.776 for 4 degrees of freedom, from any printed table."""
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    assert interval.half_width == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)


def test_one_value_has_no_interval():
    assert math.isnan(t_interval([1.0]).half_width)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.floats(-1e3, 1e3))
def test_shifting_all_values_shifts_only_the_mean(values, shift):
    one, two = t_interval(values), t_interval([v + shift for v in values])
    assert two.mean == pytest.approx(one.mean + shift, abs=1e-6)
    assert two.half_width == pytest.approx(one.half_width, abs=1e-6)


def scores(seed: int, n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    labels = draw.random(n) < 0.4
    signal = labels + draw.normal(size=n)
    return labels, signal + draw.normal(size=n), (signal + draw.normal(size=n)).round(1)


def test_delong_gives_the_exact_auc_with_ties():
    labels, first, second = scores(0)
    found = delong(labels, first, second)
    assert found.auc[0] == pytest.approx(roc_auc_score(labels, first), abs=1e-12)
    assert found.auc[1] == pytest.approx(roc_auc_score(labels, second), abs=1e-12)


def test_delong_standard_errors_agree_with_the_bootstrap():
    labels, first, second = scores(1, n=800)
    found, draw, differences = delong(labels, first, second), np.random.default_rng(2), []
    for _ in range(800):
        rows = draw.integers(0, len(labels), len(labels))
        differences.append(
            roc_auc_score(labels[rows], first[rows]) - roc_auc_score(labels[rows], second[rows])
        )
    # 800 draws know a standard deviation to 1/sqrt(1600) = 2.5 %; allow four of those.
    assert found.difference_standard_error == pytest.approx(np.std(differences), rel=0.10)


def test_a_model_does_not_differ_from_itself():
    labels, first, _ = scores(3)
    assert delong(labels, first, first).p_value == 1.0


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="two samples of each label"):
        delong(np.ones(5), np.arange(5.0), np.arange(5.0))
