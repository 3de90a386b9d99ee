"""Errors of predictions, and bands of known errors, by hand."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from experiments.validating.errors import GOALS_APART, band_of, error, verdicts


def test_errors_are_signed():
    assert error(110, 100) == pytest.approx(0.1) and error(90, 100) == pytest.approx(-0.1)
    assert error(0, 0) == 0 and error(1, 0) == math.inf


def test_a_band_comes_from_the_other_configurations_and_their_runs():
    same = {name: [1.1, 1.1] for name in "abcd"}
    band = band_of("a", same | {"a": [9.0]})
    assert band is not None
    assert band == (pytest.approx(1.1), pytest.approx(1.1))
    assert band_of("a", {"a": [1.0], "b": [1.0], "c": [1.0]}) is None


def test_a_band_ends_where_normal_errors_leave_one_in_twenty_on_each_side():
    """At 1.645 standard deviations; a band of 80 % would end at 1.28."""
    quantiles = [NormalDist(0.0, 0.2).inv_cdf((k + 0.5) / 2000) for k in range(2000)]
    band = band_of("own", {str(k): [math.exp(q)] for k, q in enumerate(quantiles)})
    assert band is not None
    # 4,000 draws tell the 5 % point to 0.03 standard deviations; asked for are four of these.
    ends = tuple(map(math.log, band))
    assert ends == (pytest.approx(-1.645 * 0.2, abs=0.026), pytest.approx(1.645 * 0.2, abs=0.026))


def test_a_band_from_few_others_is_as_wide_as_their_number_asks_for():
    """Three others, of which one is 3 off: a mean of three draws, each 3 with probability 1/3, and
    one's deviation from the mean of 1, which is -1 or 2, larger by the square root of 3/2.

    Of 81 cases the least sum, -sqrt(3/2), comes in 16, the largest, 3 + 2 sqrt(3/2), in 1, and the
    next, 2 + 2 sqrt(3/2), in 6: the ends of the band lie within the first and the last of these.
    """
    band = band_of("own", {"a": [1.0], "b": [1.0], "c": [math.exp(3)]})
    assert band is not None
    low, high = map(math.log, band)
    assert (low, high) == (pytest.approx(-math.sqrt(1.5)), pytest.approx(2 + 2 * math.sqrt(1.5)))


@pytest.mark.parametrize("runs", [2, 3])
def test_a_band_from_few_runs_is_as_wide_as_their_number_asks_for(runs):
    """Others with one mean: a run's deviations are left, of which the mean took a share."""
    off = 0.1
    logs = [-off, off] if runs == 2 else [-off, off, 0.0]
    band = band_of("own", {name: [math.exp(value) for value in logs] for name in "abc"})
    assert band is not None
    wide = off * math.sqrt(runs / (runs - 1))
    assert tuple(map(math.log, band)) == (pytest.approx(-wide), pytest.approx(wide))


def test_goals_stand_beside_what_was_found():
    found = verdicts([0.04, -0.16], [0.02, -0.06], [True] * 9 + [False])
    told = [line.rpartition(": ")[2] for line in found]
    assert told == ["10.0% (MISSED)", "16.0% (MISSED)", "4.0% (met)", "90.0% (met)"]
    assert verdicts([0.01], [], [])[0].endswith("1.0% (met)")
    met = verdicts([0.06, -0.1], [], [], GOALS_APART)  # of servers behind a link, 8 and 20 %
    assert met == [
        "throughput, mean error <= 8%: 8.0% (met)",
        "throughput, largest <= 20%: 10.0% (met)",
    ]
