"""Seconds, samples and dollars to a target AUC, by hand."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.statistics import paired_ratio
from experiments.tables import table
from experiments.targets import COLUMNS, first_crossing, target_lines

AUCS = st.lists(st.floats(0.4, 0.9), min_size=1, max_size=6)


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


def test_a_ratio_to_what_took_no_time_is_not_known():
    """Else it is a paired t test of logarithms: see the tests of windows."""
    assert math.isnan(paired_ratio([0.0, 1.0], [1.0, 1.0]).mean)


def of_ways(ways: dict[str, dict[int, list[tuple[float, ...]]]], *shares: float, usd=0.0):
    """Lines of ways: mode -> seed -> second, samples and AUC of each snapshot."""
    snapshots = [
        (mode, seed, *point)
        for mode, own in ways.items()
        for seed, points in own.items()
        for point in points
    ]
    return target_lines(snapshots, "sync", shares, usd_per_hour=usd)


def way(*aucs: float, speed: float = 1.0) -> list[tuple[float, ...]]:
    return [(n / speed, 1e6 * n, auc) for n, auc in enumerate(aucs, start=1)]


def test_time_cost_and_censoring_of_a_target_by_hand():
    """The climb of sync ends at 0.7; half of it is 0.6."""
    ways = {
        "sync": {0: way(0.6, 0.7), 1: way(0.6, 0.7)},
        "fast": {0: way(0.6, 0.7, speed=4), 1: way(0.55, 0.65, speed=4)},
    }
    lines = of_ways(ways, 0.5, 1.0, usd=7200)
    sync, fast, _, never = lines
    assert sync["target_auc"] == pytest.approx(0.6) and sync["seconds"] == pytest.approx(1.0)
    assert fast["ratio_to_sync"] == pytest.approx(math.sqrt(0.25 * 0.375))
    # seconds 0.3125 at 7,200 $/h are 0.625 $; sync needs a million samples
    assert fast["seconds"] == pytest.approx(0.3125) and fast["usd"] == pytest.approx(0.625)
    assert fast["usd_per_million_samples_of_sync"] == pytest.approx(0.625)
    assert fast["samples"] == pytest.approx(1.25e6)
    assert math.isnan(of_ways(ways, 0.5)[1]["usd"]), "no price"
    assert (never["reached"], never["not_before_s"]) == (1, 0.5)
    unknown = ("seconds", "ratio_to_sync", "usd_per_million_samples_of_sync")
    assert all(math.isnan(never[name]) for name in unknown)
    told = table(lines, COLUMNS).splitlines()
    assert re.split(r" {2,}", told[-1])[3] == "not reached by 1 of 2 seeds, > 0.5 s"


def test_each_seed_has_the_target_of_syncs_run_of_that_seed():
    """Half a climb is 0.6 and 0.55, which sync reaches at once in each stream; the mean's half,
    0.575, would be late in seed 1."""
    ways = {
        "sync": {0: way(0.6, 0.7), 1: way(0.55, 0.6)},
        "x": {0: way(0.6, 0.7), 1: way(0.55)},
    }
    sync, other = of_ways(ways, 0.5)
    assert sync["target_auc"] == pytest.approx(0.575)
    assert (sync["seconds"], sync["seconds_half_width_95"]) == pytest.approx((1.0, 0.0))
    assert other["reached"] == 2 and other["ratio_to_sync"] == pytest.approx(1.0)


def test_seconds_to_a_target_are_held_against_those_of_the_same_seeds():
    def way(end_s: float) -> list[tuple[float, ...]]:
        return [(end_s, 1.0, 0.7)]

    ways = {"sync": {0: way(1.0), 1: way(2.0)}, "hybrid": {1: way(4.0), 0: way(3.0)}}
    _, hybrid = of_ways(ways, 1.0)
    assert hybrid["ratio_to_sync"] == pytest.approx(math.sqrt(3.0 * 2.0))
    assert hybrid["ratio_to_sync_low_95"] != hybrid["ratio_to_sync_high_95"]
    _, other = of_ways({"sync": ways["sync"], "hybrid": {1: way(4.0), 2: way(3.0)}}, 1.0)
    assert math.isnan(other["ratio_to_sync"]), "as many seeds, and not the same"
