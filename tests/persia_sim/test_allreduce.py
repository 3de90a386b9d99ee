"""Dense gradients: the all-reduce in closed form and as traffic on NICs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from persia_sim.engine.clock import Clock
from persia_sim.engine.hardware import Platform
from persia_sim.engine.simulate import simulate
from persia_sim.model.allreduce import (
    Algorithm,
    Bucket,
    DenseSync,
    bucket_sizes,
    ring_s,
    sync_delay,
    tree_s,
)
from persia_sim.model.cluster import Cluster
from persia_sim.model.demand import demand
from persia_sim.model.scenario import Averaging, Discipline, Noise, Scenario
from persia_sim.model.stamps import Mark
from persia_sim.presets.catalogue import costs_of
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.hand_world import hand_scenario
from tests.persia_sim.sim_configurations import small_cluster, small_scenario


def sync(algorithm: Algorithm) -> DenseSync:
    return DenseSync(
        algorithm=algorithm,
        intra_bytes_per_s=8.0,
        inter_bytes_per_s=2.0,
        intra_latency_s=1.0,
        inter_latency_s=1.0,
        source="test",
    )


def test_ring_and_tree_have_their_closed_forms() -> None:
    assert ring_s(8, 80.0, 2.0, 0.5) == 2 * 7 * 0.5 + 2 * 7 / 8 * 80 / 2
    assert tree_s(8, 80.0, 2.0, 0.5) == 2 * 3 * 0.5 + 2 * 80 / 2
    assert ring_s(1, 80.0, 2.0, 0.5) == 0 == tree_s(1, 80.0, 2.0, 0.5)


def test_ring_and_tree_in_numbers_that_are_no_integers() -> None:
    """4 ranks, 9 bytes at 4 a second: 6 hops pass on a quarter each, or up and down once whole."""
    assert ring_s(4, 9.0, 4.0, 0.25) == 1.5 + 3.375
    assert tree_s(4, 9.0, 4.0, 0.25) == 4 * 0.25 + 4.5
    assert tree_s(5, 9.0, 4.0, 0.25) == 6 * 0.25 + 4.5  # a third level
    assert tree_s(2, 9.0, 4.0, 0.25) == 0.5 + 4.5


def test_hierarchical_is_two_rings_and_one_host_is_one() -> None:
    law = sync(Algorithm.HIERARCHICAL)
    assert law.seconds(64.0, 8, 4) == ring_s(4, 64.0, 8.0, 1.0) + ring_s(2, 64.0, 2.0, 1.0)
    assert law.seconds(64.0, 4, 4) == ring_s(4, 64.0, 8.0, 1.0)
    assert law.seconds(64.0, 1, 4) == 0


def test_ring_over_hosts_runs_at_the_slower_link() -> None:
    assert sync(Algorithm.RING).seconds(64.0, 8, 4) == ring_s(8, 64.0, 2.0, 1.0)
    assert sync(Algorithm.TREE).seconds(64.0, 4, 4) == tree_s(4, 64.0, 8.0, 1.0)


def test_ring_of_99_mb_over_eight_hosts_takes_14_ms_at_12_5_gb_per_s() -> None:
    assert ring_s(8, 99e6, 12.5e9, 0.0) == pytest.approx(13.86e-3, rel=1e-3)


def test_buckets_go_from_the_output_to_the_input_and_hold_every_byte() -> None:
    layers = (1000, 500, 100, 10)
    plan = bucket_sizes(layers, 400.0)
    assert plan == [(110 / 1610, 440.0), (610 / 1610, 2000.0), (1.0, 4000.0)]
    assert sum(size for _, size in plan) == 4 * sum(layers)
    assert bucket_sizes(layers, 1e9) == [(1.0, 6440.0)]


def test_overlap_hides_all_but_what_comes_after_the_last_bucket() -> None:
    forward_end, backward = np.array([1.0, 1.0]), np.array([4.0, 4.0])
    plan = [Bucket(0.5, 1.5), Bucket(1.0, 0.5)]
    assert sync_delay(5.0, forward_end, backward, plan, True, 0.0) == 0.5
    assert sync_delay(5.0, forward_end, backward, plan, False, 0.0) == 2.0
    assert sync_delay(5.0, forward_end, backward, plan, True, 0.25) == 0.75
    late = [Bucket(0.5, 9.0), Bucket(1.0, 0.5)]  # a slow bucket holds up the next one
    assert sync_delay(5.0, forward_end, backward, late, True, 0.0) == 3.0 + 9.0 + 0.5 - 5.0


def test_the_slowest_rank_decides_when_a_bucket_starts() -> None:
    plan = [Bucket(1.0, 1.0)]
    assert sync_delay(7.0, np.array([1.0, 3.0]), np.array([4.0, 4.0]), plan, True, 0.0) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("intra_bytes_per_s", 0.0, "must be >= 1e-06"),
        ("intra_latency_s", -1.0, "must lie in [0, "), ("inter_latency_s", -1.0, "must lie in ["),
        ("inter_bytes_per_s", 0.0, "must be >= 1e-06"), ("overhead_s", -1.0, "must lie in [0, "),
        ("bucket_bytes", 0.0, "must be >= 1 "), ("bucket_bytes", 1e-300, "must be >= 1 "),
    ],
)  # fmt: skip
def test_a_wrong_constant_is_refused(field: str, value: float, rule: str) -> None:
    said = re.escape(f"{field} of the all-reduce is {value}: {rule}")
    with pytest.raises(ValueError, match=said):
        replace(sync(Algorithm.RING), **{field: value})
    least = replace(sync(Algorithm.RING), intra_latency_s=0.0, overhead_s=0.0, bucket_bytes=1)
    assert least.seconds(64.0, 2, 2) == 64 / 8


def test_defaults_are_those_of_the_text() -> None:
    """Buckets of 25 MiB as in PyTorch's DDP, nothing extra."""
    plain = DenseSync(source="test")
    assert (plain.bucket_bytes, plain.overhead_s) == (26_214_400, 0)
    assert plain.algorithm is Algorithm.HIERARCHICAL


def test_one_rank_sums_nothing() -> None:
    for algorithm in Algorithm:
        assert sync(algorithm).seconds(64.0, 1, 4) == 0.0


def test_no_bucket_means_no_delay() -> None:
    assert sync_delay(5.0, np.array([1.0]), np.array([4.0]), [], True, 0.0) == 0.0


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
