"""A run that is stopped by its user, or whose reader goes away, ends quietly and soon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.__main__ import main
from runtime.run.folder import status_of
from tests.runtime.spawned import Command

LATE = ["--executor", "concurrent", "--mode", "hybrid", "--ranks", "2", "--latency-s", "60"]


def training(folder, *words):
    """A process of the command that trains."""
    process = Command(
        folder.parent, "train", "--data.name", "synthetic", *words,
        "--test-rows", "200", "--out", str(folder),
    )  # fmt: skip
    while not (folder / "metrics.jsonl").exists():  # about to be trained
        assert process.is_alive()
        time.sleep(0.05)
    return process


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_ends_a_run_in_a_checkpoint_and_it_goes_on(number, status, tmp_path, capsys):
    run = tmp_path / "run"
    process = training(run, "--checkpoint-every", "10min", "--evaluate-every-steps", "20")
    while not (run / "metrics.jsonl").read_text():  # it is in the training itself
        time.sleep(0.02)
    os.kill(process.pid, number)
    code, out, told = process.ended()
    assert code == status_of(run) == status  # 75, EX_TEMPFAIL: a job controller starts it again
    name = signal.Signals(number).name
    assert f"{name}: ends the step and writes a checkpoint" in told
    samples = int(
        re.search(rf"interrupted by {name} after ([\d,]+) samples", out)[1].replace(",", "")
    )
    assert out.endswith(f"go on with: persia-runtime train --resume {run}\n")
    assert json.loads((run / "ending.json").read_text())["by"] == name
    steps = samples // 128 + 5
    assert main(["train", "--resume", str(run), "--steps", str(steps)]) == 0
    assert f"goes on from {run}/checkpoints/{samples:015d}" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples"] == steps * 128 == samples + 5 * 128
    assert summary["resumed_at_samples"] == [samples]
    assert not (run / "ending.json").exists()
    typed = json.loads((run / "command.json").read_text())
    assert typed["train"][:4] == ["--data.name", "synthetic", "--checkpoint-every", "10min"]
    assert typed["resume"] == [["--resume", str(run), "--steps", str(steps)]]


WAITS = """
import ctypes
import time
from pathlib import Path
from runtime.models.networks import FeedForward

HERE = Path(__file__).parent

def wait_for(name):
    (HERE / f"is-{name}").touch()
    while not (HERE / f"go-{name}").exists():
        time.sleep(0.02)

if (HERE / "hold-imported").exists():
    wait_for("imported")

class Loses:
    def __del__(self):
        wait_for("lost")

class Net(FeedForward):
    def __init__(self, *words):
        super().__init__(*words)
        if (HERE / "hold-lost").exists():
            Loses()
        if (HERE / "hold-called").exists():
            (HERE / "is-called").touch()
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second time it never returns, and no signal wakes it
                ctypes.CDLL(None).pthread_mutex_lock(lock)

    def forward(self, dense, embeddings):
        if not self.training and (HERE / "hold-judged").exists():
            wait_for("judged")
        return super().forward(dense, embeddings)
"""


def held(folder, where, *words):
    """A process of the command that stands where nothing is trained yet, or no more."""
    (folder / "waits.py").write_text(WAITS)
    (folder / f"hold-{where}").touch()
    process = Command(
        folder, "train", "--data.name", "synthetic", "--steps", "5", "--test-rows", "200",
        "--model.name", "waits:Net", *words, "--out", str(folder / "run"),
        environment=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip
    while not (folder / f"is-{where}").exists():
        assert process.is_alive(), process.said()
        time.sleep(0.02)
    return process


@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_ends_the_command_in_a_sentence(number, tmp_path):
    process = held(tmp_path, "imported")
    os.kill(process.pid, number)
    code, _, told = process.ended(50)
    assert code == 75
    last = told.splitlines()[-1]
    assert last == "interrupted: there is nothing to go on from; the same command starts anew"
    assert "Traceback" not in told


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("lost", "interrupted by SIGTERM"),
        pytest.param("called", "SIGTERM: ended, though a call", marks=pytest.mark.long),
    ],
)
def test_a_signal_that_nobody_hears_ends_the_command_all_the_same(where, said, tmp_path):
    """What it raises may be lost where Python tidies up or imports; a call may not return."""
    process = held(tmp_path, where)
    os.kill(process.pid, signal.SIGTERM)
    code, out, told = process.ended(100)
    assert code == 75 and said in out + told, told
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_in_the_last_evaluation_does_not_undo_what_was_trained(number, tmp_path):
    process = held(tmp_path, "judged")
    os.kill(process.pid, number)
    name = signal.Signals(number).name
    while (
        f"{name}: all is trained; ends when it is judged and written down" not in process.said()[1]
    ):
        assert process.is_alive(), process.said()
        time.sleep(0.02)
    (tmp_path / "go-judged").touch()
    code, _, told = process.ended(100)
    assert code == 0, told
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.multiproc
def test_a_second_ctrl_c_ends_a_run_before_a_long_latency_is_over(tmp_path):
    process, calm = training(tmp_path / "run", *LATE), 0
    while calm < 10:  # messages are on their way: who has sent none ends at the first signal
        assert process.is_alive()
        time.sleep(0.02)
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            states = {one.read_text().rpartition(")")[2].split()[0] for one in
                      Path(f"/proc/{process.pid}/task").glob("*/stat")}  # fmt: skip
            calm = calm + 1 if states == {"S"} else 0
    os.kill(process.pid, signal.SIGINT)
    while "SIGINT" not in process.said()[1]:  # two signals at once are one
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    code, _, told = process.ended(50)
    assert code == 130
    lines = [line for line in told.splitlines() if line.strip()]
    assert lines[-1] == "interrupted: there is nothing to go on from; the same command starts anew"
    assert lines[-2].startswith("SIGINT: ends the step")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("file", "left"),
    [
        ("checkpoints/000128/state.json", "go on with: persia-runtime train --resume {}"),
        ("nothing", "there is nothing to go on from; the same command starts anew"),
        ("summary.json", "{} holds a finished run"),
    ],
)
def test_ctrl_c_says_what_is_left(file, left, tmp_path, monkeypatch, capsys):
    def stopped(*_):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.train_command.train_in_folder", stopped)
    assert main(["train", "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err.strip().endswith(left.format(tmp_path / "run"))


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize("words", ["data list", "train --help"])
def test_a_reader_that_goes_away_is_no_error(words):
    """`| head -1`, with a reader that has gone before anything is written."""
    shell = f"set -o pipefail; {sys.executable} -m runtime {words} | true"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.first_case
@pytest.mark.multiproc
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("runtime data list", 0),
        ("runtime no-such-command", 2),
        ("runtime train --data.name none", 2),
        ("experiments list", 0),
        ("persia_sim --steps 40", 0),
        ("persia_sim --steps none", 2),
    ],
)
def test_a_command_whose_output_is_closed_ends_with_its_own_exit_code(words, code, closed):
    shell = f"{sys.executable} -m {words} {closed}"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert found.returncode == code, found.stderr
    assert "Traceback" not in found.stderr + found.stdout
    if "2>&-" not in closed and code:
        assert found.stderr.startswith("error: ")


@pytest.mark.multiproc
def test_a_disk_that_is_full_for_the_output_is_one_sentence():
    shell = f"{sys.executable} -m runtime train --help > /dev/full"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert found.returncode == 2
    assert re.fullmatch(r"error: .*No space left on device; the disk is full.*\n", found.stderr)


@pytest.mark.multiproc
def test_a_current_folder_that_was_removed_is_one_sentence(tmp_path):
    (gone := tmp_path / "gone").mkdir()
    modules = Path(__file__).parents[2]
    shell = f"cd {gone} && rmdir {gone} && {sys.executable} -m runtime data list"
    found = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(modules)},
    )  # fmt: skip
    assert found.returncode == 2
    last = "error: the current folder has been removed: change to one that is there\n"
    assert found.stderr.endswith(last) and "Traceback" not in found.stderr
