"""Dense traffic on shared NICs: alone it keeps its closed form, together it is slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persia_sim.engine.clock import Clock
from persia_sim.engine.hardware import Platform
from persia_sim.engine.simulate import simulate
from persia_sim.model.allreduce import Algorithm
from persia_sim.model.cluster import Cluster
from persia_sim.model.demand import demand
from persia_sim.model.scenario import Averaging, Discipline, Noise, Scenario
from persia_sim.model.stamps import Mark
from persia_sim.presets.catalogue import costs_of
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.hand_world import hand_scenario
from tests.persia_sim.sim_configurations import small_cluster, small_scenario


def both(base: Scenario) -> tuple[Scenario, Scenario]:
    return base, replace(base, dense_on_nics=True)


def slow_cards() -> Cluster:
    """NICs of GPU hosts that bind."""
    cluster = small_cluster()
    host = replace(cluster.nn.host, nic_bytes_per_s=cluster.nn.host.nic_bytes_per_s / 40)
    return replace(cluster, nn=replace(cluster.nn, host=host))


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.RAW_HYBRID, Mode.HYBRID])
def test_alone_on_its_cards_the_all_reduce_takes_its_closed_form(mode: Mode) -> None:
    base = small_scenario(
        mode, discipline=Discipline.UNSHARED, infinite_cpus=True, noise=Noise(gpu_cv=0.2)
    )
    own = base.cluster.nic_rates(base.cluster.nn)[0]
    sync = replace(base.costs.dense_sync, inter_bytes_per_s=own, bucket_bytes=4e6)
    apart, shared = both(replace(base, costs=replace(base.costs, dense_sync=sync)))
    assert simulate(shared).stamps == pytest.approx(simulate(apart).stamps, rel=1e-9)


@pytest.mark.parametrize("mode", [m for m in Mode if m.has_barrier])
@pytest.mark.parametrize("discipline", [Discipline.FLUID, Discipline.FIFO])
def test_sharing_the_cards_is_slower_where_they_bind(mode: Mode, discipline: Discipline) -> None:
    cluster = slow_cards()
    base = small_scenario(mode, cluster=cluster, discipline=discipline)
    apart, shared = (simulate(s) for s in both(base))
    assert shared.makespan_s > apart.makespan_s * 1.02
    more = sum(shared.link_bytes.values()) - sum(apart.link_bytes.values())
    need, hosts = shared.need, cluster.nn.hosts
    sent = sum(b.nic_bytes for b in need.buckets) * hosts * 2
    assert more == pytest.approx(sent * base.steps, rel=1e-9)


def test_background_averaging_disturbs_the_rows_on_the_cards() -> None:
    rounds = Averaging(period_s=0.02, stall_share=0)
    mode = Mode.ASYNC_AVERAGING
    base = small_scenario(mode, cluster=slow_cards(), tau=None, steps=40, averaging=rounds)
    apart, shared = (simulate(s) for s in both(base))
    late = shared.stamps[Mark.ROWS] - shared.stamps[Mark.LOOKUP]
    assert late.mean() > (apart.stamps[Mark.ROWS] - apart.stamps[Mark.LOOKUP]).mean()


def test_each_gpu_of_a_host_has_a_ring_of_its_own_with_its_peers() -> None:
    """Beside one flow of rows, the rings of two GPUs have two thirds of a NIC, and one ring half:
    300 bytes at 10 a second and a flow of 400 take 45 or 60 s, and 70 s together."""

    def times(algorithm: Algorithm) -> tuple[float, float]:
        scenario = hand_scenario(Mode.SYNC, ranks=4, discipline=Discipline.FLUID)
        nn = replace(scenario.cluster.nn, hosts=2, processes_per_host=2)
        nn = replace(nn, host=replace(nn.host, nic_bytes_per_s=20.0))  # half of it is payload
        cluster = replace(scenario.cluster, nn=nn)
        dense_sync = replace(scenario.costs.dense_sync, algorithm=algorithm)
        costs = replace(scenario.costs, dense_sync=dense_sync)
        scenario = replace(scenario, cluster=cluster, costs=costs)
        env = Clock()
        platform = Platform(env, scenario, demand(scenario))
        ring, rows = platform.ring(300.0, 0.0), platform.network.send((0,), 400.0)
        env.run_until(ring)
        ring_s = env.now
        env.run_until(rows)
        return ring_s, env.now

    assert times(Algorithm.HIERARCHICAL) == (45.0, 70.0)
    assert times(Algorithm.RING) == (60.0, 70.0)


def test_one_host_has_no_dense_traffic() -> None:
    cluster = small_cluster(ranks=2)
    apart, shared = both(small_scenario(Mode.SYNC, cluster=cluster, costs=costs_of("gcp-100t")))
    assert np.allclose(simulate(apart).stamps, simulate(shared).stamps, rtol=1e-12)
