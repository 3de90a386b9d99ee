"""The link to a second host: bytes that its interface counts, and the rate that it is shaped to."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.validating import schedule as module
from experiments.validating.cases import Case, travels
from experiments.validating.link import Apart
from experiments.validating.profiling import run_case
from experiments.validating.schedule import schedule
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.scenario import Scenario
from tests.experiments.test_validate import MS, STAGES
from tests.runtime.worlds import host_of_servers


def test_servers_of_another_host_are_behind_a_wire_by_hand():
    """Bytes over the rate, but for a bucket of each burst that pauses have filled, come beside what
    the call takes where nothing limits it."""
    served = STAGES | {"push": 0.0, "served": 3 * MS}  # 7 + 3 - 0.5 ms, one after the other,
    # 1.5 of them before the request, while the push is on its way
    late = STAGES | {"push": 2 * MS, "served": 1 * MS}
    for rate in (0.05, 1.0, 10.0):
        sync = Case(mode=Mode.SYNC, servers=1, gbit_per_s=rate)
        moved, per_s = travels(sync), rate / 8 * 1e9 * 1448 / 1514
        bucket = (2**15 if rate < 1 else 2**17) * 1448 / 1514
        bursts = moved.request_bytes, moved.push_bytes, moved.rows_bytes
        asked_s, pushed_s, rows_s = (max(0.0, burst - bucket) / per_s for burst in bursts)
        there_s = max(asked_s + pushed_s, asked_s + 1.5 * MS)
        step_s = 512 / schedule(sync, served, 61).samples_per_s
        assert step_s == pytest.approx(8 * MS + there_s + rows_s, rel=1e-3)
        # Late rows, many lookups of which are on their way: the slowest of training, of each
        # direction, and of the server, with more of the bucket or less. A lookup that finds a push
        # at the server waits for the rest of it; a request that finds one on the link, which is
        # another connection's, has half of the rate.
        hybrid = schedule(replace(sync, mode=Mode.HYBRID), late, 200)
        least_s, most_s = (
            max(4 * MS, (there - 2 * bucket * filled) / per_s, fetched / per_s, 3 * MS)
            for filled, there, fetched in (
                (1, sum(bursts[:2]), max(0.0, bursts[2] - bucket)),
                (0, sum(bursts[:2]), bursts[0] + bursts[2]),
            )
        )
        longest_s = most_s + 3 * MS + late["push"] + moved.request_bytes / per_s
        assert least_s * (1 - 1e-6) <= 512 / hybrid.samples_per_s <= longest_s

    unshaped = replace(sync, gbit_per_s=0.0)
    assert 512 / schedule(unshaped, served, 61).samples_per_s == pytest.approx(9.5 * MS, rel=1e-6)


def test_a_link_that_is_never_idle_has_nothing_in_its_bucket():
    """Late rows at a rate that binds: a step takes all its bytes over the rate, or more; behind
    the last of some 130 steps the pushes of four may follow."""
    slow = Case(servers=1, gbit_per_s=0.05)
    moved, late = travels(slow), STAGES | {"push": 0.0, "served": 1 * MS}
    there_s = (moved.request_bytes + moved.push_bytes) / (0.05 / 8 * 1e9 * 1448 / 1514)
    assert 512 / schedule(slow, late, 200).samples_per_s >= there_s * (1 - slow.window / 130)


def test_a_request_does_not_wait_behind_gradients_on_the_link(monkeypatch):
    """Connections share it fairly: ids of one go there while another one's gradients do. One lookup
    at a time, for several of them share the link with each other, too."""

    def one_at_a_time(case: Case, steps: int) -> Scenario:
        found = of_case(case, steps)
        return replace(found, queues=replace(found.queues, lookups_in_flight=1))

    of_case = module.scenario_of
    monkeypatch.setattr(module, "scenario_of", one_at_a_time)
    slow = Case(servers=1, gbit_per_s=0.05)
    moved, per_s = travels(slow), 0.05 / 8 * 1e9 * 1448 / 1514
    late = STAGES | {"push": 0.0, "served": 1 * MS}
    step_s = 512 / schedule(slow, late, 200).samples_per_s
    behind_s = (moved.request_bytes + moved.push_bytes + moved.rows_bytes) / per_s
    assert step_s < 0.7 * behind_s


@pytest.mark.parametrize(
    ("chosen", "step_ms"),
    [
        ({"mode": Mode.SYNC}, 30 + 7.5),  # all in turn, and no answer of a push
        ({"window": 0}, 30 + 6),  # loading and asking are done before the push
        ({"window": 4}, (30 + 6) / 5),
        ({"window": 16}, 4),  # training alone
        ({"window": 16, "round_trip_s": 0.3}, (300 + 1.5 + 1 + 0.5) / 10),  # ten are in flight
    ],
)
@pytest.mark.law15
def test_a_far_server_costs_sync_one_round_trip_and_late_rows_what_the_window_leaves(
    chosen, step_ms
):
    """Stages of 1 + 0.5, then 1 at the server, 0.5 + 4 + 0.5, and nobody waits for a push."""
    case = replace(Case(servers=1, gbit_per_s=0.0, round_trip_s=0.03), **chosen)
    near = STAGES | {"push": 0.0, "served": 1 * MS}
    found = 512 / schedule(case, near, 170).samples_per_s
    assert 1e3 * found == pytest.approx(step_ms, rel=0.06)  # where ten come at once it is rough


class Here:
    """A link to servers of this host."""

    def __init__(self) -> None:
        at, self.secret = host_of_servers()
        self.servers_at = at[0]

    def shape(self, gbit_per_s: float) -> None:
        assert gbit_per_s == 0.0

    def control(self) -> float:
        return 1.0

    def moved(self) -> tuple[int, int]:
        return 0, 0

    def cpu_s(self) -> float:
        return 0.0


@pytest.mark.long
@pytest.mark.law15
@pytest.mark.parametrize(
    "chosen", [{"mode": Mode.SYNC}, {"window": 0}, {"window": 4}, {"window": 16}]
)
def test_runs_over_a_delay_are_predicted_from_sync_beside_the_servers(chosen):
    """Within 25 %, with all the lookups in flight that the runtime has. On a busy machine stages
    take what they like: where the wire is slower they matter less."""
    near = Case(mode=Mode.SYNC, servers=1, batch=64, hidden=(8,))
    for round_trip_s in (0.03, 0.12, 0.5):
        measured = run_case(near, 30, Here()).measured
        stages = STAGES | dict(measured.cpu) | {"push": 0.0}
        stages["served"] = max(1e-6, measured.wall["read"] - measured.cpu["read"])
        far = replace(replace(near, mode=Mode.HYBRID), round_trip_s=round_trip_s, **chosen)
        predicted = schedule(far, stages, 90).samples_per_s
        found = run_case(far, 90, Here()).samples_per_s
        if predicted == pytest.approx(found, rel=0.25):
            return
    assert predicted == pytest.approx(found, rel=0.25)


DEVICE = Path(f"/sys/class/net/persia{os.getpid()}")


def packets() -> int:
    return int((DEVICE / "statistics/tx_packets").read_text())


@pytest.mark.netns
def test_bytes_to_another_host_are_those_that_its_interface_counts():
    """But for one or two in a thousand, which are TLS and heartbeats."""
    if os.geteuid():
        pytest.skip("a network namespace needs root")
    with closing(Apart("hosts")) as link:
        base = Case(mode=Mode.SYNC, batch=1024, dim=32, hidden=(8,), servers=1, gbit_per_s=0.0)
        for case in (base, replace(base, half=True), replace(base, mode=Mode.LOOKAHEAD)):
            mode, times = case.mode, 1 + case.mode.prefetches_rows
            found = run_case(case, 30, link)
            moved, (sent, come) = travels(case), found.link_bytes
            assert 1 <= sent / (moved.request_bytes + moved.push_bytes) < 1.01
            assert 1 <= come / (times * moved.rows_bytes) < 1.01
            assert 0 < found.server_cpu_s < 30 / found.samples_per_s * 1024
            assert found.measured.wall["read"] > found.measured.cpu["read"] > 0
            assert (found.measured.wall["refresh"] > 0) == mode.prefetches_rows
        link.shape(0.1)
        before = packets()
        assert 0.1 < link.control() < 1.3  # a bucket that is full at first; a timer that is late
        sent = 0.25 * 0.1 / 8 * 1e9
        assert packets() - before < sent / 4e3, "cut into packets by the bucket, on our cores"
    device = DEVICE.name + "@"
    assert device not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("asked", ["hosts", "gbit_per_s"])
def test_who_may_not_make_a_second_host_is_told_which_option_asks_for_it(asked, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=rf"^{asked} asks for a second host.*root.*leave it out"):
        Apart(asked)
