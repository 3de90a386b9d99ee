"""Intervals and DeLong against formulas and simulations that do not share their code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from experiments.statistics import (
    contrast,
    covariance_over_rows,
    placements,
    t_interval,
)  # fmt: skip


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_t_interval_is_scipys(confidence):
    values = [0.71, 0.69, 0.75, 0.72]
    low, high = stats.t.interval(confidence, df=3, loc=np.mean(values), scale=stats.sem(values))
    found = t_interval(values, confidence)
    assert found.mean - found.half_width == pytest.approx(low, rel=1e-12)
    assert found.mean + found.half_width == pytest.approx(high, rel=1e-12)
    assert found.n == 4


def test_one_value_has_no_interval_and_no_value_no_mean():
    assert math.isnan(t_interval([1.0]).half_width)
    assert t_interval([]).n == 0 and math.isnan(t_interval([]).mean)


def scores(seed: int, n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    labels = draw.random(n) < 0.4
    signal = labels + draw.normal(size=n)
    return labels, signal + draw.normal(size=n), (signal + draw.normal(size=n)).round(1)


@pytest.mark.parametrize(("positives", "negatives"), [(4, 37), (37, 4), (12, 12)])
def test_the_covariance_over_rows_is_delongs_over_all_pairs(positives, negatives):
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
    shares = np.stack([placements(labels, one) for one in scores])
    aucs = [sum(one) / positives for one in rows]
    assert shares[:, labels == 1].mean(axis=1) == pytest.approx(aucs)
    assert covariance_over_rows(labels, shares) == pytest.approx(np.array(total))


@pytest.mark.parametrize(
    "labels", [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]
)
def test_fewer_than_two_of_a_label_are_refused(labels):
    with pytest.raises(ValueError, match="two samples of each label"):
        placements(np.array(labels), np.arange(5.0))


def paired_gap(labels, first, second, clusters=None, weights=None):
    """AUC(second) - AUC(first)."""
    return contrast(labels, (first, second), clusters=clusters, weights=weights)


def test_the_mean_gap_and_its_error_of_seeds_are_those_of_the_single_gaps():
    """Perfect scores against scores whose only fault is another pair for every seed."""
    labels = np.array([1, 1, 1, 1, 0, 0, 0, 0])
    perfect = np.array([8.0, 7, 6, 5, 4, 3, 2, 1])
    seconds = [perfect[[0, 1, 2, 4, 3, 5, 6, 7]], perfect[[4, 1, 2, 3, 0, 5, 6, 7]], perfect]
    found = paired_gap(labels, [perfect] * 3, seconds)
    gaps = [roc_auc_score(labels, s) - 1 for s in seconds]
    assert found.mean == pytest.approx(np.mean(gaps))
    assert found.seeds_error == pytest.approx(np.std(gaps, ddof=1) / math.sqrt(3))


def test_equal_readers_leave_the_error_over_rows():
    labels, first, second = scores(4)
    found = paired_gap(labels, [first] * 4, [second] * 4)
    shares = placements(labels, second) - placements(labels, first)
    alone = math.sqrt(covariance_over_rows(labels, shares[None]).item())
    assert found.seeds_error == 0
    assert found.rows_error == pytest.approx(alone)
    assert found.half_width == pytest.approx(1.959964 * alone, rel=1e-4)


def test_the_variance_is_that_of_obuchowski_and_rockette():
    """MS(T), Cov2 and Cov3 from their own definitions, modality by modality and pair by pair."""
    labels, draw = scores(5)[0], np.random.default_rng(6)
    signal = labels + draw.normal(size=len(labels))
    sets = [[signal + draw.normal(size=len(labels)) for _ in range(3)] for _ in range(2)]
    found = paired_gap(labels, *sets)
    aucs = np.array([[roc_auc_score(labels, s) for s in own] for own in sets])

    def covariance(a, b):
        return covariance_over_rows(labels, np.stack([placements(labels, s) for s in (a, b)]))[0, 1]

    pairs = [(j, k) for j in range(3) for k in range(3) if j != k]
    cov2 = np.mean([covariance(own[j], own[k]) for own in sets for j, k in pairs])
    cov3 = np.mean([covariance(sets[0][j], sets[1][k]) for j, k in pairs])
    residual = aucs - aucs.mean(0) - aucs.mean(1, keepdims=True) + aucs.mean()
    ms = (residual**2).sum() / 2  # (I - 1)(J - 1)
    variance = 2 / 3 * (ms + 3 * max(cov2 - cov3, 0))
    freedom = (ms + 3 * max(cov2 - cov3, 0)) ** 2 / (ms**2 / 2)
    assert found.mean == pytest.approx(aucs[1].mean() - aucs[0].mean())
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(variance))


def test_a_contrast_of_four_has_the_error_of_its_rows():
    """Twice what one model gains over another, as two models that gain the same."""
    labels, first, second = scores(9)
    firsts, seconds = ([one + 0.1 * k * labels for k in range(3)] for one in (first, second))
    one = paired_gap(labels, firsts, seconds)
    both = contrast(labels, (firsts, firsts, seconds, seconds), (-1, -1, 1, 1))
    assert (both.mean, both.half_width, both.seeds_error, both.rows_error) == pytest.approx(
        (2 * one.mean, 2 * one.half_width, 2 * one.seeds_error, 2 * one.rows_error)
    )
    assert both.rows_error > 0
    assert contrast(labels, (firsts, firsts), (-1, 1)).half_width == 0


def test_the_interval_holds_over_new_seeds_and_new_rows():
    """Each seed has a bias of its own, all share the rows: 95 % of 300 intervals, within 3 SE."""
    draw, held = np.random.default_rng(7), 0
    for _ in range(300):
        labels = np.arange(240) < 90
        signal, shift = labels + draw.normal(size=240), draw.normal(size=240)
        firsts = [signal + 0.5 * draw.normal(size=240) for _ in range(4)]
        seconds = [signal + 0.6 * shift + 0.5 * draw.normal(size=240) for _ in range(4)]
        found = paired_gap(labels, firsts, seconds)
        spreads = [math.sqrt(2 * (1 + s)) for s in (0.25, 0.61)]
        true = stats.norm.cdf(1 / spreads[1]) - stats.norm.cdf(1 / spreads[0])
        held += abs(found.mean - true) <= found.half_width
    assert abs(held / 300 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 300)


def test_a_row_of_weight_three_counts_as_three_rows_of_one_user():
    """AUC, and its error where the three come together; ties among the scores."""
    labels, *drawn = scores(8, n=300)
    first, second = ([np.round(s + 0.1 * k, 1) for k in (0, drawn[0])] for s in drawn)
    weights, rows = np.arange(300) % 3 + 1, np.arange(300)
    again = np.repeat(rows, weights)
    found = paired_gap(labels, first, second, rows, weights=weights.astype(float))
    repeated = [[s[again] for s in own] for own in (first, second)]
    wanted = paired_gap(labels[again], *repeated, again)
    gaps = [roc_auc_score(labels, b, sample_weight=weights)
            - roc_auc_score(labels, a, sample_weight=weights)
            for a, b in zip(first, second, strict=True)]  # fmt: skip
    assert found.mean == pytest.approx(np.mean(gaps)) == pytest.approx(wanted.mean)
    assert found.half_width == pytest.approx(wanted.half_width) and found.rows_error > 0


def test_rows_of_one_user_count_as_one():
    """Every row twice: as clusters the error stays, as single rows it shrinks by root two."""
    labels, first, second = scores(8)
    twice = [np.repeat(x, 2) for x in (labels, first, second)]
    users = np.repeat(np.arange(len(labels)), 2)

    def error(labels, first, second, clusters=None):
        return paired_gap(labels, [first] * 2, [second] * 2, clusters).rows_error

    alone = error(labels, first, second, np.arange(len(labels)))
    assert alone == pytest.approx(error(labels, first, second), rel=0.01)
    assert error(*twice, users) == pytest.approx(alone, rel=1e-9)
    assert error(*twice) == pytest.approx(alone / math.sqrt(2), rel=0.01)
