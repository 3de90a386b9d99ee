"""Closed forms against numbers worked out on paper, and the all-reduce as traffic on NICs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer, cycles, latencies, shared
from persia_sim.cluster.allreduce import (
    Algorithm,
    Bucket,
    DenseSync,
    bucket_sizes,
    ring_s,
    sync_delay,
    tree_s,
)
from persia_sim.cluster.demand import demand
from persia_sim.cluster.scenario import Averaging, DenseHome, Discipline
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from tests.persia_sim.hand_world import hand_cluster, hand_costs, hand_scenario, law, role


def test_closed_form_of_one_rank_by_hand():
    base = hand_scenario(Mode.HYBRID, tau=1)
    life = latencies(base, demand(base))
    assert (life.load_s, life.lookup_s, life.copy_in_s, life.compute_s) == (23, 37, 5, 12)
    assert (life.copy_out_s, life.push_s, life.answer_s) == (9, 41, 1)
    assert (life.refresh_s, life.pull_s, life.sync_s, life.window_s) == (0, 0, 0, 104)
    assert cycles(base, demand(base)) == {
        "training loop": 12, "copy to the GPU": 5, "copy from the GPU": 9, "lookups in flight": 3.7,
        "push tasks": 42 / 8, "loaders": 23, "loaded batches": 2.3, "window": 52,
    }  # fmt: skip
    found = answer(base)
    assert (found.step_s, found.binds, found.samples_per_s) == (52, "window", 4 / 52)
    permits = replace(base, tau=None, permits=3)
    assert answer(permits).seconds["permits"] == 105 / 3
    ahead = replace(base, mode=Mode.LOOKAHEAD, tau=None, ahead=1)
    # The loop: refresh 40.5 and compute 12; the next refresh waits for the push, 9 + 41 later.
    seconds = answer(ahead).seconds
    assert (seconds["training loop"], seconds["refresh"], seconds["window"]) == (
        52.5,
        102.5,
        144.5 / 2,
    )
    pulled = answer(replace(base, mode=Mode.ASYNC, dense_home=DenseHome.APART)).seconds
    assert (pulled["training loop"], pulled["window"]) == (12 + 5, 109 / 2)
    one_way = hand_scenario(Mode.SYNC, ranks=2)
    assert answer(one_way).seconds["window"] == 113 and answer(one_way).seconds["loaders"] == 46
    many = replace(one_way, cluster=replace(one_way.cluster, loaders=4))
    assert answer(many).seconds["loaders"] == 11.5


def test_closed_form_waits_for_the_server_with_two_of_three_rows():
    """0.5 and 0.25 an id on a core of speed 0.25: 4 s for two rows, 3 s for one. The host with two
    takes 2/3 of a message at 12 bytes a second, 18 for all of it; a stream of 6 takes 9."""
    costs = hand_costs(server_lookup=law(0.5, 0.25), server_update=law(1.0, 0.5))
    base = hand_scenario(Mode.SYNC, costs=costs, steps=1)
    wide = replace(base.cluster.embedding_workers.host, nic_bytes_per_s=72.0)  # 36 of payload
    workers = replace(base.cluster.embedding_workers, host=wide)
    cluster = replace(base.cluster, embedding_workers=workers).with_servers(2)
    for stream, fan, message in ((float("inf"), 18.0, 24.0), (6.0, 9.0, 6.0)):
        link = replace(cluster.link, stream_bytes_per_s=stream)
        scenario = replace(base, cluster=replace(cluster, link=link))
        life = latencies(scenario, demand(scenario))
        to_rank = 192 / message
        lookup = 0.5 + 2.5 + 48 / fan + 4.0 + 0.5 + 96 / fan + 6.5 + to_rank
        push = 0.5 + to_rank + 7.5 + 120 / fan + 8.0
        assert (life.lookup_s, life.push_s) == pytest.approx((lookup, push))
        assert life.load_s == pytest.approx(2.25 + 268 / min(36.0, stream) + 96 / min(24.0, stream))
        stamps = simulate(scenario).stamps[:, 0, 0]
        assert stamps[Mark.ROWS] - stamps[Mark.LOOKUP] == pytest.approx(lookup)
        assert stamps[Mark.APPLIED] - stamps[Mark.PUSH] == pytest.approx(push)


def test_closed_form_counts_what_overlap_leaves_of_the_all_reduce():
    """Two ranks: 9 s exposed; in hybrid with buckets of 64 and 840 bytes what follows backward."""
    costs = hand_costs(gpu_fixed_s=48.0)  # 16 and 32: the first bucket is long through
    for mode, bucket, exposed in (
        (Mode.SYNC, 64.0, 9.0), (Mode.RAW_HYBRID, 64.0, 9.0), (Mode.HYBRID, 1e9, 9.0),
        (Mode.HYBRID, 64.0, 0.5 + 840 / 113 + 0.5),
    ):  # fmt: skip
        sync = replace(costs.dense_sync, bucket_bytes=bucket)
        base = hand_scenario(mode, 2, costs=replace(costs, dense_sync=sync))
        life = latencies(base, demand(base))
        assert life.sync_s == pytest.approx(exposed), (mode, bucket)
        assert life.window_s == pytest.approx(37 + 5 + 48 + exposed + 9 + 41)
        assert answer(base).seconds["training loop"] == pytest.approx(48 + exposed)


def test_shared_cards_bound_the_answer_unless_nothing_is_shared():
    """One loader brings a batch in 23 s; its NIC takes in 556 bytes of each at 16 a second."""
    base = hand_scenario(Mode.RAW_HYBRID)
    alone = answer(base)
    assert (alone.binds, alone.step_s) == ("loaders", 23)
    crowded = answer(replace(base, discipline=Discipline.FLUID))
    assert crowded.step_s == 556 / 16 and crowded.binds.startswith("worker")
    assert crowded.samples_per_s == 4 * 16 / 556
    found = shared(base, demand(base))
    assert not any("cores" in name or "memory" in name for name in found)  # infinite_cpus


def test_averaging_lengthens_the_step_by_its_share_of_time():
    """Rounds of 9 s every 45 s."""
    rounds = Averaging(period_s=45.0)
    base = hand_scenario(Mode.ASYNC_AVERAGING, 2, averaging=rounds, steps=10_000)
    assert answer(base).seconds["training loop"] == pytest.approx(12 / 0.8, rel=1e-3)
    # Five steps of 12 s end at 60: one round has begun by then.
    short = replace(base, steps=5)
    assert answer(short).seconds["training loop"] == pytest.approx((5 * 12 + 9) / 5)


def test_rounds_that_would_lock_the_replicas_for_ever_are_refused():
    """A round takes 9 s: every 9 s or less nothing is ever trained."""
    base = hand_scenario(Mode.ASYNC_AVERAGING, 2, averaging=Averaging(period_s=9.0), steps=2)
    with pytest.raises(ValueError, match=r"averaging.period_s is 9\.0: a round takes 9 s"):
        simulate(base)
    assert simulate(replace(base, averaging=Averaging(period_s=9.1))).makespan_s > 2 * 12
    alone = Averaging(period_s=1.0)
    assert simulate(hand_scenario(Mode.ASYNC_AVERAGING, averaging=alone)).makespan_s < 700


def test_bounds_of_shared_resources_by_hand():
    """Two GPUs in one host, three workers on hosts of their own, servers with 2 and 1 rows."""
    cluster = hand_cluster(2).with_workers(3)
    fast = replace(cluster.nn.host, nic_bytes_per_s=50.0)  # 25 of payload
    nn = replace(cluster.nn, hosts=1, processes_per_host=2, host=fast)
    worker = replace(cluster.embedding_workers.host, memory_bytes_per_s=64.0)
    workers = replace(cluster.embedding_workers, cores_per_process=4, host=worker)
    cluster = replace(cluster, nn=nn, embedding_workers=workers)
    server = replace(cluster.servers.host, memory_bytes_per_s=32.0)
    cluster = replace(cluster, servers=role(server, processes=2, cores=3))
    base = hand_scenario(Mode.HYBRID, 2, cluster=cluster, tau=4)
    base = replace(base, discipline=Discipline.FLUID, infinite_cpus=False)
    need = demand(base)
    assert shared(base, need) == pytest.approx({
        "GPU host NICs, in": 2 * (192 + 96) / 25,
        "GPU host NICs, out": 2 * 192 / 25,
        "worker NICs, out": 2 * (48 + 120 + 192) / (3 * 16),
        "worker NICs, in": 2 * (268 + 96 + 192) / (3 * 16),
        "server NICs, in": 2 * (48 + 120) / 12,
        "server NICs, out": 2 * 96 / 12,
        "worker cores": 2 * (2 + 6 + 7) / 12,
        # Requests twice, rows and activations, gradients and pushes; 64 bytes a second.
        "worker memory": 2 * (2 * 48 + 96 + 192 + 192 + 120) / (3 * 64),
        "server cores": 2 * (3 + 11) / 3,
        "server memory": 2 * (2 * 96 + 4 * 96) / 32,
    })  # fmt: skip
    apart = replace(base, mode=Mode.ASYNC, dense_home=DenseHome.APART)
    assert shared(apart, demand(apart))["dense server"] == 2 * 2 * 4.0
    spread = replace(base, mode=Mode.ASYNC)  # the first server has two thirds of the weights
    found = shared(spread, demand(spread))
    assert found["server NICs, in"] == pytest.approx(2 * (48 + 120 + 904) / 12)
    assert found["server NICs, out"] == pytest.approx(2 * (96 + 904) / 12)
    assert found["server cores"] == pytest.approx(2 * (3 + 11 + 2 * 4.0 * 2 / 3) / 3)
    assert found["server memory"] == pytest.approx(2 * (2 * 96 + 4 * 96 + 4 * 904) / 32)
    ahead = replace(base, mode=Mode.LOOKAHEAD, tau=None, ahead=1)
    found = shared(ahead, demand(ahead))  # everything is fetched twice
    assert found["worker cores"] == pytest.approx(2 * (2 * (2 + 6) + 7) / 12)
    assert found["server NICs, out"] == pytest.approx(2 * 2 * 96 / 12)


def sync(algorithm: Algorithm) -> DenseSync:
    return DenseSync(
        algorithm=algorithm,
        intra_bytes_per_s=8.0,
        inter_bytes_per_s=2.0,
        intra_latency_s=1.0,
        inter_latency_s=1.0,
        source="test",
    )


def test_ring_and_tree_in_numbers_that_are_no_integers():
    """4 ranks, 9 bytes at 4 a second: 6 hops pass on a quarter each, or up and down once whole."""
    assert ring_s(4, 9.0, 4.0, 0.25) == 1.5 + 3.375
    assert tree_s(4, 9.0, 4.0, 0.25) == 4 * 0.25 + 4.5
    assert tree_s(5, 9.0, 4.0, 0.25) == 6 * 0.25 + 4.5  # a third level
    assert tree_s(2, 9.0, 4.0, 0.25) == 0.5 + 4.5
    assert ring_s(1, 9.0, 4.0, 0.25) == tree_s(1, 9.0, 4.0, 0.25) == 0


def test_buckets_go_from_the_output_to_the_input_and_hold_every_byte():
    layers = (1000, 500, 100, 10)
    plan = bucket_sizes(layers, 400.0)
    assert plan == [(110 / 1610, 440.0), (610 / 1610, 2000.0), (1.0, 4000.0)]
    assert sum(size for _, size in plan) == 4 * sum(layers)
    assert bucket_sizes(layers, 1e9) == [(1.0, 6440.0)]


def test_overlap_hides_all_but_what_comes_after_the_last_bucket():
    forward_end, backward = np.array([1.0, 1.0]), np.array([4.0, 4.0])
    plan = [Bucket(0.5, 1.5), Bucket(1.0, 0.5)]
    assert sync_delay(5.0, forward_end, backward, plan, True, 0.0) == 0.5
    assert sync_delay(5.0, forward_end, backward, plan, False, 0.0) == 2.0
    assert sync_delay(5.0, forward_end, backward, plan, True, 0.25) == 0.75
    late = [Bucket(0.5, 9.0), Bucket(1.0, 0.5)]  # a slow bucket holds up the next one
    assert sync_delay(5.0, forward_end, backward, late, True, 0.0) == 3.0 + 9.0 + 0.5 - 5.0


def test_the_slowest_rank_decides_when_a_bucket_starts():
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
def test_a_wrong_constant_is_refused(field, value, rule):
    said = re.escape(f"{field} of the all-reduce is {value}: {rule}")
    with pytest.raises(ValueError, match=said):
        replace(sync(Algorithm.RING), **{field: value})
    least = replace(sync(Algorithm.RING), intra_latency_s=0.0, overhead_s=0.0, bucket_bytes=1)
    assert least.seconds(64.0, 2, 2) == 64 / 8
