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


def test_servers_of_another_host_are_behind_a_wire_by_hand():
    """Bytes over the rate, but for a bucket of each burst that pauses have filled, come beside what
    the call takes where nothing limits it."""
    served = STAGES | {"push": 0.0, "served": 3 * MS}  # 7 + 3 - 0.5 ms, one after the other
    late = STAGES | {"push": 2 * MS, "served": 1 * MS}
    for rate in (0.05, 1.0, 10.0):
        sync = Case(mode=Mode.SYNC, servers=1, gbit_per_s=rate)
        moved, per_s = travels(sync), rate / 8 * 1e9 * 1448 / 1514
        bucket = (2**15 if rate < 1 else 2**17) * 1448 / 1514
        bursts = moved.request_bytes, moved.push_bytes, moved.rows_bytes
        whole_s = sum(max(0.0, burst - bucket) for burst in bursts) / per_s
        step_s = 512 / schedule(sync, served, 61).samples_per_s
        assert step_s == pytest.approx(9.5 * MS + whole_s, rel=1e-6)
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
    """Late rows at a rate that binds: a step takes all its bytes over the rate, or more."""
    slow = Case(servers=1, gbit_per_s=0.05)
    moved, late = travels(slow), STAGES | {"push": 0.0, "served": 1 * MS}
    there_s = (moved.request_bytes + moved.push_bytes) / (0.05 / 8 * 1e9 * 1448 / 1514)
    assert 512 / schedule(slow, late, 200).samples_per_s >= there_s * (1 - 1e-6)


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
            mode, times = case.mode, 1 + (case.mode is Mode.LOOKAHEAD)
            found = run_case(case, 30, link)
            moved, (sent, come) = travels(case), found.link_bytes
            assert 1 <= sent / (moved.request_bytes + moved.push_bytes) < 1.01
            assert 1 <= come / (times * moved.rows_bytes) < 1.01
            assert 0 < found.server_cpu_s < 30 / found.samples_per_s * 1024
            assert found.measured.wall["read"] > found.measured.cpu["read"] > 0
            assert (found.measured.wall["refresh"] > 0) == (mode is Mode.LOOKAHEAD)
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
