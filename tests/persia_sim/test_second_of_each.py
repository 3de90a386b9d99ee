"""What befalls one process alone, which is not the first of its kind: it is that one, no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.staleness import staleness_in_pushes
from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import Checkpoints, Crash, SlowDown, Target
from persia_sim.cluster.scenario import Averaging, DenseHome, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.clock import Clock
from persia_sim.engine.faults import Disturbed
from persia_sim.engine.hardware import Platform
from persia_sim.engine.simulate import Run, simulate
from persia_sim.report.critical_path import STANDSTILL, blame_of_resources, critical_path
from persia_sim.report.measure import steady_steps
from persia_sim.report.row_staleness import staleness
from tests.persia_sim.hand_world import hand_cluster, hand_scenario
from tests.persia_sim.sim_configurations import small_scenario

MANY_S = 10_000.0


def of_several(ranks: int = 1, workers: int = 1, servers: int = 1) -> Cluster:
    cluster = hand_cluster(ranks).with_gpu(fp32_flops=float("inf"))
    cluster = replace(cluster, servers=replace(cluster.servers, hosts=servers))
    return cluster.with_workers(workers)


def away(target: Target, index: int, at_s: float, until_s: float) -> Crash:
    return Crash(target=target, index=index, at_s=at_s, detect_s=0.0, restart_s=until_s - at_s)


@pytest.mark.parametrize("server", range(4))
def test_the_server_that_crashes_is_the_one_that_serves_late(server):
    """Each is another number of times as slow, and 3 s is what a lookup takes the first one."""
    cluster = of_several(servers=4)
    slow = [SlowDown(target=Target.SERVER, index=n, factor=1.0 + n) for n in range(4)]
    crash = away(Target.SERVER, server, 0.0, MANY_S)
    run = simulate(hand_scenario(steps=1, cluster=cluster, disturbances=(*slow, crash)))
    assert run.stamps[Mark.READ, 0, 0] == MANY_S + 3.0 * (1 + server)


@pytest.mark.parametrize("worker", range(3))
def test_the_worker_that_crashes_is_that_of_its_batches(worker):
    """Three ranks, a worker each: the batches of one of them wait, those of the others do not."""
    base = hand_scenario(Mode.ASYNC, ranks=3, steps=2, cluster=of_several(ranks=3, workers=3))
    # Worker w serves the batches of rank w: 3 s + r, as one loader serves the ranks in turn.
    plain = simulate(base).stamps[Mark.READ]
    crash = away(Target.WORKER, worker, 0.0, MANY_S)
    late = simulate(replace(base, disturbances=(crash,))).stamps[Mark.READ]
    assert (late[:, 0] >= MANY_S).tolist() == [rank == worker for rank in range(3)]
    others = [rank for rank in range(3) if rank != worker]
    assert (late[others] == plain[others]).all()


def test_a_crash_that_no_batch_of_the_path_has_met_costs_nothing():
    """Rank 0 is slow, so the path is its own; the worker of rank 1 is away for a while."""
    base = hand_scenario(Mode.ASYNC, ranks=2, steps=6, cluster=of_several(ranks=2, workers=2))
    slow = SlowDown(target=Target.RANK, index=0, factor=20.0)
    calm = simulate(replace(base, disturbances=(slow,)))
    at_s = float(calm.stamps[Mark.LOOKUP, 1, 0])
    blame = {}
    for worker in (0, 1):
        crash = away(Target.WORKER, worker, at_s, at_s + 100.0)
        run = simulate(replace(base, disturbances=(slow, crash)))
        blame[worker] = blame_of_resources(run)
        assert sum(blame[worker].values()) == pytest.approx(run.makespan_s)
    assert blame[1] == blame_of_resources(calm) and STANDSTILL not in blame[1]
    assert 0 < blame[0][STANDSTILL] <= 100.0


@pytest.mark.parametrize("target", [Target.RANK, Target.WORKER, Target.SERVER])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_slow_process_makes_its_own_work_slow(target, index):
    """By three times what it took: 12 s of a GPU, 6 s of pooling, 3 s of a lookup."""
    cluster = of_several(ranks=3, workers=3, servers=3)
    base = hand_scenario(Mode.ASYNC, ranks=3, steps=1, cluster=cluster)
    slow = replace(base, disturbances=(SlowDown(target=target, index=index, factor=3.0),))
    plain, late = (simulate(each).stamps[:, :, 0] for each in (base, slow))
    gained = np.diff(late - plain, axis=0)
    own = [2.0 * (rank == index) for rank in range(3)]
    computing = gained[Mark.BACKWARD_END - 1].tolist()
    asked, pooled = (gained[mark - 1].tolist() for mark in (Mark.READ, Mark.ROWS))
    zero = [0.0] * 3
    assert computing == ([12.0 * each for each in own] if target is Target.RANK else zero)
    assert pooled == ([6.0 * each for each in own] if target is Target.WORKER else zero)
    # A worker asks with 2 s of its cores; whichever server is slow, all ranks' lookups ask it.
    of_worker = [2.0 * each for each in own]
    expected = {Target.WORKER: of_worker, Target.SERVER: [6.0] * 3, Target.RANK: zero}
    assert asked == expected[target]


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_the_path_of_a_slow_rank_goes_by_its_own_pushes_whichever_rank_it_is(tau):
    """In async a lookup waits for pushes of its own rank. The second rank's first batch is loaded
    behind the first one's, which takes as long again."""
    base = hand_scenario(Mode.ASYNC, tau=tau, ranks=2, steps=6, cluster=of_several(2, 2))
    paths, runs = [], []
    for rank in (0, 1):
        slow = SlowDown(target=Target.RANK, index=rank, factor=20.0)
        runs.append(simulate(replace(base, disturbances=(slow,))))
        paths.append(critical_path(runs[-1]))
    loading_s = [path.pop("load") for path in paths]
    assert loading_s[1] == 2 * loading_s[0]
    assert paths[0] == pytest.approx(paths[1])


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_pushes_count_until_the_first_rank_that_is_through_whichever_are_slower(slow):
    """Behind its last lookup the others meet a run that empties itself."""
    disturbances = (SlowDown(target=Target.RANK, index=slow, factor=3.0),)
    base = small_scenario(Mode.ASYNC, steps=40, tau=2, disturbances=disturbances)
    run = simulate(base, trace=True)
    read, applied = (run.stamps[mark].tolist() for mark in (Mark.READ, Mark.APPLIED))
    through_s = min(of_rank[-1] for of_rank in read)
    counted = [s for s in steady_steps(run) if all(of[s] <= through_s for of in applied)]
    assert run.trace is not None and 5 < len(counted) < len(steady_steps(run))
    every = staleness_in_pushes(run.trace)
    found = staleness(run)
    expected = every.missed_pushes[np.isin(every.step, counted)]
    assert found.pushes_mean == pytest.approx(expected.mean())
    assert found.pushes_p99 == pytest.approx(np.percentile(expected, 99))


def loops(run: Run) -> list[list[float]]:
    """When each rank was through with its steps."""
    return run.stamps[Mark.UPDATED].tolist()


@pytest.mark.parametrize("index", range(3))
def test_without_a_barrier_a_rank_that_crashes_goes_back_alone(index):
    base = hand_scenario(Mode.ASYNC, ranks=3, steps=8, cluster=of_several(ranks=3, workers=3))
    plain = loops(simulate(base))
    at_s = (plain[index][4] + plain[index][5]) / 2
    crash = away(Target.RANK, index, at_s, at_s + 7.0)
    late = loops(simulate(replace(base, disturbances=(crash,))))
    for rank in range(3):
        if rank != index:
            assert late[rank] == plain[rank]
    assert late[index][:5] == plain[index][:5]
    # Without a checkpoint all of its work is done again.
    assert late[index][5] == pytest.approx(plain[index][5] + 7.0 + at_s)


TIMES = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@given(TIMES, TIMES, st.integers(0, 2), st.integers(0, 20))
def test_a_crash_takes_the_part_of_a_push_that_its_own_server_holds(arrived, held, server, at_s):
    env = Clock()
    crash = away(Target.SERVER, server, float(at_s), at_s + 1.0)
    disturbed = Disturbed(env, (crash,), simulate_nothing())
    arrived_s = np.array(arrived, float)
    done_s = arrived_s + np.array(held)
    holds = arrived[server] <= at_s <= arrived[server] + held[server]
    lost = disturbed.servers_lost(arrived_s, done_s)
    found = [] if lost is None else np.flatnonzero(lost).tolist()
    assert found == ([server] if holds else [])


def simulate_nothing() -> Platform:
    """Hardware that nobody asks."""
    scenario = hand_scenario(cluster=of_several(servers=3))
    return Platform(Clock(), scenario, demand(scenario))


def test_checkpoints_are_those_of_the_rank_that_writes_most_whichever_it_is():
    """A slow rank works for longer, and writes more of them."""
    checkpoints = Checkpoints(interval_s=300.0, write_s=1.0)
    base = hand_scenario(Mode.ASYNC, ranks=3, steps=12, cluster=of_several(ranks=3, workers=3))
    base = replace(base, checkpoints=checkpoints)
    written = []
    for rank in range(3):
        slow = SlowDown(target=Target.RANK, index=rank, factor=10.0)
        written.append(simulate(replace(base, disturbances=(slow,))).losses.checkpoints)
    assert written == [written[0]] * 3
    assert written[0] > simulate(base).losses.checkpoints


def dense_events(scenario: Scenario, *kinds: Kind) -> list[tuple[Kind, int, int, int]]:
    trace = simulate(scenario, trace=True).trace
    assert trace is not None
    return [(Kind(e.kind), e.rank, e.step, e.version) for e in trace if e.kind in kinds]


@pytest.mark.parametrize("home", list(DenseHome))
@pytest.mark.parametrize("shards", [False, True])
def test_a_version_of_the_dense_weights_counts_the_pushes_before_it(home, shards):
    scenario = small_scenario(Mode.ASYNC, dense_home=home, trace_shards=shards)
    seen, pushes = Counter[Kind](), 0
    for kind, _, _, version in dense_events(scenario, Kind.DENSE_PULL, Kind.DENSE_PUSH):
        assert version == pushes, f"{kind.name} {seen}"
        pushes += kind is Kind.DENSE_PUSH
        seen[kind] += 1
    batches = scenario.cluster.ranks * scenario.steps
    assert seen == {Kind.DENSE_PULL: batches, Kind.DENSE_PUSH: batches}


def test_a_round_of_averaging_has_every_rank_once_under_its_number():
    scenario = small_scenario(Mode.ASYNC_AVERAGING, averaging=Averaging(period_s=0.02))
    found = dense_events(scenario, Kind.AVERAGE_READ, Kind.AVERAGE_WRITE)
    rounds = sorted({number for *_, number in found})
    assert rounds == list(range(len(rounds))) and len(rounds) > 2
    for number in rounds:
        own = [(kind, rank) for kind, rank, _, of in found if of == number]
        assert own == [(kind, rank) for kind in (Kind.AVERAGE_READ, Kind.AVERAGE_WRITE)
                       for rank in range(4)]  # fmt: skip
