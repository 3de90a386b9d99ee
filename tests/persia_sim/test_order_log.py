"""Orders with a row for each server: versions, windows and Little's law hold at every shard."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from persia_sim.engine.order_log import EachShard
from persia_sim.engine.simulate import simulate
from persia_sim.model.incidents import Crash, Target
from persia_sim.model.scenario import Noise, Scenario
from persia_sim.words.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.words.trace import ALL, Kind, Trace
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.sim_configurations import message_to_each_host, small_scenario
from tests.persia_sim.test_laws import contended, traced


def by_shard(scenario: Scenario) -> Trace:
    run = simulate(replace(scenario, trace_shards=True), trace=True)
    assert run.trace is not None
    return run.trace


@settings(max_examples=15)
@given(contended())
def test_littles_law_is_exact_at_every_shard(scenario: Scenario) -> None:
    trace = by_shard(scenario)
    means = staleness_in_pushes(trace).mean_by_shard()
    assert set(means) == set(range(scenario.cluster.servers.processes))
    for missed, in_flight in means.values():
        assert missed == in_flight
        assert missed == 0 or scenario.mode.reads_late_rows
    late = staleness_in_steps(trace)
    if scenario.mode.reads_late_rows and scenario.window is not None:
        assert late.oldest_missing_steps.max() <= scenario.window


@pytest.mark.parametrize("merge", [True, False])
def test_versions_count_the_batches_applied_at_the_shard(merge: bool) -> None:
    base = small_scenario(Mode.HYBRID, merge_pushes=merge, tau=2, noise=Noise(gpu_cv=0.3))
    for trace in (by_shard(base), traced(base)[1]):
        for shard in {e.shard for e in trace if e.kind == Kind.PUSH}:
            version = 0
            for event in trace:
                if event.shard == shard and event.kind in (Kind.LOOKUP, Kind.PUSH):
                    assert event.version == version
                    version += (4 if merge else 1) if event.kind == Kind.PUSH else 0
            assert version == 4 * base.steps
        means = staleness_in_pushes(trace).mean_by_shard().values()
        assert all(missed == in_flight > 0 for missed, in_flight in means)


@pytest.mark.parametrize("resolve", [True, False])
def test_servers_see_different_orders_of_the_same_batches(resolve: bool) -> None:
    base = small_scenario(Mode.HYBRID, tau=4, noise=Noise(gpu_cv=0.3, server_cv=2.0))
    with message_to_each_host() if resolve else nullcontext():
        trace = by_shard(base)
    orders = {
        shard: [(e.kind, e.rank, e.step) for e in trace if e.shard == shard] for shard in range(8)
    }
    assert len({tuple(order) for order in orders.values()}) > 1
    assert len({tuple(sorted(order)) for order in orders.values()}) == 1
    assert set(Counter(orders[0]).values()) == {1}


def test_the_order_by_server_tells_of_the_same_run() -> None:
    base = small_scenario(Mode.HYBRID, noise=Noise(gpu_cv=0.1))
    whole, parts = (
        simulate(base, trace=True),
        simulate(replace(base, trace_shards=True), trace=True),
    )
    assert whole.stamps.tobytes() == parts.stamps.tobytes()
    assert whole.trace is not None and parts.trace is not None
    assert parts.trace.meta == whole.trace.meta | {"shards": 8}
    dense = [[e for e in t if e.kind == Kind.DENSE_UPDATE] for t in (whole.trace, parts.trace)]
    assert dense[0] == dense[1]


def test_every_row_of_a_batch_is_read_before_it_trains_and_written_after() -> None:
    trace = by_shard(small_scenario(Mode.RAW_HYBRID, tau=3, noise=Noise(server_cv=1.0)))
    updated = {e.step: k for k, e in enumerate(trace) if e.kind == Kind.DENSE_UPDATE}
    for k, event in enumerate(trace):
        if event.kind == Kind.LOOKUP:
            assert k < updated[event.step]
        elif event.kind == Kind.PUSH:
            assert k > updated[event.step]


@pytest.mark.parametrize("merge", [True, False])
def test_a_crashed_server_loses_its_part_of_a_push_and_no_other(merge: bool) -> None:
    base = small_scenario(Mode.HYBRID, merge_pushes=merge, steps=30)
    plain = simulate(base)
    at = float(plain.stamps[13][0, 10] - plain.need.server_update_s.max() / 2)
    event = Crash(target=Target.SERVER, index=3, at_s=at, detect_s=0.05, restart_s=0.1)
    crashed = replace(base, disturbances=(event,))
    run, trace = traced(replace(crashed, trace_shards=True))
    lost = [(e.rank, e.step, e.shard) for e in trace if e.kind == Kind.LOST_PUSH]
    # Law 13 at every server: sent = applied + lost. In its hands were pushes sent to all eight.
    assert 0 < len(lost) == run.losses.lost_parts and run.losses.lost_pushes == 0
    assert {shard for *_, shard in lost} == {3} and all(rank != ALL for rank, *_ in lost)
    for shard in range(8):
        events = [e for e in trace if e.shard == shard and e.kind == Kind.PUSH]
        grown = [b.version - a.version for a, b in pairwise(events)]
        applied = events[-1].version + (4 if merge else 1)
        assert applied == 4 * 30 - len(lost) * (shard == 3)
        assert set(grown) <= ({1} if not merge else set(range(1, 5)))
    assert all(a == b for a, b in staleness_in_pushes(trace).mean_by_shard().values())
    # One shard for all has no parts: most of each push is applied, so it is.
    whole, trace = traced(crashed)
    assert whole.losses == run.losses and not any(e.kind == Kind.LOST_PUSH for e in trace)
    assert sum(e.kind == Kind.PUSH for e in trace) == 30 * (1 if merge else 4)


def test_an_empty_order_is_a_trace() -> None:
    import simpy

    assert len(EachShard(simpy.Environment(), 3).finish(mode="sync")) == 0
    assert np.array_equal(EachShard(simpy.Environment(), 3).finish().events, np.zeros((0, 5)))
