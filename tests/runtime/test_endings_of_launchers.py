"""How a run that is asked to end says so, whoever has launched it: with the launchers themselves.

A rank that is not finished never ends with 0. torchrun's agent has exit codes of its own, so that
the run folder says 75 (`ending.json`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import __main__ as commands
from runtime.run.folder import ENDING, status_of
from tests.runtime.spawned import Command
from tests.runtime.test_torchrun import SMALL, agent, path_with, torchrun
from tests.runtime.worlds import host_of_servers

STRIKES = """
import ctypes, os, signal
from pathlib import Path
from runtime.models.networks import FeedForward

def strike(moment):
    wanted, rank, times = os.environ["STRIKE"].split()
    who, here = os.environ["WHO"], Path(os.environ["MARKS"])
    struck = len(list(here.glob("struck-*")))
    if moment == wanted and os.environ["RANK"] == rank and struck < int(times):
        (here / f"struck-{struck}").touch()
        os.kill(os.getppid() if who == "agent" else os.getpid(), signal.SIGTERM)

class Net(FeedForward):
    batches = 0

    def __init__(self, *words):
        strike("made")
        super().__init__(*words)
        if os.environ["STRIKE"].startswith("made") and os.environ["WHO"] == "agent":
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second time it never returns, and no signal wakes it
                ctypes.CDLL(None).pthread_mutex_lock(lock)

    def forward(self, dense, embeddings):
        self.batches += self.training
        at = {1: "first", 10: "middle"}.get(self.batches, "") if self.training else "judged"
        strike(at)
        return super().forward(dense, embeddings)

    def state_dict(self, *words, **more):
        strike("checkpoint")
        return super().state_dict(*words, **more)
"""
WORDS = [*SMALL, "--model.name", "strikes:Net", "--checkpoint-every", "10", "--resume", "auto"]
SAMPLES = 30 * 64


def struck(
    folder: Path, moment: str, *, rank: int = 1, times: int = 1, restarts: int, who: str = "rank"
) -> tuple[int | None, str, str]:
    """Two ranks under torchrun, of which one (or their agent) gets a SIGTERM at that moment, in so
    many attempts: exit code of the agent, and words."""
    (folder / "strikes.py").write_text(STRIKES)
    more = {"STRIKE": f"{moment} {rank} {times}", "WHO": who, "MARKS": str(folder)}
    out = ["--out", str(folder / "run")]
    return torchrun(folder, *WORDS, *out, restarts=restarts, **more)


def is_finished(run: Path) -> bool:
    """Whether the result is there, of all samples, and nothing says otherwise."""
    if not (run / "summary.json").exists():
        return False
    assert not (run / ENDING).exists()
    assert json.loads((run / "summary.json").read_text())["samples"] == SAMPLES
    return True


def ended_with_75(run: Path, by: str | None = "SIGTERM") -> bool:
    """Whether the folder says that the run is not finished."""
    if (run / "summary.json").exists():
        return False
    ending = json.loads((run / ENDING).read_text())
    return (ending["status"], ending["by"]) == (75, by) and bool(ending["told"])


@pytest.mark.long
@pytest.mark.parametrize("moment", ["made", "first", "middle", "checkpoint"])
def test_without_restarts_a_rank_that_is_asked_to_end_is_no_success(moment, tmp_path):
    """It would be 0 to whoever waits for the agent, and the rest was never trained."""
    rank = int(moment != "checkpoint")  # which rank 0 writes
    code, _, told = struck(tmp_path, moment, rank=rank, restarts=0)
    assert (code, ended_with_75(tmp_path / "run")) == (1, True), told
    assert "exitcode  : 75" in told
    # The same command goes on.
    code, _, told = struck(tmp_path, moment, rank=rank, restarts=0)
    assert (code, is_finished(tmp_path / "run")) == (0, True), told


@pytest.mark.long
@pytest.mark.parametrize("moment", ["made", "first", "middle", "checkpoint"])
def test_with_restarts_a_rank_that_is_asked_to_end_is_started_again(moment, tmp_path):
    code, _, told = struck(tmp_path, moment, rank=0, restarts=1)
    assert (code, is_finished(tmp_path / "run")) == (0, True), told
    assert len(list(tmp_path.glob("struck-*"))) == 1


@pytest.mark.long
def test_the_last_restart_that_is_asked_to_end_is_no_success(tmp_path):
    code, _, told = struck(tmp_path, "middle", times=2, restarts=1)
    assert (code, ended_with_75(tmp_path / "run")) == (1, True), told


@pytest.mark.long
def test_a_rank_that_is_asked_to_end_in_the_last_evaluation_finishes_it(tmp_path):
    code, _, told = struck(tmp_path, "judged", rank=0, restarts=0)
    assert (code, is_finished(tmp_path / "run")) == (0, True), told
    assert (tmp_path / "struck-0").exists()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["made", "middle"])
def test_an_agent_that_is_asked_to_end_starts_nothing_again(moment, tmp_path):
    code, said, told = struck(tmp_path, moment, restarts=2, who="agent", times=9)
    assert code and ended_with_75(tmp_path / "run"), told
    assert len(list(tmp_path.glob("struck-*"))) == 1
    assert "goes on from" not in said


@pytest.mark.long
def test_of_two_agents_none_takes_the_end_of_the_other_for_success(tmp_path):
    """SIGTERM to the second one, as a host that is preempted gives it: neither ends with 0."""
    (tmp_path / "strikes.py").write_text(STRIKES)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (at,), secret = host_of_servers()
    run = tmp_path / "run"
    words = [*WORDS, "--servers", "1", "--servers-at", at, "--servers-secret", str(secret)]
    more = {"STRIKE": "middle 1 9", "WHO": "agent", "MARKS": str(tmp_path)}
    environment = os.environ | {"PYTHONPATH": path_with(tmp_path)} | more
    agents = []
    for number in range(2):
        (folder := tmp_path / f"agent-{number}").mkdir()
        options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
        options += [f"--node-rank={number}", "--rdzv-backend=c10d", "--rdzv-id=endings"]
        options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        options += [f"--rdzv-conf=is_host={int(number == 0)},join_timeout=20"]
        line = [*options, "-m", "runtime", "train", *words, "--out", str(run)]
        agents.append(Command(folder, *line, main=agent, environment=environment))
    ended = [one.ended() for one in agents]
    assert all(code for code, _, _ in ended), ended
    assert ended_with_75(run), ended
    assert len(list(tmp_path.glob("struck-*"))) == 1


LOSES = """
import os, signal, subprocess, time
from pathlib import Path
from runtime.models.networks import FeedForward

class Net(FeedForward):
    batches = 0

    def forward(self, dense, embeddings):
        self.batches += self.training
        if self.batches == 10:
            os.kill(int(os.environ["SERVE"]), signal.SIGKILL)
            time.sleep(1)
        return super().forward(dense, embeddings)
"""


@pytest.mark.multiproc
@pytest.mark.long
def test_a_run_whose_servers_are_gone_is_not_finished_and_no_mistake(tmp_path, monkeypatch, capsys):
    """Those of a `serve` that is killed under it."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret for tests alone")
    line = [sys.executable, "-m", "runtime", "serve", "--listen", "127.0.0.1:0"]
    host = subprocess.Popen([*line, "--secret", str(secret)], stdout=subprocess.PIPE, text=True)
    at = host.stdout.readline().partition(" at ")[2].partition(";")[0]
    (tmp_path / "loses.py").write_text(LOSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SERVE", str(host.pid))
    run = tmp_path / "run"
    words = [*SMALL, "--executor", "concurrent", "--model.name", "loses:Net", "--out", str(run)]
    words += ["--servers", "1", "--servers-at", at, "--servers-secret", str(secret)]
    assert commands.main(["train", *words]) == 75
    assert ended_with_75(run, by=None)
    # Nobody is there: before it is under way that is a mistake, which a sentence tells.
    other = [str(tmp_path / "other") if word == str(run) else word for word in words]
    assert commands.main(["train", *other]) == 2
    assert "start `persia-runtime serve` there first" in capsys.readouterr().err
    assert status_of(tmp_path / "other") is None
    host.communicate()
