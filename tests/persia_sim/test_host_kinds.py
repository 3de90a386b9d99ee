"""Several kinds of host in one role: GPUs, NICs, cores, memory and prices of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer, cycles, shared
from persia_sim.cli.example import write_examples
from persia_sim.cluster.allreduce import Algorithm, DenseSync
from persia_sim.cluster.cluster import Cluster, Role
from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import Crash, Target
from persia_sim.cluster.memory import FORMATS, capacity
from persia_sim.cluster.scenario import DenseHome, Discipline, Noise, Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import MACHINES
from persia_sim.presets.from_file import read_cluster
from persia_sim.report.measure import throughput
from persia_sim.report.report import report
from persia_sim.report.sensitivity import gains
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import facts_of
from tests.persia_sim.sim_configurations import small_cluster, small_scenario, uncontended

FACTORS = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@st.composite
def further(draw: st.DrawFn, role: Role) -> Role:
    """A further kind of host of the role, in some respects slower or faster."""
    host = replace(
        role.host,
        name="another",
        core_speed=role.host.core_speed * draw(FACTORS),
        nic_bytes_per_s=role.host.nic_bytes_per_s * draw(FACTORS) / 40,
        memory_bytes_per_s=role.host.memory_bytes_per_s * draw(FACTORS),
    )
    return replace(
        role, host=host, also=(), hosts=draw(st.integers(1, 2)),
        processes_per_host=draw(st.integers(1, role.processes_per_host)),
        cores_per_process=draw(st.integers(1, role.cores_per_process)),
    )  # fmt: skip


@st.composite
def mixed(draw: st.DrawFn, cluster: Cluster) -> Cluster:
    """The cluster with a further kind of host in some of its roles."""
    nn, workers, servers = (
        replace(role, also=(draw(further(role)),)) if draw(st.booleans()) else role
        for role in (cluster.nn, cluster.embedding_workers, cluster.servers)
    )
    if nn.also:
        faster = cluster.gpu.fp32_flops * draw(FACTORS)
        other = nn.also[0].host.with_gpu(name="other", fp32_flops=faster)
        if draw(st.booleans()):
            nn = replace(nn, also=(replace(nn.also[0], host=other),))
    spare = draw(st.integers(0, nn.kinds[-1].processes_per_host - 1))
    ranks = max(nn.processes - spare, 1)
    return replace(cluster, ranks=ranks, nn=nn, embedding_workers=workers, servers=servers)


@st.composite
def of_kinds(draw: st.DrawFn) -> Scenario:
    mode = draw(st.sampled_from(list(Mode)))
    cluster = draw(mixed(small_cluster(4, draw(st.integers(1, 3)), draw(st.integers(1, 2)))))
    return small_scenario(
        mode,
        cluster=cluster,
        steps=draw(st.integers(2, 8)),
        dense_on_nics=mode.has_barrier and draw(st.booleans()),
    )


def split(role: Role, hosts: int) -> Role:
    """The same hosts as two kinds that do not differ."""
    return replace(role, hosts=hosts, also=(replace(role, hosts=role.hosts - hosts),))


@pytest.mark.first_case
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.law8
def test_two_kinds_that_do_not_differ_are_one_in_bytes(mode):
    cluster = small_cluster(6, 4, 3)
    slow = replace(cluster.servers.host, nic_bytes_per_s=0.2e9)
    cluster = replace(cluster, servers=replace(cluster.servers, host=slow))
    two = replace(
        cluster, nn=split(cluster.nn, 1), servers=split(cluster.servers, 2),
        embedding_workers=split(cluster.embedding_workers, 3),
    )  # fmt: skip
    one_kind, two_kinds = (
        simulate(small_scenario(mode, cluster=each), trace=True) for each in (cluster, two)
    )
    assert one_kind.stamps.tobytes() == two_kinds.stamps.tobytes()
    assert one_kind.legs.tobytes() == two_kinds.legs.tobytes()
    assert one_kind.link_bytes == two_kinds.link_bytes
    assert one_kind.link_capacity == two_kinds.link_capacity
    assert one_kind.busy_s == pytest.approx(two_kinds.busy_s)
    bounds = [answer(run.scenario).seconds for run in (one_kind, two_kinds)]
    assert bounds[0] == pytest.approx(bounds[1])
    assert cluster.usd_per_hour == pytest.approx(two.usd_per_hour)


@pytest.mark.long
@settings(max_examples=60)
@given(uncontended(), st.data())
@pytest.mark.law8
def test_max_plus_gives_the_bits_of_a_run_on_several_kinds(scenario, data):
    scenario = replace(scenario, cluster=data.draw(mixed(scenario.cluster)))
    assert simulate(scenario).stamps.tobytes() == instants(scenario).tobytes()


@settings(max_examples=20)
@given(of_kinds())
@pytest.mark.law8
def test_bytes_are_kept_and_no_run_is_faster_than_its_hosts_allow(scenario):
    run, cluster = simulate(scenario), scenario.cluster
    need, batches = run.need, cluster.ranks * scenario.steps
    servers = sum(size for name, size in run.link_bytes.items() if name.startswith("server host"))
    fetches = [need.fetch] + ([need.refresh] if need.refresh is not None else [])
    dense = 2 * need.dense_bytes if scenario.mode.has_dense_server else 0.0
    sent = (
        sum(part.request_bytes + part.rows_bytes for part in fetches) + need.push.push_bytes + dense
    )
    assert servers == pytest.approx(batches * sent)
    rates = [run.link_capacity[f"GPU host {h} in"] for h in range(cluster.nn.all_hosts)]
    assert rates == cluster.nic_rates(cluster.nn)
    bounds = shared(scenario, need)
    of_servers = [name for name in bounds if name.startswith("server")]
    for name in (*of_servers, "GPU host NICs, out"):
        assert run.makespan_s >= scenario.steps * bounds[name] * (1 - 1e-9), name
    loop = cycles(scenario, need)["training loop"]
    assert run.makespan_s >= scenario.steps * loop * (1 - 1e-9)


@pytest.mark.parametrize(
    ("mode", "knobs"),
    [(Mode.SYNC, {}), (Mode.HYBRID, {"tau": 1}), (Mode.HYBRID, {"permits": 1}), (Mode.ASYNC, {})],
)
@pytest.mark.parametrize("slow", ["embedding_workers", "nn", "servers"])
def test_whoever_computes_slowly_may_have_fast_rows_and_the_run_is_no_error(mode, knobs, slow):
    """The bound of a barrier took the slowest computation and the slowest lookup of different
    ranks for those of one, and valid runs ended with an AssertionError."""
    base = small_scenario(
        mode, steps=40, noise=Noise(gpu_cv=1.0), discipline=Discipline.UNSHARED, infinite_cpus=True
    )
    role = getattr(base.cluster, slow)
    lame = replace(role, host=replace(role.host, name="lame", core_speed=0.02), hosts=1)
    parts = {slow: replace(role, also=(lame,))}
    nn = parts.get("nn", base.cluster.nn)
    ranks = sum(kind.hosts * kind.processes_per_host for kind in nn.kinds)
    cluster = replace(base.cluster, ranks=ranks, **parts)
    run = simulate(replace(base, cluster=cluster, **knobs))
    bound = answer(run.scenario, run.need, drawn=run.drawn(0, 40)).step_s
    assert 0.3 * run.makespan_s < 40 * bound <= run.makespan_s


@settings(max_examples=20)
@given(uncontended(), st.data(), st.sampled_from(["core_speed", "nic_bytes_per_s"]))
@pytest.mark.law8
def test_without_contention_a_faster_kind_is_never_slower(scenario, data, field):
    slow = data.draw(mixed(scenario.cluster))

    def quicker(role: Role) -> Role:
        if not role.also:
            return role
        host = replace(role.also[0].host, **{field: 2 * getattr(role.also[0].host, field)})
        return replace(role, also=(replace(role.also[0], host=host),))

    fast = replace(
        slow, nn=quicker(slow.nn), servers=quicker(slow.servers),
        embedding_workers=quicker(slow.embedding_workers),
    )  # fmt: skip
    one, other = (instants(replace(scenario, cluster=each)) for each in (slow, fast))
    assert (other <= one * (1 + 1e-12)).all()


def gpu_bound(mode: Mode, slow_hosts: int) -> Scenario:
    """Two GPUs a host; those of the further kind take four times as long for a batch. As many
    loaders as a multiple of the ranks, so that none serves a fast and a slow one in turn."""
    cluster = small_cluster(4)
    old = cluster.nn.host.with_gpu(name="old", fp32_flops=cluster.gpu.fp32_flops / 4)
    also = (replace(cluster.nn, hosts=slow_hosts, host=old),) if slow_hosts else ()
    ranks = 4 + 2 * slow_hosts
    nn = replace(cluster.nn, also=also)
    cluster = replace(cluster, nn=nn, ranks=ranks, loaders=4 * ranks)
    base = small_scenario(mode, cluster=cluster, steps=40)
    return replace(base, costs=replace(base.costs, gpu_fixed_s=0.0, gpu_efficiency=((16, 1e-3),)))


def test_a_barrier_waits_for_the_slow_kind_and_without_one_rates_add_up():
    sync = [throughput(simulate(gpu_bound(Mode.HYBRID, slow))).mean for slow in (0, 1)]
    assert sync[1] == pytest.approx(sync[0] * 6 / 4 / 4, rel=0.1)
    alone = [throughput(simulate(gpu_bound(Mode.ASYNC, slow))).mean for slow in (0, 1)]
    assert alone[1] == pytest.approx(alone[0] * (4 + 2 / 4) / 4, rel=0.1)
    for mode, found in ((Mode.HYBRID, sync[1]), (Mode.ASYNC, alone[1])):
        assert found < 1.01 * answer(gpu_bound(mode, 1)).samples_per_s < 1.1 * found


def test_rows_are_there_when_the_slowest_kind_of_server_has_sent_them():
    """A lookup waits for the busiest server of its batch, a push for the one that applies last."""
    cluster = small_cluster(4, 3, 2)
    fast = cluster.servers.host
    slow = replace(fast, name="old", core_speed=fast.core_speed / 4)
    one = replace(cluster.servers, hosts=1)
    of_both = replace(one, also=(replace(one, host=slow),))
    kinds = (replace(one, hosts=2), of_both, replace(one, hosts=2, host=slow))
    found = [
        demand(small_scenario(Mode.HYBRID, cluster=replace(cluster, servers=servers)))
        for servers in kinds
    ]
    for joins in ([n.fetch.join_s for n in found], [n.push.update_join_s for n in found]):
        assert 0 < joins[0] < joins[1] == joins[2]


@pytest.mark.first_case
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("target", list(Target))
def test_a_crash_on_unequal_hosts_is_an_outage_until_the_end_of_the_run_at_most(mode, target):
    """Of the first process and of the last, which is on a host of the further kind; short, and
    longer than the rest of the run."""
    base = gpu_bound(mode, 1)
    slow = replace(base.cluster.servers.host, name="old", core_speed=0.5)
    servers = replace(base.cluster.servers, also=(replace(base.cluster.servers, host=slow),))
    base = replace(base, steps=10, cluster=replace(base.cluster, servers=servers))
    processes = {
        Target.RANK: base.cluster.ranks,
        Target.SERVER: servers.processes,
        Target.WORKER: base.cluster.embedding_workers.processes,
    }
    end_s = simulate(base).makespan_s
    for index in (0, processes[target] - 1):
        for at, restart_s in ((0.5, 0.01), (0.99, 5.0)):
            event = Crash(
                target=target, index=index, at_s=at * end_s, detect_s=0.0, restart_s=restart_s
            )
            run = simulate(replace(base, disturbances=(event,)))
            until_s = min(event.back_s, run.makespan_s)
            assert run.losses.crashes == 1 and run.makespan_s >= 0.999 * end_s
            assert run.losses.outage_s == pytest.approx(until_s - event.at_s, rel=1e-9)


@pytest.mark.first_case
@pytest.mark.parametrize("slow", [1, 10], ids=["half a host", "a slow host"])
def test_without_a_barrier_every_host_fills_its_own_nic_and_nothing_is_in_use_twice(slow):
    """The NICs of GPU hosts bind: two ranks share one, the third has another for itself."""
    base = small_scenario(Mode.ASYNC, tau=None, steps=300, dense_home=DenseHome.APART)
    cluster = replace(small_cluster(ranks=3), loaders=3)
    nn = replace(cluster.nn, hosts=1, host=replace(cluster.nn.host, nic_bytes_per_s=1e7))
    also = replace(nn, processes_per_host=1, ram_bytes_per_process=nn.ram_bytes_per_process,
                   host=replace(nn.host, name="other", nic_bytes_per_s=1e7 / slow))  # fmt: skip
    scenario = replace(base, cluster=replace(cluster, nn=replace(nn, also=(also,))))
    found, need = report(simulate(scenario)), demand(scenario)
    batches = (1 + 1 / slow) * 1e7 * 0.97 / (need.fetch.activation_bytes + need.input_bytes)
    expected = batches * scenario.workload.batch_per_rank
    assert found.samples_per_s.mean == pytest.approx(expected, rel=0.03)
    assert found.bound.samples_per_s == pytest.approx(expected)
    over = found.samples_per_s.mean / expected  # no queue is empty when the steady steps begin
    assert found.use["GPU host NIC, in"] == pytest.approx(over, rel=0.01)


def test_loaders_of_one_rank_each_are_as_fast_as_their_hosts():
    """Loading binds; cores of the second kind are half as fast."""
    base = small_scenario(Mode.ASYNC, tau=2, steps=100, dense_home=DenseHome.APART)
    cluster = replace(small_cluster(ranks=4), loaders=4)
    nn = replace(cluster.nn, hosts=1)
    also = replace(nn, host=replace(nn.host, name="old", core_speed=nn.host.core_speed / 2))
    costs = replace(base.costs, load=replace(base.costs.load, fixed_s=0.1))
    cluster = replace(cluster, nn=replace(nn, also=(also,)))
    scenario = replace(base, cluster=cluster, costs=costs)
    found = throughput(simulate(scenario)).mean
    assert answer(scenario).binds == "loaders"
    assert found == pytest.approx(answer(scenario).samples_per_s, rel=0.01)


def test_prices_names_and_what_would_help_are_of_all_kinds():
    scenario = gpu_bound(Mode.HYBRID, 1)
    cluster = scenario.cluster
    dear = replace(cluster.nn.also[0].host, usd_per_hour=1000.0)
    cluster = replace(
        cluster, nn=replace(cluster.nn, also=(replace(cluster.nn.also[0], host=dear),))
    )
    one_kind = small_cluster(4).usd_per_hour
    assert cluster.usd_per_hour == pytest.approx(one_kind + 1000.0)
    found = report(simulate(replace(scenario, cluster=cluster)))
    assert facts_of(found)["GPUs"] == f"4 x {cluster.gpu.name} + 2 x old"
    assert found.usd_per_hour == cluster.usd_per_hour
    assert found.bound.step_s <= found.step_s.mean * 1.01
    helped = {name: gain.mean for name, gain in gains(replace(scenario, steps=10)).items()}
    assert helped["GPU"] == max(helped.values()) > 0.08


def test_the_smallest_server_is_full_first():
    cluster = small_cluster()
    less = replace(cluster.servers, hosts=1, ram_bytes_per_process=1e9)
    mixed_servers = replace(cluster.servers, also=(less,))
    both = replace(cluster, servers=mixed_servers)
    work = small_scenario().workload
    found = capacity(both, work, FORMATS["f32-adagrad"])
    assert found.limit_bytes_per_server == 1e9
    assert both.servers.processes == cluster.servers.processes + less.processes


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_an_all_reduce_counts_the_hosts_of_all_kinds(algorithm):
    sync = DenseSync(
        algorithm=algorithm, intra_bytes_per_s=8.0, inter_bytes_per_s=2.0, intra_latency_s=1.0,
        inter_latency_s=0.5, source="a test",
    )  # fmt: skip
    assert sync.seconds(64.0, 12, 4, 3) == sync.seconds(64.0, 12, 4)
    # 8 + 2 + 2 GPUs on three hosts, not on ceil(12 / 8) = 2.
    assert sync.nic_bytes(64.0, 12, 8, 3) >= sync.nic_bytes(64.0, 12, 8)
    if algorithm is Algorithm.HIERARCHICAL:
        assert sync.nic_bytes(64.0, 12, 8, 3) == 2 * 2 / 3 * 64
        assert sync.seconds(64.0, 12, 8, 3) == pytest.approx(
            14 / 8 * 64 / 8 + 4 / 3 * 64 / 2 + 14 * 1.0 + 4 * 0.5
        )


def test_each_rank_has_the_gpu_of_its_host():
    scenario = gpu_bound(Mode.SYNC, 1)
    need = demand(scenario)
    took = [need.of_rank(r).compute_s for r in range(6)]
    assert took[:4] == [took[0]] * 4
    assert took[4:] == pytest.approx([4 * took[0]] * 2)
    run = simulate(scenario)
    assert np.allclose(run.computed_s[:, 0], took)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.with_ranks(2), r"ranks is 2: the cluster has 6 on several kinds"),
        (lambda c: replace(c, ranks=4), r"ranks is 4: 2 hosts of 2 GPUs and 1 hosts of 2 GPUs"),
        (lambda c: replace(c, nn=replace(c.nn, also=(c.nn,))), r"also of .* is nested"),
        (
            lambda c: replace(c, nn=replace(c.nn, host=replace(c.nn.host, gpu=None))),
            r"host a2-highgpu-8g has no gpu: give it one",
        ),
        (
            lambda c: replace(c, nn=replace(c.nn, host=replace(c.nn.host, gpus=1))),
            r"processes_per_host of GPU hosts is 2: a a2-highgpu-8g has 1; a GPU each",
        ),
        (
            lambda c: replace(c, servers=split(c.servers, 1)).with_servers(7),
            r"server hosts is 7: the cluster has 2 of several kinds.* each kind in its file",
        ),
    ],
)
def test_what_is_not_said_is_refused_in_a_sentence(change, says):
    with pytest.raises(ValueError, match=says):
        change(gpu_bound(Mode.SYNC, 1).cluster)


def test_a_file_adds_kinds_by_their_names(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "gcp-100t"\nranks = 96\n[[nn.also]]\nhost = "v100-100gbit"\nhosts = 4\n'
        "processes_per_host = 8\ncores_per_process = 10\nram_bytes_per_process = 6e10\n"
    )
    cluster = read_cluster(path)[0]
    assert [(ranks, gpu.name) for ranks, gpu in cluster.gpus] == [
        (64, cluster.gpu.name), (32, MACHINES["v100-100gbit"].chip.name),
    ]  # fmt: skip
    assert cluster.nn.all_hosts == 12
    path.write_text(path.read_text().replace("v100-1", "v100-01"))
    with pytest.raises(ValueError, match=r"nn\.also\[0\]\.host is 'v100-0.*: did you mean v100-10"):
        read_cluster(path)


def test_the_further_kinds_of_the_example_can_be_switched_on(tmp_path):
    path = write_examples(tmp_path)[0]
    written = path.read_text()
    start = written.index("#[[nn.also]]")
    end = written.index("\n\n", start)
    switched = written[start:end].replace("#", "", 1).replace("\n#", "\n")
    path.write_text(written[:start] + switched + written[end:])
    with pytest.raises(ValueError, match=r"ranks is 64: 8 hosts of 8 GPUs and 4 hosts of 4 GPUs"):
        read_cluster(path)  # whose ranks are not said yet
    path.write_text(path.read_text().replace("\nranks = 64", "\nranks = 80"))
    assert read_cluster(path)[0].nn.processes == 80
