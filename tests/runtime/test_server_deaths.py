"""A server process of a whole run is killed: late-reading modes go on, exact ones go back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runtime import __main__ as commands
from runtime import train_command
from runtime.checkpoint.places import folder_of
from runtime.embedding.server_rules import ServerRules
from runtime.hosts import row_processes
from runtime.rank.stages import Computed, RankStages
from runtime.run.saver import RunFailover
from runtime.stop import Ending, PeerError

STEPS = 60
DIES_AT = 30
"""A step behind the first checkpoint, and before the second."""


def options(folder: Path, mode: str, every: int = 20) -> list[str]:
    words = f"--mode {mode} --executor concurrent --ranks 2 --servers 2 --latency-s 0.003"
    words += f" --batch 32 --steps {STEPS} --checkpoint-every {every} --model.hidden 8 --rows.dim 4"
    words += " --data.name synthetic --test-rows 500"
    return ["train", "--out", str(folder), *words.split()]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def launched(monkeypatch) -> list:
    """The server processes of every run."""
    found: list = []

    class Noted(row_processes.RowProcesses):
        def __init__(self, *given):
            super().__init__(*given)
            found.append(self.servers)

    monkeypatch.setattr(row_processes, "RowProcesses", Noted)
    return found


@pytest.fixture
def killed(launched, monkeypatch, tmp_path) -> list[int]:
    """The server that dies at a push of rank 0, once the first checkpoint is on the disk."""
    found: list[int] = []
    push = RankStages.push

    def pushed(stages: RankStages, computed: Computed) -> None:
        handle = computed.handle
        # In async a step is one rank's, and the other one has as many.
        step = handle.step * 2 if stages._mode.has_dense_server else handle.step
        if not found and handle.rank == 0 and step >= DIES_AT:
            while not list((tmp_path / "run").glob("checkpoints/*/state.json")):
                time.sleep(0.01)
            found.append(launched[0].pids[1])
            os.kill(found[0], signal.SIGKILL)
        push(stages, computed)

    monkeypatch.setattr(RankStages, "push", pushed)
    return found


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        *product(["hybrid", "async"], ["", "--workers 2"]),
        *product(["hybrid"], ["--fresh all", "--fresh all --workers 2"]),
    ],
)
@pytest.mark.law13
def test_a_run_survives_the_death_of_a_server(mode, changes, tmp_path, launched, killed, capsys):
    assert commands.main([*options(tmp_path / "run", mode), *changes.split()]) == 0
    assert killed
    told = capsys.readouterr()
    assert f"(pid {killed[0]}) was killed by SIGKILL" in told.out + told.err
    found = summary_of(tmp_path / "run")
    assert (found["updates"], found["samples"]) == (STEPS, 32 * STEPS)
    assert len(launched) == 1
    assert found["pushes_lost_at"][0] == 0
    assert found["pushes_lost_at"][1] >= 0
    warnings = " ".join(found["warnings"])
    workers = ["embedding worker 0", "embedding worker 1"] if "--workers" in changes else []
    for who in ["ranks 0, 1", *workers]:
        assert re.search(rf"it is back, and \d+ pushes of {who} are lost", warnings), warnings
    assert found["staleness"]["mean_steps"] is None
    assert found["checkpoints_failed"] == 0


KILLER = """
import os, signal, sys, time
from pathlib import Path
from runtime.rank.stages import RankStages
from runtime.__main__ import run

push, folder = RankStages.push, Path(os.environ["RUN"])
attempt, looked = int(os.environ.get("PERSIA_TESTBED_RESTARTS", "0")), []
before = set(folder.glob("checkpoints/*/state.json"))

def pushed(stages, computed):
    if stages._rank == 0 and not looked and computed.handle.step >= 5 + 25 * attempt:
        while set(folder.glob("checkpoints/*/state.json")) <= before:
            time.sleep(0.01)
        tasks = Path("/proc/self/task").glob("*/children")
        pids = sorted(int(pid) for task in tasks for pid in task.read_text().split())
        words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
        servers = [pid for pid in pids if "server_process" in words[pid]]
        workers = [pid for pid in pids if "worker_process" in words[pid]]
        entries = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        sockets = [entry for entry in entries if "socket:" in os.path.realpath(entry)]
        looked.append(1)  # memory files, and those of checkpoints, come and go
        (folder.parent / f"held-{attempt}").write_text(
            f"{len(servers)} {len(workers)} {len(sockets)}"
        )
        if attempt < 2:
            os.kill((servers, workers)[attempt][0], signal.SIGKILL)
    push(stages, computed)

RankStages.push = pushed
run()
"""


@pytest.mark.long
@pytest.mark.law13
def test_an_exact_run_starts_again_and_nothing_of_the_dead_attempt_stays(tmp_path):
    """A server is killed, and in the next attempt a worker; the third ends as if nothing was."""
    (tmp_path / "killer.py").write_text(KILLER)
    words = [sys.executable, str(tmp_path / "killer.py"), *options(tmp_path / "run", "sync", 4)]
    words += ["--workers", "1"]
    environment = os.environ | {"RUN": str(tmp_path / "run"), "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("; the run goes back to its last checkpoint") == 2
    held = [(tmp_path / f"held-{attempt}").read_text() for attempt in range(3)]
    assert held[0].startswith("2 1 ") and held == held[:1] * 3, "servers and sockets of an attempt"
    assert summary_of(tmp_path / "run")["pushes_lost_at"] == [0, 0]
    assert commands.main(options(tmp_path / "calm", "sync", 4)) == 0
    one, other = (np.load(tmp_path / name / "predictions.npz") for name in ("run", "calm"))
    assert one["predictions"].tobytes() == other["predictions"].tobytes()


@pytest.fixture
def starts_again(monkeypatch, tmp_path):
    """What the command does behind a death: the pauses, and the words of the process that goes
    on."""
    (folder_of(tmp_path, 640)).mkdir(parents=True)
    (folder_of(tmp_path, 640) / "state.json").write_text("{}")
    done: list[object] = []
    monkeypatch.setattr(train_command.time, "sleep", done.append)
    monkeypatch.setattr(train_command.os, "execv", lambda python, words: done.append(words[-3:]))
    monkeypatch.setattr(sys, "argv", ["persia-runtime", "train", "--steps", "9"])

    def again(times: int, ending: Ending) -> list[object]:
        done.clear()
        monkeypatch.setenv("PERSIA_TESTBED_RESTARTS", str(times))
        error = PeerError("embedding server 0 has died")
        train_command._start_again(error, tmp_path, ["--steps", "9"], ending)
        return list(done)

    return again, ["--resume", str(tmp_path), "--trust"]


def test_the_command_starts_itself_again_with_growing_pauses(starts_again, capsys):
    """A host that starts again is not asked eight times at once."""
    again, goes_on = starts_again
    found = [again(times, Ending()) for times in range(9)]
    seconds = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert found == [[pause_s, goes_on] for pause_s in seconds] + [[]]
    assert "server 0 has died; the run goes back to its last checkpoint in 32 s" in (
        capsys.readouterr().err
    )


def test_a_server_of_a_run_whose_checkpoints_are_all_damaged_does_not_come_back_empty(tmp_path):
    """What it had trained would be gone, and the other servers would go on with theirs."""
    failover = RunFailover(SimpleNamespace(shards=2), ServerRules(), tmp_path, warm=False)
    failover.note_cut(0, [0])
    assert [saved.folder for saved in failover.saved(1)] == [None], "there is no checkpoint yet"
    failover.note_cut(640, [20])
    (folder := folder_of(tmp_path, 640)).mkdir(parents=True)
    (folder / "state.json").write_text("damaged")
    with pytest.raises(PeerError, match="server 1 has died, and no checkpoint of this run can be"):
        list(failover.saved(1))


@pytest.mark.first_case
@pytest.mark.parametrize("mode", ["hybrid", "async_averaging"])
@pytest.mark.law13
def test_a_run_survives_the_death_of_a_worker(mode, tmp_path, monkeypatch, capsys):
    """And says so; nothing of it is trained again."""
    found, push = [], RankStages.push

    def pushed(stages: RankStages, computed: Computed) -> None:
        if not found and stages._rank == 0 and computed.handle.step >= DIES_AT // 2:
            found.append(stages._store._workers.pids[0])
            os.kill(found[0], signal.SIGKILL)
        push(stages, computed)

    monkeypatch.setattr(RankStages, "push", pushed)
    assert commands.main([*options(tmp_path / "run", mode), "--workers", "1"]) == 0
    told = "".join(capsys.readouterr())
    sentence = f"embedding worker 0 (pid {found[0]}) was killed by SIGKILL"
    assert sentence in told
    summary = summary_of(tmp_path / "run")
    assert (summary["updates"], summary["samples"]) == (STEPS, 32 * STEPS)
    assert any(one.startswith(sentence) for one in summary["warnings"])
    assert min(summary["pushes_lost_at"]) > 0 and summary["resumed_at_samples"] == []
    assert summary["staleness"]["mean_steps"] is None
