"""A server process of a whole run is killed: late-reading modes go on, exact ones go back."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from runtime import commands
from runtime.engines.processes import open as opening

STEPS = 160


def options(folder: Path, mode: str) -> list[str]:
    words = f"--mode {mode} --executor concurrent --ranks 2 --servers 2 --latency-s 0.003"
    words += f" --batch 32 --steps {STEPS} --checkpoint-every 40 --model.hidden 8 --rows.dim 4"
    words += " --data.name synthetic --test-rows 500"
    return ["train", "--out", str(folder), *words.split()]


def kill_one_after_a_checkpoint(folder: Path, launched: list, killed: list[int]) -> None:
    while not list(folder.glob("checkpoints/*/state.json")):
        time.sleep(0.01)
    time.sleep(0.05)
    victim = launched[0].pids[1]
    os.kill(victim, signal.SIGKILL)
    killed.append(victim)


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


@pytest.mark.parametrize("mode", ["hybrid", "async", "sync"])
def test_a_run_survives_the_death_of_a_server(mode, tmp_path, launched, capsys):
    killed: list[int] = []
    arguments = tmp_path / "run", launched, killed
    threading.Thread(target=kill_one_after_a_checkpoint, args=arguments, daemon=True).start()
    assert commands.main(options(tmp_path / "run", mode)) == 0
    assert killed
    told = capsys.readouterr()
    assert f"(pid {killed[0]}) was killed by SIGKILL" in told.out + told.err
    found = summary_of(tmp_path / "run")
    assert (found["updates"], found["samples"]) == (STEPS, 32 * STEPS)
    if mode == "sync":
        assert len(launched) == 2
        assert found["pushes_lost_at"] == [0, 0]
        assert commands.main(options(tmp_path / "calm", mode)) == 0
        one, other = (np.load(tmp_path / name / "predictions.npz") for name in ("run", "calm"))
        assert one["predictions"].tobytes() == other["predictions"].tobytes()
    else:
        assert len(launched) == 1
        assert found["pushes_lost_at"][0] == 0
        assert found["pushes_lost_at"][1] >= 0
        assert "it is back" in " ".join(found["warnings"])
        assert found["staleness"]["mean_steps"] is None
