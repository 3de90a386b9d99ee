"""Costs follow the machines: what is faster is so in its own stage, what is borrowed is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from persia_sim.base.command_line import read_options
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, run, scenario_of
from persia_sim.cluster.allreduce import allreduce_s, exchange_s, gather_s
from persia_sim.cluster.demand import demand
from persia_sim.cluster.machine import Fabric, Precision, System
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.tables import RowUpdate, Table
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import MACHINES, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.fitted import REACH
from persia_sim.report.measure import throughput
from persia_sim.report.report import report
from persia_sim.sharded.command import ShardedOptions, run_sharded
from persia_sim.sharded.command import job_of as job_of_sharded
from persia_sim.sharded.compare import (
    comparison,
    dense_as,
    fitting_gpus,
    job_of,
    launching_s,
    on_gpus,
    sides,
)
from persia_sim.sharded.plan import HostTime
from persia_sim.sharded.presets import ranker_of
from persia_sim.sharded.software import SOFTWARE
from persia_sim.sharded.stages import Job, chain_s, device_step_s, fits, launched_s, stages, step_s
from tests.persia_sim.hand_world import facts_of

PRESETS = [
    SimulateOptions(),
    SimulateOptions(cluster="v100-paper", workload="kwai-video"),
    SimulateOptions(cluster="v100-2021-09", workload="criteo-ad", ranks=16),
]


def with_host(scenario: Scenario, role: str, **changes: float) -> Scenario:
    part = getattr(scenario.cluster, role)
    changed = replace(part, host=replace(part.host, **changes))
    return replace(scenario, cluster=replace(scenario.cluster, **{role: changed}))


def with_gpu(scenario: Scenario, **changes: float) -> Scenario:
    return replace(scenario, cluster=scenario.cluster.with_gpu(**changes))


STAGES = {
    "NIC of GPU hosts": (
        lambda s: with_host(s, "nn", nic_bytes_per_s=10 * s.cluster.nn.host.nic_bytes_per_s),
        lambda need: need.all_reduce_s,
    ),
    "links between GPUs": (
        lambda s: with_host(s, "nn", intra_bytes_per_s=10 * s.cluster.nn.host.peer_bytes_per_s),
        lambda need: need.all_reduce_s,
    ),
    "GPU": (
        lambda s: with_gpu(s, fp32_flops=2 * s.cluster.gpu.fp32_flops),
        lambda need: need.compute_s,
    ),
    "bus": (
        lambda s: with_gpu(s, pcie_bytes_per_s=2 * s.cluster.gpu.pcie_bytes_per_s),
        lambda need: need.fetch.copy_in_s + need.push.copy_out_s,
    ),
    "cores of GPU hosts": (lambda s: with_host(s, "nn", core_speed=2.0), lambda need: need.load_s),
    "cores of workers": (
        lambda s: with_host(s, "embedding_workers", core_speed=2.0),
        lambda need: need.fetch.worker_pool_s + need.push.worker_scatter_s,
    ),
    "cores of servers": (
        lambda s: with_host(s, "servers", core_speed=2.0),
        lambda need: float(need.fetch.server_s.max() + need.push.server_update_s.max()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", PRESETS, ids=lambda options: options.cluster)
@pytest.mark.parametrize("costs", ["its own", "the catalogue's"])
@pytest.mark.parametrize("part", STAGES)
def test_what_is_faster_never_leaves_its_own_stage_unchanged(part, costs, options):
    scenario = scenario_of(options)
    if costs != "its own":
        scenario = replace(scenario, costs=CATALOGUE)
    faster, stage = STAGES[part]
    assert stage(demand(faster(scenario))) < 0.995 * stage(demand(scenario))


def test_two_bytes_travel_and_multiply_faster_than_four():
    """A V100's tensor cores have eight times its float32 rate, and gradients half the bytes."""
    base = replace(scenario_of(PRESETS[2]), costs=CATALOGUE)
    reach = replace(REACH, fp16=0.5, fp32=0.5, activation_passes=0.0, inter_latency_s=0.0,
                    intra_latency_s=0.0)  # fmt: skip
    base = replace(base, costs=replace(CATALOGUE, reach=reach, launching=None))
    half = replace(base, workload=replace(base.workload, precision=Precision.FP16))
    four, two = demand(base), demand(half)
    assert two.compute_s == pytest.approx(four.compute_s * 15.7 / 125)
    assert two.all_reduce_s == pytest.approx(four.all_reduce_s / 2, rel=0.02)  # whole layers


@pytest.mark.parametrize("name", [n for n, host in MACHINES.items() if host.gpus])
def test_both_kinds_of_training_sum_the_gradient_as_fast(name):
    """One law: 64 GPUs on eight machines, of the same workload."""
    work = replace(workloads()["criteo-syn1"], precision=Precision.FP16)
    base = scenario_of(SimulateOptions(mode=Mode.SYNC, tau=4))
    nn = replace(base.cluster.nn, host=MACHINES[name], cores_per_process=8,
                 ram_bytes_per_process=6e10)  # fmt: skip
    scenario = replace(base, cluster=replace(base.cluster, nn=nn), workload=work, costs=CATALOGUE)
    system = System(host=MACHINES[name], gpus=64)
    job = Job(ranker=ranker_of(work), system=system, software=SOFTWARE["torchrec"], reach=REACH,
              batch=scenario.batch)  # fmt: skip
    assert demand(scenario).all_reduce_s == pytest.approx(stages(job).allreduce_s)


@pytest.mark.parametrize("fabric", list(Fabric))
def test_a_collective_waits_for_its_hops_however_little_it_sends(fabric):
    box = replace(MACHINES["dgx-a100"], fabric=fabric)
    reach = replace(REACH, intra_latency_s=1e-6, inter_latency_s=1e-3)
    one, four = System(host=box, gpus=8), System(host=box, gpus=32)
    assert allreduce_s(one, reach, 1e-9) == pytest.approx(14e-6)
    assert allreduce_s(four, reach, 1e-9) == pytest.approx(14e-6 + 4e-3)  # a tree of depth 2
    assert exchange_s(one, reach, 1e-9) == pytest.approx(1e-6)
    assert exchange_s(four, reach, 1e-9) == pytest.approx(1e-3)
    assert gather_s(four, reach, 1e-9) == pytest.approx(7e-6 + 3e-3)


def mine(tmp_path: Path, body: str) -> Scenario:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "gcp-100t"\n{body}')
    return scenario_of(SimulateOptions(cluster=str(path), workload="criteo-syn1", steps=12))


def test_another_machine_brings_its_own_nic_price_and_source(tmp_path):
    found = mine(tmp_path, '[nn]\nhost = "p5.48xlarge"\n').cluster
    assert found.nn.host == MACHINES["p5.48xlarge"]
    assert found.usd_per_hour == pytest.approx(8 * 98.32 + (100 * 1007 + 30 * 45251) / 730)


def test_no_price_and_no_source_outlive_an_edit(tmp_path):
    edited = mine(tmp_path, "[servers.host]\nnic_bytes_per_s = 1.25e10\n")
    host = edited.cluster.servers.host
    assert (host.name, host.usd_per_hour, host.source) == (
        "m2-ultramem-416, edited",
        0,
        "a file, from m2-ultramem-416",
    )
    told = facts_of(report(simulate(edited)))
    assert told["cost"] == "unknown: no usd_per_hour of m2-ultramem-416, edited"
    priced = mine(tmp_path, "[servers.host]\nnic_bytes_per_s = 1.25e10\nusd_per_hour = 60.0\n")
    assert priced.cluster.usd_per_hour == pytest.approx((8 * 21888 + 100 * 1007) / 730 + 30 * 60)
    renamed = mine(tmp_path, '[servers.host]\nname = "ours"\n').cluster.servers.host
    assert renamed == replace(MACHINES["m2-ultramem-416"], name="ours")


@pytest.mark.parametrize("options", PRESETS, ids=lambda options: options.cluster)
def test_a_published_run_borrows_nothing_and_is_not_extrapolated(options):
    need = demand(scenario_of(options))
    assert need.borrowed == () and need.extrapolated == ()


def test_constants_of_other_machines_are_named(tmp_path):
    need = demand(mine(tmp_path, "[nn.host]\nnic_bytes_per_s = 5e10\n"))
    assert need.borrowed[0].startswith("GPU, all-reduce and loaders of a2-highgpu-8g, edited as")
    assert "copy_in, copy_out assumed" in need.borrowed[-1]
    workers = mine(tmp_path, '[embedding_workers]\nhost = "2 x E5-2680 v4"\n')
    assert demand(workers).borrowed == ()  # of Persia's own runs, too
    found = demand(replace(workers, costs=CATALOGUE)).borrowed  # it follows machines
    launching, shares, assumed = found
    assert launching.startswith("launching as torch's (PyTorch, eager: ")
    assert shares == "shares of rates fitted to published steps on V100 to B200"
    assert "fitted" not in assumed


def test_the_multiplications_of_a_private_network_are_borrowed_by_every_other(tmp_path):
    def borrowed(cluster: str, workload: str, **changes: Any) -> tuple[str, ...]:
        return demand(
            scenario_of(SimulateOptions(cluster=cluster, workload=workload, **changes))
        ).borrowed

    said = ("GPU's rate as fitted to kwai-video's private network",)
    assert borrowed("v100-paper", "criteo-ad") == said
    assert borrowed("v100-paper", "kwai-video") == borrowed("v100-2021-09", "criteo-ad") == ()
    file = tmp_path / "mine.toml"
    file.write_text('base = "v100-paper"\n[nn.host]\nnic_bytes_per_s = 5e10\n')
    assert borrowed(str(file), "criteo-ad")[0] == said[0]
    rate = {"device": "V100", "fixed_s": 0, "flops_per_s": [[512, 1e12]]}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"schema": 3, "gpu": rate}))
    assert borrowed("v100-paper", "criteo-ad", profile=profile) == ()


def test_both_sides_of_a_comparison_have_one_dense_network():
    scenario = scenario_of(SimulateOptions(workload="criteo-syn1", mode=Mode.SYNC, steps=20))
    job = job_of(scenario, SOFTWARE["hugectr"])
    need = demand(replace(scenario, costs=dense_as(scenario.costs, job)))
    parts = stages(job)
    assert need.compute_s == pytest.approx(parts.dense_s + launching_s(job))
    assert launching_s(job) >= chain_s(job, tables=False), "the host's share comes on top"
    assert need.all_reduce_s == pytest.approx(parts.allreduce_s)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", SOFTWARE)
def test_no_system_multiplies_faster_than_the_data_sheet_says(name, precision):
    work = replace(workloads()["criteo-syn1"], precision=precision)
    job = job_of(
        replace(scenario_of(SimulateOptions(workload="criteo-syn1")), workload=work), SOFTWARE[name]
    )
    peak = job.system.host.chip.peak_flops(job.system.host.chip.arithmetic(precision))
    assert stages(job).dense_s >= 6 * job.ranker.dense_macs * job.per_gpu / peak


@pytest.mark.parametrize("host_time", list(HostTime))
def test_launching_follows_one_law_on_both_sides_of_a_comparison(host_time):
    """Without rows both sides are one and the same: a step of a dense network and its all-reduce,
    which the host launches meanwhile, hidden or not."""
    by_hand = {"hidden": 4.0, "partly": 5.0, "exposed": 7.0}
    assert launched_s(4.0, 3.0, host_time) == by_hand[host_time]
    soft = replace(SOFTWARE["tf2"], host_time=host_time, host_exchange_s=0.0, id_s=0.0)
    job = replace(
        job_of(scenario_of(SimulateOptions(workload="criteo-ad", ranks=8)), SOFTWARE["tf2"]),
        software=soft,
    )
    bare = replace(job.ranker, tables=(Table(rows=1, dim=1e-3, ids_per_sample=(1e-9,)),))
    bare = replace(bare, dense_widths=job.ranker.widths, update=RowUpdate.SGD)
    soft = replace(soft, table_kernels=0.0)
    for batch in (8, 800_000):
        alone = replace(job, ranker=bare, software=soft, batch=batch, reads_files=False)
        parts = stages(alone)
        reduced_s = device_step_s(parts, soft) - parts.dense_s - parts.gpu_s
        hybrid_s = parts.dense_s + launching_s(alone) + reduced_s
        hops_s = parts.input_s + 2 * parts.exchange_s  # of nothing
        assert hybrid_s == pytest.approx(step_s(alone), abs=hops_s + 1e-9)


PRESENT = [(cluster, work) for cluster in ("v100-2021-09", "v100-paper", "gcp-100t")
           for work in ("criteo-ad", "taobao-ad", "criteo-syn1", "kwai-video")]  # fmt: skip


@pytest.mark.parametrize(("cluster", "work"), PRESENT)
@pytest.mark.parametrize("batch", [64, 512, 8192])
def test_two_commands_answer_one_question_alike(cluster, work, batch):
    """`--compare sharded` is the step of `sharded` where no noise, loader or fault is beside."""
    options = SimulateOptions(
        cluster=cluster, workload=work, batch_per_rank=batch, ranks=8, gpu_cv=0.0, steps=24
    )
    base = scenario_of(options)
    free = replace(base.costs, load=replace(base.costs.load, fixed_s=0.0, per_item_s=0.0))
    base = replace(base, costs=free)
    gpus = fitting_gpus(job_of(base, SOFTWARE["torchrec"]), 64)
    if not gpus:
        assert fitting_gpus(job_of(base, SOFTWARE["torchrec"]), 64) is None
        return
    other, need = on_gpus(base, gpus, SOFTWARE["torchrec"])
    machine = base.cluster.nn.host.name
    asked = ShardedOptions(model=work, system=machine, gpus=gpus, batch_per_gpu=batch)
    alone = job_of_sharded(asked)
    rate = alone.batch / step_s(alone)
    assert throughput(simulate(other, need=need)).mean == pytest.approx(rate, rel=0.03)


def test_a_cluster_without_published_costs_launches_its_network_and_says_so(tmp_path):
    """Eight H100 in one host: the GPUs need a tenth of a millisecond for 512 samples, their host
    milliseconds, as `sharded` has it; and the screen says how much of the step that is."""
    base = replace(mine(tmp_path, '[nn]\nhost = "p5.48xlarge"\n'), costs=CATALOGUE)
    base = replace(base, cluster=base.cluster.resized(8))
    work = replace(workloads()["criteo-ad"], precision=Precision.FP16)
    base = replace(base, workload=work)
    need, soft = demand(base), SOFTWARE["torch"]
    kernels = len(work.mlp) * soft.layer_kernels * 1.5
    expected = soft.host_s + soft.host_multi_s + soft.launch_s * kernels
    assert need.launching_s == pytest.approx(expected / MACHINES["p5.48xlarge"].core_speed)
    assert need.compute_s > 0.9 * need.launching_s > 1e-3
    run = simulate(base)
    share = need.launching_s / report(run).step_s.mean
    borrows = facts_of(report(run))["borrowed constants"]
    assert "launching as torch's" in borrows
    assert f"{share:.0%} of this step is launching" in borrows
    alone = replace(base, cluster=base.cluster.resized(1))
    assert demand(alone).launching_s == pytest.approx(
        need.launching_s - soft.host_multi_s / MACHINES["p5.48xlarge"].core_speed
    )


def test_on_other_machines_an_all_reduce_inside_a_host_follows_its_links(tmp_path):
    """What the fitted clusters take beside their messages stays theirs: 7.16 ms on 8 V100 of 2021
    are nothing that NVLinks of H100 wait for."""
    own = scenario_of(SimulateOptions(ranks=8, workload="criteo-ad", mode=Mode.SYNC))
    assert demand(own).sync_overhead_s == own.costs.dense_sync.overhead_s > 5e-3
    other = mine(tmp_path, '[nn]\nhost = "p5.48xlarge"\n')
    one, two = (replace(other, cluster=other.cluster.with_ranks(n)) for n in (8, 16))
    assert demand(one).sync_overhead_s == 0
    assert demand(two).sync_overhead_s == own.costs.dense_sync.overhead_s, "it crosses NICs"


def test_the_screen_says_how_much_of_a_step_is_borrowed(tmp_path):
    other = mine(tmp_path, '[nn]\nhost = "p5.48xlarge"\n')
    result = report(simulate(other))
    share = sum(result.blame.get(name, 0.0) for name in ("GPU", "all-reduce", "loaders"))
    assert 0 < share < 1
    borrows = facts_of(result)["borrowed constants"]
    assert f"{share:.0%} of this step rests on constants of other machines" in borrows
    published = report(simulate(scenario_of(SimulateOptions(steps=12))))
    assert "borrowed constants" not in facts_of(published)


@pytest.mark.parametrize("ranks", [16, 64, 128])
def test_an_all_reduce_inside_an_nvlink_domain_needs_no_nic_on_either_side(tmp_path, ranks):
    """Up to 64 GPUs are one ring inside; two domains of eight hosts share the NICs of these."""
    wide = mine(tmp_path, "[nn.host]\nnvlink_domain = 64\n")
    wide = replace(wide, cluster=wide.cluster.with_ranks(ranks), mode=Mode.SYNC, tau=None)
    job = job_of(wide, SOFTWARE["hugectr"])
    need = demand(replace(wide, costs=dense_as(wide.costs, job)))
    assert need.all_reduce_s == pytest.approx(stages(job).allreduce_s)
    own, size = demand(wide), wide.workload.dense_gradient_bytes
    hop, reach = wide.costs.reach.intra_latency_s, wide.costs.reach
    inside, local = reach.inside(wide.cluster.nn.host, 8), min(ranks, 64)
    expected = 2 * (local - 1) * (hop + size / local / inside)
    if ranks == 128:  # two groups, each of eight NICs
        out = 8 * reach.outside(wide.cluster.nn.host)
        expected += 2 * reach.inter_latency_s + size / out
    assert own.all_reduce_s == pytest.approx(expected)


def test_half_of_the_gpus_of_each_host_are_half_of_an_nvlink_domain(tmp_path):
    text = "[nn]\nprocesses_per_host = 4\nhosts = 16\n[nn.host]\nnvlink_domain = 64\n"
    cluster = mine(tmp_path, text).cluster
    assert cluster.nn.near == 32 and (cluster.system.local, cluster.system.nodes) == (32, 2)


def test_a_share_that_was_fitted_in_float32_is_extrapolated_in_two_bytes():
    base = scenario_of(SimulateOptions(workload="criteo-syn1"))
    half = replace(base, workload=replace(base.workload, precision=Precision.FP16))
    assert [demand(each).extrapolated for each in (base, half)] == [(), ("gpu_efficiency",)]
    assert demand(replace(half, costs=CATALOGUE)).extrapolated == ()


LOUD = {"gpu_cv": 0.5, "slow": ("rank:1x2", "worker:0x9")}


@pytest.mark.parametrize("changes", [{}, LOUD], ids=str)
def test_what_was_simulated_is_compared_as_the_report_has_it(changes):
    """One run, one answer: rate, interval and price; and the other side has an interval, too."""
    run = simulate(scenario_of(SimulateOptions(workload="criteo-ad", ranks=8, steps=40, **changes)))
    ours, tables = sides(run)
    assert ours.samples_per_s == throughput(run) and ours.usd == report(run).usd_per_million_samples
    rate = throughput(run)
    hybrid, on_gpus, *_ = comparison(run).lines
    assert f"{rate.mean:,.0f} samples/s +-{rate.relative:.2%} on 8 GPUs" in hybrid
    assert 0 < tables.samples_per_s.half_width < inf and str(tables) in on_gpus
    assert "; 90 % band " in hybrid and "; 90 % band " in on_gpus


def test_both_sides_of_a_comparison_have_the_same_noise_slow_ranks_and_loaders():
    options = {"cluster": "v100-2021-09", "workload": "criteo-ad", "steps": 60}

    def rates(**changes: Any) -> list[float]:
        scenario = scenario_of(SimulateOptions(**options, **changes))
        return [side.samples_per_s.mean for side in sides(simulate(scenario))]

    calm = rates(gpu_cv=0.0)
    job = job_of(scenario_of(SimulateOptions(**options)), SOFTWARE["torchrec"])
    # A rank that is four times as slow computes three times longer; launching is beside it.
    slow = rates(gpu_cv=0.0, slow=("rank:0x4",))
    step, dense_s = step_s(job), stages(job).dense_s
    assert slow[0] < 0.95 * calm[0]
    assert slow[1] / calm[1] == pytest.approx(step / (step + 3 * dense_s), rel=1e-3)
    # One loader binds both.
    one = rates(gpu_cv=0.0, loaders=1)
    assert one[0] < 0.5 * calm[0] and one[1] == pytest.approx(one[0], rel=0.05)
    noisy = rates(gpu_cv=0.5)[1]
    assert noisy < 0.98 * calm[1]
    assert rates(gpu_cv=0.0, slow=("server:0x1.5",))[1] == calm[1], "there are no servers"
    assert rates(gpu_cv=0.5, seed=1)[1] != noisy


@pytest.mark.long
def test_a_comparison_takes_as_many_gpus_as_have_room():
    scenario = scenario_of(SimulateOptions(workload="criteo-syn1", steps=20))
    run = simulate(scenario)
    hybrid, tables = sides(run)
    assert hybrid.gpus == 64 and tables.gpus % 8 == 0
    assert tables.gpus * 40e9 > workloads()["criteo-syn1"].rows * 129 * 4
    found = comparison(run)
    said = "\n".join(found.lines)
    assert f"on {tables.gpus:,} GPUs" in said and "fewer have no room" in said
    assert (hybrid.batch, tables.batch) == (64 * 8192, tables.gpus * 8192), "as large a GPU"
    assert all(f"GPUs, {side.batch:,} a step, $" in said for side in (hybrid, tables))
    times = hybrid.samples_per_s.mean / tables.samples_per_s.mean
    assert found.times.value == pytest.approx(times)
    a_gpu = found.times.times(tables.gpus / hybrid.gpus)
    assert f"{found.times:.3g} times the rate (a GPU: {a_gpu:.3g}) and" in said
    assert found.times.decisive in said
    small = replace(scenario, workload=replace(workloads()["criteo-ad"], batch_per_rank=512))
    assert [side.gpus for side in sides(simulate(small))] == [64, 64]
    hopeless = replace(scenario, workload=replace(scenario.workload, rows=1e16, dim=128))
    without = comparison(simulate(hopeless))
    assert "no number up to 2,048 has room" in without.lines[1] and without.times is None


TOO_MANY_ROWS = """
name = "huge"
fields = 4
ids_per_field = 1.0
dim = 64
rows = 1e16
mlp = [64, 1]
batch_per_rank = 512
source = "a test"
"""


@pytest.mark.parametrize("workload", ["criteo-syn1", TOO_MANY_ROWS], ids=["large", "huge"])
def test_who_compares_rows_that_servers_cannot_hold_is_told_whether_gpus_can(workload, tmp_path):
    """The number of GPUs is the one from which on they have room, each with its batch of now."""
    if workload == TOO_MANY_ROWS:
        workload = str(tmp_path / "huge.toml")
        Path(workload).write_text(TOO_MANY_ROWS)
    words = ["--workload", workload, "--server-hosts", "1", "--steps", "20"]
    with pytest.raises(ValueError, match="memory per server is") as alone:
        run(read_options(SimulateOptions, words, "persia-sim"))
    assert "GPUs" not in str(alone.value), "nobody asked"
    with pytest.raises(ValueError, match="memory per server is") as both:
        run(read_options(SimulateOptions, [*words, "--compare", "sharded"], "persia-sim"))
    message = str(both.value)
    if workload != "criteo-syn1":
        assert message.endswith("no room either, on no number of them up to 2,048")
        return
    [gpus] = re.findall(r"have room from (\d+) GPUs of \S+ on, and this cluster has 64", message)
    host = scenario_of(SimulateOptions(workload="criteo-syn1")).cluster.system.host
    for count, has_room in ((int(gpus), True), (int(gpus) - host.gpus, False)):
        job = job_of(scenario_of(SimulateOptions(workload="criteo-syn1")), SOFTWARE["torchrec"])
        batch = count * workloads()["criteo-syn1"].batch_per_rank
        assert fits(replace(job, system=System(host=host, gpus=count), batch=batch)) is has_room


def doubted(scenario: Scenario) -> dict[str, str]:
    return facts_of(report(simulate(replace(scenario, steps=8))))


def test_a_figure_in_a_wrong_unit_that_is_possible_is_asked_about_beside_what_it_makes(tmp_path):
    """Bits for bytes, GHz for times a core, MB and GFLOPS for a thousand times as much."""
    for changes, fact, said in (
        ({"nic_bytes_per_s": 400e9}, "step", "is 4e+11: did you mean 5e+10 (400 Gbit/s)?"),
        ({"core_speed": 3.5}, "step", "is 3.5: did you mean 1 (1 is the measured core"),
        ({"fp16_flops": 312e9}, "step", "is 3.12e+11: did you mean 3.12e+14 (312 TFLOPS)?"),
    ):
        (field,) = changes
        host = "nn.host.gpu" if field == "fp16_flops" else "nn.host"
        made = mine(tmp_path, f"[{host}]\n{field} = {changes[field]}\n")
        _, asked = doubted(made)[fact].split("\n")
        assert asked.startswith(field) and said in asked
    box = replace(MACHINES["dgx-a100"], name="mine").with_gpu(hbm_bytes=40e6)
    assert box.doubts == {"memory": "hbm_bytes of mine is 4e+07: did you mean 4e+10 (40 GB)?"}


def test_no_machine_that_is_sold_is_asked_about():
    assert all(host.doubts == {} for host in MACHINES.values())
    assert "did you mean" not in "".join(doubted(scenario_of(SimulateOptions())).values())
    lonely = replace(MACHINES["c2-standard-30"], nic_bytes_per_s=inf)
    assert lonely.doubts == {}, "without limit is no mistake"


def test_gbit_written_as_gb_are_asked_about_and_more_than_any_machine_has_is_refused(tmp_path):
    lonely = replace(MACHINES["c2-standard-30"], nic_bytes_per_s=100e9)
    assert "is 1e+11: did you mean 1.25e+10 (100 Gbit/s)?" in lonely.doubts["step"]
    with pytest.raises(ValueError, match=r"nic_bytes_per_s.* 4e\+14: machines have"):
        mine(tmp_path, "[nn.host]\nnic_bytes_per_s = 4e14\n")


def test_sharded_asks_about_a_memory_in_megabytes(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text('base = "dgx-a100"\n[gpu]\nhbm_bytes = 80e6\nfp16_flops = 312e9\n')
    said = run_sharded(ShardedOptions(model="dlrm", system=str(path), anyway=True)).splitlines()
    memory = next(k for k, line in enumerate(said) if line.startswith("memory"))
    assert "did you mean 8e+10 (80 GB)?" in said[memory + 1]
    step = next(k for k, line in enumerate(said) if line.startswith("step"))
    assert "did you mean 3.12e+14 (312 TFLOPS)?" in said[step + 1]
