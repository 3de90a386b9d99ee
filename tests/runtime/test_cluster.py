"""Runs on Ray: two nodes of this machine, real processes, real deaths. Nothing here stops a Ray
that others have started: nodes end with the fixture, what else is killed is known by its pid."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from persia_sim.base.staleness import summary_of
from persia_sim.base.trace import Kind, Trace
from runtime import __main__ as commands
from runtime.guarded import NOT_STORED, guarded
from runtime.run.folder import ENDING, status_of
from runtime.stop import PeerError
from tests.runtime.hosts.test_slow_wire import assert_hidden
from tests.runtime.spawned import SLOW
from tests.runtime.worlds import predictions_in

MARK = "PERSIA_TESTBED_TEST_OF_RAY"
WORDS = ["--data.name", "synthetic", "--steps", "60", "--batch", "64", "--test-rows", "500"]
ON_TWO = ["--ranks", "2", "--servers", "2"]

KILLER = """
import os, signal, time
from pathlib import Path
from runtime.models.networks import FeedForward

def those(role):
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = {mark!r}.encode() in (process / "environ").read_bytes()
            if mine and f"{{role}}_process".encode() in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:
            pass

def parent_of(pid):
    return int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])

class Net(FeedForward):
    batches = 0

    def forward(self, dense, embeddings):
        self.batches += self.training
        killed = Path({run!r} + ".killed")
        last = str(int(os.environ.get("WORLD_SIZE", 0)) - 1)
        if self.batches == 5 and os.environ.get("RANK") == last and not killed.exists():
            for victim in those("loader"):
                os.kill(victim, signal.SIGKILL)
        if self.batches == 30 and os.environ.get("RANK") == last and not killed.exists():
            while not list(Path({run!r}).glob("checkpoints/*/state.json")):
                time.sleep(0.02)
            killed.touch()
            for victim in ({victim},):
                os.kill(victim, signal.SIGKILL)
        return super().forward(dense, embeddings)
"""
SLOW_TO_WRITE = """
    def state_dict(self, *words, **more):
        if self.batches > 29 and self.training:
            time.sleep(8)
        return super().state_dict(*words, **more)
"""


@pytest.fixture(scope="module")
def mark():
    """In the environment of every process of these nodes, and of no other."""
    os.environ[MARK] = f"{MARK}-{os.getpid()}"
    yield os.environ[MARK]
    del os.environ[MARK]


@pytest.fixture(scope="module")
def cluster(mark):
    pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    from runtime.hosts.ray.room import local_nodes

    with ExitStack() as ends:
        try:
            found = ends.enter_context(local_nodes(2, cores=6))
        except PeerError as error:
            pytest.skip(str(error))
        yield found


@pytest.fixture
def address(cluster):
    return cluster.address


def start(where: str, *words: str, folder: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "runtime", "train", "--ray", where, *words]
    return subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train(where: str, *words: str, folder: Path) -> tuple[int, str, str]:
    process = start(where, *words, folder=folder)
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.ray
@pytest.mark.law1
@pytest.mark.law11
@pytest.mark.law12
def test_a_rank_killed_on_ray_costs_no_byte(address, mark, tmp_path, monkeypatch):
    """Laws 1 and 11: all go back to the last checkpoint, and end with the bytes of threads; before
    that others went on for two loaders."""
    run = tmp_path / "killed"
    killer = KILLER.format(mark=mark, run=str(run), victim="os.getpid()")
    (tmp_path / "mortal_on_ray.py").write_text(killer)
    words = [*WORDS, "--model.name", "mortal_on_ray:Net", "--checkpoint-every", "20"]
    more = ["--loaders", "2", "--out", "killed"]
    code, told, error = train(address, *words, *ON_TWO, *more, folder=tmp_path)
    assert code == 0, told + error
    assert len(re.findall(r"^loader \d: 1 CPU on .* \(node \w+\)$", told, re.MULTILINE)) == 2
    assert len(re.findall(r"^rank \d: 1 CPU on ", told, re.MULTILINE)) == 2
    assert re.search(r"warning: .*rank 1 was killed by SIGKILL; all ranks go back to the", error)
    assert len(json.loads((run / "summary.json").read_text())["resumed_at_samples"]) == 1
    monkeypatch.syspath_prepend(tmp_path)
    threads = ["--ranks", "2", "--executor", "concurrent", "--out", str(tmp_path / "threads")]
    assert commands.main(["train", *words, *threads]) == 0
    assert predictions_in(run) == predictions_in(tmp_path / "threads")


@pytest.mark.ray
def test_a_rank_whose_actor_is_killed_writes_itself_down_before_another_goes_on(
    address, mark, tmp_path
):
    """Where Ray lets it: then it still holds the folder when the next one comes."""
    run = tmp_path / "run"
    killer = KILLER.format(mark=mark, run=str(run), victim="os.getppid()") + SLOW_TO_WRITE
    (tmp_path / "slow_to_write.py").write_text(killer)
    words = ["--model.name", "slow_to_write:Net", "--checkpoint-every", "20", "--out", "run"]
    code, told, error = train(address, *WORDS, "--servers", "1", *words, folder=tmp_path)
    assert code == 0, told + error
    summary = json.loads((run / "summary.json").read_text())
    (at,) = summary["resumed_at_samples"]
    assert summary["updates"] == 60 and 64 * 20 <= at < 64 * 40


@pytest.mark.ray
@pytest.mark.law5
@pytest.mark.law9
@pytest.mark.law12
def test_on_ray_the_window_holds_and_each_batch_is_trained_once(address, tmp_path):
    """Laws 5 and 9."""
    hybrid = ["--mode", "hybrid", "--tau", "3", "--no-merge-pushes", "--out", "run"]
    hybrid += ["--workers", "2"]
    code, told, error = train(address, *WORDS, *ON_TWO, *hybrid, folder=tmp_path)
    assert code == 0, told + error
    for role, number in (
        ("rank", 0),
        ("rank", 1),
        ("embedding server", 0),
        ("embedding server", 1),
        ("embedding worker", 0),
        ("embedding worker", 1),
    ):
        assert re.search(rf"^{role} {number}: 1 CPU on [\w.]+ \(node \w+\)$", told, re.MULTILINE)
    order = Trace.load(tmp_path / "run" / "trace.npz")
    assert 0 < summary_of(order).max_steps <= 3
    pushes = [tuple(row) for row in order.of_kind(Kind.PUSH)[:, [2, 3, 4]].tolist()]
    assert sorted(pushes) == [(r, s, k) for r in range(2) for s in range(60) for k in range(2)]


FAR = """
from pathlib import Path
from experiments.validating.slow_wire import slow_wire
from runtime.hosts.row_processes import RowProcesses
from runtime.models.networks import FeedForward as Net

wires, addresses = [], RowProcesses.addresses.fget

def behind_a_wire(processes):
    wires.append(slow_wire(float(Path("delay_s").read_text())))
    *near, far = addresses(processes)
    return [*near, wires[-1].__enter__().to(far)]

RowProcesses.addresses = property(behind_a_wire)
"""
"""A network whose ranks reach their servers, or the workers beside these, over a wire."""


@pytest.mark.ray
@pytest.mark.law5
@pytest.mark.law6
@pytest.mark.law12
@pytest.mark.law15
@pytest.mark.parametrize("workers", ["0", "1"])
def test_on_ray_a_window_hides_a_wire(workers, address, tmp_path):
    """In sync each step pays it. What was recorded behind it replays to the same bytes."""
    (tmp_path / "far.py").write_text(FAR)
    words = {
        "sync": [*WORDS[:2], *WORDS[4:], "--mode", "sync", "--steps", "40"],
        "hybrid": [*WORDS[:2], *WORDS[4:], "--mode", "hybrid", "--tau", "16", "--steps", "140"],
    }
    model = ["--model.name", "far:Net"]
    runs: list[Path] = []

    def summary() -> dict:
        return json.loads((runs[-1] / "summary.json").read_text())

    def step_s(mode: str, wire_s: float) -> float:
        (tmp_path / "delay_s").write_text(str(wire_s / 2))
        runs.append(tmp_path / f"{mode}-{len(runs)}")
        there = ["--servers", "2", "--workers", workers, "--out", runs[-1].name]
        code, told, error = train(address, *words[mode], *model, *there, folder=tmp_path)
        assert code == 0, told + error
        return 64 / summary()["samples_per_s"]

    without_s = step_s("sync", 0.0)
    for mode, most in (("sync", 1), ("hybrid", 10)):
        assert_hidden(0.03, most, functools.partial(step_s, mode), lambda: without_s)
    late = summary()["staleness"]
    assert late["mean_steps"] > 16 / 2 and late["max_steps"] <= 16

    again = ["--executor", "replay", "--trace", f"{runs[-1].name}/trace.npz", "--shards", "2"]
    line = [sys.executable, "-m", "runtime", "train", *words["hybrid"], *model, *again]
    subprocess.run([*line, "--out", "again"], cwd=tmp_path, check=True)
    assert predictions_in(tmp_path / "again") == predictions_in(runs[-1])


@pytest.mark.ray
@pytest.mark.law12
@pytest.mark.law13
def test_a_server_and_a_worker_killed_on_ray_come_back(address, mark, tmp_path):
    """The server with its shard."""
    run = tmp_path / "back"
    killer = KILLER.format(
        mark=mark, run=str(run), victim="*map(next, map(those, ('server', 'worker')))"
    )
    (tmp_path / "killer_of_servers.py").write_text(killer)
    words = ["--model.name", "killer_of_servers:Net", "--checkpoint-every", "20", "--out", "back"]
    hybrid = ["--mode", "hybrid", "--tau", "3", "--latency-s", "0.01", "--workers", "1"]
    code, told, error = train(address, *WORDS, *ON_TWO, *hybrid, *words, folder=tmp_path)
    assert code == 0, told + error
    for who in r"server \d", "worker 0":
        assert re.search(rf"embedding {who} \(pid \d+.*\) was killed by SIGKILL.* it is back", told)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["updates"], summary["resumed_at_samples"]) == (60, [])
    assert sum(summary["pushes_lost_at"]) > 0  # of steps 20 to 26, at least


@pytest.mark.ray
def test_a_server_whose_actor_is_killed_is_started_again_by_ray(address, mark, tmp_path):
    """And a loader's; at another address, so all ranks go back to the last checkpoint."""
    run = tmp_path / "run"
    victims = "*map(parent_of, map(next, map(those, ('server', 'loader'))))"
    killer = KILLER.format(mark=mark, run=str(run), victim=victims)
    (tmp_path / "killer_of_actors.py").write_text(killer)
    words = ["--model.name", "killer_of_actors:Net", "--checkpoint-every", "20", "--out", "run"]
    hybrid = ["--mode", "hybrid", "--tau", "3", "--loaders", "1"]
    code, told, error = train(address, *WORDS, *ON_TWO, *hybrid, *words, folder=tmp_path)
    assert code == 0, told + error
    assert re.search(r"warning: rank .*; all ranks go back to the last checkpoint", error)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["updates"], len(summary["resumed_at_samples"])) == (60, 1)


HOLDS = """
import sys, ray
from ray.util import placement_group
ray.init({address!r}, logging_level="ERROR")
assert placement_group([{{"CPU": 1}}] * 5).wait(60)
print("held", flush=True)
sys.stdin.readline()
"""
TAKES_ONE_AWAY = """
import ray
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
ray.init({address!r}, logging_level="ERROR")
of_ranks = [i for i, one in placement_group_table().items()
            if one["state"] == "CREATED" and one["strategy"] == "PACK"]
remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(of_ranks[0]))))
"""


@pytest.mark.ray
@pytest.mark.law9
def test_ranks_come_and_go_with_the_room_for_them(address, tmp_path):
    """Law 9: with two, three and two ranks each batch is trained once."""
    (tmp_path / "lasting.py").write_text(SLOW)
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDS.format(address=address)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert held.stdout.readline() == "held\n"
    words = [*WORDS[:2], "--steps", "500", *WORDS[4:], "--model.name", "lasting:Net"]
    words += ["--checkpoint-every", "20", "--servers", "1", "--ranks", "1:3", "--out", "grown"]
    process = start(address, *words, folder=tmp_path)
    warned = []
    try:
        wait_for_checkpoint(process, tmp_path / "grown")
        held.communicate("\n")
        warned.append(process.stderr.readline())
        while "warning" not in warned[-1]:
            warned.append(process.stderr.readline())
        wait_for_checkpoint(process, tmp_path / "grown", after=newest(tmp_path / "grown"))
        subprocess.run([sys.executable, "-c", TAKES_ONE_AWAY.format(address=address)], check=True)
        (tmp_path / "enough").touch()
        told, error = process.communicate(timeout=200)
    finally:
        held.kill()
        process.kill()
    assert process.returncode == 0, told + error
    assert "there is room for more ranks; all ranks go back to the last" in warned[-1]
    assert re.search(r"warning: rank .*; all ranks go back to the last checkpoint", error)
    summary = json.loads((tmp_path / "grown" / "summary.json").read_text())
    assert (summary["updates"], summary["samples"], summary["ranks"]) == (500, 500 * 64, 2)
    went_on = json.loads((tmp_path / "grown" / "command.json").read_text())["resume"]
    assert [words[words.index("--ranks") + 1] for words in went_on] == ["3", "2"]


def newest(run: Path) -> str:
    return max((file.parent.name for file in run.glob("checkpoints/[0-9]*/state.json")), default="")


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path, after: str = "") -> None:
    while newest(run) <= after:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.law11
@pytest.mark.law13
@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_servers_come_and_go_with_the_room_for_them_and_as_somebody_wishes(
    mode, address, tmp_path, monkeypatch
):
    """Laws 11 and 13: with one, three and two servers the bytes of sync are those of threads, and
    every push is applied or counted."""
    (tmp_path / "lasting.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDS.format(address=address)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert held.stdout.readline() == "held\n"
    run = tmp_path / "resized"
    words = [*WORDS[:2], "--steps", "300", *WORDS[4:], "--model.name", "lasting:Net"]
    words += ["--mode", mode, "--checkpoint-every", "20"]
    process = start(
        address, *words, "--servers", "1:3", "--ranks", "2",
        "--out", "resized", folder=tmp_path,
    )  # fmt: skip
    told = []

    def wait_for(sentence: str) -> None:
        while not re.search(sentence, "".join(told)):
            assert process.poll() is None, "".join(told[-20:]) + process.stderr.read()
            told.append(process.stderr.readline())

    # One server beside the ranks and what is held; then three; then two, as somebody wishes.
    resize = [sys.executable, "-m", "runtime", "resize", "resized", "--servers"]
    try:
        wait_for_checkpoint(process, run)
        refused = subprocess.run([*resize, "9"], cwd=tmp_path, capture_output=True, text=True)
        assert refused.returncode == 2
        assert "it was started with --servers 1:3; begin it with" in refused.stderr
        held.communicate("\n")
        wait_for(r"there is room for more servers; all ranks go back to the last checkpoint")
        wait_for(r"servers: \d -> 3; the pause was \d+\.\d s\n")
        subprocess.run([*resize, "2"], cwd=tmp_path, check=True)
        wait_for(r"servers: 3 -> 2; the pause was \d+\.\d s\n")
        (tmp_path / "enough").touch()
        _, error = process.communicate(timeout=200)
    finally:
        held.kill()
        process.kill()
    assert process.returncode == 0, error

    # Nothing was lost, and all was trained once.
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["updates"], summary["samples"]) == (300, 300 * 64)
    assert summary["pushes_lost_at"] == [0, 0]
    went_on = json.loads((run / "command.json").read_text())["resume"]
    assert [words[words.index("--servers") + 1] for words in went_on][-2:] == ["3", "2"]
    if mode == "sync":
        threads = ["--ranks", "2", "--executor", "concurrent", "--out", str(tmp_path / "threads")]
        assert commands.main(["train", *words, *threads]) == 0
        assert predictions_in(run) == predictions_in(tmp_path / "threads")


ASKS = """
import os, signal, time
from pathlib import Path
from runtime.models.networks import FeedForward

class Net(FeedForward):
    batches = 0

    def forward(self, dense, embeddings):
        self.batches += self.training
        asked = Path({run!r} + ".asked")
        if self.batches == 30 and os.environ.get("RANK") == "1" and not asked.exists():
            while not list(Path({run!r}).glob("checkpoints/*/state.json")):
                time.sleep(0.02)
            asked.touch()
            os.kill({victim}, signal.SIGTERM)
            time.sleep(1)
        return super().forward(dense, embeddings)
"""


@pytest.mark.ray
@pytest.mark.law11
def test_a_rank_on_ray_that_is_asked_to_end_is_started_again(address, tmp_path):
    """As by a host that is preempted; it ended with 0, and the rest was never trained."""
    run = tmp_path / "asked"
    (tmp_path / "asks_rank.py").write_text(ASKS.format(run=str(run), victim="os.getpid()"))
    words = ["--model.name", "asks_rank:Net", "--checkpoint-every", "20", "--out", "asked"]
    code, told, error = train(address, *WORDS, *ON_TWO, *words, folder=tmp_path)
    assert code == 0, told + error
    assert "a rank was asked to end; all ranks go back to the last checkpoint" in error
    assert json.loads((run / "summary.json").read_text())["samples"] == 60 * 64
    assert not (run / ENDING).exists()


@pytest.mark.ray
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_on_ray_that_is_asked_to_end_says_so(number, status, address, tmp_path):
    """Its process and its folder alike; the same command goes on."""
    run = tmp_path / "ended"
    words = [*WORDS[:2], "--steps", "400", *WORDS[4:], *ON_TWO, "--latency-s", "0.02"]
    words += ["--checkpoint-every", "5", "--out", "ended", "--resume", "auto"]
    process = start(address, *words, folder=tmp_path)
    try:
        wait_for_checkpoint(process, run)
        process.send_signal(number)
        told, error = process.communicate(timeout=200)
    finally:
        process.kill()
    assert (process.returncode, status_of(run)) == (status, status), told + error
    assert not (run / "summary.json").exists()
    code, told, error = train(address, *words, folder=tmp_path)
    assert code == 0, told + error
    assert json.loads((run / "summary.json").read_text())["samples"] == 400 * 64


@pytest.mark.ray
def test_what_the_cluster_is_short_of_is_said(address, tmp_path):
    words = [*WORDS, "--ranks", "9", "--servers", "1", "--cluster-wait-s", "1"]
    code, _, error = train(address, *words, folder=tmp_path)
    assert code == 2
    assert re.search(
        r"error: the cluster of 2 hosts has had no room for 9 ranks, 1 server, 0 workers and"
        r" 0 loaders for 1 s: 10 CPU are asked for \(1 of one process\), 8 are there \(4 on a"
        r" host\), \d are free; add hosts, or use fewer --ranks",
        error,
    )  # fmt: skip


@pytest.mark.ray
def test_a_dry_run_prints_places_and_trains_nothing(address, tmp_path):
    code, told, error = train(address, *WORDS, *ON_TWO, "--dry-run", folder=tmp_path)
    assert code == 0, error
    assert "embedding server 1: 1 CPU on " in told and "--ranks" in told
    assert not list(tmp_path.iterdir())


def test_an_exit_code_of_a_rank_is_that_of_the_command():
    pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    from runtime.hosts.ray.actors import RankExit

    for code in (2, NOT_STORED):

        def fails(code: int = code) -> None:
            raise RankExit(code, "error: the disk is full", follows=False).as_error()

        assert guarded(fails) == code
