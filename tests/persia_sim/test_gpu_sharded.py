"""Tables on the GPUs: plans conserve the work, stages and schedules are as by hand, limits hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.popularity import lru_miss_rate
from persia_sim.cluster.allreduce import allreduce_s, exchange_s, gather_s
from persia_sim.cluster.machine import Fabric, Gpu, Host, Precision, Reach, System
from persia_sim.cluster.tables import RowUpdate, Storage, Table
from persia_sim.presets.fitted import REACH
from persia_sim.sharded.plan import (
    HostTime,
    Pipeline,
    Software,
    Strategy,
    hot_share,
    make_plan,
)
from persia_sim.sharded.ranker import Ranker
from persia_sim.sharded.software import SOFTWARE
from persia_sim.sharded.stages import Job, Stages, schedule, stages, step_s

GPU = Gpu(
    name="round", fp32_flops=10e12, tf32_flops=100e12, fp16_flops=200e12, hbm_bytes_per_s=1e12,
    hbm_bytes=10e9, pcie_bytes_per_s=20e9, source="round figures",
)  # fmt: skip
HOST = Host(
    name="round", gpu=GPU, gpus=4, fabric=Fabric.SWITCH, intra_bytes_per_s=100e9, rdma=True,
    nic_bytes_per_s=40e9, cores=8, ram_bytes=1e12, core_speed=1.0, source="round figures",
)  # fmt: skip
WHOLE = Reach(
    fp32=1.0, tf32=1.0, fp16=1.0, hbm=1.0, switch=1.0, mesh=0.5, pairs=0.25, pcie=1.0, nic=1.0,
    tcp=0.5, host=1.0, uvm=0.1, activation_passes=0.0, source="everything at its nominal rate",
)  # fmt: skip
BARE = Software(name="bare", launch_s=0.0, id_s=0.0, strategy=Strategy.TABLE, source="nothing")
FOUR = Ranker(
    name="four", tables=(Table(rows=1000, dim=10, count=4),), dense_macs=1e6, dense_params=1e6,
    dense_features=0, source="round figures",
)  # fmt: skip
SIZES = st.builds(
    Table,
    rows=st.integers(1, 10**7).map(float),
    dim=st.sampled_from([8.0, 16.0, 128.0]),
    ids_per_sample=st.lists(st.sampled_from([1.0, 3.0, 50.0]), min_size=1, max_size=2).map(tuple),
    count=st.integers(1, 5),
)
RANKERS = st.lists(SIZES, min_size=1, max_size=4).map(
    lambda tables: replace(FOUR, tables=tuple(tables))
)


def job(**changes: object) -> Job:
    base = Job(
        ranker=FOUR, system=System(host=HOST, gpus=4), software=BARE, reach=WHOLE, batch=4000,
        precision=Precision.FP16,
    )  # fmt: skip
    return replace(base, **changes)


@given(RANKERS, st.integers(1, 9), st.sampled_from([Strategy.TABLE, Strategy.ROW]))
def test_every_id_is_looked_up_once_where_columns_stay_together(ranker, gpus, strategy):
    load = make_plan(ranker, gpus, strategy).sharded
    assert load.ids.sum() == pytest.approx(ranker.ids)
    elements = sum(t.count * t.ids * t.dim for t in ranker.tables)
    assert load.elements.sum() == pytest.approx(elements)
    assert load.bytes.sum() == pytest.approx(ranker.table_bytes)


@given(RANKERS, st.integers(1, 9), st.sampled_from(list(Strategy)))
def test_every_plan_reads_every_row_of_a_sample_and_returns_every_vector(ranker, gpus, strategy):
    plan = make_plan(ranker, gpus, strategy, replicate_rows=100.0, hot_rows=10.0)
    elements = sum(t.count * t.ids * t.dim for t in ranker.tables)
    assert plan.sharded.elements.sum() + plan.local_elements == pytest.approx(elements)
    if gpus == 1:
        assert plan.local_ids == 0 and plan.replicated_values == 0
    if strategy is Strategy.TABLE:
        at_home = sum(
            t.count * t.pooled * (1.0 if t.rows <= 100 else hot_share(t, 10.0))
            for t in ranker.tables
            if gpus > 1
        )
        assert plan.sharded.sent.sum() + at_home == pytest.approx(ranker.pooled)


def test_columns_show_every_gpu_every_id_and_partial_sums_come_from_every_gpu():
    columns = make_plan(FOUR, 4, Strategy.COLUMN).sharded
    assert columns.ids.tolist() == [4.0] * 4 and columns.sent.tolist() == [10.0] * 4
    rows = make_plan(FOUR, 4, Strategy.ROW)
    assert rows.partial_sums and rows.sharded.ids.tolist() == [1.0] * 4
    assert rows.sharded.sent.tolist() == [40.0] * 4  # all four tables' vectors, from each


def test_gradients_of_copied_tables_are_summed_or_gathered_where_they_are_sparse():
    """Four tables of 1,000 rows of ten numbers on each of four GPUs, 1,000 samples each; SGD."""
    plan = make_plan(FOUR, 4, Strategy.DATA_PARALLEL)
    assert plan.sharded.sent.sum() == 0 and plan.local_ids == 4
    assert plan.replicated_values == 4 * 1000 * 10
    copies = replace(BARE, strategy=Strategy.DATA_PARALLEL, id_s=1e-10)
    summed, gathered = (
        stages(job(software=replace(copies, sparse_gradients=sparse))) for sparse in (False, True)
    )
    assert summed.exchange_s == gathered.exchange_s == 0
    ring = 2 * 3 / 4 / 100e9
    assert summed.allreduce_s == pytest.approx(ring * 2 * (1e6 + 40_000))  # two bytes each
    # A line has an id of 8 bytes and ten numbers of 2; three GPUs send theirs to each.
    lines = 3 * 1000 * 4 * (8 + 20)
    assert (summed.copied_s, gathered.copied_s) == pytest.approx((ring * 2 * 40_000, lines / 100e9))
    assert gathered.allreduce_s == pytest.approx(ring * 2 * 1e6 + lines / 100e9)
    # Each GPU sorts and reads its own lines, adds them to a gradient as large as the tables, which
    # was zeroed and is read while all rows are read and written; or updates the rows of all lines.
    line = 100 + 20 + 2 * 40
    assert summed.update_s == pytest.approx((1000 * 4 * line + 4 * 160_000) / 1e12)
    assert gathered.update_s == pytest.approx(4000 * 4 * line / 1e12)


def test_a_planner_splits_the_table_that_costs_more_than_a_fair_share():
    heavy = Table(rows=1e6, dim=128, ids_per_sample=(100.0,))
    ranker = replace(FOUR, tables=(heavy, *(Table(rows=1e6, dim=128) for _ in range(7))))
    whole = make_plan(ranker, 8, Strategy.TABLE).imbalance
    assert whole == pytest.approx(100 / (107 / 8))
    assert make_plan(ranker, 8, Strategy.PLANNED).imbalance < 1.3
    # Columns read every id again: where ids are what costs, nothing is split.
    by_ids = make_plan(ranker, 8, Strategy.PLANNED, id_elements=1e6).sharded
    assert by_ids.ids.max() == 100


def test_a_planner_cuts_no_column_but_rows_where_there_are_more_gpus_than_columns():
    """Ten GPUs for a table of four columns: three parts of the columns, each in three of the
    rows."""
    one = replace(FOUR, tables=(Table(rows=1e6, dim=4),))
    load = make_plan(one, 10, Strategy.PLANNED).sharded
    assert load.ids.tolist() == pytest.approx([1 / 3] * 9 + [0.0])
    assert load.elements.tolist() == pytest.approx([4 / 9] * 9 + [0.0])
    assert load.sent.tolist() == pytest.approx([4 / 3] * 9 + [0.0])
    assert load.bytes.sum() == pytest.approx(one.table_bytes)
    assert make_plan(one, 4, Strategy.PLANNED).sharded.ids.tolist() == [1.0] * 4  # columns do


def test_tables_that_are_alike_are_dealt_in_turn_also_where_they_have_no_room():
    alike = replace(FOUR, tables=(Table(rows=1000, dim=10, count=7),))
    for room in (inf, 1.0):
        load = make_plan(alike, 3, Strategy.TABLE, room_bytes=room).sharded
        assert load.ids.tolist() == [3.0, 2.0, 2.0]
        assert load.bytes.tolist() == [120e3, 80e3, 80e3]


def test_hot_rows_take_their_share_of_the_lookups_as_zipf_says():
    table = Table(rows=100, dim=1, zipf=1.0)
    weights = 1.0 / np.arange(1, 101)
    assert hot_share(table, 10) == pytest.approx(weights[:10].sum() / weights.sum())
    assert hot_share(table, 100) == 1.0


def test_one_gpu_exchanges_nothing():
    parts = stages(job(system=System(host=HOST, gpus=1)))
    assert parts.exchange_s == parts.allreduce_s == 0


def test_stages_are_bytes_and_multiplications_over_rates():
    parts = stages(job())
    # 4,000 samples look up one row of 40 bytes on each GPU and make a vector of 20 of it; SGD reads
    # the vector's gradient, and reads and writes the row.
    assert parts.lookup_s == pytest.approx(4000 * (40 + 20) / 1e12)
    assert parts.update_s == pytest.approx(4000 * (20 + 2 * 40) / 1e12)
    # A GPU sends three quarters of its vectors of 10 numbers of 2 bytes.
    assert parts.exchange_s == pytest.approx(4000 * 20 * 3 / 4 / 100e9)
    assert parts.dense_s == pytest.approx(1000 * 6e6 / 200e12)
    assert parts.allreduce_s == pytest.approx(2 * 3 / 4 * 2e6 / 100e9)
    # Four ids of 8 bytes a sample cross the bus, which two GPUs of a switch share; three quarters
    # of them then go to other GPUs.
    assert parts.input_s == pytest.approx(1000 * 32 / 10e9 + 1000 * 32 * 3 / 4 / 100e9)
    there = stages(job(reads_files=False))
    assert there.input_s == pytest.approx(1000 * 32 * 3 / 4 / 100e9)


def test_keys_of_rows_that_every_gpu_has_do_not_travel():
    """1,000 samples with four ids of 8 bytes cross the bus of a GPU, and those that are elsewhere
    its link."""
    everywhere = job(software=replace(BARE, strategy=Strategy.DATA_PARALLEL))
    assert stages(everywhere).input_s == pytest.approx(1000 * 32 / 10e9)
    sizes = (Table(rows=100, dim=10, count=2), Table(rows=1000, dim=10, count=2))
    mixed = replace(FOUR, tables=sizes)
    small = stages(job(ranker=mixed, software=replace(BARE, replicate_rows=500.0)))
    assert small.input_s == pytest.approx(1000 * 32 / 10e9 + 1000 * 16 * 3 / 4 / 100e9)


def test_between_nodes_the_nic_binds_and_an_nvlink_domain_has_none():
    two = System(host=HOST, gpus=8)
    # Of seven peers three are near: 3 MB at 100 GB/s; four are far: 4 MB at 10 GB/s.
    assert exchange_s(two, WHOLE, 7e6) == pytest.approx(4e6 / 10e9)
    domain = System(host=replace(HOST, nvlink_domain=8), gpus=8)
    assert exchange_s(domain, WHOLE, 7e6) == pytest.approx(7e6 / 100e9)
    assert domain.nodes == 1 and two.nodes == 2
    near, far = 2 * 3 / 4 * 8e6 / 100e9, 2 * 1 / 2 * 2e6 / 10e9
    assert allreduce_s(two, WHOLE, 8e6) == pytest.approx(near + far)
    # A node's four NICs carry the four parts of the other node, once, while those of its own are
    # passed on at 100 GB/s; on one node there are these alone.
    assert gather_s(two, WHOLE, 1e6) == pytest.approx(4e6 / 40e9)
    assert gather_s(System(host=HOST, gpus=4), WHOLE, 1e6) == pytest.approx(3e6 / 100e9)


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_partial_sums_of_rows_are_added_inside_a_node_before_they_cross_a_nic(nodes):
    """Every GPU has a partial sum of 4 x 10 numbers of 2 bytes of every sample; added inside a
    node there is one a node, of which each other node needs its samples' part."""
    system, soft = System(host=HOST, gpus=4 * nodes), replace(BARE, strategy=Strategy.ROW)
    asked = job(system=system, software=soft, batch=4000 * nodes)
    whole = 4000 * nodes * 4 * 10 * 2
    assert stages(asked).exchange_s == pytest.approx(whole * (nodes - 1) / nodes / 40e9)


def test_tcp_costs_its_share():
    tcp = System(host=replace(HOST, rdma=False), gpus=8)
    assert exchange_s(tcp, WHOLE, 7e6) == pytest.approx(2 * 4e6 / 10e9)


@pytest.mark.parametrize(
    ("gpus", "bus", "ring", "pairs"),
    [
        (2, 32e9, 32e9, 32e9),  # behind one switch
        (4, 32e9, 32e9, 16e9 * 3 / 2),  # two share a way out, which two thirds of the bytes take
        (8, 32e9, 20e9, 5e9 * 7 / 4),  # four share the way to the other socket with four sevenths
        (8, 64e9, 20e9, 5e9 * 7 / 4),  # which a faster bus does not widen
    ],
)
def test_gpus_without_nvlink_share_switches_and_the_way_between_sockets(gpus, bus, ring, pairs):
    host = replace(HOST, gpus=gpus, fabric=Fabric.PCIE, intra_bytes_per_s=bus)
    box = System(host=host, gpus=gpus)
    assert exchange_s(box, WHOLE, 1e9) == pytest.approx(1e9 / pairs)
    assert allreduce_s(box, WHOLE, 1e9) == pytest.approx(2 * (gpus - 1) / gpus * 1e9 / ring)


def test_a_box_without_nvlinks_is_as_its_switches_bridges_and_peers_are():
    """Eight GPUs at 32 GB/s, two sockets at 20 GB/s, which four share with four sevenths of what
    they send: 8.75 GB/s each. All behind one switch meet no socket; without peer-to-peer a
    byte passes the bus twice; a bridge takes what goes to the neighbour."""
    box = replace(HOST, gpus=8, fabric=Fabric.PCIE, intra_bytes_per_s=32e9, gpus_per_switch=4)
    four = System(host=box, gpus=4)
    assert exchange_s(four, WHOLE, 1e9) == pytest.approx(1e9 / 32e9)
    staged = replace(box, peer_to_peer=False, gpus_per_switch=2)
    two, staged_two = (System(host=h, gpus=2) for h in (box, staged))
    assert exchange_s(staged_two, WHOLE, 1e9) == pytest.approx(2 * exchange_s(two, WHOLE, 1e9))
    # Of four GPUs two share 16 GB/s for all that they send.
    assert exchange_s(System(host=staged, gpus=4), WHOLE, 3e9) == pytest.approx(3e9 / 8e9)
    bridged = replace(box, bridge_bytes_per_s=100e9, gpus_per_switch=1)
    assert exchange_s(System(host=bridged, gpus=2), WHOLE, 1e9) == pytest.approx(1e9 / 50e9)
    # Of three peers one is at the other end of a bridge; to the two others goes the bus alone.
    assert exchange_s(System(host=bridged, gpus=4), WHOLE, 3e9) == pytest.approx(2e9 / 32e9)


def test_some_pairs_of_a_cube_mesh_of_eight_have_no_nvlink():
    mesh = replace(HOST, gpus=8, fabric=Fabric.MESH)
    for gpus, rate in ((4, 50e9), (8, 25e9)):
        system = System(host=mesh, gpus=gpus)
        assert exchange_s(system, WHOLE, 1e9) == pytest.approx(1e9 / rate)
        summed = 2 * (gpus - 1) / gpus * 1e9 / 50e9
        assert allreduce_s(system, WHOLE, 1e9) == pytest.approx(summed)


@pytest.mark.parametrize(("strategy", "share"), [("table", 1 / 4), ("data_parallel", 1.0)])
def test_adam_over_the_whole_table_streams_it_whatever_the_batch(strategy, share):
    """A gradient is zeroed and read; weights and two moments are read and written. The batch adds
    its own lines: the vectors' gradients, read once, into rows that are read and written."""
    soft = replace(BARE, strategy=Strategy(strategy), sparse_gradients=True)
    for batch in (4000, 40_000):
        asked = job(ranker=replace(FOUR, update=RowUpdate.DENSE_ADAM), software=soft, batch=batch)
        lines = batch * (20 + 2 * 40)
        streamed = 8 * share * 4 * 4 * 1000 * 10
        assert stages(asked).update_s == pytest.approx((lines + streamed) / 1e12)


def test_rows_in_the_hosts_memory_cross_its_bus():
    def with_storage(storage: Storage, share: float = 0.2) -> Job:
        table = Table(rows=1e6, dim=10, count=4, zipf=1.05, storage=storage, cached_share=share)
        return job(ranker=replace(FOUR, tables=(table,)))

    assert stages(with_storage(Storage.HBM)).miss_s == 0
    uvm = stages(with_storage(Storage.UVM)).miss_s
    # Four tables, a row of 40 bytes there and back for 4,000 ids, over four buses at a tenth.
    assert uvm == pytest.approx(4 * 4000 * 40 * 2 / 0.1 / 4 / 20e9)
    cached = stages(with_storage(Storage.UVM_CACHE)).miss_s
    missed = 4000 * lru_miss_rate(0.2e6, 1e6, 1.05)
    assert cached == pytest.approx(4 * missed * 40 * 2 / 4 / 20e9)
    assert stages(with_storage(Storage.UVM_CACHE, 1.0)).miss_s == 0
    assert cached < uvm


def test_adam_over_whole_tables_in_the_hosts_memory_streams_them_over_the_bus():
    """Two tables of 1,000 rows of ten numbers with two moments, there and back, whatever the batch,
    over four buses; the others stay in HBM."""
    there = replace(FOUR.tables[0], count=2, storage=Storage.UVM)
    tables = (there, replace(there, storage=Storage.HBM))
    ranker = replace(FOUR, tables=tables, update=RowUpdate.DENSE_ADAM)
    for batch in (4000, 40_000):
        asked = job(ranker=ranker, batch=batch)
        looked_up = 2 * batch * 40 / 0.1 / 4 / 20e9
        streamed = 2 * 2 * 1000 * 120 / 4 / 20e9
        assert stages(asked).miss_s == pytest.approx(looked_up + streamed)


PARTS = Stages(
    input_s=2.0, miss_s=4.0, lookup_s=3.0, exchange_s=5.0, forward_s=1.0, backward_s=2.0,
    update_s=6.0, allreduce_s=0.0, gpu_s=0.5, host_s=0.0,
)  # fmt: skip


def starts(pipeline: Pipeline, parts: Stages = PARTS) -> np.ndarray:
    spans = schedule(parts, replace(BARE, pipeline=pipeline))
    return np.array([s.start_s for s in spans if s.stage == "forward"])


def test_without_a_pipeline_a_step_is_the_sum_of_its_stages():
    whole = 2.0 + 4.0 + 3.0 + 5.0 + 1.0 + 0.5 + 2.0 + 5.0 + 6.0
    assert np.diff(starts(Pipeline.BASE)) == pytest.approx(whole)


def test_the_backward_pass_hides_half_of_an_all_reduce_and_the_exchange_back_delays_the_rest():
    """3 of it: of the 2 of backward half is hidden, so 2 remain. The link is free after the
    exchange back (5), so the weights are there after 7, later than rows after 5 + 6 of update: no.
    10 of it: 9 remain, after the exchange back: 14 instead of 11. Where all of it is of
    copied rows, nothing hides it and the update waits: 5 + 10 + 6."""
    rest = 2.0 + 4.0 + 3.0 + 5.0 + 1.0 + 0.5 + 2.0
    for reduce_s, copied_s, more in ((3.0, 0.0, 11.0), (10.0, 0.0, 14.0), (10.0, 10.0, 21.0)):
        parts = replace(PARTS, allreduce_s=reduce_s, copied_s=copied_s)
        assert np.diff(starts(Pipeline.BASE, parts)) == pytest.approx(rest + more)


def test_pipelines_hide_input_then_misses_then_the_exchange():
    assert np.diff(starts(Pipeline.SPARSE_DIST)) == pytest.approx(26.5)  # input is hidden
    assert np.diff(starts(Pipeline.PREFETCH)) == pytest.approx(22.5)  # and misses
    # Semi-sync: misses 4, lookup 3, the exchange (5) beside dense (3.5), exchange back 5, update 6.
    assert np.diff(starts(Pipeline.SEMI_SYNC))[1:] == pytest.approx(4.0 + 3.0 + 5.0 + 5.0 + 6.0)


@given(st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8))
def test_no_pipeline_is_slower_than_none(seconds):
    names = ("input_s", "miss_s", "lookup_s", "exchange_s", "forward_s", "backward_s", "update_s",
             "allreduce_s")  # fmt: skip
    parts = replace(PARTS, **dict(zip(names, seconds, strict=True)))
    base = starts(Pipeline.BASE, parts)[-1]
    for pipeline in (Pipeline.SPARSE_DIST, Pipeline.PREFETCH):
        assert starts(pipeline, parts)[-1] <= base + 1e-9


def test_no_stream_does_two_things_at_once():
    for pipeline in Pipeline:
        spans = schedule(PARTS, replace(BARE, pipeline=pipeline))
        for stream in ("copy", "gpu", "link"):
            mine = sorted((s.start_s, s.end_s) for s in spans if s.stream == stream)
            assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(mine))


def test_the_host_is_the_floor_of_small_batches_and_added_hidden_or_neither():
    slow = replace(BARE, host_s=5e-3)
    for batch in (4, 4 * 10**6):
        gpu_s = step_s(job(batch=batch))
        for host_time, expected in (
            (HostTime.EXPOSED, gpu_s + 5e-3),
            (HostTime.PARTLY, (gpu_s**2 + 5e-3**2) ** 0.5),
            (HostTime.HIDDEN, max(gpu_s, 5e-3)),
        ):
            soft = replace(slow, host_time=host_time)
            assert step_s(job(software=soft, batch=batch)) == pytest.approx(expected)
    without = step_s(job(software=replace(BARE, pipeline=Pipeline.BASE)))
    waits = replace(slow, pipeline=Pipeline.BASE, host_time=HostTime.PARTLY)  # nothing hides it
    assert step_s(job(software=waits)) == pytest.approx(without + 5e-3)


def test_the_host_of_what_crosses_nodes_may_be_hidden_less():
    soft = replace(BARE, host_s=5e-3, host_time=HostTime.PARTLY)
    soft = replace(soft, host_time_across=HostTime.EXPOSED)
    for gpus, exposed in ((4, False), (8, True)):
        asked = job(software=soft, system=System(host=HOST, gpus=gpus), batch=10**6)
        gpu_s = step_s(replace(asked, software=BARE))
        expected = gpu_s + 5e-3 if exposed else (gpu_s**2 + 5e-3**2) ** 0.5
        assert step_s(asked) == pytest.approx(expected)


def test_a_gpu_that_reads_less_may_send_more_and_then_it_sends_while_others_read():
    """One GPU reads 100 ids of a wide table, the others a row of each of many: what is summed is of
    one GPU, not the longest reading of one and the longest sending of another."""
    heavy = Table(rows=1000, dim=10, ids_per_sample=(100.0,))
    light = Table(rows=1000, dim=10, count=3)
    asked = job(ranker=replace(FOUR, tables=(heavy, light)), software=replace(BARE, id_s=1e-12))
    plan, parts = asked.plan.sharded, stages(asked)
    assert plan.ids.tolist() == [100.0, 1.0, 1.0, 1.0] or sorted(plan.ids) == [1, 1, 1, 100]
    one = replace(asked, ranker=replace(FOUR, tables=(heavy,)))
    alone = stages(one)
    assert parts.lookup_s == pytest.approx(alone.lookup_s)
    assert parts.update_s == pytest.approx(alone.update_s)
    assert parts.exchange_s == pytest.approx(alone.exchange_s)


def test_ids_are_sorted_for_sgd_too_but_where_each_gradient_is_scattered():
    """Of four tables each GPU has one: 4,000 ids, each a tenth of a nanosecond."""
    sorts = replace(BARE, id_s=1e-10)
    scatters, took = replace(sorts, sgd_sorts=False), 4000 * 1e-10
    for update, soft, sorted_once in (
        (RowUpdate.SGD, sorts, True),
        (RowUpdate.SGD, scatters, False),
        (RowUpdate.ADAGRAD, scatters, True),
    ):
        asked = job(software=soft, ranker=replace(FOUR, update=update))
        without = replace(asked, software=replace(soft, id_s=0.0))
        assert stages(asked).lookup_s - stages(without).lookup_s == pytest.approx(took)
        more = stages(asked).update_s - stages(without).update_s
        assert more == pytest.approx(took * sorted_once)


@pytest.mark.parametrize("field", ["hbm", "switch", "nic", "fp16", "host"])
def test_a_faster_part_is_never_slower(field):
    for software in SOFTWARE.values():
        eight = job(system=System(host=HOST, gpus=8), software=software, batch=8192, reach=REACH)
        better = replace(REACH, **{field: min(1.0, getattr(REACH, field) * 1.1)})
        assert step_s(replace(eight, reach=better)) <= step_s(eight) * (1 + 1e-12)


def test_a_gpu_without_tf32_computes_in_float32():
    old = replace(HOST, gpu=replace(GPU, tf32_flops=None))
    asked = job(system=System(host=old, gpus=4), precision=Precision.TF32)
    assert stages(asked).dense_s == pytest.approx(1000 * 6e6 / 10e12)
