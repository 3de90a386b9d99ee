"""A server process of a whole run is killed: late-reading modes go on, exact ones go back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from experiments.drilling.trial import alive, processes_of
from persia_sim.words.vocabulary import Mode
from runtime import commands
from runtime.engines.processes import open as opening
from runtime.rank.stages import Computed, RankStages

STEPS = 60
LONG = 300
"""So many that a run is not over before it was looked at."""
DIES_AT = 30
"""A step behind the first checkpoint, and before the second."""


def options(folder: Path, mode: str, every: int = 20, steps: int = STEPS) -> list[str]:
    words = f"--mode {mode} --executor concurrent --ranks 2 --servers 2 --latency-s 0.003"
    words += f" --batch 32 --steps {steps} --checkpoint-every {every} --model.hidden 8 --rows.dim 4"
    words += " --data.name synthetic --test-rows 500"
    return ["train", "--out", str(folder), *words.split()]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture
def launched(monkeypatch) -> list:
    """The server processes of every run."""
    found: list = []
    launch = opening.launch

    def noted(*given):
        found.append(launch(*given))
        return found[-1]

    monkeypatch.setattr(opening, "launch", noted)
    return found


@pytest.fixture
def killed(launched, monkeypatch, tmp_path) -> list[int]:
    """The server that dies at a push of rank 0, once the first checkpoint is on the disk."""
    found: list[int] = []
    push = RankStages.push

    def pushed(stages: RankStages, computed: Computed) -> None:
        handle = computed.handle
        # In async a step is one rank's, and the other one has as many.
        step = handle.step * 2 if stages._mode is Mode.ASYNC else handle.step
        if not found and handle.rank == 0 and step >= DIES_AT:
            while not list((tmp_path / "run").glob("checkpoints/*/state.json")):
                time.sleep(0.01)
            found.append(launched[0].pids[1])
            os.kill(found[0], signal.SIGKILL)
        push(stages, computed)

    monkeypatch.setattr(RankStages, "push", pushed)
    return found


@pytest.mark.parametrize("changes", [[], ["--checkpoint-incremental"]], ids=["whole", "changes"])
@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_a_run_survives_the_death_of_a_server(mode, changes, tmp_path, launched, killed, capsys):
    assert commands.main([*options(tmp_path / "run", mode), *changes]) == 0
    assert killed
    told = capsys.readouterr()
    assert f"(pid {killed[0]}) was killed by SIGKILL" in told.out + told.err
    found = summary_of(tmp_path / "run")
    assert (found["updates"], found["samples"]) == (STEPS, 32 * STEPS)
    assert len(launched) == 1
    assert found["pushes_lost_at"][0] == 0
    assert found["pushes_lost_at"][1] >= 0
    assert "it is back" in " ".join(found["warnings"])
    assert found["staleness"]["mean_steps"] is None
    assert found["checkpoints_failed"] == 0


def test_an_exact_run_starts_again_and_nothing_of_the_dead_attempt_stays(tmp_path):
    """Two servers are killed, one in each of two attempts; the third ends as if nothing was."""
    words = [sys.executable, "-m", "runtime", *options(tmp_path / "run", "sync", 2, LONG)]
    folder, held = tmp_path / "run", []
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen(words, stderr=log, stdout=log)
        for attempt in range(3):
            known = set(folder.glob("checkpoints/*/state.json"))
            while set(folder.glob("checkpoints/*/state.json")) <= known and run.poll() is None:
                time.sleep(0.005)
            servers = processes_of(run.pid).get("server", [])
            held.append((_sockets(run.pid), len(servers)))
            if attempt < 2:
                os.kill(servers[attempt], signal.SIGKILL)
                while all(map(alive, servers)):
                    time.sleep(0.005)
                while not _is_fresh(run.pid, servers) and run.poll() is None:
                    time.sleep(0.005)
        assert run.wait() == 0, (tmp_path / "log").read_text()
    told = (tmp_path / "log").read_text()
    assert told.count("; the run goes back to its last checkpoint") == 2, told
    assert held[0][1] == 2
    assert held[1:] == [held[0]] * 2
    assert summary_of(folder)["pushes_lost_at"] == [0, 0]
    assert commands.main(options(tmp_path / "calm", "sync", steps=LONG)) == 0
    one, other = (np.load(tmp_path / name / "predictions.npz") for name in ("run", "calm"))
    assert one["predictions"].tobytes() == other["predictions"].tobytes()


def _sockets(pid: int) -> int:
    """Open in a process; its memory files, and those of checkpoints, come and go."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(entry).startswith("socket:")
    return found


def _is_fresh(pid: int, dead: list[int]) -> bool:
    """Whether the next attempt has its servers, and none of the last attempt is left."""
    servers = processes_of(pid).get("server", [])
    return len(servers) == 2 and not set(servers) & set(dead)
