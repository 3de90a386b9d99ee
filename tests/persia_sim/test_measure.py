"""Throughput with its interval, noise, and staleness of steps, pushes and rows by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from scipy import stats

from persia_sim.base.trace import Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.cluster.incidents import Purpose, SlowDown, Target, lognormal_factors, stream
from persia_sim.cluster.scenario import Noise
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets.catalogue import workloads
from persia_sim.presets.point import Point
from persia_sim.presets.point import scenario_of as point_scenario
from persia_sim.report.measure import (
    Estimate,
    mean_interval,
    steady_steps,
    step_durations,
    step_time,
    throughput,
    warm_up,
)
from persia_sim.report.report import report
from persia_sim.report.row_staleness import row_staleness, staleness, staleness_of
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import facts_of, hand_costs, hand_scenario, hand_workload
from tests.persia_sim.sim_configurations import small_scenario, uncontended


def half_width(values: np.ndarray) -> float:
    """The interval again, with numpy's correlation and scipy's quantile.

    Window: all of the covariance up to n/16, then linearly down to none at n/8; 12 degrees of
    freedom; corrected for the mean that was taken from the same values. Not below the interval of
    six batch means, the last n - n mod 6 values, with 5 degrees of freedom.
    """
    n = len(values)
    off = values - values.mean()
    covariance = np.correlate(off, off, "full")[n - 1 :]  # sums, at lags 0, 1, ...
    window = n // 8
    lags = np.arange(1, window)
    weight = np.minimum(1.0, 2.0 - 2.0 * lags / window)
    spectrum = (covariance[0] + 2 * (weight * covariance[1:window]).sum()) / (1 - 1.5 * window / n)
    spectrum = max(spectrum, covariance[0] / n)
    of_spectrum = stats.t.ppf(0.975, 12) * sqrt(spectrum) / n
    means = [batch.mean() for batch in np.split(values[n % 6 :], 6)]
    of_batches = stats.t.ppf(0.975, 5) * stats.sem(means)
    return float(max(of_spectrum, of_batches))


@pytest.mark.parametrize("size", [16, 17, 100, 1200])
@pytest.mark.parametrize("memory", [0.0, 0.8, -0.9])
def test_interval_of_a_series_with_memory(size, memory):
    shocks = np.random.default_rng(size).normal(3.0, 1.0, size)
    series = np.zeros(size)
    for k in range(size):
        series[k] = shocks[k] + (memory * series[k - 1] if k else 0.0)
    found = mean_interval(series)
    assert found.mean == pytest.approx(series.mean()) and found.values == size
    assert found.half_width == pytest.approx(half_width(series), rel=1e-3)
    assert found.relative == pytest.approx(found.half_width / found.mean)


def test_a_long_series_has_the_interval_of_its_600_block_means():
    series = np.random.default_rng(5).normal(1.0, 0.3, 2 * 600 + 137)
    blocks = series[:1200].reshape(600, 2).mean(1)
    found = mean_interval(series)
    assert found.mean == pytest.approx(series.mean()) and found.values == 1337
    assert found.half_width == pytest.approx(half_width(blocks), rel=1e-3)
    shorter = mean_interval(series[:1200])  # not yet cut into blocks
    assert shorter.half_width == pytest.approx(half_width(series[:1200]), rel=1e-3)


COVERED = {
    "sync": {"mode": Mode.SYNC},
    "hybrid": {"mode": Mode.HYBRID, "loaders": 4},
    "async": {"mode": Mode.ASYNC, "loaders": 60},
    "a window that binds": {"cluster": "h100-host", "workload": "kwai-video", "tau": 1},
}
SHORT, LONG = 60, 2500


@pytest.mark.long
def test_the_95_percent_interval_holds_the_rate_of_a_long_run():
    """Of 40 short runs in each of four configurations, whose batches share nothing, 90 to 98 % (the
    binomial error of a true 95 % is 1.7 %); from the spectrum alone it was 143 of the 160."""
    holds = {}
    for name, options in COVERED.items():
        sizes = {} if "cluster" in options else {"workers": 7, "servers": 2}
        point = Point(ranks=2, gpu_cv=0.2, server_cv=0.5, discipline="unshared", **sizes, **options)

        def rate(steps: int, seed: int, point: Point = point) -> Estimate:
            scenario = point_scenario(replace(point, steps=steps, seed=seed))
            scenario = replace(scenario, infinite_cpus=True)
            return throughput(SimpleNamespace(scenario=scenario, stamps=instants(scenario)))

        expected = rate(LONG, 1_000).mean
        short = [rate(SHORT, seed) for seed in range(40)]
        holds[name] = [abs(each.mean - expected) <= each.half_width for each in short]
    assert 0.90 <= np.mean([*holds.values()]) <= 0.98


def test_fewer_than_sixteen_values_have_no_interval():
    assert mean_interval(np.arange(15.0)) == Estimate(7.0, inf, 15)
    assert mean_interval(np.arange(16.0)).half_width < inf
    assert Estimate(0.0, 1.0, 20).relative == inf


def test_warm_up_leaves_the_rest_with_the_least_standard_error():
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


def test_a_slow_start_is_cut_and_a_short_series_loses_a_quarter():
    slow = np.concatenate([np.full(10, 9.0), np.ones(50)])
    assert warm_up(slow) == 10
    assert [warm_up(np.ones(n)) for n in (4, 8, 19)] == [1, 2, 4]
    assert warm_up(np.ones(20)) == 0


def test_steps_of_a_barrier_are_the_distances_of_its_updates():
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


def test_rates_of_ranks_that_wait_for_nobody_add_up():
    """Async: rank 0 computes 2,000 s, rank 1 three times as long, each with 5 s of pulling."""
    slow = SlowDown(target=Target.RANK, index=1, factor=3.0)
    costs = hand_costs(gpu_fixed_s=2000.0)
    run = simulate(hand_scenario(Mode.ASYNC, 2, steps=30, costs=costs, disturbances=(slow,)))
    assert throughput(run).mean == pytest.approx(4 / 2005 + 4 / 6005)
    # The step time is that of two equal ranks with the same sum of rates.
    assert step_time(run).mean == pytest.approx(2 / (1 / 2005 + 1 / 6005))
    assert step_durations(run) == pytest.approx([2 / (1 / 2005 + 1 / 6005)] * 29)


def test_a_rate_is_that_of_all_ranks_and_not_of_the_last_one_alone():
    """Rank 1 takes four times as long until rank 0 has ended, and is as quick from then on."""
    run = simulate(hand_scenario(Mode.ASYNC, 2, steps=100, costs=hand_costs(gpu_fixed_s=2000.0)))
    uneven = run.stamps.copy()
    uneven[Mark.UPDATED] = np.cumsum([[10.0] * 100, [40.0] * 25 + [10.0] * 75], axis=1)
    assert throughput(replace(run, stamps=uneven)).mean == pytest.approx(4 / 10 + 4 / 40)


@pytest.mark.parametrize(("tau", "dropped"), [(0, 5), (3, 8), (30, 14)])
def test_the_window_and_five_steps_are_dropped_at_least_but_never_more_than_half(tau, dropped):
    run = simulate(hand_scenario(Mode.HYBRID, tau=tau, steps=30, costs=hand_costs(gpu_fixed_s=2e4)))
    assert step_time(run).values == 29 - dropped


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.5])
def test_factors_have_mean_one_and_the_asked_variation(cv):
    drawn = lognormal_factors(np.random.default_rng(1), cv, 2_000_000)
    assert drawn.mean() == pytest.approx(1, abs=4 * cv / np.sqrt(2e6))
    assert drawn.std() == pytest.approx(cv, rel=0.02)
    # The logarithm is normal: its spread is sqrt(log(1 + cv^2)), its mean minus half the square.
    sigma = np.sqrt(np.log(1 + cv**2))
    assert np.log(drawn).std() == pytest.approx(sigma, rel=0.01)
    assert np.median(drawn) == pytest.approx(np.exp(-(sigma**2) / 2), rel=0.01)


def test_a_draw_belongs_to_seed_purpose_entity_and_step():
    def first(*place: int) -> float:
        seed, purpose, entity, step = place
        return float(stream(seed, Purpose(purpose), entity, step).random())

    places = [(0, 1, 0, 0), (1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 6, 3, 2)]
    drawn = [first(*place) for place in places]
    assert len(set(drawn)) == len(places) and drawn == [first(*place) for place in places]
    # Philox keyed by (seed, purpose and entity), its counter starting at the step's own block.
    for (seed, purpose, entity, step), value in zip(places, drawn, strict=True):
        key = np.array([seed, purpose * 2**32 + entity], np.uint64)
        bits = np.random.Philox(key=key, counter=[0, 0, 0, step])
        assert np.random.Generator(bits).random() == value


def test_another_entity_or_a_longer_run_sees_the_same_factors():
    short = lognormal_factors(stream(3, Purpose.GPU, 2), 0.3, 10)
    long = lognormal_factors(stream(3, Purpose.GPU, 2), 0.3, 50)
    assert np.array_equal(long[:10], short)


def test_two_rows_a_field_by_hand():
    """Two draws of a fair coin: a row stands in another batch with chance 1 - 1/4; of three missed
    pushes 2.25 touched it, Binomial(3, 3/4)."""
    work = replace(
        workloads()["taobao-ad"], fields=3, rows=6.0, batch_per_rank=1, ids_per_field=2.0, zipf=0.0
    )
    found = row_staleness(np.array([3]), work)
    assert (found.mean, found.hottest) == pytest.approx((2.25, 2.25))
    assert found.fresh == pytest.approx(1 / 64, abs=0.001)
    assert (found.p50, found.p90, found.p99) == (2, 3, 3)


def test_popular_rows_weigh_by_how_often_batches_meet_them():
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


def late(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Missing steps, the oldest of them and missed pushes of every lookup, from the stamps."""
    read, applied = run.stamps[Mark.READ], run.stamps[Mark.APPLIED]
    ranks, steps = read.shape
    barrier = run.scenario.mode.has_barrier
    missing, oldest, pushes = [], [], []
    for r in range(ranks):
        for s in range(steps):
            closed = applied.max(0) if barrier else applied[r]
            open_steps = [k for k in range(s) if closed[k] > read[r, s]]
            missing.append(len(open_steps))
            oldest.append(s - open_steps[0] if open_steps else 0)
            between = (applied > read[r, s]) & (applied < applied[r, s])
            pushes.append(int(between.sum()))
    return np.array(missing), np.array(oldest), np.array(pushes)


def percentile(values: np.ndarray, level: float) -> float:
    """Linear between order statistics, as in the textbook (Hyndman and Fan's type 7)."""
    ordered = np.sort(values)
    place = (len(ordered) - 1) * level
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


@pytest.mark.parametrize("mode", [Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC])
def test_staleness_from_the_instants_themselves(mode):
    noise = Noise(gpu_cv=0.4, server_cv=1.0)
    run = simulate(small_scenario(mode, tau=5, steps=60, noise=noise, seed=3), trace=True)
    # The first ten steps are the start; at the end a run empties itself.
    missing, oldest, pushes = (values.reshape(4, 60)[:, 11:] for values in late(run))
    full = run.stamps[Mark.READ][:, -1].min()
    pushes = pushes[:, : int((run.stamps[Mark.APPLIED].max(0)[11:] <= full).sum())].ravel()
    assert steady_steps(run) == range(11, 60)
    found = staleness(run)
    assert found.steps_mean == pytest.approx(missing.mean()) and missing.mean() > 4
    assert found.steps_p99 == pytest.approx(percentile(missing.ravel(), 0.99))
    assert found.steps_oldest == oldest.max()
    assert found.pushes_mean == pytest.approx(pushes.mean()) and pushes.std() > 0.2
    assert found.pushes_p99 == pytest.approx(percentile(pushes, 0.99))


def test_staleness_of_a_window_of_one_by_hand():
    """Reads at 33, 56, 137, 160, ...; pushes applied at 127, 150, 231, ...: all but the first miss
    exactly the step before, and the first three of six are the start."""
    run = simulate(hand_scenario(Mode.HYBRID, tau=1, steps=6), trace=True)
    found = report(run)
    late = found.staleness
    assert late is not None
    assert (late.steps_mean, late.steps_p99, late.steps_oldest) == (1, 1, 1)
    assert (late.pushes_mean, late.pushes_p99) == (1, 1)
    # One row a field: every push touches every row.
    assert (late.rows.mean, late.rows.hottest) == pytest.approx((1, 1))
    assert late.rows.fresh == 0 and late.rows.p50 == 1
    told = facts_of(found)
    assert told["rows by pushes missed"] == ("half miss at most 1, 90 % at most 1, 99 % at most 1")
    assert told["most popular row"] == "misses 1.0 pushes on average"
    assert told["batches in flight"] == "at most 2"
    untraced = simulate(hand_scenario(Mode.SYNC))
    assert report(untraced).staleness is None and "staleness" not in facts_of(report(untraced))
    with pytest.raises(ValueError, match="the run has no trace: simulate with trace=True"):
        staleness(untraced)


def test_percentiles_of_lookups_that_miss_0_to_100_steps():
    """All 101 lookups of a rank come before its first push, so lookup s misses s steps."""
    events = [Event(Kind.LOOKUP, 0, s, 0, 0) for s in range(101)]
    events += [Event(Kind.PUSH, 0, s, 0, s) for s in range(101)]
    trace, work = Trace.of(events, mode="hybrid", ranks=1), hand_workload()
    found = staleness_of(trace, work, range(101))
    assert (found.steps_mean, found.steps_p99, found.steps_oldest) == (50, 99, 100)
    assert (found.pushes_mean, found.pushes_p99) == (50, 99)
    rows = found.rows  # one row a field: every push touches it
    assert rows.mean == pytest.approx(50) and (rows.p50, rows.p90, rows.p99) == (50, 90, 99)
    lost = [event._replace(kind=int(Kind.LOST_PUSH)) for event in events[101:]]
    gone = Trace.of(events[:101] + lost, mode="hybrid", ranks=1)
    found = staleness_of(gone, work, range(101))
    assert (found.pushes_mean, found.pushes_p99, found.steps_oldest) == (0, 0, 100)


@given(uncontended())
def test_most_batches_in_flight_counted_from_the_instants(scenario):
    run = simulate(scenario)
    starts, ends = (np.sort(run.stamps[m].ravel()) for m in (Mark.LOOKUP, Mark.APPLIED))
    most = {
        side: max(k + 1 - int(np.searchsorted(ends, t, side=side)) for k, t in enumerate(starts))
        for side in ("left", "right")
    }
    assert most["right"] <= run.max_in_flight <= most["left"]  # ends and starts at one instant


def test_ranks_that_meet_others_no_more_add_no_rate_behind_an_incident_either():
    """Full servers; of ranks that are behind the last steps meet nobody: with these the rate
    was up to 25 % above what was trained while all ranks ran, and above its bound."""
    point = SimulateOptions(
        mode=Mode.ASYNC, workload="criteo-syn1", ranks=6, workers=1, slow=("rank:0x30",),
        servers=4, loaders=8, batch_per_rank=16, permits=3, gpu_cv=0.0, steps=150,
    )  # fmt: skip
    run = simulate(scenario_of(point))
    ended = run.stamps[Mark.UPDATED]
    since_s, until_s = ended[:, 10].max(), ended[:, -1].min()
    trained = 16 * ((ended > since_s) & (ended <= until_s)).sum() / (until_s - since_s)
    assert throughput(run).mean == pytest.approx(trained, rel=0.02)
