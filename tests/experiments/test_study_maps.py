"""The modes' timeline, the ablation, and the map of hybrid against tables on the GPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from experiments.studies import ablation, modes_timeline, sharded_map
from experiments.studies.ablation import ALL_ON, HALF_ROWS, MERGING, VARIANTS, WINDOW
from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer, shared
from persia_sim.cluster.demand import demand
from persia_sim.cluster.machine import System
from persia_sim.cluster.memory import FORMATS
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.presets.fitted import REACH
from persia_sim.report.measure import throughput
from persia_sim.sharded.compare import launching_s
from persia_sim.sharded.plan import HostTime, Strategy
from persia_sim.sharded.software import SOFTWARE
from persia_sim.sharded.stages import device_step_s, fits, launched_s, step_s
from tests.experiments.raw_runs import read_csv


def of_step(bars, step):
    return {b.stage: (b.start_s, b.end_s) for b in bars if b.step == step}


def lasts(bar: tuple[float, float]) -> float:
    return bar[1] - bar[0]


def test_in_hybrid_the_all_reduce_begins_inside_the_backward_pass():
    options = modes_timeline.Options(steps=16, shown=2)
    for mode, overlaps in ((Mode.RAW_HYBRID, False), (Mode.HYBRID, True)):
        run = modes_timeline.simulated(options, mode)
        bars = of_step(modes_timeline.bars_of(run, range(8, 10)), 8)
        assert (bars["dense_sync"][0] < bars["backward"][1] - 1e-6) == overlaps
        assert bars["dense_sync"][1] > bars["backward"][1]
        whole_s = run.need.all_reduce_s
        assert lasts(bars["dense_sync"]) >= whole_s - 1e-9


def test_the_table_has_the_steps_of_one_rank_from_the_middle_of_the_run(tmp_path, capsys):
    options = modes_timeline.Options(
        modes=("sync", "hybrid"), steps=16, shown=2, cluster_ranks=2, out=tmp_path
    )
    modes_timeline.run(options)
    told = capsys.readouterr().out
    rows = read_csv(tmp_path / "modes_timeline.csv")
    assert {(r["mode"], r["step"]) for r in rows} == set(product(("sync", "hybrid"), "89"))
    for mode in (Mode.SYNC, Mode.HYBRID):
        starts = modes_timeline.simulated(options, mode).stamps[Mark.START]
        step_s = np.diff(starts[0, 5:14]).mean()
        own = [r for r in rows if r["mode"] == mode]
        assert float(own[0]["mean_step_s"]) == pytest.approx(step_s, abs=1e-7)
        assert min(float(r["start_s"]) for r in own) == 0
        assert f"{1e3 * step_s:.1f}" in told
        assert all(float(r["start_s"]) < float(r["end_s"]) for r in own)


@pytest.fixture(scope="module")
def ablated(tmp_path_factory):
    out = tmp_path_factory.mktemp("ablation")
    options = ablation.Options(places=("100T-10Gbit",), ranks=2, steps=16, out=out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *_, **__: None)
        ablation.run(options)
    return options, read_csv(out / "ablation.csv")


@pytest.mark.parametrize("place", ["Kwai", "100T"])
def test_slow_nics_are_those_that_rows_travel_by_and_the_all_reduce_keeps_its_own(place):
    options = ablation.Options()
    usual, slow = (ablation.scenario_of(name, options) for name in (place, f"{place}-10Gbit"))
    assert demand(slow).all_reduce_s == demand(usual).all_reduce_s > 0
    assert {rate for role in (slow.cluster.nn, slow.cluster.embedding_workers, slow.cluster.servers)
            for rate in slow.cluster.nic_rates(role)} == {1.25e9 * 0.97}  # fmt: skip


def test_each_variant_is_simulated_beside_the_one_with_everything_on(ablated):
    options, rows = ablated
    assert [row["variant"] for row in rows] == list(VARIANTS)
    base = float(rows[0]["value"])
    for row in rows:
        assert float(row["difference"]) == pytest.approx(float(row["value"]) / base - 1)
        assert row["binds"] and row["where"] == "100T-10Gbit, 2 GPUs"
    scenario = ablation.scenario_of("100T-10Gbit", options)
    assert (scenario.mode, scenario.tau, scenario.merges) == (Mode.HYBRID, 4, True)
    sync = replace(scenario, mode=Mode.SYNC, tau=None, merge_pushes=None)
    by_name = {row["variant"]: float(row["value"]) for row in rows}
    assert by_name["neither (sync)"] == pytest.approx(throughput(simulate(sync)).mean)
    assert by_name["neither (sync)"] < by_name["all-reduce not overlapped"] < by_name[ALL_ON]


def test_variants_change_one_thing_each():
    options = ablation.Options()
    base = ablation.scenario_of("100T-10Gbit", options)
    assert set(base.cluster.nic_rates(base.cluster.servers)) == {0.97 * 10e9 / 8}
    wire = base.workload.wire
    changed = {name: change(base) for name, change in VARIANTS.items()}
    assert changed[ALL_ON] == base
    assert changed[WINDOW] == replace(base, tau=0)
    assert changed[MERGING].merges is False
    half = changed[HALF_ROWS].workload
    assert half.wire == replace(wire, row_value_bytes=2)
    assert half.rows_bytes / base.workload.rows_bytes == (128 + 1) / (2 * 128)
    assert changed["lookahead, forwarded"].lookahead == "forwarded"
    assert changed["lookahead, forwarded"].steps_ahead == base.tau


def test_a_second_ablation_simulates_only_what_is_missing(ablated, monkeypatch):
    options, rows = ablated

    def again(_):
        raise AssertionError("simulated again")

    monkeypatch.setattr(ablation, "_rate", again)
    found = ablation.simulated(options)
    assert [f"{r['value']}" for r in found] == [row["value"] for row in rows]
    with pytest.raises(AssertionError, match="again"):
        ablation.simulated(replace(options, steps=17))


def test_both_sides_of_the_map_train_the_same_dense_network_as_fast():
    for gpu, software in (("v100", "torchrec"), ("h100", "hugectr")):
        scenario = sharded_map.hybrid_of(gpu, software, 100.0, 1e11, 55_296)
        side = sharded_map.sharded_of(gpu, software, 100.0, 1e11, 55_296)
        assert (side.job.system.gpus, side.job.batch) == (64, scenario.batch)
        parts, need, soft = side.parts, demand(scenario), SOFTWARE[software]
        launching = need.compute_s - parts.dense_s
        # Eight kernels (four where they are fused) a layer of six, cast to two bytes; tables and
        # their exchanges are the sharded side's alone.
        kernels = 6 * soft.layer_kernels * (1.5 if soft.casts else 1.0)
        if soft.host_time is HostTime.HIDDEN:
            memory = (900e9 / side.job.system.host.chip.hbm_bytes_per_s) ** 0.5
            assert launching == pytest.approx(kernels * soft.replay_s * memory)
            assert launching < parts.gpu_s
        else:
            once_s = soft.host_s + soft.host_multi_s
            host_s = (once_s + kernels * soft.launch_s) / side.job.system.host.core_speed
            assert launching == pytest.approx(host_s) and host_s < parts.host_s
        # Rings of eight GPUs and of eight machines, once more for each further bucket.
        hops_s = (len(need.buckets) - 1) * 14 * (REACH.intra_latency_s + REACH.inter_latency_s)
        assert need.all_reduce_s == pytest.approx(parts.allreduce_s + hops_s)


def test_the_all_reduce_takes_the_same_nics_for_as_long_on_both_sides():
    """2-byte gradients round the eight hosts at the rate of RDMA, beside hybrid's rows, too."""
    work = sharded_map.workload_of(1e10, 55_296)
    for nic in (10.0, 100.0):
        scenario = sharded_map.hybrid_of("a100", "torchrec", nic, 1e10, 55_296)
        need, rate = demand(scenario), scenario.cluster.nic_rates(scenario.cluster.nn)[0]
        on_nic_s = sum(bucket.nic_bytes for bucket in need.buckets) / rate
        rdma = nic * 1e9 / 8 * REACH.nic
        assert on_nic_s == pytest.approx(2 * 7 / 8 * 2 * work.weights / rdma)
        assert on_nic_s <= need.all_reduce_s
        rows_out = 8 * need.push.gradient_bytes / rate
        assert shared(scenario, need)["GPU host NICs, out"] == pytest.approx(rows_out + on_nic_s)


def test_one_law_says_on_both_sides_what_hides_the_hosts_time():
    """The other law shortens both sides, each by what it hides of its own launching."""
    place = "a100", "torchrec", 400.0, 1e10, 55_296
    for host_time in HostTime:
        side = sharded_map.sharded_of(*place, host_time)
        device_s = device_step_s(side.parts, side.job.software)
        assert side.job.host_time is host_time
        assert side.step_s == pytest.approx(launched_s(device_s, side.parts.host_s, host_time))
        scenario = sharded_map.hybrid_of(*place, host_time)
        job = replace(side.job, system=System(host=side.job.system.host, gpus=64))
        assert scenario.costs.gpu_fixed_s == pytest.approx(launching_s(job), rel=1e-6)
    own, exposed = (
        sharded_map.software_of("torchrec", h) for h in (sharded_map.OF_SOFTWARE, "exposed")
    )
    assert own == SOFTWARE["torchrec"] and exposed.host_time is own.host_time


@pytest.mark.long
@pytest.mark.minutes  # two: fluid shares of many hosts
def test_rows_that_do_not_fit_64_gpus_take_as_many_as_they_need():
    side = sharded_map.sharded_of("a100", "torchrec", 100.0, 1e14, 55_296)
    assert side.gpus_for_memory == 6250  # 400 TB in 64 GB each
    assert side.job.system.gpus == 6256, "whole machines of eight"
    held = side.job.plan.sharded.bytes
    assert held.sum() == pytest.approx(4e14) and fits(side.job)


@pytest.mark.parametrize("gpu", ["v100", "h100"])
@pytest.mark.parametrize("parameters", [1e10, 1e12])
def test_the_plan_of_the_map_has_room_for_what_is_beside_rows_too(gpu, parameters):
    assert fits(sharded_map.sharded_of(gpu, "torchrec", 100.0, parameters, 55_296).job)


@pytest.mark.parametrize("parameters", [1e10, 6.25e12])
def test_the_other_sides_step_is_that_of_the_fastest_strategy_with_room(parameters):
    """The very step that `persia-sim sharded` prints; columns only where each GPU has one."""
    side = sharded_map.sharded_of("a100", "torchrec", 100.0, parameters, 55_296)
    assert side.step_s == step_s(side.job) and side.plan == side.job.software.strategy
    strategies = sharded_map.strategies_on(side.job.system.gpus)
    assert (Strategy.COLUMN in strategies) == (side.job.system.gpus <= 128)
    jobs = [
        replace(side.job, software=replace(side.job.software, strategy=strategy))
        for strategy in strategies
    ]
    assert side.step_s == min(step_s(job) for job in jobs if fits(job))


def test_hybrid_rents_hosts_that_hold_its_rows_and_is_near_its_best():
    scenario = sharded_map.hybrid_of("a100", "torchrec", 25.0, 1e13, 55_296)
    servers = scenario.cluster.servers
    rows_bytes = 1e13 / 128 * FORMATS["f32-sgd"].row_bytes(128)
    assert servers.processes * servers.ram_bytes_per_process >= rows_bytes
    assert scenario.cluster.nn.host.nic_bytes_per_s == servers.host.nic_bytes_per_s == 25e9 / 8
    assert scenario.cluster.usd_per_hour == pytest.approx(
        8 * 32.77
        + (scenario.cluster.embedding_workers.hosts * 1007 + servers.hosts * (
            45251 if "m2" in servers.host.name else 1007)) / 730
    )  # fmt: skip
    most = sharded_map.cluster_of("a100", 25.0, 256, servers)
    best = answer(replace(scenario, cluster=most)).samples_per_s
    assert answer(scenario).samples_per_s >= 0.95 * best


def test_the_map_is_written_with_its_ratios(tmp_path, capsys):
    options = sharded_map.Options(
        gpus=("a100",), software=("torchrec",), nic_gbit_per_s=(10.0, 200.0), parameters=(1e11,),
        steps=8, out=tmp_path, host_time=("own", "partly"),
    )  # fmt: skip
    sharded_map.run(options)
    rows = read_csv(tmp_path / "sharded_map.csv")
    assert [row["nic_gbit_per_s"] for row in rows] == ["10.0"] * 2 + ["200.0"] * 2
    assert [row["host_time"] for row in rows] == ["exposed", "partly"] * 2
    for row in rows:
        hybrid, rival = (float(row[f"{side}_samples_per_s"]) for side in ("hybrid", "sharded"))
        assert float(row["throughput_ratio"]) == pytest.approx(hybrid / rival)
        price = float(row["sharded_usd_per_hour"]) / rival
        price /= float(row["hybrid_usd_per_hour"]) / hybrid
        assert float(row["dollar_ratio"]) == pytest.approx(price)
        assert float(row["sharded_usd_per_hour"]) == pytest.approx(8 * 32.77)
        assert row["prices"] == "2022-06; CPU hosts 2021-11"
        assert hybrid <= 1.01 * float(row["hybrid_bound_samples_per_s"])
    said = capsys.readouterr().out
    assert "4 cells (4 to run)" in said
    for host_time in ("exposed", "partly"):
        faster = sum(float(r["throughput_ratio"]) > 1 for r in rows if r["host_time"] == host_time)
        assert f"the host's launching {host_time}: hybrid is faster in {faster} and" in said
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    (tmp_path / "cells.jsonl").write_text(lines[0] + '\n{"label": "cut')
    sharded_map.run(replace(options, dry_run=True))
    assert "4 cells (3 to run)" in capsys.readouterr().out
    assert not (tmp_path / "sharded_map.png").exists()
