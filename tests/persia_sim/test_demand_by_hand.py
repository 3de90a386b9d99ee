"""Bytes and seconds of one batch, from the numbers of the workload, worked out on paper."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest

from persia_sim.base.popularity import expected_distinct, mix64, zipf_bins
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.allreduce import SITE_LATENCY_S, Algorithm, DenseSync
from persia_sim.cluster.costs import Law
from persia_sim.cluster.demand import demand, loader_start_s
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.workload import Wire, Workload
from persia_sim.presets.catalogue import CLUSTERS, workloads
from tests.persia_sim.hand_world import (
    HAND,
    hand_cluster,
    hand_costs,
    hand_scenario,
    hand_workload,
    law,
    role,
)


def test_bytes_of_a_batch():
    work = hand_workload()
    assert work.ids_per_batch == 4 * 3 * 2 == 24
    assert work.distinct_ids == work.sent_ids == 3  # one row a field
    # An id of 8 bytes, a count of 4 and an index of 16 for each distinct id; a position of 4 for
    # each occurrence; a count for each sample and field; 40 of header.
    assert work.loader_bytes == (8 + 4) * 3 + 4 * 24 + 4 * 4 * 3 + 16 * 3 + 40 == 268
    assert work.input_bytes == 4 * 4 * (5 + 1) == 96  # 5 features and a label
    assert work.request_bytes == 16 * 3 == 48
    assert work.row_bytes == 32 and work.rows_bytes == 32 * 3 == 96
    assert work.activation_bytes == 2 * 4 * 3 * 8 == 192
    assert work.push_bytes == (8 + 32) * 3 == 120


def test_bytes_with_other_wires():
    all_of_them = hand_workload(wire=Wire(deduplicate=False))
    sent = (all_of_them.request_bytes, all_of_them.rows_bytes, all_of_them.push_bytes)
    assert sent == (16 * 24, 32 * 24, 40 * 24)
    half = hand_workload(wire=Wire(row_value_bytes=2))
    assert (half.rows_bytes, half.push_bytes) == ((16 + 2) * 3, (24 + 2) * 3)  # and a scale
    wide = hand_workload(wire=Wire(activation_value_bytes=4))
    assert wide.activation_bytes == 384
    # Rows and one more a field (the empty one), an index an occurrence, a count a sample and field.
    apart = hand_workload(wire=Wire(pooled=False))
    assert apart.activation_bytes == (3 + 3) * 8 * 2 + 8 * 24 + 8 * 4 * 3 == 384


def test_parameters_and_operations_of_the_dense_network():
    work = hand_workload()
    assert work.input_width == 3 * 8 + 5
    assert work.layer_params == ((29 + 1) * 7, (7 + 1) * 2)
    assert (work.weights, work.dense_bytes, work.flops_per_sample) == (226, 904, 1356)


def scenario_with_every_law(mode: Mode = Mode.SYNC, **changes: Any) -> Scenario:
    """Two server processes, and each law with a fixed part, a part by id and a part by byte."""
    cluster = hand_cluster(ranks=2)
    cluster = replace(cluster, servers=role(cluster.servers.host, processes=2))
    costs = hand_costs(
        load=law(1.0, 0.25, 0.5),
        worker_forward=law(1.0, 2.0, 0.25),
        worker_rpc=law(0.75),
        worker_pool=law(3.0, 0.5, 0.125),
        worker_scatter=law(5.0, 0.25, 0.0625),
        server_lookup=law(0.55, 0.25, 0.125),
        server_update=law(1.55, 0.75, 0.375),
        server_create=law(0.25, 2.0, 0.0625),
        copy_in=law(1.1, 0.5, 0.25),
        copy_out=law(2.0, 1.5, 0.125),
        gpu_fixed_s=3.0,
        gpu_efficiency=((4, 0.5),),
    )
    return hand_scenario(mode, 2, cluster=cluster, costs=costs, **changes)


def test_shares_of_the_servers_follow_the_hash_of_each_row():
    """SplitMix64 written out; its first output for the state 0 is the published test vector."""

    def hashed(key: int) -> int:
        z = (key + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert hashed(0) == 0xE220A8397B1DCDAF
    assert mix64(np.arange(5, dtype=np.uint64)).tolist() == [hashed(k) for k in range(5)]
    counts = np.bincount([hashed(k) % 2 for k in range(3)], minlength=2)
    assert hand_workload().server_shares(2) == pytest.approx(counts / 3)
    # Two rows a field, drawn 8 times with chances 2/3 and 1/3: the shares of expected distinct ids.
    met = [1 - (1 / 3) ** 8, 1 - (2 / 3) ** 8]
    two = hand_workload(rows=6.0)
    load = np.zeros(4)
    for key in range(6):
        load[hashed(key) % 4] += met[key % 2]
    assert two.server_shares(4) == pytest.approx(load / load.sum(), rel=1e-9)
    each = replace(two, wire=Wire(deduplicate=False))
    load = np.zeros(4)
    for key in range(6):
        load[hashed(key) % 4] += [2 / 3, 1 / 3][key % 2]
    assert each.server_shares(4) == pytest.approx(load / load.sum(), rel=1e-9)


def test_rows_beyond_the_hashed_ones_spread_evenly():
    """5,000 equally likely values: the first 1,024 keys are placed one by one."""
    work = hand_workload(fields=1, rows=5000.0, zipf=0.0, batch_per_rank=100, ids_per_field=1.0)
    placed = np.bincount(mix64(np.arange(1024, dtype=np.uint64)) % np.uint64(8), minlength=8)
    expected = (placed + (5000 - 1024) / 8) / 5000
    assert work.server_shares(8) == pytest.approx(expected, rel=1e-4)


def test_seconds_of_one_batch():
    need = demand(scenario_with_every_law())
    zero, one = need.server_shares.tolist()  # two rows on one server, one on the other (see above)
    assert sorted((zero, one)) == pytest.approx([1 / 3, 2 / 3])
    ids = np.array([round(3 * zero), round(3 * one)])
    assert need.load_s == (1.0 + 0.25 * 4 * (3 + 5) + 0.5 * (268 + 96)) / 0.5
    fetch = need.fetch
    assert fetch.worker_forward_s == (1.0 + 2.0 * 24 + 0.25 * 48 + 2 * 0.75) / 2
    assert fetch.server_s == pytest.approx((0.55 + 0.25 * ids + 0.125 * 32 * ids) / 0.25)
    assert fetch.worker_pool_s == (3.0 + 0.5 * 24 + 0.125 * 96) / 2
    copied = 192 + 96  # rows, and what needs none
    assert fetch.copy_in_s == pytest.approx((1.1 + 0.5 * 3 + 0.25 * copied) / 0.5 + copied / 64)
    assert need.push.copy_out_s == (2.0 + 1.5 * 3 + 0.125 * 192) / 0.5 + 192 / 64
    assert need.push.worker_scatter_s == (5.0 + 0.25 * 24 + 0.0625 * 120 + 2 * 0.75) / 2
    assert need.push.server_update_s == pytest.approx((1.55 + 0.75 * ids + 0.375 * 32 * ids) / 0.25)
    sent = (fetch.request_bytes, fetch.rows_bytes, fetch.activation_bytes, need.push.gradient_bytes)
    assert (need.loader_bytes, *sent, need.push.push_bytes) == (268, 48, 96, 192, 192, 120)
    assert need.input_bytes == 96
    # A row is read and copied, or read, added to, and written with as much state.
    assert (fetch.server_memory_bytes, need.push.update_memory_bytes) == (2 * 96, 4 * 96)


def test_compute_is_operations_over_half_of_the_peak():
    need = demand(scenario_with_every_law())
    compute = 3.0 + 4 * 1356 / (0.5 * 4096)
    assert need.forward_s == pytest.approx(compute / 3)
    assert need.backward_s == pytest.approx(2 * compute / 3)
    assert need.compute_s == pytest.approx(compute)
    assert need.dense_bytes == 904
    assert need.dense_copy_s == 904 / 226 == 4.0
    slower = hand_scenario(costs=hand_costs(dense_server_bytes_per_s=200.0))
    assert demand(slower).dense_copy_s == 4.52


def test_efficiency_is_linear_in_the_logarithm_of_the_batch():
    costs = hand_costs(gpu_efficiency=((4, 0.1), (64, 0.5)))
    found = [costs.efficiency(batch) for batch in (1, 4, 16, 32, 64, 1000)]
    between = 0.1 + 0.4 * (log(32) - log(4)) / (log(64) - log(4))
    assert found == pytest.approx([0.1, 0.1, 0.3, between, 0.5, 0.5])


def test_rows_that_miss_cost_their_creation():
    scenario = scenario_with_every_law()
    without, with_misses = demand(scenario), demand(scenario, 0.5)
    missing = 1.5 * without.server_shares  # every second one of three ids; no call without any
    created = (0.25 + 2.0 * missing + 0.0625 * 32 * missing) / 0.25
    assert with_misses.fetch.server_s - without.fetch.server_s == pytest.approx(created)
    with pytest.raises(ValueError, match=r"miss_rate is 1\.5: must lie in \[0, 1\]"):
        demand(scenario, 1.5)


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        # 2 ranks on 2 hosts: once round in two hops of 0.25 s, half of 904 bytes in each.
        (Algorithm.RING, 2 * 0.25 + 904 / 113),
        (Algorithm.TREE, 2 * 1 * 0.25 + 2 * 904 / 113),
        (Algorithm.HIERARCHICAL, 2 * 0.25 + 904 / 113),
    ],
)
def test_all_reduce_of_two_ranks(algorithm, seconds):
    scenario = scenario_with_every_law()
    sync = replace(scenario.costs.dense_sync, algorithm=algorithm)
    need = demand(replace(scenario, costs=replace(scenario.costs, dense_sync=sync)))
    [bucket] = need.buckets
    assert (bucket.ready_share, bucket.seconds) == (1.0, seconds)
    assert need.sync_overhead_s == 0.5 and need.all_reduce_s == seconds
    assert need.averaging_s == seconds + 0.5


def test_all_reduce_over_twelve_gpus_in_three_hosts():
    """1,200 bytes; 4 GPUs a host, 600 bytes a second inside and 100 between, a hop is 1 s."""
    numbers = {
        # 22 hops; each rank passes on 11/12 of the bytes twice, and a host's NIC every one of them
        Algorithm.RING: (22 + 2200 / 100, 2200.0),
        # depth 4, up and down; the root's NIC takes and gives everything
        Algorithm.TREE: (8 + 2400 / 100, 2400.0),
        # inside: 6 hops and 1,800 bytes; between three hosts: 4 hops and 1,600 bytes
        Algorithm.HIERARCHICAL: (6 + 1800 / 600 + 4 + 1600 / 100, 1600.0),
    }
    for algorithm, (seconds, on_card) in numbers.items():
        sync = DenseSync(
            algorithm=algorithm, intra_bytes_per_s=600.0, inter_bytes_per_s=100.0,
            intra_latency_s=1.0, inter_latency_s=1.0, source=HAND,
        )  # fmt: skip
        assert sync.seconds(1200.0, 12, 4) == seconds
        slow_inside = replace(sync, intra_bytes_per_s=50.0)
        if algorithm is not Algorithm.HIERARCHICAL:
            assert slow_inside.seconds(1200.0, 12, 4) == seconds * 2 - (seconds - on_card / 100)
    # A host that is not full: 5 ranks on two hosts of 4.
    assert sync.seconds(1200.0, 5, 4) == 6 + 3 + 2 + 1200 / 100


def test_a_hop_between_hosts_that_are_apart_takes_the_latency_of_their_link():
    """Two hosts of one GPU: a ring of two hops. Inside a site GPUs' own network has hops of its
    own; what the file says of them stands."""

    def seconds(link_s: float, **said: float) -> float:
        base = hand_scenario(Mode.SYNC, 2)
        costs = replace(base.costs, dense_sync=DenseSync(source=HAND, **said))
        link = replace(base.cluster.link, latency_s=link_s)
        cluster = replace(base.cluster, link=link)
        (bucket,) = demand(replace(base, costs=costs, cluster=cluster)).buckets
        return bucket.seconds

    near_s = seconds(0.0)
    assert seconds(0.015) - near_s == pytest.approx(2 * 0.015)
    assert seconds(0.015, inter_latency_s=0.0) == near_s
    assert seconds(50e-6) == near_s  # as in all presets: TCP inside one site
    assert max(make().link.latency_s for make in CLUSTERS.values()) == SITE_LATENCY_S


def test_buckets_of_hybrid_hold_whole_layers_from_the_output_on():
    """Layers of 210 and 16 parameters: 64 bytes are there after 16/226 of the backward pass."""
    base = scenario_with_every_law(Mode.HYBRID)
    sync = replace(base.costs.dense_sync, bucket_bytes=64.0)
    small = replace(base, costs=replace(base.costs, dense_sync=sync))
    first, second = demand(small).buckets
    assert (first.ready_share, second.ready_share) == (16 / 226, 1.0)
    assert (first.seconds, second.seconds) == (0.5 + 64 / 113, 0.5 + 840 / 113)
    [whole] = demand(replace(small, mode=Mode.RAW_HYBRID)).buckets  # exposed: in one piece
    assert whole.seconds == 0.5 + 904 / 113
    for alone in (hand_scenario(Mode.HYBRID), hand_scenario(Mode.ASYNC, 2)):
        assert demand(alone).buckets == () and demand(alone).sync_overhead_s == 0.0
    assert demand(hand_scenario(Mode.SYNC)).averaging_s == 0.0


def test_lookahead_looks_again_at_the_rows_with_pending_pushes():
    """Half of a batch's ids stand in the batches ahead: fixed parts stay, the rest halves."""
    base = scenario_with_every_law(Mode.LOOKAHEAD, ahead=3)
    values = 2.0
    # Four draws of a fair coin meet 2 (1 - 1/16) values; the batch's and 2 x 3 others' draws.
    work = replace(base.workload, rows=3 * values, zipf=0.0, ids_per_field=0.5, batch_per_rank=4)
    own, others, all_of_them = (values * (1 - 0.5**n) for n in (2, 12, 14))
    share = (own + others - all_of_them) / own
    assert work.pending_fraction(6) == pytest.approx(share, rel=1e-12) and 0.9 < share < 1
    scenario = replace(base, workload=work)
    need = demand(scenario)
    whole, again = need.fetch, need.refresh
    assert again is not None
    assert again.request_bytes == pytest.approx(whole.request_bytes * share)
    assert again.rows_bytes == pytest.approx(whole.rows_bytes * share)
    assert again.activation_bytes == pytest.approx(whole.activation_bytes * share)
    assert again.server_memory_bytes == pytest.approx(whole.server_memory_bytes * share)
    fixed = {
        "worker_forward_s": (1.0 + 2 * 0.75) / 2, "worker_pool_s": 3.0 / 2
    }  # fmt: skip
    for name, paid_again in fixed.items():
        expected = paid_again + (getattr(whole, name) - paid_again) * share
        assert getattr(again, name) == pytest.approx(expected), name
    rows_alone = whole.copy_in_s - 4 * 4 * (5 + 1) * (
        0.25 / 0.5 + 1 / 64
    )  # no dense features again
    assert again.copy_in_s == pytest.approx(2.2 + (rows_alone - 2.2) * share)
    assert again.server_s == pytest.approx(2.2 + (whole.server_s - 2.2) * share)
    one_ahead = demand(replace(scenario, ahead=1)).refresh
    assert one_ahead is not None and one_ahead.rows_bytes < again.rows_bytes
    default = replace(scenario, ahead=None)
    told = replace(scenario, ahead=default.steps_ahead)
    assert repr(demand(default).refresh) == repr(demand(told).refresh)
    assert demand(replace(scenario, mode=Mode.SYNC, ahead=None)).refresh is None


def test_pending_fraction_by_drawing():
    work = hand_workload(fields=1, rows=50.0, zipf=0.8, batch_per_rank=20, ids_per_field=1.0)
    chance = np.arange(1, 51) ** -0.8
    rng = np.random.default_rng(3)
    drawn = rng.choice(50, (4000, 4, 20), p=chance / chance.sum())
    shares, own = 0, 0
    for mine, *others in drawn:
        here = np.unique(mine)
        shares, own = shares + np.isin(here, others).sum(), own + len(here)
    assert work.pending_fraction(3) == pytest.approx(shares / own, abs=0.005)
    assert work.pending_fraction(0) == work.pending_fraction(-1) == 0.0


def test_zipf_bins_hold_the_sums_of_the_law():
    for values, exponent in ((10.0, 1.3), (5000.0, 1.05), (5000.0, 0.0)):
        each = np.arange(1, values + 1) ** -exponent
        each /= each.sum()
        chance, number = zipf_bins(values, exponent)
        assert chance[0] == pytest.approx(each[0], rel=1e-5)
        assert (chance * number).sum() == pytest.approx(1) and number.sum() == pytest.approx(values)
        for draws in (10.0, 300.0):
            exact = (1 - (1 - each) ** draws).sum()
            assert expected_distinct(draws, values, exponent) == pytest.approx(exact, rel=1e-5)


def test_distinct_ids_never_pass_the_table():
    assert expected_distinct(1.0, 100.0, 1.0) == pytest.approx(1.0)
    assert expected_distinct(1e9, 100.0, 1.0) == pytest.approx(100.0)


def test_loaders_start_evenly_over_one_batch():
    scenario = hand_scenario(ranks=2, steps=3)
    cluster = replace(scenario.cluster, loaders=4)
    starts = [loader_start_s(k, replace(scenario, cluster=cluster), 8.0) for k in range(4)]
    assert starts == [0.0, 2.0, 4.0, 6.0]
    idle = replace(scenario, cluster=replace(scenario.cluster, loaders=100))  # six batches in all
    assert [loader_start_s(k, idle, 6.0) for k in (0, 1, 5, 6)] == [0.0, 1.0, 5.0, 0.0]


def test_a_law_is_flagged_at_its_own_number_of_items():
    """24 occurrences a batch at the worker, 1.5 ids a server; 4 samples of 3 fields and
    5 dense features at the loader."""
    scenario = scenario_with_every_law()
    items = {
        "load": 32.0, "worker_forward": 24.0, "worker_pool": 24.0, "worker_scatter": 24.0,
        "server_lookup": 1.5, "server_update": 1.5,
    }  # fmt: skip
    for name, count in items.items():
        for bounds, outside in (
            ((count, count), ()), ((count + 0.1, 99.0), (name,)), ((0.0, count - 0.1), (name,))
        ):  # fmt: skip
            measured = replace(getattr(scenario.costs, name), fitted_items=bounds)
            costs = replace(scenario.costs, **{name: measured})
            assert demand(replace(scenario, costs=costs)).extrapolated == outside


def test_law_is_affine():
    assert Law(fixed_s=1.0, per_item_s=2.0, per_byte_s=4.0, source=HAND)(3, 5) == 1 + 6 + 20
    assert not law().extrapolates(1e30)


def test_parameters_of_the_named_workloads():
    """Published sizes: 6.25 to 100 trillion parameters for Criteo-Syn 1 to 5."""
    named: dict[str, Workload] = workloads()
    for number, trillions in enumerate((6.25, 12.5, 25.0, 50.0, 100.0), start=1):
        work = named[f"criteo-syn{number}"]
        assert work.rows * work.dim == pytest.approx(trillions * 1e12)
