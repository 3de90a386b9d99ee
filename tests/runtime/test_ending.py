"""A run that is asked to end: it finishes its step, writes itself down, and says how to go on."""

from __future__ import annotations

import errno
import json
import os
import signal
import time

import numpy as np
import pytest

from persia_sim.base.vocabulary import Mode
from runtime.__main__ import main
from runtime.checkpoint import whole
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import read_checkpoint
from runtime.config import DataConfig
from runtime.run.record import run_into
from runtime.run.saver import Saving
from runtime.run.session import train
from runtime.stop import Ending, Interrupted, NotStored
from tests.runtime.worlds import ArraySource, assert_same_bytes, config

SOURCE = ArraySource(300)
MODES = {
    "constant_lag": {"executor": "constant_lag", "mode": Mode.HYBRID, "tau": 2},
    "threads": {"executor": "concurrent", "mode": Mode.HYBRID, "tau": 2},
    "forwarded": {"executor": "concurrent", "mode": Mode.LOOKAHEAD, "lookahead": "forwarded"},
}


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Where a shell runs the tests in the background they would ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def after(samples, act):
    """Acts once, when so many samples are trained; for ``on_samples``."""
    seen = [0, False]

    def told(more):
        seen[0] += more
        if seen[0] >= samples and not seen[1]:
            seen[1] = True
            act()

    return told


@pytest.mark.parametrize("name", MODES)
def test_a_signal_ends_the_leg_and_the_checkpoint_is_where_it_ended(name, tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    ending = Ending()

    def signalled():
        os.kill(os.getpid(), signal.SIGTERM)
        while not ending:  # the main thread hears it as soon as it runs
            time.sleep(0.001)

    with pytest.raises(Interrupted) as told:
        train(
            config(ranks=2, batch=4, **MODES[name]),
            ArraySource(3000),
            saving=Saving(tmp_path, None, ending),
            on_samples=after(48, signalled),
        )
    (cut,) = complete_checkpoints(tmp_path)
    assert 48 <= int(cut.name) < 3000
    assert str(told.value) == (
        f"interrupted by SIGTERM after {int(cut.name):,} samples; go on with:"
        f" persia-runtime train --resume {tmp_path}"
    )
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config(), SOURCE, saving=Saving(tmp_path), on_samples=after(48, twice))
    assert not complete_checkpoints(tmp_path)


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_and_counted_and_training_goes_on(tmp_path, monkeypatch):
    """The second of three checkpoints and of the end's; the first one stays meanwhile."""
    write, told, left = whole.write_dense, [], []

    def sometimes(file, dense):
        if dense["version"] == 8:
            left.append([int(f.name) for f in complete_checkpoints(tmp_path / "run")])
            full()
        return write(file, dense)

    monkeypatch.setattr(whole, "write_dense", sometimes)
    chosen = config(checkpoint_every=4, keep_checkpoints=9)
    outcome = train(chosen, SOURCE, saving=Saving(tmp_path / "run", on_warning=told.append))
    assert left == [[96]]
    assert [int(f.name) for f in complete_checkpoints(tmp_path / "run")] == [96, 288, 300]
    (warning,) = told
    assert "No space left on device" in warning and "that at 96 samples stays" in warning
    monkeypatch.undo()
    undisturbed = train(chosen, SOURCE, saving=Saving(tmp_path / "other"))
    assert_same_bytes(outcome, undisturbed)
    at_288 = complete_checkpoints(tmp_path / "run")[1]
    resumed = train(chosen, SOURCE, saving=Saving(tmp_path / "on", read_checkpoint(at_288)))
    assert_same_bytes(resumed, undisturbed)
    for one in (outcome.figures, resumed.figures):
        assert (one.checkpoints_written, one.checkpoints_failed) == (3, 1)


def test_an_interrupted_run_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(whole, "write_dense", full)
    ending, told = Ending(), []
    saving = Saving(tmp_path, None, ending, told.append)
    with pytest.raises(NotStored, match="its checkpoint could not be written"):
        train(config(), SOURCE, saving=saving, on_samples=after(48, lambda: ending.ask("a test")))
    assert "No space left" in told[0] and "there is none" in told[0]


WORDS = ["train", "--data.name", "synthetic", "--data.rows", "400", "--steps", "6", "--batch", "32",
         "--test-rows", "100", "--model.hidden", "8"]  # fmt: skip


@pytest.mark.parametrize("every", ["2", "end"])
def test_a_model_that_was_to_be_kept_and_is_not_is_a_failure(every, tmp_path, monkeypatch, capsys):
    """Wherever in the writing the disk is full: test_a_write_that_fails_leaves_nothing."""
    monkeypatch.setattr(whole, "write_dense", full)
    words = [*WORDS, "--checkpoint-every", every, "--out", str(tmp_path / "run")]
    assert main(words) == 3
    told = capsys.readouterr()
    assert "a checkpoint was not written: [Errno 28] No space left on device; there is none" in (
        told.err + told.out
    )
    assert told.err.splitlines()[-1].startswith("error: the trained model is not kept: --checkpoi")
    assert (tmp_path / "run/summary.json").exists()  # the scores are
    assert not complete_checkpoints(tmp_path / "run")


def test_a_full_disk_ends_in_that_failure_and_leaves_no_part_of_a_checkpoint(small_disk, capsys):
    """600 KiB: the folder without its rows fits, which take as much again for each checkpoint."""
    folder = small_disk(600) / "run"
    assert main([*WORDS, "--rows.dim", "64", "--checkpoint-every", "2", "--out", str(folder)]) == 3
    told = capsys.readouterr()
    assert "a checkpoint was not written: [Errno 28] No space left on device" in told.out + told.err
    assert "the trained model is not kept" in told.err
    for left in (folder / "checkpoints").iterdir():
        assert (left / "state.json").exists()


def test_a_run_that_is_interrupted_before_its_first_step_says_so(tmp_path):
    """It ends as other interrupted ones do, and a later one in its folder is not disturbed."""
    chosen, ending = synthetic(ranks=2, batch=4, **MODES["threads"]), Ending()
    ending.ask("a test")
    with pytest.raises(Interrupted) as told:
        run_into(tmp_path, chosen, ending=ending)
    assert str(told.value) == (
        "interrupted by a test before its first step: nothing was trained yet, so there is nothing"
        " to go on from; start it anew"
    )
    left = json.loads((tmp_path / "ending.json").read_text())
    assert left == {"status": 75, "by": "a test", "told": str(told.value)}
    assert not complete_checkpoints(tmp_path)
    assert run_into(tmp_path, chosen)["samples"] > 0
    assert not (tmp_path / "ending.json").exists()


def killed_and_resumed(folder, chosen, at, **resume):
    """A run that dies without a word after ``at`` samples and is gone on with."""

    class Killed(BaseException):
        pass

    def die():
        raise Killed

    with pytest.raises(Killed):
        run_into(folder, chosen, on_samples=after(at, die))
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"updates": 9, "sam')  # half a line, as a kill may leave it
    return run_into(folder, chosen, resume=True, **resume)


def synthetic(**changes):
    return config(data=DataConfig(name="synthetic", rows=600), test_rows=300, **changes)


def test_the_folder_of_a_resumed_run_is_that_of_an_undisturbed_one(tmp_path):
    chosen = synthetic(
        mode="hybrid",
        tau=2,
        ranks=2,
        checkpoint_every=6,
        evaluate_every_steps=4,
        keep_checkpoints=3,
    )
    told: list[str] = []
    run_into(tmp_path / "whole", chosen)
    killed_and_resumed(tmp_path / "killed", chosen, 24 * 17, on_start=told.append)
    # Killed in step 17: the cut was at 12, lines were written for steps 4, 8, 12 and 16.
    assert "goes on from" in told[1] and "288 samples, 12 updates" in told[1]
    one, other = (tmp_path / name for name in ("whole", "killed"))
    assert (one / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    updates = [json.loads(line)["updates"] for line in (one / "metrics.jsonl").open()]
    assert updates == [4, 8, 12, 16, 20, 24, 25]
    arrays = [np.load(f / "predictions.npz")["predictions"].tobytes() for f in (one, other)]
    assert arrays[0] == arrays[1]
    traces = [np.load(f / "trace.npz")["step"].tobytes() for f in (one, other)]
    assert traces[0] == traces[1]
    assert [f.name for f in complete_checkpoints(one)] == [
        f.name for f in complete_checkpoints(other)
    ]
    summaries = [json.loads((f / "summary.json").read_text()) for f in (one, other)]
    clocks = ("wall_s", "samples_per_s", "longest_pause_s", "resumed_at_samples", "resident_bytes")
    for name in (*clocks, "bound_by"):
        for summary in summaries:
            summary.pop(name)
    assert summaries[0] == summaries[1]
