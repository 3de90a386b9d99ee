"""A sweep: plan, dry run, resume, a killed point, a failed point, a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from experiments.points import Point, data_sha256
from experiments.result_cache import sole_writer
from experiments.sweeping import Whole, print_plan, run_points
from persia_sim.base import progress
from persia_sim.base.progress import Progress
from persia_sim.base.vocabulary import Mode
from runtime.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
)
from runtime.models.networks import FeedForward
from runtime.run import folder as run_folder
from runtime.run.folder import read_summary
from runtime.run.record import run_into
from runtime.stop import Ending, Interrupted, Terminated
from tests.experiments.clicks import clicks_file
from tests.tree import PACKAGES, ROOT

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


def test_one_bar_counts_over_all_parts_of_a_study(tmp_path, monkeypatch):
    bars = []

    class Bar(Progress):
        def __init__(self, **options: object) -> None:
            bars.append((options["initial"], options["total"]))
            super().__init__(**options)

    monkeypatch.setattr(progress, "Progress", Bar)
    whole = Whole(3)
    for part in ("a", "b", "c"):
        run_points(points(1), tmp_path / part, 1, 512, whole=whole)
    run_points(points(1), tmp_path / "more than was planned", 1, 512, whole=whole)
    assert bars == [(0, 3), (1, 3), (2, 3), (3, 4)]


def test_a_sweep_says_how_far_it_is_where_no_terminal_shows_a_bar(tmp_path, monkeypatch, capsys):
    run_points(points(1), tmp_path / "short", 1, 512)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    run_points(points(2), tmp_path / "long", 1, 512)
    said = capsys.readouterr().err
    assert "\r" not in said and re.fullmatch(r"(training: .* [0-2]\.\d/2 points \[.*\]\n)+", said)


def test_every_bar_of_every_command_is_one_that_says_lines_without_a_terminal():
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    users = [path.name for path in files if "import tqdm" in path.read_text()]
    assert users == ["progress.py"]


def test_a_second_run_does_nothing_and_a_larger_one_only_the_rest(tmp_path):
    run_points(points(2), tmp_path, jobs=2, samples_per_point=512)
    files = [p.folder(tmp_path) / "summary.json" for p in points(2)]
    written = [file.stat().st_mtime_ns for file in files]
    run_points(points(3), tmp_path, jobs=2, samples_per_point=512)
    assert [file.stat().st_mtime_ns for file in files] == written
    assert points(3)[2].is_done(tmp_path)


def test_a_point_of_a_sweep_has_the_bytes_of_a_run_alone(tmp_path):
    """Its process was forked from one that had run others before, and a second ran beside it."""
    late = SyncConfig(mode=Mode.HYBRID, tau=2, ranks=4)
    all_points = points(3, sync=late)
    run_points(all_points, tmp_path / "sweep", jobs=2, samples_per_point=512)
    for point in all_points[1:]:
        run_into(tmp_path / point.label, point.config)
        for name in ("predictions.npz", "trace.npz"):
            files = point.folder(tmp_path / "sweep") / name, tmp_path / point.label / name
            with np.load(files[0]) as mine, np.load(files[1]) as alone:
                assert mine.files == alone.files
                for array in mine.files:
                    assert mine[array].tobytes() == alone[array].tobytes(), (name, array)


def test_a_point_does_not_ask_again_what_its_sweep_knows_of_code_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_versions", {"commit": "of the sweep"})
    run_points(points(1), tmp_path, jobs=1, samples_per_point=512)
    written = json.loads((points(1)[0].folder(tmp_path) / "env.json").read_text())
    assert written["commit"] == "of the sweep"
    assert "packages" not in written


def test_a_point_that_is_not_to_begin_is_left_out_with_all_behind_it_and_is_no_failure(tmp_path):
    """A second run does what is left."""
    run_points(points(1), tmp_path, jobs=1, samples_per_point=512)
    asked = []

    def begins(point: Point) -> bool:
        asked.append(point.label)
        return len(asked) < 2

    run_points(points(5), tmp_path, jobs=1, samples_per_point=512, begins=begins)
    assert asked == ["seed1", "seed2"]
    assert [point.is_done(tmp_path) for point in points(5)] == [True, True, False, False, False]
    run_points(points(3), tmp_path, jobs=2, samples_per_point=512)
    assert points(3)[2].is_done(tmp_path)


def test_a_failed_point_is_named_and_the_others_are_kept(tmp_path):
    wrong = Point(label="wrong", config=replace(TINY, model=ModelConfig(name="no.such:Model")))
    with pytest.raises(ValueError, match=r"1 of 2 points.*\n.*wrong: model 'no.such:Model'"):
        run_points([wrong, *points(1)], tmp_path, jobs=1, samples_per_point=512)
    assert points(1)[0].is_done(tmp_path)


def test_a_failed_point_is_tried_again_and_its_failure_forgotten(tmp_path):
    """A second sweep starts it anew: its note of failure changes from one error to the other."""
    wrong = Point(label="wrong", config=replace(TINY, model=ModelConfig(name="no.such:Model")))
    folder = wrong.folder(tmp_path)
    with pytest.raises(ValueError, match=r"wrong: model 'no\.such:Model'"):
        run_points([wrong], tmp_path, jobs=1, samples_per_point=512)
    (folder / "failed.txt").write_text("of the first time\n")
    with pytest.raises(ValueError, match=r"wrong: model 'no\.such:Model'"):
        run_points([wrong], tmp_path, jobs=1, samples_per_point=512)
    right = points(1)[0]
    right.folder(tmp_path).mkdir()
    (right.folder(tmp_path) / "failed.txt").write_text("of the first time\n")
    (right.folder(tmp_path) / "summary.json").write_text('{"cut sho')
    run_points([right], tmp_path, jobs=1, samples_per_point=512)
    assert right.is_done(tmp_path)
    assert not (right.folder(tmp_path) / "failed.txt").exists()


def test_two_sweeps_do_not_write_into_one_folder(tmp_path):
    with sole_writer(tmp_path), pytest.raises(ValueError, match="written by another process"):
        run_points(points(1), tmp_path, jobs=1, samples_per_point=512)
    assert not points(1)[0].folder(tmp_path).exists()
    with sole_writer(tmp_path):
        pass  # the first writer's end has freed it


def test_a_point_waits_until_a_killed_sweeps_process_has_left_its_folder(tmp_path):
    point = points(1)[0]
    with sole_writer(point.folder(tmp_path)):
        late = threading.Thread(target=run_points, args=([point], tmp_path, 1, 512))
        late.start()
        late.join(timeout=1.0)
        assert not (point.folder(tmp_path) / "config.json").exists()
    late.join(timeout=120)
    assert point.is_done(tmp_path)


def test_the_plan_says_what_is_done_and_by_another_commit(tmp_path, capsys):
    done, missing = points(2)
    done.folder(tmp_path).mkdir()
    (done.folder(tmp_path) / "summary.json").write_text('{"tasks": {}}')
    (done.folder(tmp_path) / "env.json").write_text('{"commit": "another"}')
    print_plan([done, missing], tmp_path, 3)
    told = capsys.readouterr().out
    assert "2 points (1 done, 1 to run), 3 at a time;" in told
    assert "1 of the done points were made by another commit" in told


@pytest.mark.parametrize("content", ["[]", '{"commit": ', "null", "[" * 100_000, "\xff"])
def test_a_done_point_whose_environment_was_damaged_counts_as_one_of_another_commit(
    content, tmp_path, capsys
):
    [done] = points(1)
    done.folder(tmp_path).mkdir()
    (done.folder(tmp_path) / "summary.json").write_text('{"tasks": {}}')
    (done.folder(tmp_path) / "env.json").write_text(content, encoding="latin-1")
    print_plan([done], tmp_path, 1)
    assert "1 of the done points were made by another commit" in capsys.readouterr().out


class Held(FeedForward):
    """A network that computes nothing as long as a file is in the folder of the data sets, of
    which the processes of a sweep are told."""

    def forward(self, dense, embeddings):
        while (Path(os.environ.get("PERSIA_DATA_DIR", "/nowhere")) / "hold").exists():
            time.sleep(0.02)
        return super().forward(dense, embeddings)


HELD = ModelConfig(name="tests.experiments.test_sweeping:Held", hidden=(8,))


@pytest.fixture
def hold(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSIA_DATA_DIR", str(tmp_path))
    (tmp_path / "hold").touch()
    return tmp_path / "hold"


def process_of(folder: Path, ended: Callable[[], object]) -> int:
    """The process of a point, once it works in its folder: it says so in env.json.

    ``ended``: whether the sweep has ended, which it must not.
    """
    deadline = time.monotonic() + 300
    while not (folder / "env.json").exists() and time.monotonic() < deadline:
        assert not ended(), [file.read_text() for file in folder.parent.glob("*/failed.txt")]
        time.sleep(0.02)
    found: int = json.loads((folder / "env.json").read_text())["process"]
    return found


@pytest.mark.long
def test_a_killed_point_loses_itself_only(tmp_path, hold):
    """Kill -9 one process of a running sweep; the others finish, and a second run mends it."""
    three = points(3, model=HELD)
    first = three[0].folder(tmp_path)  # now: Python 3.11 parses sources in one thread at a time
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(run_points, three, tmp_path, 1, 512)
        os.kill(process_of(first, sweep.done), signal.SIGKILL)
        hold.unlink()
        with pytest.raises(ValueError, match=r"seed0: its process was killed \(SIGKILL\)"):
            sweep.result(timeout=200)
    assert [p.is_done(tmp_path) for p in points(3, model=HELD)] == [False, True, True]
    run_points(points(3, model=HELD), tmp_path, 1, 512)
    assert all(p.is_done(tmp_path) for p in points(3, model=HELD))


@pytest.mark.long
def test_a_sweep_that_is_killed_leaves_no_point_behind(tmp_path, hold):
    """Also one that would go on for ever."""
    script = tmp_path / "sweep.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path.cwd())!r})
from pathlib import Path
from experiments.sweeping import run_points
from tests.experiments.test_sweeping import HELD, points
if __name__ == "__main__":
    run_points(points(3, model=HELD), Path({str(tmp_path)!r}), 1, 512)
""")
    sweep = subprocess.Popen([sys.executable, str(script)])
    first = points(3, model=HELD)[0].folder(tmp_path)
    child = process_of(first, lambda: sweep.poll() is not None)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = Path(f"/proc/{child}").exists()
    hold.unlink()
    assert not left


def test_a_point_that_left_a_checkpoint_goes_on_from_it(tmp_path):
    """And ends as one that was not disturbed."""
    long = replace(TINY, steps=6, checkpoint=CheckpointConfig(checkpoint_every=2))
    point, ending = Point(label="long", config=long), Ending()
    with pytest.raises(Interrupted):
        run_into(point.folder(tmp_path), long, lambda more: ending.ask("a test"), ending=ending)
    run_points([point], tmp_path, jobs=1, samples_per_point=768)
    summary = read_summary(point.folder(tmp_path))
    assert len(summary["resumed_at_samples"]) == 1
    assert summary["tasks"] == run_into(tmp_path / "whole", long)["tasks"]


class FullDisk(torch.nn.Module):
    """A model whose first batch finds the disk full."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, dense, embeddings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_stops_the_sweep_and_is_told(tmp_path):
    full = ModelConfig(name="tests.experiments.test_sweeping:FullDisk")
    with pytest.raises(ValueError, match=r"seed0: the disk is full.*\n.*seed1: not started"):
        run_points(points(2, model=full), tmp_path, jobs=1, samples_per_point=512)


def test_a_signal_says_how_many_points_are_done_and_stays_what_it_is(tmp_path, monkeypatch):
    run_points(points(1), tmp_path, jobs=1, samples_per_point=512)
    for stop in (KeyboardInterrupt, Terminated):
        monkeypatch.setattr("experiments.sweeping._carried_out", Mock(side_effect=stop))
        with pytest.raises(KeyboardInterrupt, match="interrupted: 1 of 2 points done") as told:
            run_points(points(2), tmp_path, jobs=1, samples_per_point=512)
        assert told.type is stop


def test_a_signal_to_a_point_is_answered_by_nothing(capfd):
    ending = Ending(quiet=True)
    with ending.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until = time.monotonic() + 100
        while not ending and time.monotonic() < wait_until:
            time.sleep(0.001)
    assert ending.why == "SIGTERM" and capfd.readouterr().err == ""


def test_points_of_equal_config_run_once(tmp_path):
    run_points([*points(1), *points(1)], tmp_path, jobs=2, samples_per_point=512)
    assert len(list(tmp_path.glob("seed0-*"))) == 1


def test_a_point_reads_the_data_of_its_own_sweep(tmp_path, monkeypatch):
    """Points are forked from a server that began with the environment of an earlier sweep."""
    run_points(points(1), tmp_path / "first", 1, 16)
    for rows in (2000, 2400):
        place = tmp_path / str(rows)
        clicks_file(place, rows)
        monkeypatch.setenv("PERSIA_DATA_DIR", str(place))
        (point,) = points(1, data=DataConfig(name="kuairand-pure-14d"))
        point = replace(point, data_sha256=data_sha256(point.config))
        run_points([point], place / "sweep", 1, 16)
        told = json.loads((point.folder(place / "sweep") / "summary.json").read_text())["data"]
        assert told["train_rows"] + told["test_rows"] == rows
