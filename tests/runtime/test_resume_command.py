"""`train --resume RUN`: what it takes from the run, what may be given anew, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from runtime import train_command
from runtime.checkpoint.whole import complete_checkpoints
from runtime.commands import main
from runtime.config import CheckpointConfig, DataConfig, TrainConfig, read_config
from runtime.data.synthetic import SyntheticSource
from runtime.run import schedule
from runtime.run.ending import Ending, Interrupted
from runtime.run.record import run_into
from runtime.run.resume import cut_metrics, going_on
from runtime.run.session import Saving, train
from runtime.train_options import read_train
from tests.runtime.test_ending import after
from tests.runtime.worlds import ArraySource, config


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A hybrid run over two ranks, stopped after eight of its steps."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    chosen = config(
        mode="hybrid", tau=2, ranks=2, shards=2, checkpoint_every=4, test_rows=200, fuse_ranks=True,
        data=DataConfig(name="synthetic", rows=600),
    )  # fmt: skip
    ending = Ending()
    with pytest.raises(Interrupted):
        run_into(folder, chosen, after(24 * 8, lambda: ending.ask("a test")), ending=ending)
    return folder


@pytest.fixture
def refused(capsys, monkeypatch):
    def said(*words: str) -> str:
        monkeypatch.setattr("runtime.run.record.train", lambda *a, **k: pytest.fail("it trained"))
        try:
            code = main(["train", *words])
        except SystemExit as left:
            code = left.code
        assert code == 2
        return " ".join(capsys.readouterr().err.split())

    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.lr", "0.5"], "--model.lr is 0.5, but the run in"),
        (["--tau", "3"], "--tau is 3"),
        (["--batch", "48"], "--batch is 48"),
        (["--seed", "1"], "--seed is 1"),
        (["--rows.dim", "8"], "--rows.dim is 8"),
        (["--data.rows", "700"], "--data.rows is 700"),
        (["--data.shuffle"], "--data.shuffle is True"),
        (["--no-merge-pushes"], "--merge-pushes is False"),
        (["--no-trace-order"], "--trace-order is False"),
        (["--precision", "bfloat16"], "--precision is bfloat16"),
        (["--nonfinite", "skip"], "--nonfinite is skip"),
        (["--mode", "raw_hybrid"], "--mode is raw_hybrid"),
    ],
)
def test_what_decides_what_is_trained_cannot_be_given_anew(unfinished, words, said, refused):
    told = refused("--resume", str(unfinished), *words)
    assert said in told
    assert "which decides what is trained: leave it out, or start a new run" in told


def test_who_trains_and_how_far_may_be_given_anew(unfinished, monkeypatch, capsys):
    seen = []

    def spied(folder, chosen, **options):
        before = read_config(folder / "config.json")
        start = going_on(folder, chosen, before, seen.append)
        seen.append((chosen, start))
        raise ValueError("seen")

    monkeypatch.setattr("runtime.run.record.run_into", spied)
    words = (
        "--ranks 4 --shards 3 --executor concurrent --threads 2 --steps 40 --keep 5 --latency-s 0.1"
        " --checkpoint-every 30s --evaluate-every-steps 7 --test-rows 100 --permits 3"
    )
    assert main(["train", "--resume", str(unfinished), *words.split()]) == 2
    assert capsys.readouterr().err == "error: seen\n"
    warning, (chosen, start) = seen
    assert "trace.npz begins where this does" in warning
    assert (chosen.sync.ranks, chosen.engine.shards, chosen.steps) == (4, 3, 40)
    assert chosen.sync.tau == 2 and chosen.rows.dim == 4  # from the run
    assert start.state.samples == int(complete_checkpoints(unfinished)[-1].name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "{tmp}/none"], "there is no run, it holds no config.json"),
        (["--resume", ""], "--resume is empty"),
        (["--resume", "{run}", "--out", "x"], "remove --out"),
        (["--resume", "{run}", "--config", "x.toml"], "remove --config"),
        (["--out", "{run}"], "unfinished run with checkpoints; go on with --resume"),
    ],
)
def test_folders_that_do_not_fit_are_refused_in_a_sentence(
    unfinished, tmp_path, words, said, refused
):
    filled = [word.format(tmp=tmp_path, run=unfinished) for word in words]
    assert said in refused(*filled)


def test_a_run_without_a_checkpoint_cannot_be_gone_on_with(tmp_path, refused):
    (tmp_path / "config.json").write_text(json.dumps({"steps": 3}))
    assert "holds no checkpoint that can be used" in refused("--resume", str(tmp_path))


def test_a_run_is_not_gone_on_with_on_other_data(unfinished, monkeypatch, capsys):
    known = SyntheticSource.provenance
    monkeypatch.setattr(
        SyntheticSource, "provenance", lambda self: replace(known(self), sha256="0" * 64)
    )
    before = sorted(unfinished.rglob("*"))
    assert main(["train", "--resume", str(unfinished)]) == 2
    assert "has changed since the run began" in capsys.readouterr().err
    assert sorted(unfinished.rglob("*")) == before


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
    monkeypatch.setattr(train_command, "work", lambda *_: None)
    try:
        code = main(["train", f"--checkpoint-every={text}"])
    except SystemExit as left:
        code = left.code
    told = capsys.readouterr()
    assert code == 2
    assert "checkpoint" in (told.err + told.out).replace("-", "_")


def test_a_time_ends_a_leg_wherever_it_is(tmp_path, monkeypatch):
    """A clock that goes a second a look: a checkpoint comes every so many batches."""
    looks = count()
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    train(config(checkpoint_every="4s", keep=99), ArraySource(300), saving=Saving(tmp_path))
    # A leg begins at second k and is due at k + 4: three batches, and the fourth look ends it.
    found = [int(cut.name) for cut in complete_checkpoints(tmp_path)]
    assert found == [3 * 24, 6 * 24, 9 * 24, 12 * 24, 300]


def test_incremental_rows_need_checkpoints_and_the_native_kernels():
    with pytest.raises(ValueError, match="checkpoint_incremental is used with checkpoint_every"):
        CheckpointConfig(checkpoint_incremental=True)
    with pytest.raises(ValueError, match="checkpoint_incremental needs --kernels native"):
        config(kernels="reference", checkpoint_incremental=True, checkpoint_every=3)


def test_a_run_with_shards_goes_on_with_servers_without_saying_so_twice(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('{"engine": {"shards": 3, "executor": "concurrent"}}')
    command = read_train(["--resume", str(folder), "--servers", "2"])
    assert (command.run.engine.servers, command.run.engine.shards) == (2, 1)


def test_an_end_that_was_evaluated_and_not_summed_up_is_evaluated_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [{"updates": 20, "drained": False}, {"updates": 40, "drained": False},
             {"updates": 40, "drained": True}, {"updates": 60, "drained": False}]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cut_metrics(file, 40)
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines[:2]
