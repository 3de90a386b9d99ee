"""When curves reach a target: by hand, and where they do not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.targets import Crossing, Journey, first_crossing, paired_ratio, targets, told

AUCS = st.lists(st.floats(0.4, 0.9), min_size=1, max_size=6)


def test_a_crossing_before_the_first_snapshot_starts_from_an_auc_of_one_half_at_zero():
    assert first_crossing([8.0], [0.7], 0.6) == Crossing(pytest.approx(4.0), True)


def test_a_curve_that_falls_back_has_crossed_at_its_first_time():
    assert first_crossing([1, 2, 3], [0.6, 0.5, 0.8], 0.6) == Crossing(1.0, True)


def test_the_drained_end_counts_in_place_of_the_snapshot_at_its_instant():
    assert not first_crossing([1, 2, 2], [0.5, 0.7, 0.6], 0.65).reached
    assert first_crossing([1, 2, 2], [0.5, 0.6, 0.7], 0.65).at == pytest.approx(1.75)


@given(AUCS, st.floats(0.51, 0.9))
def test_a_crossing_is_where_the_line_between_snapshots_has_the_target(aucs, target):
    at = [float(n) for n in range(1, len(aucs) + 1)]
    found = first_crossing(at, aucs, target)
    assert found.reached == (max(aucs) >= target)
    if not found.reached:
        assert found.at == at[-1]
        return
    left = math.ceil(found.at) - 1  # the snapshot before; -1 would be the start
    line = [0.5, *aucs]
    share = found.at - left
    assert line[left] + share * (line[left + 1] - line[left]) == pytest.approx(target, abs=1e-9)
    assert all(auc < target for auc in aucs[:left])


def test_a_ratio_is_the_geometric_mean_with_the_interval_of_its_logarithms():
    own, sync = [1.0, 2.0, 3.0], [4.0, 4.0, 5.0]
    found = paired_ratio(own, sync)
    logs = [math.log(a / b) for a, b in zip(own, sync, strict=True)]
    ends = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(stats.gmean([a / b for a, b in zip(own, sync, strict=True)]))
    assert (found.low, found.high) == pytest.approx((math.exp(ends.low), math.exp(ends.high)))
    assert math.isnan(paired_ratio([0.0, 1.0], [1.0, 1.0]).mean)


def test_what_is_never_reached_is_told_with_how_long_it_was_watched():
    late = [Crossing(3.0, True), Crossing(9.0, False), Crossing(7.0, False)]
    assert told(late) == "not reached by 2 of 3 seeds, > 7.0 s"
    assert told([Crossing(3.0, True)]) == "3.0"


def way(*aucs: float, speed: float = 1.0) -> Journey:
    at = range(1, len(aucs) + 1)
    return Journey(seconds=[n / speed for n in at], samples=[1e6 * n for n in at], auc=aucs)


def test_time_cost_and_censoring_of_a_target_by_hand():
    """The climb of sync ends at 0.7; half of it is 0.6."""
    journeys = {
        "sync": {0: way(0.6, 0.7), 1: way(0.6, 0.7)},
        "fast": {0: way(0.6, 0.7, speed=4), 1: way(0.55, 0.65, speed=4)},
    }
    sync, fast, _, never = targets(journeys, "sync", (0.5, 1.0))
    assert sync.auc == pytest.approx(0.6) and sync.seconds.mean == pytest.approx(1.0)
    assert [c.at for c in fast.crossings] == pytest.approx([0.25, 0.375])
    assert fast.ratio.mean == pytest.approx(math.sqrt(0.25 * 0.375))
    # seconds 0.3125 at 7,200 $/h are 0.625 $; sync needs a million samples
    assert fast.usd(7200).mean == pytest.approx(0.625)
    assert fast.usd_per_million(7200) == pytest.approx(0.625)
    assert fast.samples == pytest.approx(1.25e6)
    assert math.isnan(fast.usd(0).mean), "no price"
    assert (never.reached, never.not_before) == (1, 0.5)
    assert math.isnan(never.seconds.mean) and math.isnan(never.ratio.mean)
    assert math.isnan(never.usd_per_million(7200))


def test_each_seed_has_the_target_of_syncs_run_of_that_seed():
    """Half a climb is 0.6 and 0.55, which sync reaches at once in each stream; the mean's half,
    0.575, would be late in seed 1."""
    journeys = {
        "sync": {0: way(0.6, 0.7), 1: way(0.55, 0.6)},
        "x": {0: way(0.6, 0.7), 1: way(0.55)},
    }
    sync, other = targets(journeys, "sync", (0.5,))
    assert sync.auc == pytest.approx(0.575)
    assert [c.at for c in sync.crossings] == pytest.approx([1.0, 1.0])
    assert other.reached == 2 and other.ratio.mean == pytest.approx(1.0)


def test_seconds_to_a_target_are_held_against_those_of_the_same_seeds():
    def way(end_s: float) -> Journey:
        return Journey(seconds=[end_s], samples=[1.0], auc=[0.7])

    ways = {"sync": {0: way(1.0), 1: way(2.0)}, "hybrid": {1: way(4.0), 0: way(3.0)}}
    found = {t.mode: t for t in targets(ways, "sync", (1.0,))}
    assert found["hybrid"].ratio.mean == pytest.approx(math.sqrt(3.0 * 2.0))
    assert found["hybrid"].ratio.low != found["hybrid"].ratio.high
    others = {"sync": ways["sync"], "hybrid": {1: way(4.0), 2: way(3.0)}}
    found = {t.mode: t for t in targets(others, "sync", (1.0,))}
    assert math.isnan(found["hybrid"].ratio.mean), "as many seeds, and not the same"
