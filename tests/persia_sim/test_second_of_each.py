"""What befalls one process alone, which is not the first of its kind: it is that one, no other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from persia_sim.base.staleness import staleness_in_pushes
from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.incidents import Outage, SlowDown, Target
from persia_sim.cluster.scenario import Averaging, DenseHome, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.report.measure import steady_steps
from persia_sim.report.row_staleness import staleness
from tests.persia_sim.hand_world import hand_cluster, hand_scenario
from tests.persia_sim.sim_configurations import small_scenario

MANY_S = 10_000.0


def of_several(ranks: int = 1, workers: int = 1, servers: int = 1) -> Cluster:
    cluster = hand_cluster(ranks).with_gpu(fp32_flops=float("inf"))
    cluster = replace(cluster, servers=replace(cluster.servers, hosts=servers))
    return cluster.with_workers(workers)


@pytest.mark.parametrize("server", range(4))
def test_the_server_that_stands_still_is_the_one_that_serves_late(server):
    """Each is another number of times as slow, and 3 s is what a lookup takes the first one."""
    cluster = of_several(servers=4)
    slow = [SlowDown(target=Target.SERVER, index=n, factor=1.0 + n) for n in range(4)]
    outage = Outage(index=server, at_s=0.0, for_s=MANY_S)
    run = simulate(hand_scenario(steps=1, cluster=cluster, disturbances=(*slow, outage)))
    assert run.stamps[Mark.READ, 0, 0] == MANY_S + 3.0 * (1 + server)


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
