"""What the host launches in a step of tables on the GPUs, for which of them; what graphs replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.cluster.machine import Precision, System
from persia_sim.presets.costs import CATALOGUE
from persia_sim.sharded.plan import HostTime, Strategy
from persia_sim.sharded.software import SOFTWARE
from persia_sim.sharded.stages import host_s, stages, updates_s
from tests.persia_sim.test_gpu_sharded import BARE, FOUR, HOST, RANKERS, job


def test_the_catalogue_launches_as_eager_pytorch_does():
    """The catalogue's figures stand without the systems with tables on GPUs, and are one's."""
    torch, found = SOFTWARE["torch"], CATALOGUE.launching
    assert found.layer_s == torch.launch_s * torch.layer_kernels
    assert (found.step_s, found.sync_s) == (torch.host_s, torch.host_multi_s)
    assert found.casts == torch.casts and torch.source in found.source


def test_a_step_launches_kernels_for_each_layer_and_each_table_or_each_width_of_them():
    """Eight a layer of two, half as many more where they are cast; five a table of four, or of one
    width; those of tables four times where one thread has four GPUs; none of layers that are
    replayed."""
    soft = replace(BARE, launch_s=1e-6, layer_kernels=8.0, table_kernels=5.0)
    two = replace(FOUR, dense_layers=2)
    apart = replace(soft, fused_tables=False)
    for software, precision, expected in (
        (soft, Precision.FP32, 16 + 5),
        (apart, Precision.FP32, 16 + 20),
        (replace(soft, casts=True), Precision.FP32, 16 + 5),
        (replace(soft, casts=True), Precision.FP16, 24 + 5),
        (replace(apart, tables_by_one_thread=True), Precision.FP32, 16 + 4 * 20),
        (replace(apart, layers_replayed=True), Precision.FP32, 20),
    ):
        asked = job(software=software, ranker=two, precision=precision)
        assert stages(asked).host_s == pytest.approx(expected * 1e-6)
        quick = System(host=replace(HOST, core_speed=2.0), gpus=4)
        assert stages(replace(asked, system=quick)).host_s == pytest.approx(expected * 0.5e-6)


@given(RANKERS, st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_the_host_launches_no_longer_for_more_gpus_but_for_the_tables_of_one_thread(
    ranker, gpus, machines, fused
):
    """A thread for each GPU launches while the others do. One thread for tables launches those of
    a machine's GPUs, whatever other machines do; of layers as before."""
    apart = replace(
        BARE,
        launch_s=1e-6,
        table_kernels=5.0,
        fused_tables=fused,
        host_s=1e-3,
        strategy=Strategy.ROW,
    )
    together = replace(apart, tables_by_one_thread=True)
    system = System(host=replace(HOST, gpus=gpus), gpus=gpus * machines)
    one = System(host=replace(HOST, gpus=1), gpus=1)
    tables = ranker.table_widths if fused else ranker.table_count
    alone_s, each_s, all_s = (
        host_s(job(software=soft, ranker=ranker, system=where))
        for soft, where in ((together, one), (apart, system), (together, system))
    )
    assert each_s == pytest.approx(alone_s)
    assert all_s - each_s == pytest.approx((gpus - 1) * tables * 5e-6)


def test_gpus_of_one_thread_sort_their_ids_one_after_the_other():
    """Each of four GPUs has one of four tables; two machines of two sort at the same time."""
    sorts = replace(BARE, id_s=1e-10, tables_by_one_thread=True)
    without = stages(job(software=replace(sorts, id_s=0.0))).update_s
    for gpus, before in ((4, 4), (2, 2), (1, 1)):
        system = System(host=replace(HOST, gpus=gpus), gpus=4)
        parts = stages(job(software=sorts, system=system))
        assert parts.update_s - without == pytest.approx(before * 4000 * 1e-10)
    # Two tables on four GPUs, two of a machine: of one there both, of the other none.
    few = replace(FOUR, tables=(replace(FOUR.tables[0], count=2),))
    pairs = System(host=replace(HOST, gpus=2), gpus=4)
    asked = job(software=replace(sorts, strategy=Strategy.SLOT), system=pairs, ranker=few)
    sorting = updates_s(asked) - updates_s(replace(asked, software=replace(BARE, id_s=0.0)))
    assert sorting[:2].tolist() == pytest.approx([2 * 4000 * 1e-10] * 2)


def test_a_network_whose_layers_nobody_counted_has_as_many_as_its_multiplications_suggest():
    for macs, layers in ((2.46e6, 8.0), (16 * 2.46e6, 16.0)):
        assert replace(FOUR, dense_macs=macs).layers == pytest.approx(layers)
    assert replace(FOUR, dense_layers=3).layers == 3


def test_what_a_step_has_once_is_paid_where_it_is_met():
    once = replace(BARE, host_s=1e-3, host_multi_s=4e-3, host_exchange_s=8e-3)
    one, four = (System(host=HOST, gpus=gpus) for gpus in (1, 4))
    copies = replace(once, strategy=Strategy.DATA_PARALLEL)
    for asked, expected in (
        (job(software=once, system=one), 1),
        (job(software=once, system=four), 1 + 4 + 8),
        (job(software=copies, system=four), 1 + 4),
    ):
        assert stages(asked).host_s == pytest.approx(expected * 1e-3)


def test_replayed_kernels_take_the_gpu_their_least_time_and_the_host_none():
    """Two layers of eight and a width of eight; half as long with four times the bandwidth."""
    graphs = replace(BARE, launch_s=7.0, replay_s=1e-6, host_time=HostTime.HIDDEN)
    layers = replace(graphs, layers_replayed=True, host_time=HostTime.EXPOSED)
    two = replace(FOUR, dense_layers=2)
    for times, relative in ((1, 1.0), (4, 0.5)):
        system = System(host=HOST.with_gpu(hbm_bytes_per_s=times * 900e9), gpus=4)
        parts = stages(job(software=graphs, system=system, ranker=two))
        assert parts.gpu_s == pytest.approx(24e-6 * relative) and parts.host_s == 0
        parts = stages(job(software=layers, system=system, ranker=two))  # the width is launched
        assert parts.gpu_s == pytest.approx(16e-6 * relative) and parts.host_s == 8 * 7.0
