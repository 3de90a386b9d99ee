"""Staleness and batches in flight, counted from the instants of a run themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from persia_sim.engine.run import Run
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import steady_steps
from persia_sim.insight.report import (
    report,
    staleness,
    staleness_of,
    text,
)
from persia_sim.model.scenario import Noise, Scenario
from persia_sim.model.stamps import Mark
from persia_sim.words.trace import Event, Kind, Trace
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.hand_world import hand_scenario, hand_workload, line
from tests.persia_sim.sim_configurations import small_scenario, uncontended


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
def test_staleness_from_the_instants_themselves(mode: Mode) -> None:
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


def test_staleness_of_a_window_of_one_by_hand() -> None:
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
    assert line(text(found), "staleness") == (
        "steps 1.00 (p99 1, oldest 1); pushes 1.0 (p99 1); by row 1.00 (fresh 0.0%, p50 1, p90 1, "
        "p99 1, hottest 1.0)"
    )
    assert line(text(found), "in flight") == "at most 2 batches"
    untraced = simulate(hand_scenario(Mode.SYNC))
    assert report(untraced).staleness is None and "staleness" not in text(report(untraced))
    with pytest.raises(ValueError, match="the run has no trace: simulate with trace=True"):
        staleness(untraced)


def test_percentiles_of_lookups_that_miss_0_to_100_steps() -> None:
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
def test_most_batches_in_flight_counted_from_the_instants(scenario: Scenario) -> None:
    run = simulate(scenario)
    starts, ends = (np.sort(run.stamps[m].ravel()) for m in (Mark.LOOKUP, Mark.APPLIED))
    most = {
        side: max(k + 1 - int(np.searchsorted(ends, t, side=side)) for k, t in enumerate(starts))
        for side in ("left", "right")
    }
    assert most["right"] <= run.max_in_flight <= most["left"]  # ends and starts at one instant
