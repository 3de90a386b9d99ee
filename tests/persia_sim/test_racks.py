"""Racks with uplinks: what must hold whatever the racks, and what they cost, by hand."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Kind, Mode
from persia_sim.bounds.closed_form import answer, cycles, shared
from persia_sim.bounds.transfers import uplink_bytes
from persia_sim.cli.example import write_examples
from persia_sim.cluster.cluster import Cluster, Rack
from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import Crash, Target
from persia_sim.cluster.placement import placement, server_groups
from persia_sim.cluster.scenario import DenseHome, Discipline, Scenario, WorkerChoice
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets.from_file import read_cluster
from persia_sim.report.measure import throughput
from persia_sim.report.report import report, sent_bytes
from persia_sim.report.sensitivity import gains
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import facts_of, hand_scenario
from tests.persia_sim.sim_configurations import (
    message_to_each_host,
    small_cluster,
    small_scenario,
    uncontended,
)

GBIT = 1e9 / 8


def rack(name: str, gpu: int, worker: int, server: int, uplink: float = inf) -> Rack:
    return Rack(
        name=name, gpu_hosts=gpu, worker_hosts=worker, server_hosts=server,
        uplink_bytes_per_s=uplink, source="a test",
    )  # fmt: skip


def racked(
    cluster: Cluster, cuts: list[tuple[float, float, float]], uplinks: list[float]
) -> Cluster:
    """The cluster in as many racks as uplinks, cut at these shares of each role's hosts."""
    roles = cluster.nn, cluster.embedding_workers, cluster.servers
    edges = [
        [0, *sorted(round(cut[k] * role.all_hosts) for cut in cuts), role.all_hosts]
        for k, role in enumerate(roles)
    ]
    return replace(
        cluster,
        racks=tuple(
            rack(f"r{n}", *(edge[n + 1] - edge[n] for edge in edges), uplink)
            for n, uplink in enumerate(uplinks)
        ),
    )


@st.composite
def places(draw: st.DrawFn, uplinks: st.SearchStrategy[float]) -> tuple[list, list[float]]:
    count = draw(st.integers(2, 3))
    part = st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])
    cut = st.tuples(part, part, part)
    return [draw(cut) for _ in range(count - 1)], [draw(uplinks) for _ in range(count)]


SLOW = st.sampled_from([0.05 * GBIT, 0.3 * GBIT, 2 * GBIT, 50 * GBIT])


@st.composite
def in_racks(draw: st.DrawFn) -> Scenario:
    """A contended run of any mode on a cluster cut into racks anyhow."""
    mode = draw(st.sampled_from(list(Mode)))
    cluster = small_cluster(
        draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    )
    scenario = small_scenario(
        mode,
        cluster=racked(cluster, *draw(places(SLOW))),
        worker_choice=draw(st.sampled_from(list(WorkerChoice))),
        steps=draw(st.integers(2, 10)),
        dense_home=draw(st.none() | st.sampled_from(list(DenseHome)))
        if mode is Mode.ASYNC
        else None,
        dense_on_nics=mode.has_barrier and draw(st.booleans()),
    )
    if mode is Mode.LOOKAHEAD:
        scenario = replace(scenario, lookahead=draw(st.sampled_from(["reread", "forwarded"])))

    # One bucket of gradients, or many.
    sync = replace(scenario.costs.dense_sync, bucket_bytes=draw(st.sampled_from([1e5, 1e9])))
    return replace(scenario, costs=replace(scenario.costs, dense_sync=sync))


def same(one: Run, other: Run) -> bool:
    carried = {name: size for name, size in other.link_bytes.items() if "uplink" not in name}
    return (
        one.stamps.tobytes() == other.stamps.tobytes()
        and one.legs.tobytes() == other.legs.tobytes()
        and one.link_bytes == carried
        and one.busy_s == other.busy_s
    )


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("discipline", list(Discipline))
@pytest.mark.law8
def test_one_rack_is_no_rack_in_bytes(mode, discipline):
    scenario = small_scenario(mode, discipline=discipline)
    cluster = replace(scenario.cluster, racks=(rack("all", 2, 3, 2, 1.0),))
    assert same(simulate(scenario), simulate(replace(scenario, cluster=cluster)))


@settings(max_examples=15)
@given(in_racks(), st.sampled_from([1e18, inf]))
@pytest.mark.law8
def test_an_uplink_that_cannot_bind_is_none_in_bytes(scenario, rate):
    """Message by message; and as coflows, where the servers stand in one rack."""
    racks = [replace(each, uplink_bytes_per_s=rate) for each in scenario.cluster.racks]
    one_rack = [replace(each, server_hosts=0) for each in racks]
    one_rack[-1] = replace(one_rack[-1], server_hosts=scenario.cluster.servers.hosts)
    for each, sent in ((one_rack, nullcontext), (racks, message_to_each_host)):
        wide = replace(scenario, steps=3, cluster=replace(scenario.cluster, racks=tuple(each)))
        none = replace(wide, cluster=replace(scenario.cluster, racks=()))
        with sent():
            assert same(simulate(none), simulate(wide))


def test_without_a_barrier_a_thin_uplink_holds_up_only_the_ranks_behind_it():
    """All workers and servers are in the second rack: its ranks cross no uplink."""
    cluster = replace(small_cluster(ranks=4), loaders=4)
    racks = rack("far", 1, 0, 0, uplink=1e6), rack("near", 1, 3, 2, uplink=1e10)
    base = small_scenario(Mode.ASYNC, tau=None, steps=60, dense_home=DenseHome.APART)
    alone, thin = (
        report(simulate(replace(base, cluster=replace(cluster, racks=own)))) for own in ((), racks)
    )
    rate = thin.samples_per_s.mean
    assert 0.4 * alone.samples_per_s.mean < rate < 1.01 * thin.bound.samples_per_s
    assert thin.use["uplink, out"] == pytest.approx(1.0, abs=0.1)


@settings(max_examples=25)
@given(in_racks())
@pytest.mark.law9
def test_every_byte_between_racks_crosses_two_uplinks_once(scenario):
    run = simulate(scenario)
    found = {name: size for name, size in run.link_bytes.items() if "uplink" in name}
    told = {name: size.sum() for name, size in uplink_bytes(scenario, run.need).items()}
    assert found == pytest.approx(told, rel=1e-9, abs=1e-6)
    out = sum(size for name, size in found.items() if name.endswith("out"))
    assert out == pytest.approx(sum(found.values()) - out)


@settings(max_examples=25)
@given(in_racks())
@pytest.mark.law8
def test_no_run_is_faster_than_its_uplinks_and_its_constraints_allow(scenario):
    run = simulate(scenario)
    bounds = shared(scenario, run.need)
    for way in ("out", "in"):
        assert run.makespan_s >= scenario.steps * bounds[f"uplinks, {way}"] * (1 - 1e-9)
    assert run.makespan_s >= scenario.steps * cycles(scenario, run.need)["training loop"] * (
        1 - 1e-9
    )


@settings(max_examples=25)
@given(uncontended(), places(SLOW), st.floats(1, 20))
@pytest.mark.law8
def test_without_contention_a_faster_uplink_is_never_slower(scenario, where, factor):
    cuts, uplinks = where
    slow = replace(scenario, cluster=racked(scenario.cluster, cuts, uplinks))
    fast = replace(scenario, cluster=racked(scenario.cluster, cuts, [factor * u for u in uplinks]))
    assert (instants(fast) <= instants(slow) * (1 + 1e-12)).all()


HALVES = [(0.5, 0.5, 0.5)]


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC])
@pytest.mark.law8
def test_at_named_contended_runs_throughput_rises_with_the_uplinks_rate(mode):
    cluster = small_cluster(4, 4, 2)
    rates = [0.05, 0.2, 0.8, 100.0]
    found = [
        throughput(
            simulate(small_scenario(mode, cluster=racked(cluster, HALVES, [r * GBIT] * 2)))
        ).mean
        for r in rates
    ]
    for slow, fast in pairwise(found):
        assert fast >= slow * (1 - 0.02)
    assert found[-1] > 3 * found[0]


@pytest.mark.parametrize("uplink", [0.3 * GBIT, 3 * GBIT])
def test_coflows_over_racks_agree_with_single_messages_within_three_percent(uplink):
    cluster = racked(small_cluster(4, 4, 3), [(0.5, 0.5, 0.25)], [uplink, 2 * uplink])
    base = small_scenario(Mode.HYBRID, cluster=cluster, tau=4, steps=15)
    coflows = throughput(simulate(base)).mean
    with message_to_each_host():
        messages = throughput(simulate(base)).mean
    assert coflows == pytest.approx(messages, rel=0.03)


def test_a_narrow_uplink_binds_and_the_closed_form_says_so():
    cluster = racked(small_cluster(8, 4, 4), HALVES, [0.2 * GBIT] * 2)
    scenario = small_scenario(Mode.HYBRID, cluster=cluster, steps=40)
    bound = answer(scenario)
    assert bound.binds.startswith("uplinks")
    found = throughput(simulate(scenario)).mean
    assert 0.8 * bound.samples_per_s < found < 1.02 * bound.samples_per_s


def test_traffic_inside_a_rack_does_not_meet_the_uplink():
    """Workers beside the servers, GPUs elsewhere: fan-outs stay, activations and gradients go."""
    apart = racked(small_cluster(), [(1.0, 0.0, 0.0)], [0.5 * GBIT, 0.7 * GBIT])
    run = simulate(small_scenario(Mode.HYBRID, cluster=apart))
    batches, need = run.scenario.cluster.ranks * run.scenario.steps, run.need
    assert run.link_bytes["uplink 0 in"] == pytest.approx(batches * need.fetch.activation_bytes)
    assert run.link_bytes["uplink 0 out"] == pytest.approx(batches * need.gradient_bytes)


def test_an_uplink_of_three_bytes_a_second_by_hand():
    """Activations and gradients of 192 bytes over 1.5 payload bytes a second: 128 s, not 12; the
    GPU host is alone in its rack, so nothing else changes."""
    racks = (rack("gpu", 1, 0, 0, 3.0), rack("cpu", 0, 1, 1, 6.0))
    far = hand_scenario(steps=1)
    far = replace(far, cluster=replace(far.cluster, racks=racks))
    near = simulate(hand_scenario(steps=1)).makespan_s
    assert simulate(far).makespan_s == near + 2 * (128.0 - 12.0)


def test_a_fan_out_to_two_racks_waits_for_the_farther_one_by_hand():
    """A request of 48 bytes, of which the second server gets two thirds over 0.25 payload bytes a
    second; without racks the worker's 16 bytes a second count."""
    cluster = hand_scenario().cluster
    cluster = replace(cluster, servers=replace(cluster.servers, hosts=2))
    racks = (rack("here", 1, 1, 1, 0.5), rack("there", 0, 0, 1, 0.5))
    base = hand_scenario(steps=1, cluster=cluster)
    far = replace(base, cluster=replace(cluster, racks=racks))
    assert demand(far).server_shares == pytest.approx([1 / 3, 2 / 3])
    late = simulate(far).stamps - simulate(base).stamps
    assert late[Mark.LOOKUP, 0, 0] == 0
    assert late[Mark.READ, 0, 0] == pytest.approx(48 * 2 / 3 / 0.25 - 48 / 16)


def test_a_run_ends_when_the_last_gradients_are_at_the_workers_too():
    """The last step's worker reaches the servers at once, and the other worker over 1 MB/s: the
    order of events has the step all the same, else no replay would take it."""
    cluster = small_cluster(1, workers=2, server_hosts=1)
    far, near = rack("far", 0, 1, 0, 1e6), rack("near", 1, 1, 1, 1e9)
    scenario = small_scenario(
        Mode.LOOKAHEAD, lookahead="forwarded", cluster=replace(cluster, racks=(far, near)), steps=2
    )
    trace = simulate(scenario, trace=True).trace
    assert trace is not None
    assert [e.step for e in trace if e.kind == Kind.PUSH] == [0, 1]


@pytest.mark.parametrize("uplink", [1e6, 1e9])
def test_what_a_server_loses_the_workers_have_applied(uplink):
    """Gradients reach the other worker long after the crashed server, or before: the order of
    forwarded rows is that of the workers."""
    cluster = small_cluster(1, workers=2, server_hosts=1)
    far, near = rack("far", 0, 1, 0, uplink), rack("near", 1, 1, 1, 1e9)
    base = small_scenario(
        Mode.LOOKAHEAD, lookahead="forwarded", cluster=replace(cluster, racks=(far, near)), steps=2
    )
    at_s = float(simulate(base).legs[Leg.AT_SERVERS, 0, 1]) + 1e-9
    event = Crash(target=Target.SERVER, index=0, at_s=at_s, detect_s=0.0, restart_s=1e-4)
    run = simulate(replace(base, disturbances=(event,)), trace=True)
    assert run.trace is not None and run.losses.lost_parts == 1
    assert [e.kind for e in run.trace if e.kind in (Kind.PUSH, Kind.LOST_PUSH)] == [Kind.PUSH] * 2


def test_no_more_than_the_racks_hosts():
    with pytest.raises(ValueError, match="server_hosts of all racks together is 1: the cluster"):
        replace(small_cluster(), racks=(rack("one", 2, 3, 1), rack("two", 0, 0, 0)))
    split = racked(small_cluster(), HALVES, [GBIT, GBIT])
    with pytest.raises(
        ValueError, match=r"worker_hosts .* say the worker_hosts of every rack anew"
    ):
        split.with_workers(7)


def test_fifo_refuses_racks_and_names_the_remedy():
    split = racked(small_cluster(), HALVES, [GBIT, GBIT])
    with pytest.raises(ValueError, match=r"discipline is fifo: gcp-100t has racks.*choose fluid"):
        small_scenario(Mode.HYBRID, cluster=split, discipline=Discipline.FIFO)


@pytest.mark.parametrize("field", ["gpu_hosts", "uplink_bytes_per_s"])
def test_a_rack_refuses_what_makes_no_sense(field):
    with pytest.raises(ValueError, match=f"{field} of rack one is -1"):
        replace(rack("one", 1, 1, 1), **{field: -1})


def test_a_crash_strikes_the_server_of_its_rack():
    cluster = racked(small_cluster(), HALVES, [GBIT, GBIT])
    base = small_scenario(Mode.HYBRID, cluster=cluster)
    end = simulate(base).makespan_s
    last = cluster.servers.processes - 1
    crash = Crash(target=Target.SERVER, index=last, at_s=end / 2, detect_s=0.5, restart_s=0.5)
    run = simulate(replace(base, disturbances=(crash,)))
    assert run.makespan_s > end + 0.5
    assert np.isfinite(run.stamps).all()


def test_a_narrow_uplink_is_blamed_used_reported_and_what_would_help():
    cluster = racked(small_cluster(8, 4, 4), HALVES, [0.2 * GBIT] * 2)
    scenario = small_scenario(Mode.HYBRID, cluster=cluster, steps=40)
    found = report(simulate(scenario))
    assert max(found.blame, key=lambda name: found.blame[name]) == "uplinks"
    assert 0.8 < max(found.use["uplink, out"], found.use["uplink, in"]) < 1.02
    carried = sum(size for name, size in found.run.link_bytes.items() if "uplink" in name) / 2
    share = carried / sent_bytes(found.run)
    told = facts_of(found)
    assert told["racks"] == "2, uplinks of 0.2 Gbit/s"
    assert told["sent between racks"] == f"{100 * share:.1f} % of the bytes"
    wide = racked(small_cluster(8, 4, 4), HALVES, [5000 * GBIT] * 2)
    without = report(simulate(replace(scenario, cluster=wide)))
    assert without.blame.get("uplinks", 0.0) == 0
    assert sent_bytes(without.run) == pytest.approx(sent_bytes(found.run))  # each byte once
    helped = gains(replace(scenario, steps=12))
    assert helped["uplinks"].mean == max(each.mean for each in helped.values()) > 0.05
    assert "uplinks" not in gains(small_scenario(Mode.SYNC, steps=3))


def test_the_racks_of_the_example_can_be_switched_on(tmp_path):
    cluster_file = write_examples(tmp_path)[0]
    written = cluster_file.read_text()
    assert read_cluster(cluster_file)[0].racks == ()
    start = written.index("#[[racks]]")
    end = written.index("\n\n", start)
    cluster_file.write_text(
        written[:start]
        + written[start:end].replace("#", "", 1).replace("\n#", "\n")
        + written[end:]
    )
    racks = read_cluster(cluster_file)[0].racks
    assert [each.gpu_hosts for each in racks] == [4, 4]
    assert all(each.uplink_bytes_per_s < inf for each in racks)


def test_a_file_with_racks_for_other_hosts_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "gcp-100t"\n[[racks]]\nname = "a"\ngpu_hosts = 8\nworker_hosts = 100\n'
        "server_hosts = 29\nuplink_bytes_per_s = 1e9\n"
    )
    with pytest.raises(ValueError, match=r"cluster .*: server_hosts of all racks together is 29"):
        read_cluster(path)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ASYNC])
def test_a_server_of_a_rack_is_charged_with_its_share_of_the_memory_traffic(mode, each):
    """The same bytes as without racks, host by host, whatever the racks hold; in async a copy of
    the dense weights is read and written for each pull and each push. ``each``: the run asks when
    every single server was done."""
    base = small_scenario(mode, cluster=small_cluster(server_hosts=3), steps=6, trace_shards=each)
    host = replace(base.cluster.servers.host, memory_bytes_per_s=1e9)
    cluster = replace(base.cluster, servers=replace(base.cluster.servers, host=host))
    apart = racked(cluster, [(0.5, 0.3, 0.3)], [2 * GBIT, 2 * GBIT])
    need = demand(replace(base, cluster=cluster))
    batches = base.cluster.ranks * base.steps
    copies = 4 * need.dense_bytes * (mode is Mode.ASYNC)
    touched = batches * (need.fetch.server_memory_bytes + need.update_memory_bytes + copies)
    busiest = np.bincount(cluster.servers.host_of, weights=need.server_shares).max()
    for one in (cluster, apart):
        run = simulate(replace(base, cluster=one), trace=each)
        assert run.busy_s["server memory"] == pytest.approx(touched * busiest / 1e9)


def test_a_fan_out_to_a_rack_weighs_its_streams_of_which_the_hottest_holds_the_others_back():
    """Shares of 1/2, 1/4 in one rack count as 1.5 streams, two of 1/8 in the other as 2."""
    cluster = small_cluster(server_hosts=2)
    cluster = replace(cluster, servers=replace(cluster.servers, processes_per_host=2))
    cluster = racked(cluster, [(0.5, 0.5, 0.5)], [GBIT, GBIT])
    shares = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    first, second = server_groups(cluster, placement(cluster), shares)
    assert (first.share, first.streams, second.share, second.streams) == (0.75, 1.5, 0.25, 2.0)
