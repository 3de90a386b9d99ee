"""Step time, throughput and their interval: against scipy, formulas written anew, and by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt

import numpy as np
import pytest
from scipy import stats

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import (
    Estimate,
    mean_interval,
    step_durations,
    step_time,
    throughput,
    warm_up,
)
from persia_sim.model.incidents import SlowDown, Target
from persia_sim.model.stamps import Mark
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.hand_world import hand_costs, hand_scenario


def half_width(values: np.ndarray) -> float:
    """The interval again, with numpy's correlation and scipy's quantile.

    Window: all of the covariance up to n/16, then linearly down to none at n/8; 12 degrees of
    freedom; corrected for the mean that was taken from the same values.
    """
    n = len(values)
    off = values - values.mean()
    covariance = np.correlate(off, off, "full")[n - 1 :]  # sums, at lags 0, 1, ...
    window = n // 8
    lags = np.arange(1, window)
    weight = np.minimum(1.0, 2.0 - 2.0 * lags / window)
    spectrum = (covariance[0] + 2 * (weight * covariance[1:window]).sum()) / (1 - 1.5 * window / n)
    spectrum = max(spectrum, covariance[0] / n)
    return float(stats.t.ppf(0.975, 12) * sqrt(spectrum) / n)


@pytest.mark.parametrize("size", [16, 17, 100, 1200])
@pytest.mark.parametrize("memory", [0.0, 0.8, -0.9])
def test_interval_of_a_series_with_memory(size: int, memory: float) -> None:
    shocks = np.random.default_rng(size).normal(3.0, 1.0, size)
    series = np.zeros(size)
    for k in range(size):
        series[k] = shocks[k] + (memory * series[k - 1] if k else 0.0)
    found = mean_interval(series)
    assert found.mean == pytest.approx(series.mean()) and found.values == size
    assert found.half_width == pytest.approx(half_width(series), rel=1e-3)
    assert found.relative == pytest.approx(found.half_width / found.mean)


def test_a_long_series_has_the_interval_of_its_600_block_means() -> None:
    series = np.random.default_rng(5).normal(1.0, 0.3, 2 * 600 + 137)
    blocks = series[:1200].reshape(600, 2).mean(1)
    found = mean_interval(series)
    assert found.mean == pytest.approx(series.mean()) and found.values == 1337
    assert found.half_width == pytest.approx(half_width(blocks), rel=1e-3)
    shorter = mean_interval(series[:1200])  # not yet cut into blocks
    assert shorter.half_width == pytest.approx(half_width(series[:1200]), rel=1e-3)


def test_white_noise_has_students_interval_on_average() -> None:
    """The mean square of the half widths is that of t(12) sigma / sqrt(n)."""
    rng = np.random.default_rng(8)
    squares = [mean_interval(rng.normal(0, 2.0, 160)).half_width ** 2 for _ in range(800)]
    expected = stats.t.ppf(0.975, 12) * 2.0 / sqrt(160)
    assert sqrt(np.mean(squares)) == pytest.approx(expected, rel=0.04)


def test_fewer_than_sixteen_values_have_no_interval() -> None:
    assert mean_interval(np.arange(15.0)) == Estimate(7.0, inf, 15)
    assert mean_interval(np.arange(16.0)).half_width < inf
    assert Estimate(0.0, 1.0, 20).relative == inf


def test_warm_up_leaves_the_rest_with_the_least_standard_error() -> None:
    """MSER-5 in its own words: drop k blocks of five such that the mean of the others is surest."""
    rng = np.random.default_rng(4)
    found = set()
    for size in (20, 24, 25, 60, 90) * 30:
        fading = rng.uniform(0, 6) * np.exp(-np.arange(size) / rng.uniform(1, 20))
        values = 3 + fading + rng.normal(0, 0.5, size)
        blocks = size // 5
        means = [sum(values[5 * k : 5 * k + 5]) / 5 for k in range(blocks)]
        errors = []
        for dropped in range(max(1, blocks // 3)):
            rest = means[dropped:]
            mean = sum(rest) / len(rest)
            errors.append(sum((x - mean) ** 2 for x in rest) / len(rest) ** 2)
        assert warm_up(values) == 5 * errors.index(min(errors))
        found.add(warm_up(values))
    assert len(found) > 4  # from none to a third of the blocks


def test_a_slow_start_is_cut_and_a_short_series_loses_a_quarter() -> None:
    slow = np.concatenate([np.full(10, 9.0), np.ones(50)])
    assert warm_up(slow) == 10
    assert [warm_up(np.ones(n)) for n in (4, 8, 19)] == [1, 2, 4]
    assert warm_up(np.ones(20)) == 0


def test_steps_of_a_barrier_are_the_distances_of_its_updates() -> None:
    run = simulate(hand_scenario(Mode.SYNC, ranks=2, steps=30))
    assert step_durations(run) == pytest.approx([113.0] * 29)
    assert step_time(run).mean == pytest.approx(113.0)
    assert throughput(run).mean == pytest.approx(2 * 4 / 113)
    jitter = run.stamps.copy()
    jitter[Mark.UPDATED] += np.random.default_rng(0).normal(0, 5.0, 30)
    noisy = replace(run, stamps=jitter)
    rate, step = throughput(noisy), step_time(noisy)
    assert rate.half_width / rate.mean == pytest.approx(step.half_width / step.mean)
    assert rate.values == step.values <= 24


def test_rates_of_ranks_that_wait_for_nobody_add_up() -> None:
    """Async: rank 0 computes 2,000 s, rank 1 three times as long, each with 5 s of pulling."""
    slow = SlowDown(target=Target.RANK, index=1, factor=3.0)
    costs = hand_costs(gpu_fixed_s=2000.0)
    run = simulate(hand_scenario(Mode.ASYNC, 2, steps=30, costs=costs, disturbances=(slow,)))
    assert throughput(run).mean == pytest.approx(4 / 2005 + 4 / 6005)
    # The step time is that of two equal ranks with the same sum of rates.
    assert step_time(run).mean == pytest.approx(2 / (1 / 2005 + 1 / 6005))
    assert step_durations(run) == pytest.approx([2 / (1 / 2005 + 1 / 6005)] * 29)


@pytest.mark.parametrize(("tau", "dropped"), [(0, 5), (3, 8), (30, 14)])
def test_the_window_and_five_steps_are_dropped_at_least_but_never_more_than_half(
    tau: int, dropped: int
) -> None:
    run = simulate(hand_scenario(Mode.HYBRID, tau=tau, steps=30, costs=hand_costs(gpu_fixed_s=2e4)))
    assert step_time(run).values == 29 - dropped
