"""When checkpoints are written, which are kept, and what a run that goes on behind them counts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from runtime import train_command
from runtime.__main__ import main
from runtime.checkpoint.places import complete_checkpoints
from runtime.checkpoint.whole import newest
from runtime.config import (
    DataConfig,
    TrainConfig,
)
from runtime.run import training
from runtime.run.record import beginning, run_into
from runtime.run.saver import Saving
from runtime.run.session import train
from runtime.stop import Ending, Interrupted
from runtime.train_options import read_train
from tests.runtime.test_ending import after
from tests.runtime.worlds import ArraySource, config


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("250", 250, None), ("30s", None, 30.0), ("10min", None, 600.0), ("1.5h", None, 5400.0),
     ("end", None, None)],
)  # fmt: skip
def test_checkpoints_come_every_so_many_steps_or_seconds(text, steps, seconds):
    found = read_train(["--checkpoint-every", text]).run.checkpoint
    assert (found.every_steps, found.every_s, found.at_end) == (steps, seconds, True)
    assert not TrainConfig().checkpoint.at_end


@pytest.mark.parametrize("text", ["0", "-5", "0s", "10m", "s", "1e3s", "soon", "9999999h", ""])
def test_other_words_for_it_are_refused(text, capsys, monkeypatch):
    monkeypatch.setattr(train_command, "train_in_folder", lambda *_: None)
    try:
        code = main(["train", f"--checkpoint-every={text}"])
    except SystemExit as left:
        code = left.code
    told = capsys.readouterr()
    assert code == 2
    assert "checkpoint" in (told.err + told.out).replace("-", "_")


def test_a_time_ends_a_leg_wherever_it_is(tmp_path, monkeypatch):
    """A clock that goes a second a batch: a checkpoint comes every so many batches."""
    now = SimpleNamespace(s=0)
    clock = SimpleNamespace(monotonic=lambda: now.s, perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", clock)
    monkeypatch.setattr("runtime.stop.time", clock)

    def tick(samples: int) -> None:
        now.s += 1

    train(
        config(checkpoint_every="4s", keep_checkpoints=99),
        ArraySource(300),
        saving=Saving(tmp_path),
        on_samples=tick,
    )
    # A leg begins at second k and is due at k + 4: four batches of 24 samples.
    cuts = [int(cut.name) for cut in complete_checkpoints(tmp_path)]
    assert cuts == [4 * 24, 8 * 24, 12 * 24, 300]


def test_damaged_checkpoints_never_stand_for_the_newest_of_those_to_keep(tmp_path):
    """The run goes on from before them, on another schedule: what it writes itself must stay."""
    source = ArraySource(300)
    train(config(checkpoint_every=5, keep_checkpoints=3), source, saving=Saving(tmp_path))
    for damaged in complete_checkpoints(tmp_path)[1:]:
        (damaged / "dense.pt").write_bytes(b"")
    ending = Ending()
    goes_on = Saving(tmp_path, newest(tmp_path), ending)
    often = config(checkpoint_every=3, keep_checkpoints=1)
    with pytest.raises(Interrupted, match="after 192 samples"):
        train(often, source, saving=goes_on, on_samples=after(72, lambda: ending.ask("a test")))
    assert [int(left.name) for left in complete_checkpoints(tmp_path)] == [192]
    assert newest(tmp_path).state.samples == 192


def test_an_end_that_was_evaluated_and_not_summed_up_is_evaluated_once(tmp_path):
    lines = [
        {"updates": n, "samples": 24 * n, "drained": drained, "tasks": {"t": {"auc": None, "n": 3}}}
        for n, drained in ((20, False), (40, False), (40, True), (60, False))
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"updates": 60, "sam')
    start = SimpleNamespace(state=SimpleNamespace(updates=40))
    beginning(tmp_path, TrainConfig(), start, [])()
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines[:2]


def test_a_run_that_its_steps_have_ended_goes_on_behind_short_batches(tmp_path):
    """Each pass of 50 rows ends with a short batch, so that steps are less than so many samples."""
    rows = DataConfig(name="synthetic", rows=50, epochs=9)
    chosen = config(checkpoint_every="end", steps=6, test_rows=200, data=rows)
    assert run_into(tmp_path / "run", chosen)["samples"] < 6 * chosen.batch
    assert run_into(tmp_path / "run", replace(chosen, steps=9), resume=True)["updates"] == 9


def curve(folder):
    """Samples at which a run was evaluated on the way."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["samples"] for line in lines if not line["drained"]]


@pytest.mark.first_case
@pytest.mark.parametrize("mode", ["async", "async_averaging"])
@pytest.mark.parametrize(("ranks", "others"), [(3, 1), (1, 3), (2, 5)])
def test_steps_that_ranks_share_are_counted_alike_whatever_number_of_them_goes_on(
    mode, ranks, others, tmp_path, capsys
):
    """An update takes a share: of 3 ranks a third of a step, of one a whole one. By hand: a pass of
    200 samples has seven steps of 32, the last of which is of 8, and there are three passes."""
    words = ["--mode", mode, "--match", "global", "--batch", "32", "--model.hidden", "8"]
    words += ["--data.name", "synthetic", "--data.rows", "200", "--data.epochs", "3"]
    words += ["--test-rows", "200", "--evaluate-every-steps", "3", "--checkpoint-every", "end"]
    run = tmp_path / "run"

    def goes_on(*more):
        code = main(["train", "--resume", str(run), *more])
        return code, capsys.readouterr().err

    first = ["--ranks", str(ranks), "--steps", "10", "--out", str(run)]
    assert main(["train", *words, *first]) == 0
    assert "add --steps, more than 10" in goes_on("--steps", "10")[1]
    assert goes_on("--ranks", str(others), "--steps", "15")[0] == 0
    assert "add --steps, more than 15" in goes_on("--steps", "15")[1]
    assert goes_on("--steps", "18")[0] == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (18, 400 + 4 * 32)
    assert not any("the data gave" in note for note in summary["notes"])
    assert curve(run) == [96, 192, 200 + 2 * 32, 200 + 5 * 32, 400 + 32, 400 + 4 * 32]
    assert goes_on("--steps", "30")[0] == 0
    assert "trained on all of its data" in goes_on("--steps", "40")[1]
