"""Intervals and DeLong against formulas and simulations that do not share their code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from experiments.statistics import delong, t_interval


def test_t_interval_of_a_known_sample():
    """t quantile 2.776 for 4 degrees of freedom, from any printed table."""
    interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    assert interval.half_width == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)


def test_one_value_has_no_interval():
    assert math.isnan(t_interval([1.0]).half_width)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_t_interval_is_scipys(confidence):
    values = [0.71, 0.69, 0.75, 0.72]
    low, high = stats.t.interval(confidence, df=3, loc=np.mean(values), scale=stats.sem(values))
    found = t_interval(values, confidence)
    assert found.mean - found.half_width == pytest.approx(low, rel=1e-12)
    assert found.mean + found.half_width == pytest.approx(high, rel=1e-12)
    assert found.n == 4


def test_no_value_has_no_mean():
    assert t_interval([]).n == 0 and math.isnan(t_interval([]).mean)


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


def test_delong_of_two_positives_and_three_negatives_by_hand():
    """psi(3, .) = 1 1 1 and psi(1, .) = 1 0 0, so AUC 4/6; the rows' means 1 and 1/3 vary by 2/9,
    the columns' means 1, 1/2 and 1/2 by 1/12; (2/9)/2 + (1/12)/3 = 5/36."""
    labels = np.array([1, 0, 1, 0, 0])
    first = np.array([3.0, 0.0, 1.0, 2.0, 2.0])
    found = delong(labels, first, -first)
    assert found.auc == pytest.approx((4 / 6, 2 / 6))
    assert found.standard_error[0] == pytest.approx(math.sqrt(5 / 36))
    assert found.standard_error[1] == pytest.approx(math.sqrt(5 / 36))
    assert found.difference_standard_error == pytest.approx(2 * math.sqrt(5 / 36)), "fully opposed"
    z = (4 / 6 - 2 / 6) / (2 * math.sqrt(5 / 36))
    assert found.p_value == pytest.approx(2 * stats.norm.sf(z))


@pytest.mark.parametrize(("positives", "negatives"), [(4, 37), (37, 4), (12, 12)])
def test_delong_is_its_definition_over_all_pairs(positives, negatives):
    """DeLong's structural components, pair by pair (Biometrics 44, equations 4 to 6)."""
    draw = np.random.default_rng(positives)
    labels = np.repeat([1, 0], [positives, negatives])
    scores = [(labels + draw.normal(size=len(labels))).round(1) for _ in range(2)]
    psi = [
        [[(x > y) + 0.5 * (x == y) for y in s[labels == 0]] for x in s[labels == 1]] for s in scores
    ]
    rows = [[sum(row) / negatives for row in one] for one in psi]
    columns = [[sum(c) / positives for c in zip(*one, strict=True)] for one in psi]

    def covariance(a, b):
        mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
        products = [(x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)]
        return sum(products) / (len(a) - 1)

    total = [
        [
            covariance(rows[i], rows[j]) / positives
            + covariance(columns[i], columns[j]) / negatives
            for j in range(2)
        ]
        for i in range(2)
    ]
    found = delong(labels, *scores)
    for number in range(2):
        assert found.auc[number] == pytest.approx(sum(rows[number]) / positives)
        assert found.standard_error[number] == pytest.approx(math.sqrt(total[number][number]))
    difference = math.sqrt(total[0][0] + total[1][1] - 2 * total[0][1])
    assert found.difference_standard_error == pytest.approx(difference)
    z = abs(found.auc[0] - found.auc[1]) / difference
    assert found.p_value == pytest.approx(2 * stats.norm.sf(z))


def test_delong_standard_errors_agree_with_the_bootstrap():
    labels, first, second = scores(1, n=800)
    found, draw = delong(labels, first, second), np.random.default_rng(2)
    rows = draw.integers(0, len(labels), (800, len(labels)))
    ones = labels[rows].sum(axis=1)

    def aucs(scores):
        """Of every draw, by the sum of the ranks of its ones."""
        ranks = (stats.rankdata(scores[rows], axis=1) * labels[rows]).sum(axis=1)
        return (ranks - ones * (ones + 1) / 2) / (ones * (len(labels) - ones))

    assert aucs(first)[0] == pytest.approx(roc_auc_score(labels[rows[0]], first[rows[0]]))
    differences = aucs(first) - aucs(second)
    # 800 draws know a standard deviation to 1/sqrt(1600) = 2.5 %; allow four of those.
    assert found.difference_standard_error == pytest.approx(np.std(differences), rel=0.10)


def test_a_model_does_not_differ_from_itself():
    labels, first, _ = scores(3)
    assert delong(labels, first, first).p_value == 1.0


@pytest.mark.parametrize(
    "labels", [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
)
def test_fewer_than_two_of_a_label_are_refused(labels):
    with pytest.raises(ValueError, match="two samples of each label"):
        delong(np.array(labels), np.arange(5.0), np.arange(5.0))
