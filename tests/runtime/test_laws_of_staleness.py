"""Laws 5, 7 and 9: the window holds, Little's law is exact, nothing is lost in silence."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.words.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.words.trace import Kind
from persia_sim.words.vocabulary import Mode
from runtime.rank.feed import Feed, training_stream
from runtime.stop import Stop
from tests.persia_sim.oracles import mean_by_shard
from tests.runtime.worlds import ENGINES, ArraySource, config, on_engine, run

SOURCE = ArraySource(600)
HYBRIDS = st.sampled_from([Mode.HYBRID, Mode.RAW_HYBRID])


@settings(max_examples=10)
@given(
    mode=HYBRIDS,
    tau=st.integers(0, 5),
    ranks=st.integers(1, 4),
    permits=st.none() | st.integers(1, 4),
    merge=st.booleans(),
    engine=st.sampled_from(ENGINES),
)
@pytest.mark.law5
def test_the_window_never_exceeds_tau(mode, tau, ranks, permits, merge, engine):
    chosen = config(
        mode=mode, tau=tau, ranks=ranks, permits=permits, merge_pushes=merge, **on_engine(engine)
    )
    stale = staleness_in_steps(run(chosen, SOURCE).trace)
    assert stale.oldest_missing_steps.max() <= tau
    assert len(stale.step) == ranks * 25


@settings(max_examples=10)
@given(mode=HYBRIDS, tau=st.integers(0, 9), ranks=st.integers(1, 4), merge=st.booleans())
@pytest.mark.law5
def test_the_constant_lag_reaches_tau_exactly_from_step_tau_on(mode, tau, ranks, merge):
    chosen = config(mode=mode, tau=tau, ranks=ranks, merge_pushes=merge)
    stale = staleness_in_steps(run(chosen, SOURCE).trace)
    assert (stale.missing_steps == np.minimum(stale.step, tau)).all()
    assert (stale.oldest_missing_steps == np.minimum(stale.step, tau)).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.law5
def test_in_async_the_window_counts_own_pushes_only(engine):
    chosen = config(mode=Mode.ASYNC, tau=2, ranks=4, **on_engine(engine))
    assert staleness_in_steps(run(chosen, SOURCE).trace).oldest_missing_steps.max() <= 2


@pytest.mark.law5
def test_without_a_bound_the_queues_imply_one():
    chosen = config(mode=Mode.HYBRID, tau=None, ranks=2, queue_batches=1, executor="concurrent")
    assert chosen.implied_tau == 4
    for push_s in (
        0.005,
        0.1,
        1.0,
    ):  # the longer ones where a lookup takes longer, on a busy machine

        def is_late(rank: int, step: int, push_s: float = push_s) -> bool:
            time.sleep(push_s)
            return False

        world = run(chosen, SOURCE, lose_push=is_late)
        most = staleness_in_steps(world.trace).oldest_missing_steps.max()
        assert most <= chosen.implied_tau
        if most > 0:
            return
    assert most > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.law5
def test_a_lost_push_closes_its_step_and_is_counted(merge, engine):
    chosen = config(mode=Mode.HYBRID, tau=1, ranks=3, merge_pushes=merge, **on_engine(engine, 2))
    world = run(chosen, SOURCE, lose_push=lambda rank, step: rank == 1 and step % 5 == 0)
    lost = world.trace.of_kind(Kind.LOST_PUSH)
    assert world.meter.pushes_lost == 5
    assert {(r, s) for _, _, r, s, _, _ in lost.tolist()} == {(1, s) for s in range(0, 25, 5)}
    assert staleness_in_steps(world.trace).oldest_missing_steps.max() <= 1
    replayed = run(config(mode=Mode.HYBRID, tau=1, ranks=3, merge_pushes=merge, shards=2), SOURCE,
                   order=world.trace)  # fmt: skip
    assert replayed.state()["rows.values"].tobytes() == world.state()["rows.values"].tobytes()


MERGED = {"mode": Mode.HYBRID, "tau": 3}
ON_ARRIVAL = {**MERGED, "merge_pushes": False}
LITTLE = {
    "lag": ("lag", ON_ARRIVAL),
    "merged": ("threads", MERGED),
    "concurrent": ("threads", ON_ARRIVAL),
    "async": ("threads", {"mode": Mode.ASYNC, "tau": 1}),
    "with lost pushes": ("threads", ON_ARRIVAL),
    "merged in servers": ("processes", MERGED),
    "async in servers": ("processes", {"mode": Mode.ASYNC, "tau": 1}),
    "with lost pushes in servers": ("processes", ON_ARRIVAL),
}


@pytest.mark.parametrize("name", LITTLE)
@pytest.mark.law7
def test_mean_staleness_in_pushes_is_mean_batches_in_flight_exactly(name):
    faults, (engine, chosen) = {}, LITTLE[name]
    if "lost pushes" in name:
        faults = {"lose_push": lambda rank, step: (rank + step) % 3 == 0}
    world = run(config(ranks=4, **chosen, **on_engine(engine, 3)), SOURCE, **faults)
    for shard, (missed, in_flight) in mean_by_shard(staleness_in_pushes(world.trace)).items():
        assert missed == in_flight, f"shard {shard}"
        assert missed > 0


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD])
@pytest.mark.parametrize("engine", ["lag", *ENGINES])
@pytest.mark.law7
def test_sync_and_lookahead_have_no_staleness(mode, engine):
    trace = run(config(mode=mode, ranks=3, **on_engine(engine, 2)), SOURCE).trace
    assert staleness_in_pushes(trace).missed_pushes.max() == 0
    assert staleness_in_steps(trace).missing_steps.max() == 0


@settings(max_examples=30)
@given(
    samples=st.integers(0, 200),
    ranks=st.integers(1, 7),
    batch=st.integers(1, 50),
    barrier=st.booleans(),
    order=st.randoms(use_true_random=False),
)
@pytest.mark.law9
def test_each_sample_is_handed_out_exactly_once(samples, ranks, batch, barrier, order):
    source = ArraySource(samples, seed=1)
    source._all.dense[:, 0] = np.arange(samples)  # a name for every sample
    batch = max(batch, ranks)  # fewer samples than ranks in a batch are refused
    chosen = config(batch=batch, ranks=ranks)
    feed = Feed(training_stream(chosen, source), ranks, barrier, Stop())
    next_step = dict.fromkeys(range(ranks), 0)
    seen: list[float] = []
    while next_step:
        rank = order.choice(list(next_step))
        work = feed.take(rank, next_step[rank])
        if work is None:
            del next_step[rank]
            continue
        next_step[rank] += 1
        seen += work.batch.dense[:, 0].tolist()
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize("engine", ["lag", *ENGINES])
@pytest.mark.law9
def test_each_push_is_applied_exactly_once(engine):
    chosen = config(mode=Mode.HYBRID, tau=2, ranks=3, merge_pushes=False, **on_engine(engine, 2))
    trace = run(chosen, SOURCE).trace
    reads, writes = trace.of_kind(Kind.LOOKUP), trace.of_kind(Kind.PUSH)
    places = [sorted(map(tuple, rows[:, 2:5].tolist())) for rows in (reads, writes)]
    assert places[0] == places[1]
    assert len(set(places[0])) == len(places[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_permits_bound_batches_in_flight(engine):
    chosen = config(mode=Mode.HYBRID, tau=None, permits=2, ranks=2, merge_pushes=False,
                    **on_engine(engine))  # fmt: skip
    flying: dict[int, set[int]] = {0: set(), 1: set()}
    for event in run(chosen, SOURCE).trace:
        if event.kind == Kind.LOOKUP:
            flying[event.rank].add(event.step)
            assert len(flying[event.rank]) <= 2
        elif event.kind == Kind.PUSH:
            flying[event.rank].discard(event.step)
