"""Laws 5, 6, 7 and 9: the window holds, Little's law is exact, nothing is lost in silence, and what
was recorded replays to its bytes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.base.trace import ALL, Kind, Trace
from persia_sim.base.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.dense import averaging
from runtime.rank.feed import Feed, training_stream
from runtime.stop import Stop
from tests.persia_sim.oracles import mean_by_shard
from tests.runtime.worlds import (
    ENGINES,
    ArraySource,
    World,
    assert_same_bytes,
    config,
    on_engine,
    run,
)

SOURCE = ArraySource(600)
HYBRIDS = st.sampled_from([Mode.HYBRID, Mode.RAW_HYBRID])
STEPS = 25

MERGED = {"mode": Mode.HYBRID, "tau": 3}
ON_ARRIVAL = {**MERGED, "merge_pushes": False}
CONCURRENT = {
    "sync": {},
    "lookahead": {"mode": Mode.LOOKAHEAD},
    "merged": MERGED,
    "on arrival": ON_ARRIVAL,
    "raw": {**ON_ARRIVAL, "mode": Mode.RAW_HYBRID},
    "permits": {**ON_ARRIVAL, "tau": None, "permits": 2},
    "async": {"mode": Mode.ASYNC, "tau": 2},
    "averaging": {"mode": Mode.ASYNC_AVERAGING, "tau": 2},
}


@dataclass
class Recorded:
    """A run of many ranks at once, in the order in which its events fell."""

    name: str
    chosen: TrainConfig
    world: World

    @property
    def trace(self) -> Trace:
        return self.world.trace


@pytest.fixture(
    scope="module",
    params=[(name, "threads") for name in CONCURRENT]
    + [(name, "processes") for name in ("sync", "merged", "async")]
    + [(name, "network") for name in ("lookahead", "averaging")]
    + [(name, "workers") for name in ("lookahead", "on arrival", "raw", "async")],
    ids="-".join,
)
def recorded(request) -> Recorded:
    name, engine = request.param
    # On a busy machine a round of averaging takes longer than so few steps: they get slower, too.
    for latency_s in (0.0, 0.02, 0.2) if name == "averaging" else (0.0,):
        own = {**CONCURRENT[name], "latency_s": latency_s, **on_engine(engine, 2)}
        chosen = config(ranks=4, **own)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(averaging, "PERIOD_S", 0.01)
            world = run(chosen, SOURCE)
        if len(world.trace.of_kind(Kind.AVERAGE_WRITE)):
            break
    return Recorded(name, chosen, world)


@pytest.mark.law6
def test_a_recorded_run_replays_to_the_same_bytes(recorded, tmp_path):
    recorded.trace.save(tmp_path / "trace.npz")
    order = Trace.load(tmp_path / "trace.npz")
    own = dict(CONCURRENT[recorded.name])
    own.pop("permits", None)
    again = config(ranks=4, executor="replay", trace=tmp_path / "trace.npz", shards=2, **own)
    replayed = run(again, SOURCE, order=order)
    assert_same_bytes(recorded.world, replayed)
    assert (recorded.trace.events == replayed.trace.events).all()
    if recorded.name == "averaging":
        assert len(order.of_kind(Kind.AVERAGE_WRITE)) > 0


@pytest.mark.law2
@pytest.mark.law6
def test_a_recorded_run_of_an_exact_mode_has_the_bytes_of_sync(recorded):
    if not recorded.chosen.sync.mode.reads_late_rows:
        assert_same_bytes(run(config(ranks=4, shards=2), SOURCE), recorded.world)


@pytest.mark.law5
def test_the_window_of_a_recorded_run_never_exceeds_tau(recorded):
    """In async it is of a rank's own pushes; without tau of what the permits allow."""
    stale = staleness_in_steps(recorded.trace)
    assert stale.oldest_missing_steps.max() <= recorded.chosen.implied_tau
    if not recorded.chosen.sync.mode.reads_late_rows:
        assert stale.missing_steps.max() == 0


def assert_littles_law(trace: Trace, shards: int, late: bool) -> None:
    means = mean_by_shard(staleness_in_pushes(trace))
    assert len(means) == shards
    for shard, (missed, in_flight) in means.items():
        assert missed == in_flight, f"shard {shard}"
        assert (missed > 0) == late


@pytest.mark.law7
def test_mean_staleness_in_pushes_is_mean_batches_in_flight_exactly(recorded):
    assert_littles_law(recorded.trace, 2, recorded.chosen.sync.mode.reads_late_rows)


def assert_each_push_is_applied_once(trace: Trace, merged: bool) -> None:
    reads, writes = (
        [tuple(row) for row in trace.of_kind(kind)[:, 2:5].tolist()]
        for kind in (Kind.LOOKUP, Kind.PUSH)
    )
    assert len(set(reads)) == len(reads)
    if merged:
        reads = list({(ALL, step, shard) for _, step, shard in reads})
    assert sorted(writes) == sorted(reads)


@pytest.mark.law9
def test_each_push_of_a_recorded_run_is_applied_exactly_once(recorded):
    shares = 4 if recorded.chosen.sync.mode.has_barrier else 1  # of a batch; else a rank has it all
    assert len(recorded.trace.of_kind(Kind.LOOKUP)) == shares * STEPS * 2
    assert_each_push_is_applied_once(recorded.trace, recorded.chosen.sync.merges)


def test_permits_bound_the_batches_in_flight_of_a_recorded_run(recorded):
    permits = recorded.chosen.sync.permits
    flying: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in recorded.trace if permits else ():
        place = (event.rank, event.shard)
        if event.kind == Kind.LOOKUP:
            flying[place].add(event.step)
            assert len(flying[place]) <= permits
        elif event.kind == Kind.PUSH:
            flying[place].discard(event.step)


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
@given(
    mode=st.sampled_from([m for m in Mode if m.has_barrier]),
    tau=st.integers(0, 9),
    ranks=st.integers(1, 4),
    merge=st.booleans(),
)
@pytest.mark.law5
@pytest.mark.law7
@pytest.mark.law9
def test_the_constant_lag_reaches_tau_exactly_from_step_tau_on(mode, tau, ranks, merge):
    late = {"tau": tau, "merge_pushes": merge} if mode.reads_late_rows else {}
    chosen = config(mode=mode, ranks=ranks, shards=3, **late)
    trace = run(chosen, SOURCE).trace
    stale = staleness_in_steps(trace)
    reached = np.minimum(stale.step, late.get("tau", 0))
    assert (stale.missing_steps == reached).all()
    assert (stale.oldest_missing_steps == reached).all()
    assert_littles_law(trace, 3, late=bool(reached.max()))
    assert_each_push_is_applied_once(trace, chosen.sync.merges)


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


@pytest.mark.first_case
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.law5
@pytest.mark.law7
def test_a_lost_push_closes_its_step_and_is_counted(merge, engine):
    chosen = config(mode=Mode.HYBRID, tau=1, ranks=3, merge_pushes=merge, **on_engine(engine, 2))
    world = run(chosen, SOURCE, lose_push=lambda rank, step: rank == 1 and step % 5 == 0)
    lost = world.trace.of_kind(Kind.LOST_PUSH)
    assert world.meter.pushes_lost == 5
    assert {(r, s) for _, _, r, s, _, _ in lost.tolist()} == {(1, s) for s in range(0, 25, 5)}
    assert staleness_in_steps(world.trace).oldest_missing_steps.max() <= 1
    assert_littles_law(world.trace, 2, late=True)
    replayed = run(config(mode=Mode.HYBRID, tau=1, ranks=3, merge_pushes=merge, shards=2), SOURCE,
                   order=world.trace)  # fmt: skip
    assert replayed.state()["rows.values"].tobytes() == world.state()["rows.values"].tobytes()


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
