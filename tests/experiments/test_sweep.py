"""A sweep: plan, dry run, resume, a killed point, a failed point, a full disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.points import Point
from experiments.sweep import run_points
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, TrainConfig
from runtime.run.folder import read_summary

pytestmark = pytest.mark.multiproc
TINY = TrainConfig(
    steps=4,
    evaluation=EvaluationConfig(test_rows=500),
    data=DataConfig(name="synthetic"),
    model=ModelConfig(hidden=(8,)),
)


def points(count: int, **changes: object) -> list[Point]:
    return [
        Point(label=f"seed{seed}", config=replace(TINY, seed=seed, **changes))
        for seed in range(count)
    ]


def test_a_second_run_does_nothing_and_a_larger_one_only_the_rest(tmp_path):
    run_points(points(2), tmp_path, jobs=2, samples_per_point=512)
    written = {p: (p.folder(tmp_path) / "summary.json").stat().st_mtime_ns for p in points(2)}
    run_points(points(3), tmp_path, jobs=2, samples_per_point=512)
    for point, when in written.items():
        assert (point.folder(tmp_path) / "summary.json").stat().st_mtime_ns == when
    assert points(3)[2].is_done(tmp_path)


def test_a_changed_config_is_another_point(tmp_path):
    one, other = points(1)[0], points(1, batch=64)[0]
    assert one.folder(tmp_path) != other.folder(tmp_path)
    moved = replace(one, config=replace(one.config, data=DataConfig(name="synthetic", dir=Path())))
    assert one.folder(tmp_path) == moved.folder(tmp_path)


def test_a_failed_point_is_named_and_the_others_are_kept(tmp_path):
    wrong = Point(label="wrong", config=replace(TINY, model=ModelConfig(name="no.such:Model")))
    with pytest.raises(ValueError, match=r"1 of 2 points.*\n.*wrong: model 'no.such:Model'"):
        run_points([wrong, *points(1)], tmp_path, jobs=1, samples_per_point=512)
    assert points(1)[0].is_done(tmp_path)


def test_a_killed_point_loses_itself_only(tmp_path):
    """Kill -9 one process of a running sweep; the others finish, and a second run mends it."""
    sweep, victim = _start_sweep(tmp_path)
    os.kill(_process_of(victim), signal.SIGKILL)
    _, told = sweep.communicate(timeout=120)
    done = [p.is_done(tmp_path) for p in points(3, steps=150)]
    assert done == [False, True, True]
    assert "seed0: its process was killed (SIGKILL)" in told
    run_points(points(3, steps=150), tmp_path, 1, 128 * 150)
    assert all(p.is_done(tmp_path) for p in points(3, steps=150))


def _start_sweep(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A sweep of three points in a process of its own; its first point is running."""
    program = f"""
import sys
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from experiments.sweep import run_points
from tests.experiments.test_sweep import points
if __name__ == "__main__":
    run_points(points(3, steps=150), Path({str(tmp_path)!r}), 1, 128 * 150)
"""
    script = tmp_path / "sweep.py"
    script.write_text(program)
    sweep = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    victim = points(3, steps=150)[0].folder(tmp_path)
    deadline = time.monotonic() + 60
    while not (victim / "env.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return sweep, victim


def _process_of(folder: Path) -> int:
    """The process that works in the folder: it says so in env.json."""
    found: int = json.loads((folder / "env.json").read_text())["process"]
    return found


def test_a_summary_is_there_whole_or_not_at_all(tmp_path):
    run_points(points(1), tmp_path, jobs=1, samples_per_point=512)
    folder = points(1)[0].folder(tmp_path)
    summary = read_summary(folder)
    assert summary is not None
    assert set(summary["tasks"]) == {"click"}
    assert not list(folder.glob("*.tmp"))
    for name in ("config.json", "env.json", "metrics.jsonl", "trace.npz", "predictions.npz"):
        assert (folder / name).exists()


class FullDisk(torch.nn.Module):
    """A model whose first batch finds the disk full."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, dense, embeddings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_stops_the_sweep_and_is_told(tmp_path):
    full = ModelConfig(name="tests.experiments.test_sweep:FullDisk")
    with pytest.raises(ValueError, match=r"seed0: the disk is full.*\n.*seed1: not started"):
        run_points(points(2, model=full), tmp_path, jobs=1, samples_per_point=512)


def test_points_of_equal_config_run_once(tmp_path):
    run_points([*points(1), *points(1)], tmp_path, jobs=2, samples_per_point=512)
    assert len(list(tmp_path.glob("seed0-*"))) == 1


def test_a_sweep_that_is_killed_leaves_no_point_behind(tmp_path):
    sweep, victim = _start_sweep(tmp_path)
    child = _process_of(victim)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
