"""Every figure of the report against one computed another way: on paper, or from the stamps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.incidents import SlowDown, Target
from persia_sim.cluster.scenario import Averaging, DenseHome, Discipline, Noise
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.report.critical_path import WORKERS
from persia_sim.report.measure import step_time
from persia_sim.report.report import Report, exposed, report, sent_bytes
from tests.persia_sim.hand_world import facts_of, hand_costs, hand_scenario, law, sync_of_two
from tests.persia_sim.sim_configurations import small_scenario


def shares(said: str) -> dict[str, float]:
    """`12.3 %  name` and, below it, ` 4.5 %  other` as a dict."""
    lines = re.findall(r"^ *([\d.]+) %  (.+)$", said, flags=re.M)
    return {name: float(share) / 100 for share, name in lines}


def test_throughput_step_and_bound_of_two_ranks_in_sync():
    found = report(simulate(sync_of_two()))
    # 40 steps have 39 durations; the first five are the start.
    assert found.samples_per_s.mean == pytest.approx(2 * 4 / 113)
    assert found.step_s.mean == pytest.approx(113) and found.step_s.values == 34
    assert found.step_s.half_width == pytest.approx(0, abs=1e-9)
    assert (found.bound.step_s, found.bound.binds) == (113, "window")
    told = facts_of(found)
    assert told["throughput"] == "0.0708 samples/s"
    assert told["its 95 % interval"].startswith("+-0.00 % of it, from 34 steps")
    assert told["step"].startswith("113000.00 ms")
    assert told["shortest step possible"].startswith("113000.00 ms, set by: window")


@pytest.mark.parametrize(
    ("cores", "memory", "said"), [(0.1, 0.2, True), (0.7, 0.2, False), (0.1, 0.7, False)]
)
def test_more_workers_do_not_help_only_where_those_that_are_there_are_idle(cores, memory, said):
    found = report(simulate(sync_of_two()))
    use = {"worker cores": cores, "worker memory": memory}
    told = facts_of(replace(found, blame={WORKERS: 1.0}, use=use))
    assert ("more do not" in told.get("advice", "")) == said


def test_dollars_per_hour_and_per_million_samples():
    found = report(simulate(sync_of_two()))
    assert found.usd_per_hour == 2 * 8 + 4 + 2 == 22
    # A million samples are 125,000 steps of 113 s: 3,923.6 hours.
    assert found.usd_per_million_samples == pytest.approx(22 * 125_000 * 113 / 3600)
    told = facts_of(found)
    assert (told["cost of an hour"], told["cost of 10^6 samples"]) == ("$22", "$86319.444")
    cheap = replace(found, usd_per_million_samples=0.000266)  # no sample is free
    assert facts_of(cheap)["cost of 10^6 samples"] == "$0.00027"
    roles = ("nn", "embedding_workers", "servers")
    base = sync_of_two()
    for role in roles:
        part = getattr(base.cluster, role)
        free = replace(part, host=replace(part.host, usd_per_hour=0.0))
        base = replace(base, cluster=replace(base.cluster, **{role: free}))
    assert not [name for name in facts_of(report(simulate(base))) if name.startswith("cost")]


def test_use_of_every_resource_of_one_rank_in_sync():
    """Seconds of one step over the 104 that a step takes once the first 23 have passed."""
    run = simulate(hand_scenario(Mode.SYNC, steps=10))
    seconds = {
        "GPU": 12, "copy to the GPU": 5, "copy from the GPU": 9, "worker cores": 2 + 6 + 7,
        "server cores": 3 + 11,
        "GPU host NIC, in": (192 + 96) / 24, "GPU host NIC, out": 192 / 24,
        "worker host NIC, out": (48 + 120 + 192) / 16,
        "worker host NIC, in": (268 + 96 + 192) / 16,
        "server host NIC, in": (48 + 120) / 12, "server host NIC, out": 96 / 12,
    }  # fmt: skip
    expected = {name: s / 104 for name, s in seconds.items()}
    found = report(run)
    assert found.use == pytest.approx(expected)
    assert shares(facts_of(found)["busy resources"]) == pytest.approx(
        dict(sorted(expected.items(), key=lambda item: -item[1])[:6]), abs=6e-4
    )
    assert sent_bytes(run) == 10 * (364 + 48 + 96 + 192 + 192 + 120)
    assert facts_of(found)["sent in a step"] == "1.01 kB"
    in_part = replace(run, link_bytes={"worker host 0 in": 15.0, "worker host 0 out": 7.0})
    assert facts_of(report(in_part))["sent in a step"] == "1.5 B"


def test_use_of_the_busiest_of_several():
    """Three workers share 8 batches as 3, 3, 2; of two GPU hosts each has four. All of it over four
    steps of the steady length."""
    base = hand_scenario(Mode.SYNC, ranks=2, steps=4)
    cluster = base.cluster.with_workers(3).with_servers(2)
    run = simulate(replace(base, cluster=cluster))
    found, end = report(run).use, 4 * step_time(run).mean
    assert found["worker host NIC, out"] == pytest.approx(3 * 360 / 16 / end)
    assert found["worker cores"] == pytest.approx(8 * 15 / 3 / end)  # the mean of all cores
    assert found["GPU host NIC, in"] == pytest.approx(4 * (192 + 96) / 24 / end)
    # A host with two of three rows: 2/3 of 12 bytes a second is the most its NIC gives.
    assert found["server host NIC, out"] == pytest.approx(8 * 96 * (2 / 3) / 12 / end)
    assert found["server cores"] == pytest.approx(8 * 14 / end)  # each server serves every batch
    many = replace(cluster, embedding_workers=replace(
        cluster.embedding_workers, cores_per_process=4
    ))  # fmt: skip
    quarter = report(simulate(replace(base, cluster=many))).use
    assert quarter["worker cores"] == pytest.approx(found["worker cores"] / 4)


def test_use_in_async_has_the_dense_server():
    base = hand_scenario(Mode.ASYNC, ranks=2, steps=6, dense_home=DenseHome.APART)
    run = simulate(base)
    use, end = report(run).use, 6 * step_time(run).mean
    assert use["dense server"] == pytest.approx(2 * 6 * 2 * 4 / end)  # pull and push take 4 s each
    assert use["GPU host NIC, in"] == pytest.approx(6 * (192 + 96) / 24 / end)


def test_a_gpu_is_idle_while_a_round_stops_it():
    """12 s of each of 8 steps, whatever the time from the start of forward to the end of backward:
    rounds of 9 s every 70 s lock the replicas."""
    rounds = Averaging(period_s=70.0)
    run = simulate(hand_scenario(Mode.ASYNC_AVERAGING, ranks=2, steps=8, averaging=rounds))
    stopped = (run.stamps[Mark.BACKWARD_END] - run.stamps[Mark.START]).mean()
    assert stopped > 12.5
    assert report(run).use["GPU"] == pytest.approx(12 / step_time(run).mean)


def test_a_slow_gpu_is_busy_longer():
    slow = SlowDown(target=Target.RANK, index=1, factor=3.0)
    run = simulate(hand_scenario(Mode.SYNC, ranks=2, steps=8, disturbances=(slow,)))
    assert report(run).use["GPU"] == pytest.approx((12 + 36) / 2 / step_time(run).mean)


def test_exposed_times_of_sync_are_the_life_without_compute():
    """Between two steps the loop waits for copies back and push (50), then for 10, 27 and 5."""
    one = exposed(simulate(hand_scenario(Mode.SYNC, steps=7)))
    assert one == pytest.approx({
        "window, permit or lookup task": 9 + 41, "lookup at servers": 10, "rows to the rank": 27,
        "copy to the GPU": 5,
    })  # fmt: skip
    two = exposed(simulate(sync_of_two(steps=4)))
    # Rank 0 waits 23 s for rank 1 in the first of four steps; the all-reduce takes 9 in each.
    assert two["dense sync and other ranks"] == pytest.approx(9 + 23 / 8)
    assert {name: s for name, s in two.items() if name in one} == pytest.approx(one)


def test_exposed_times_of_a_starved_and_of_a_pulling_loop():
    slow = hand_scenario(Mode.RAW_HYBRID, steps=7, costs=hand_costs(load=law(500.0)))
    assert exposed(simulate(slow)) == pytest.approx({
        # Batches come 1,020.75 s apart; the life before compute is 42, compute itself 12.
        "load": 1020.75 - 54, "lookup at servers": 10, "rows to the rank": 27, "copy to the GPU": 5,
    })  # fmt: skip
    busy = hand_scenario(Mode.ASYNC, steps=7, costs=hand_costs(gpu_fixed_s=1000.0))
    assert exposed(simulate(busy)) == pytest.approx({"refresh or dense pull": 5})
    again = hand_scenario(Mode.LOOKAHEAD, steps=7, ahead=3)
    # After the update 9 + 41 until the push is applied, then the second look of 40.5.
    assert exposed(simulate(again))["refresh or dense pull"] == pytest.approx(90.5)
    nothing = hand_scenario(Mode.RAW_HYBRID, steps=7, costs=hand_costs(gpu_fixed_s=1000.0))
    run = simulate(nothing)
    assert exposed(run) == {}
    assert facts_of(report(run))["ranks stand still for"] == "nothing"


def test_exposed_times_are_printed_in_milliseconds_largest_first():
    told = facts_of(report(simulate(hand_scenario(Mode.SYNC, steps=7))))
    assert told["ranks stand still for"].splitlines() == [
        "50000.00 ms  window, permit or lookup task",
        "27000.00 ms  rows to the rank",
        "10000.00 ms  lookup at servers",
        " 5000.00 ms  copy to the GPU",
    ]


def test_blame_is_printed_as_shares_of_the_makespan():
    found = report(simulate(hand_scenario(Mode.SYNC, steps=10)))
    said = shares(facts_of(found)["critical path, stages"])
    expected = {"push": 410, "rows to the rank": 270, "forward and backward": 120,
                "lookup at servers": 100, "copy from the GPU": 90}  # fmt: skip
    assert dict(list(said.items())[:5]) == pytest.approx(
        {name: s / 1064 for name, s in expected.items()}, abs=6e-4
    )
    assert sum(found.stages.values()) == pytest.approx(1)
    # Of a batch: 8 messages of 0.5 s one way, NICs of the worker (16 bytes a second) and of the
    # server (12), its cores, the worker's, copies, compute; the load once, the answer once.
    resources = {"server NICs": 22, "worker NICs": 24, "worker cores and memory": 15,
                 "server cores and memory": 14, "copies to and from the GPU": 14, "GPU": 12,
                 "latency": 3.0 + 0.1, "GPU hosts' NICs": 0}  # fmt: skip
    once = {"worker NICs": 16.75, "GPU hosts' NICs": 4}
    expected = {name: (10 * s + once.get(name, 0)) / 1064 for name, s in resources.items()}
    expected["loaders"] = 2.25 / 1064
    assert found.blame == pytest.approx(expected)
    said = shares(facts_of(found)["critical path, resources"])
    largest = sorted(expected.items(), key=lambda item: -item[1])[:6]
    assert said == pytest.approx(dict(largest), abs=6e-4)


def test_head_of_the_report_says_what_was_simulated():
    base = hand_scenario(Mode.HYBRID, ranks=2, tau=3, permits=7, steps=20, seed=11)
    told = facts_of(report(simulate(base)))
    assert (told["cluster"], told["workload"], told["GPUs"]) == ("hand", "hand", "2 x abacus")
    assert told["embedding workers"] == "1" and told["embedding servers"] == "1 server on 1 host"
    assert told["embedding tables"] == "3 rows of 8 numbers"
    assert told["parameters"] == "24 in rows, 226 dense"
    assert told["batch"] == "8 samples, 4 on each rank"
    assert told["mode"] == "hybrid, tau 3, 7 permits a rank"
    assert told["NICs"] == "shared as unshared" and told["run"] == "20 steps, seed 11"
    for mode, knobs, said in (
        (Mode.SYNC, {}, "sync"),
        (Mode.LOOKAHEAD, {"ahead": 2}, "lookahead, 2 steps ahead, reread"),
        (Mode.ASYNC, {"tau": None}, "async, tau unbounded"),
        (Mode.ASYNC, {"tau": 0}, "async, tau 0"),
    ):
        found = facts_of(report(simulate(hand_scenario(mode, steps=6, **knobs))))
        assert found["mode"] == said
    default = simulate(hand_scenario(Mode.LOOKAHEAD, steps=6))
    ahead = f"lookahead, {default.scenario.steps_ahead} steps ahead, reread"
    assert facts_of(report(default))["mode"] == ahead


def test_extrapolated_laws_are_named():
    measured = replace(law(1.0), fitted_items=(100.0, 200.0))
    run = simulate(hand_scenario(costs=hand_costs(server_lookup=measured, load=measured)))
    told = facts_of(report(run))["extrapolated laws"]
    assert told == "load, server_lookup: outside the range of their fit"
    assert "extrapolated laws" not in facts_of(report(simulate(hand_scenario())))


def test_a_share_is_printed_from_half_a_tenth_of_a_per_cent_on():
    found = report(simulate(hand_scenario()))
    small = replace(found, use={"a": 0.5, "b": 0.0005, "c": 0.00049}, blame={"d": 0.0005})
    assert facts_of(small)["busy resources"] == "50.0 %  a\n 0.1 %  b"
    assert facts_of(small)["critical path, resources"] == "0.1 %  d"


@given(st.sampled_from(list(Discipline)), st.integers(0, 3))
def test_shares_of_use_and_blame_lie_between_nothing_and_all(discipline, seed):
    noise = Noise(gpu_cv=0.3)
    found: Report = report(simulate(small_scenario(discipline=discipline, noise=noise, seed=seed)))
    for shares_of in (found.use, found.blame):
        assert all(0 < share <= 1 + 1e-9 for share in shares_of.values())
