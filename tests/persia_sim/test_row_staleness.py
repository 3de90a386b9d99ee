"""Staleness by row against the batches that really share rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persia_sim.insight.report import RowStaleness, row_staleness
from persia_sim.model.popularity import zipf_bins
from persia_sim.presets.catalogue import workloads


def test_nothing_missed_is_fresh_everywhere() -> None:
    found = row_staleness(np.zeros(5, np.int64), workloads()["criteo-ad"])
    assert found == RowStaleness(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_the_mean_is_the_share_of_rows_that_another_batch_meets() -> None:
    work = workloads()["criteo-syn5"]
    found = row_staleness(np.array([4, 6]), work)
    assert found.mean == pytest.approx(5 * work.pending_fraction(1.0), rel=1e-6)


def test_distribution_agrees_with_batches_drawn_one_by_one() -> None:
    work = replace(workloads()["taobao-ad"], fields=1, rows=2000.0, batch_per_rank=64, zipf=1.1)
    lags = np.array([0, 3, 3, 12])
    probability, number = zipf_bins(work.rows, work.zipf)
    ranks = np.repeat(probability / 1.0, number.round().astype(int))
    rng = np.random.default_rng(1)
    missed: list[int] = []
    for lag in np.tile(lags, 400):
        drawn = rng.choice(len(ranks), (int(lag) + 1, work.batch_per_rank), p=ranks / ranks.sum())
        touched = sum(np.isin(np.unique(drawn[0]), other).astype(int) for other in drawn[1:])
        missed += np.broadcast_to(touched, np.unique(drawn[0]).shape).tolist()
    found = row_staleness(lags, work)
    assert found.mean == pytest.approx(np.mean(missed), rel=0.02)
    assert found.fresh == pytest.approx(np.mean(np.array(missed) == 0), abs=0.01)
    for level, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(np.percentile(missed, level), abs=1)


def test_popular_rows_are_later_than_rare_ones() -> None:
    found = row_staleness(np.full(10, 20), workloads()["criteo-syn1"])
    assert found.p50 <= found.p90 <= found.p99 <= found.hottest + 1 <= 21
    assert 0 < found.fresh < 1


def test_two_rows_a_field_by_hand() -> None:
    """Two draws of a fair coin: a row stands in another batch with chance 1 - 1/4; of three missed
    pushes 2.25 touched it, Binomial(3, 3/4)."""
    work = replace(
        workloads()["taobao-ad"], fields=3, rows=6.0, batch_per_rank=1, ids_per_field=2.0, zipf=0.0
    )
    found = row_staleness(np.array([3]), work)
    assert (found.mean, found.hottest) == pytest.approx((2.25, 2.25))
    assert found.fresh == pytest.approx(1 / 64, abs=0.001)
    assert (found.p50, found.p90, found.p99) == (2, 3, 3)


def test_popular_rows_weigh_by_how_often_batches_meet_them() -> None:
    """Chances 2/3 and 1/3: met by 8/9 and 5/9 of batches, so weights 8/13 and 5/13."""
    work = replace(workloads()["taobao-ad"], fields=1, rows=2.0, batch_per_rank=2, zipf=1.0)
    found = row_staleness(np.array([1]), work)
    late = 8 / 13 * 8 / 9 + 5 / 13 * 5 / 9
    assert found.mean == pytest.approx(late) and found.fresh == pytest.approx(1 - late, abs=0.004)
    assert found.hottest == pytest.approx(8 / 9)
    mixed = row_staleness(np.array([0, 1, 3, 3]), work)
    assert mixed.mean == pytest.approx(1.75 * late) and mixed.hottest == pytest.approx(14 / 9)
    missed = [8 / 13 * (1 / 9) ** n + 5 / 13 * (4 / 9) ** n for n in (0, 1, 3, 3)]
    assert mixed.fresh == pytest.approx(sum(missed) / 4, abs=0.004)
    assert row_staleness(np.zeros(0, np.int64), work).fresh == 1.0
