"""The critical path blames what binds: by hand, by slowing one stage, and by its derivative."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.cluster.demand import Demand, demand
from persia_sim.cluster.incidents import SlowDown, Target
from persia_sim.cluster.scenario import DenseHome, Discipline, Noise, Queues, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.report.critical_path import (
    _causes,
    _walk,
    blame_of_resources,
    critical_path,
)
from persia_sim.report.measure import throughput
from persia_sim.report.report import remedy, report
from persia_sim.report.sensitivity import gains, without_slow
from tests.persia_sim.hand_world import hand_costs, hand_scenario, law
from tests.persia_sim.sim_configurations import small_scenario, uncontended

ONE_STEP = {  # of one rank alone, see test_timeline_by_hand
    "lookup at servers": 10, "rows to the rank": 27, "copy to the GPU": 5,
    "forward and backward": 12, "copy from the GPU": 9, "push": 41,
}  # fmt: skip


def test_in_sync_every_part_is_to_blame_for_its_own_time():
    for steps in (1, 7):
        blame = critical_path(simulate(hand_scenario(Mode.SYNC, steps=steps)))
        each = {part: seconds * steps for part, seconds in ONE_STEP.items()}
        assert blame == pytest.approx({"load": 23.0, "push answer": 1.0} | each)


def test_with_one_permit_every_answer_counts_too():
    blame = critical_path(simulate(hand_scenario(Mode.RAW_HYBRID, steps=6, permits=1)))
    each = {part: seconds * 6 for part, seconds in ONE_STEP.items()}
    assert blame == pytest.approx({"load": 23.0, "push answer": 6.0} | each)


def test_the_all_reduce_and_the_last_rank_are_on_the_path():
    """Rank 1 starts 23 s later (one loader); the all-reduce takes 9 of the 113 s of a step."""
    blame = critical_path(simulate(hand_scenario(Mode.SYNC, ranks=2, steps=4)))
    each = {part: seconds * 4 for part, seconds in ONE_STEP.items()}
    assert blame == pytest.approx({"load": 46.0, "push answer": 1.0, "dense sync": 36.0} | each)


def test_lookahead_blames_the_second_look():
    """From step 1 on a step waits for the last push, then looks again (40.5) and computes."""
    blame = critical_path(simulate(hand_scenario(Mode.LOOKAHEAD, steps=5, ahead=2)))
    first = {"load": 23.0, "lookup at servers": 10.0, "rows to the rank": 27.0,
             "copy to the GPU": 5.0, "push answer": 1.0}  # fmt: skip
    often = {"refresh": 40.5, "forward and backward": 12, "copy from the GPU": 9, "push": 41}
    expected = first | {part: 5.0 * seconds for part, seconds in often.items()}
    assert blame == pytest.approx(expected)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD])
def test_of_several_ranks_the_last_push_is_followed(mode):
    """Rank 1's worker is three times as slow: 4 s more to ask, 12 to pool, 14 to scatter."""
    slow = SlowDown(target=Target.WORKER, index=1, factor=3.0)
    base = hand_scenario(mode, ranks=2, steps=4)
    base = replace(base, cluster=base.cluster.with_workers(2), disturbances=(slow,))
    blame = critical_path(simulate(base))
    often = {"forward and backward": 12, "dense sync": 9, "copy from the GPU": 9, "push": 55}
    lookup = {"lookup at servers": 14, "rows to the rank": 39, "copy to the GPU": 5}
    once = {"load": 46, "push answer": 1}
    if mode.reads_fresh_rows:
        often |= lookup
    else:
        often, once = often | {"refresh": 56.5}, once | lookup
    assert blame == pytest.approx(once | {part: 4 * seconds for part, seconds in often.items()})


STEPS = 40


@pytest.mark.parametrize("queue", ["forwarded", "on_gpu", "backward", "copied_back"])
def test_short_buffers_never_blame_a_stage_that_stands_still(queue):
    """Whatever the buffers, a loop that is always busy is the path."""
    queues = replace(Queues(), **{queue: 1})
    slow = hand_costs(gpu_fixed_s=1000.0)
    base = hand_scenario(Mode.RAW_HYBRID, steps=STEPS, costs=slow, queues=queues)
    assert critical_path(simulate(base))["forward and backward"] == STEPS * 1000.0


def test_full_buffers_pass_the_blame_to_the_stage_behind_them():
    """A slow push with buffers of one: load and compute stand still, pushes follow each other."""
    slow = hand_costs(server_update=law(250.0))
    short = Queues(
        dataset=1, lookups_in_flight=1, forwarded=1, on_gpu=1, backward=1, copied_back=1,
        push_tasks=1,
    )  # fmt: skip
    run = simulate(hand_scenario(Mode.RAW_HYBRID, steps=STEPS, costs=slow, queues=short))
    blame = critical_path(run)
    assert blame["push"] == pytest.approx(STEPS * 1030.0)
    assert blame["push answer"] == pytest.approx(STEPS * 1.0)
    once = {name: s for name, s in ONE_STEP.items() if name != "push"}
    assert {name: blame[name] for name in once} == pytest.approx(once)


AT_ONCE = Mark.LOOKUP, Mark.COPY_IN, Mark.COPY_OUT, Mark.PUSH
"""What begins as soon as the last of what it waits for is there."""


@settings(max_examples=30)
@given(uncontended())
def test_where_nothing_is_served_an_instant_is_that_of_its_cause(scenario):
    """Whatever the buffers: a cause that was left out would leave time that nothing explains."""
    run = simulate(scenario)
    causes = _causes(run)
    stamps = run.stamps
    for node in product(AT_ONCE, range(scenario.cluster.ranks), range(scenario.steps)):
        earlier = [stamps[cause] for cause in causes(node) if stamps[cause] <= stamps[node]]
        assert max(earlier) == pytest.approx(stamps[node], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_path_leads_without_a_gap_to_the_start_of_the_run(mode):
    steps = list(_walk(simulate(small_scenario(mode))))
    assert [step.is_first for step in steps] == [False] * (len(steps) - 1) + [True]
    assert all(step.since_s == earlier.until_s for step, earlier in pairwise(steps))
    assert steps[-1].since_s == 0.0


FETCH = {  # what of a fetch belongs to a part of the path
    "lookup at servers": ("worker_forward_s", "request_bytes", "server_s", "join_s"),
    "rows to the rank": ("rows_bytes", "worker_pool_s", "activation_bytes"),
    "copy to the GPU": ("copy_in_s",),
}
OTHERS = {
    "load": ("load_s", "loader_bytes", "input_bytes"),
    "forward and backward": ("forward_s", "backward_s"),
    "dense pull": ("dense_copy_s", "dense_bytes"),
}
PUSH = {
    "copy from the GPU": ("copy_out_s",),
    "push": (
        "gradient_bytes",
        "worker_scatter_s",
        "push_bytes",
        "server_update_s",
        "update_join_s",
    ),
}


def slowed(need: Demand, part: str, factor: float) -> Demand:
    """The same with every second of one part so many times as long."""
    if part in FETCH:
        parts = {name: getattr(need.fetch, name) * factor for name in FETCH[part]}
        return replace(need, fetch=replace(need.fetch, **parts))
    if part in PUSH:
        parts = {name: getattr(need.push, name) * factor for name in PUSH[part]}
        return replace(need, push=replace(need.push, **parts))
    if part == "dense sync":
        buckets = tuple(replace(b, seconds=b.seconds * factor) for b in need.buckets)
        return replace(need, buckets=buckets, sync_overhead_s=need.sync_overhead_s * factor)
    return replace(need, **{name: getattr(need, name) * factor for name in OTHERS[part]})


@pytest.mark.long
@settings(max_examples=100)
@given(
    uncontended(),
    st.sampled_from([*FETCH, *OTHERS, *PUSH, "dense sync"]),
    st.sampled_from([0.0, 1.0]),
)
def test_a_part_is_to_blame_for_as_much_as_slowing_it_costs(scenario, part, gpu_cv):
    """Instants are maxima of sums, so the end is convex in the seconds of a stage: what the path
    blames lies between what one per mille less saves and what one per mille more costs.

    So, too, where compute hides a part of the dense sync (hybrid): what a rank computes behind the
    instant at which a bucket was there is no part of the path. Not so with permits or servers out
    of order (the k-th return is no maximum of sums), nor for lookahead's copies (its second look
    copies, too). Without latency every second of a part is in one of the numbers that are scaled.
    """
    mode = Mode.SYNC if scenario.mode.prefetches_rows else scenario.mode
    cluster = replace(scenario.cluster, link=replace(scenario.cluster.link, latency_s=0.0))
    scenario = replace(
        scenario,
        permits=None,
        ahead=None,
        lookahead="reread",
        noise=Noise(gpu_cv=gpu_cv),
        mode=mode,
        cluster=cluster,
    )
    need = demand(scenario)

    def end_s(factor: float) -> float:
        return simulate(scenario, need=slowed(need, part, factor)).makespan_s

    # In async a dense push may come behind the last push of rows: it has the bytes of a dense pull.
    path = critical_path(simulate(scenario))
    blamed = path.get(part, 0.0) + (path.get("dense push", 0.0) if part == "dense pull" else 0.0)
    saved, cost = (end_s(1) - end_s(0.999)) * 1000, (end_s(1.001) - end_s(1)) * 1000
    assert saved - 1e-8 <= blamed <= cost + 1e-8


@pytest.mark.parametrize(("mode", "batch"), [(Mode.HYBRID, 512), (Mode.LOOKAHEAD, 8192)])
def test_where_an_all_reduce_overlaps_each_side_is_blamed_for_what_slowing_it_costs(mode, batch):
    """With 512 samples the first bucket is still summed when the second is there: what is computed
    meanwhile hides. With 8,192 it is the other way round."""
    options = SimulateOptions(
        workload="criteo-syn1", mode=mode, ranks=16, batch_per_rank=batch, steps=30, loaders=640,
        gpu_cv=0.3,
    )  # fmt: skip
    base = replace(scenario_of(options), discipline=Discipline.UNSHARED, infinite_cpus=True)
    run = simulate(base)
    blamed = blame_of_resources(run)
    for name, part in {"GPU": "forward and backward", "all-reduce": "dense sync"}.items():
        slower, faster = (
            simulate(base, need=slowed(run.need, part, factor)).makespan_s
            for factor in (1.0001, 0.9999)
        )
        assert blamed[name] == pytest.approx((slower - faster) / 2e-4, rel=0.01), name


SLOW_CORES = 0.02
"""Speed of the workers' cores at which a batch waits for its core and most cores for a batch."""


def hinted(cores: int = 48, speed: float = SLOW_CORES, **options: Any) -> tuple[Scenario, str]:
    """A scenario of ten workers with such cores, and what its advice is."""
    scenario = scenario_of(SimulateOptions(cluster="v100-2021-09", workload="avazu-ad", **options))
    role = scenario.cluster.embedding_workers
    role = replace(role, cores_per_process=cores, host=replace(role.host, core_speed=speed))
    made = replace(scenario, cluster=replace(scenario.cluster, embedding_workers=role))
    return made, remedy(report(simulate(made)))


def gain(scenario: Scenario, **changes: Any) -> float:
    """Of throughput, where the scenario has other values."""
    change = {"it": lambda s: replace(s, **changes)}
    return gains(scenario, changes=change)["it"].mean


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "hint", "wider"),
    [
        ({"tau": 4}, "faster ones or a wider window help", {"tau": 8}),
        ({"tau": None, "permits": 2}, "faster ones or more permits help", {"permits": 4}),
        ({"mode": Mode.SYNC}, "faster ones help", {}),
        ({"mode": Mode.LOOKAHEAD}, "faster ones help", {"ahead": 8}),
    ],
)
def test_workers_that_are_waited_for_and_idle_need_what_the_report_says(options, hint, wider):
    scenario, said = hinted(**options)
    assert said == f"one core serves a batch: {hint}, more do not"
    assert gains(scenario)["embedding workers' cores"].mean > 0.08
    assert (gain(scenario, **wider) > 0.3) == ("wider" in said or "permits" in said)
    assert gain(scenario, cluster=scenario.cluster.with_workers(20)) < 0.01


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("slow", "mode", "hint", "least", "most"),
    [
        ("rank:0x10", Mode.HYBRID, "rank 0 (10 times): replace what is slow", 2, 3),
        ("rank:0x10", Mode.ASYNC_AVERAGING, "rank 0 (10 times): nobody waits for it", 0.1, 0.15),
        ("worker:3x100", Mode.HYBRID, "worker 3 (100 times): replace what is slow", 3, 9),
        ("server:0x1000", Mode.HYBRID, "server 0 (1000 times): replace what is slow", 2, 9),
    ],
)
def test_a_slow_process_is_named_and_what_it_costs_is_what_sensitivity_says(
    slow, mode, hint, least, most
):
    """Of a rank that nobody waits for, nine tenths of an eighth of the rate."""
    scenario, said = hinted(speed=0.7, mode=mode, slow=(slow,))
    assert said == f"slow: {hint}"
    [(name, found)] = gains(scenario, changes=without_slow(scenario)).items()
    assert name == f"slow {slow.partition('x')[0].replace(':', ' ')}" and least < found.mean < most
    healthy, said = hinted(speed=0.7, mode=mode)
    assert said == "" and without_slow(healthy) == {}


@pytest.mark.long
def test_a_slow_rank_that_shares_its_loaders_starves_the_others_and_the_report_says_so():
    """As in the original: a loader goes round the ranks, and a full buffer holds it up."""
    scenario, said = hinted(speed=0.7, mode=Mode.ASYNC_AVERAGING, slow=("rank:0x10",))
    ranks, loaders = scenario.cluster.ranks, scenario.cluster.loaders
    assert loaders % ranks == 0 and said.endswith("nobody waits for it")
    uneven = replace(scenario, cluster=replace(scenario.cluster, loaders=loaders + 1))
    rates = [throughput(simulate(replace(s, steps=200))).mean for s in (scenario, uneven)]
    assert rates[1] < 0.6 * rates[0]  # with more loaders than before
    said = remedy(report(simulate(uneven)))
    assert f"--loaders a multiple of the {ranks} ranks helps" in said


def test_a_gpu_is_never_busier_than_all_the_time():
    """Also where one rank of a mode without common steps is much slower than the others."""
    scenario, _ = hinted(speed=0.7, mode=Mode.ASYNC_AVERAGING, slow=("rank:0x10",))
    assert 0.9 < report(simulate(scenario)).use["GPU"] <= 1


def test_rows_that_wait_for_gradients_on_their_way_are_explained_by_their_push():
    """Also where they came to the GPU after that push had begun: every piece is a time."""
    late = small_scenario(Mode.LOOKAHEAD, lookahead="forwarded", ahead=1, steps=40)
    cluster = replace(late.cluster, link=replace(late.cluster.link, latency_s=0.01))
    scenario = replace(late, cluster=cluster, discipline=Discipline.UNSHARED)
    run = simulate(replace(scenario, noise=Noise(server_cv=0.5)))
    blame = blame_of_resources(run)
    assert sum(blame.values()) == pytest.approx(run.makespan_s)


@pytest.mark.parametrize("discipline", list(Discipline))
@pytest.mark.parametrize("home", list(DenseHome))
def test_in_async_the_last_dense_push_is_explained_too(home, discipline):
    """The run waits for it after the last push of rows: else a part of the time has no cause."""
    run = simulate(small_scenario(Mode.ASYNC, dense_home=home, discipline=discipline))
    for blame in critical_path(run), blame_of_resources(run):
        assert sum(blame.values()) == pytest.approx(run.makespan_s)


def test_gradients_on_their_way_to_workers_at_the_end_are_explained_too():
    """The last push is at the servers before its gradients are at the worker of the next batch."""
    late = small_scenario(Mode.LOOKAHEAD, lookahead="forwarded", ahead=2)
    role = late.cluster.embedding_workers
    slow = replace(role, host=replace(role.host, nic_bytes_per_s=role.host.nic_bytes_per_s / 50))
    run = simulate(replace(late, cluster=replace(late.cluster, embedding_workers=slow)))
    assert run.makespan_s > 1.001 * run.stamps[Mark.RETURNED].max()
    for blame in critical_path(run), blame_of_resources(run):
        assert sum(blame.values()) == pytest.approx(run.makespan_s) and "dense push" not in blame
