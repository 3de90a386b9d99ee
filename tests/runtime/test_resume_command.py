"""`train --resume RUN`: what it takes from the run, what may be given anew, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

from runtime.__main__ import main
from runtime.checkpoint.places import STATE, complete_checkpoints
from runtime.checkpoint.whole import read_state
from runtime.config import (
    DataConfig,
    read_config,
)
from runtime.data.synthetic import SyntheticSource
from runtime.files import write_sealed
from runtime.run.folder import claimed
from runtime.run.record import run_into
from runtime.run.saver import going_on
from runtime.stop import Ending, Interrupted
from tests.runtime.clicks_of_a_user import EDITS, NO_EDITS, edited, write_clicks
from tests.runtime.test_ending import after
from tests.runtime.worlds import config


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A hybrid run over two ranks, stopped after eight of its steps."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    chosen = config(
        mode="hybrid", tau=2, ranks=2, shards=2, checkpoint_every=4, test_rows=200, fuse_ranks=True,
        data=DataConfig(name="synthetic", rows=600),
    )  # fmt: skip
    ending = Ending()
    with claimed(folder), pytest.raises(Interrupted):
        run_into(folder, chosen, after(24 * 8, lambda: ending.ask("a test")), ending=ending)
    return folder


@pytest.fixture
def refused(refused, monkeypatch):
    def said(*words: str) -> str:
        monkeypatch.setattr("runtime.run.record.train", lambda *a, **k: pytest.fail("it trained"))
        return refused("train", *words)

    return said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.lr", "0.5"], "--model.lr is 0.5, but the run was begun with 0.001"),
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
        (["--eval-split", "validation"], "--eval-split is validation"),
        (["--test-rows", "2"], "--test-rows is 2"),
    ],
)
def test_what_decides_what_is_trained_cannot_be_given_anew(unfinished, words, said, refused):
    told = refused("--resume", str(unfinished), *words)
    assert said in told
    assert "which decides what is trained or judged: leave it out, or start a new run" in told


def test_who_trains_and_how_far_may_be_given_anew(unfinished, monkeypatch, capsys):
    seen = []

    def spied(folder, chosen, **options):
        before = read_config(folder / "config.json")
        start = going_on(folder, chosen, before, seen.append)
        seen.append((chosen, start))
        raise ValueError("seen")

    monkeypatch.setattr("runtime.run.record.run_into", spied)
    words = (
        "--ranks 4 --shards 3 --executor concurrent --threads 2 --steps 40 --latency-s 0.1"
        " --keep-checkpoints 5 --checkpoint-every 30s --evaluate-every-steps 7"
        " --permits 3"
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


SMALL = "--data.name synthetic --data.rows 400 --batch 32 --test-rows 100 --model.hidden 8"


def auto(folder, *more):
    """The command that a job controller starts again and again."""
    steps = [] if "--steps" in more else ["--steps", "8"]
    options = ["--checkpoint-every", "2", "--resume", "auto", "--out", str(folder)]
    return main(["train", *SMALL.split(), *options, *steps, *more])


def test_resume_auto_begins_goes_on_and_says_that_a_run_is_finished(tmp_path, monkeypatch, capsys):
    """One command, whatever has become of the one before: nothing, a death before the first
    checkpoint, one behind it, the end."""
    run, file = tmp_path / "run", tmp_path / "run.toml"
    file.write_text('[sync]\nmode = "hybrid"\ntau = 2\n')
    options = ["--config", str(file), "--ranks", "2"]
    asked = []

    class Dies(BaseException):
        pass

    def at(samples):
        return after(samples, lambda: (_ for _ in ()).throw(Dies))

    def trained(folder, chosen, *, on_samples, **more):
        asked.append(more["resume"])
        dies = {1: at(32), 2: at(5 * 32)}.get(len(asked))
        return run_into(folder, chosen, dies or on_samples, **more)

    monkeypatch.setattr("runtime.run.record.run_into", trained)
    for _ in range(2):
        with pytest.raises(Dies):
            auto(run, *options)
    assert auto(run, *options) == 0
    assert asked == [False, False, True]
    assert "goes on from" in (capsys.readouterr().out)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["samples"], summary["mode"], summary["tau"]) == (8 * 32, "hybrid", 2)
    assert auto(run, *options) == 0
    assert capsys.readouterr().out == f"the run in {run} is finished: nothing is left to do\n"
    assert asked == [False, False, True], "and nothing is trained again"
    assert auto(run, *options, "--steps", "10") == 0
    assert json.loads((run / "summary.json").read_text())["samples"] == 10 * 32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", "64"),
        ("mode", "hybrid"),
        ("seed", "9"),
        ("model.lr", "0.5"),
        ("rows.optimizer.lr", "0.5"),
        ("data.rows", "500"),
        ("data.name", "synthetic:criteo-ad"),
    ],
)
def test_resume_auto_of_a_finished_run_takes_no_other_options(name, value, tmp_path, capsys):
    """A job that was edited is not done because another one is."""
    assert auto(tmp_path / "run") == 0
    summary = (tmp_path / "run/summary.json").read_bytes()
    capsys.readouterr()
    begun = SMALL.split()
    options = dict(zip(begun[::2], begun[1::2], strict=True)) | {f"--{name}": value}
    words = [word for pair in options.items() for word in pair]
    words += ["--checkpoint-every", "2", "--steps", "8", "--out", str(tmp_path / "run")]
    assert main(["train", *words, "--resume", "auto"]) == 2
    told = capsys.readouterr().err
    assert re.match(f"error: --{name} is .*{value}.*, but the run was begun with", told), told
    assert (tmp_path / "run/summary.json").read_bytes() == summary


def test_a_run_is_not_gone_on_with_on_other_data(unfinished, monkeypatch, refused):
    known = SyntheticSource.provenance
    monkeypatch.setattr(
        SyntheticSource, "provenance", lambda self: replace(known(self), sha256="0" * 64)
    )
    before = sorted(unfinished.rglob("*"))
    assert "has changed since the run began" in refused("--resume", str(unfinished))
    assert sorted(unfinished.rglob("*")) == before


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """A run on a user's own data that was stopped half way: its folder, and the schema."""
    home = tmp_path_factory.mktemp("own")
    schema = write_clicks(home)
    words = ["--data.name", str(schema), "--batch", "32", "--model.hidden", "8", "--steps", "16"]
    assert main(["train", *words, "--checkpoint-every", "8", "--out", str(home / "run")]) == 0
    (home / "run" / "summary.json").unlink()  # as if it had been killed behind its last checkpoint
    return home / "run", schema


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_is_not_gone_on_with_under_an_edited_schema(own_run, edit, refused):
    run, schema = own_run
    known = schema.read_text()
    schema.write_text(edited(known, EDITS[edit]))
    try:
        told = refused("--resume", str(run))
    finally:
        schema.write_text(known)
    assert "the schema of data set mine is not the one that the run began with: " in told
    assert "and none of them may test: put the schema back, or start a new run" in told


@pytest.mark.parametrize("edit", NO_EDITS)
def test_a_schema_that_says_the_same_otherwise_is_gone_on_with(own_run, edit, monkeypatch):
    run, schema = own_run
    known = schema.read_text()
    schema.write_text(edited(known, NO_EDITS[edit]))
    monkeypatch.setattr(
        "runtime.run.record._train_and_record", lambda *_: pytest.fail("it trained")
    )
    try:
        with pytest.raises(pytest.fail.Exception, match="it trained"):
            run_into(run, read_config(run / "config.json"), resume=True)
    finally:
        schema.write_text(known)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"lr": 0.5}}, "model.lr is 0.5, but the run was begun with 0.001"),
        ({"sync": {"tau": 9}}, "tau is 9, but the run was begun with 2"),
        ({"data": {"rows": 800}}, "data.rows is 800, but the run was begun with 600"),
        ({"seed": 7}, "seed is 7, but the run was begun with 0"),
    ],
)
def test_a_config_that_was_edited_is_held_against_the_checkpoint(
    unfinished, tmp_path, change, said, refused
):
    run = tmp_path / "run"
    shutil.copytree(unfinished, run)
    content = json.loads((run / "config.json").read_text())
    for name, value in change.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    (run / "config.json").write_text(json.dumps(content))
    told = refused("--resume", str(run)).replace("--", "")
    assert (
        f"config.json was edited: {said}, which decides what is trained or judged: put it back"
        in told
    )


@pytest.mark.parametrize(
    ("steps", "words", "said"),
    [
        (4, [], "is finished; add --steps, more than 4, to go on"),
        (4, ["--steps", "4"], "is finished; add --steps, more than 4, to go on"),
        (
            None,
            [],
            "it has trained on all of its data, and a resume adds none; start a new run, su",
        ),
        (None, ["--steps", "7000"], "start a new run, such as with --data.epochs 2"),
        (99, ["--steps", "7000"], "start a new run, such as with --data.epochs 2"),
    ],
)
def test_a_finished_run_says_what_can_be_done(tmp_path, steps, words, said, refused, monkeypatch):
    rows = DataConfig(name="synthetic", rows=240)
    chosen = config(checkpoint_every="end", steps=steps, test_rows=200, data=rows)
    run_into(tmp_path / "run", chosen)
    assert said in refused("--resume", str(tmp_path / "run"), *words)


def test_code_inside_the_run_is_not_gone_on_with(unfinished, tmp_path, refused, monkeypatch):
    """Also where the checkpoint itself names it: who made the run has sealed that, too."""
    run = tmp_path / "got"
    shutil.copytree(unfinished, run)
    monkeypatch.syspath_prepend(tmp_path)
    (run / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for folder in complete_checkpoints(run):
        state = read_state(folder)
        config = state.config | {"model": state.config["model"] | {"name": "got.evil:Net"}}
        write_sealed(folder / STATE, replace(state, config=config))
    content = json.loads((run / "config.json").read_text())
    content["model"]["name"] = "got.evil:Net"
    (run / "config.json").write_text(json.dumps(content))
    for command in (["evaluate", str(run)], ["export", str(run), "--out", str(tmp_path / "x")]):
        assert main(command) == 2
    assert "code is never taken from there" in refused("--resume", str(run))
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of two checkpoints that is done."""
    folder = tmp_path_factory.mktemp("runs") / "done"
    chosen = config(mode="hybrid", tau=2, ranks=2, checkpoint_every=4, test_rows=200, steps=8,
                    evaluate_every_steps=2, data=DataConfig(name="synthetic"))  # fmt: skip
    run_into(folder, chosen, typed=["--steps", "8"])
    return folder


@pytest.fixture
def finished(done, tmp_path):
    """A copy to go on with."""
    return shutil.copytree(done, tmp_path / "done")


def content_of(folder):
    """Every file of a folder with its bytes."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("fails", ["the device", "the data"])
def test_a_resume_that_fails_before_its_first_batch_changes_nothing(
    finished, fails, monkeypatch, capsys
):
    before = content_of(finished)
    words = ["--resume", str(finished), "--steps", "20"]
    if fails == "the device":
        words += ["--device", "cuda:77"]
    else:
        where = {"the tables": "session.assemble_for", "the trainer": "session.Training",
                 "the data": "record.opened"}[fails]  # fmt: skip

        def broken(*args, **options):
            raise ValueError("broken on purpose")

        monkeypatch.setattr(f"runtime.run.{where}", broken)
    assert main(["train", *words]) == 2
    assert capsys.readouterr().err
    assert content_of(finished) == before | {finished / "lock": b""}
    monkeypatch.undo()
    assert main(["train", *words[:4]]) == 0  # and it can still go on
    assert json.loads((finished / "summary.json").read_text())["updates"] == 20
    told = json.loads((finished / "command.json").read_text())
    assert told == {"train": ["--steps", "8"], "resume": [words[:4]]}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", "[]", "line 2: the document must be a table of names"),
        ("metrics.jsonl", '{"updates": "x"}', "line 2: updates must be a whole number, got 'x'"),
        ("metrics.jsonl", "\udcff", "line 2 is not text in UTF-8"),
        ("metrics.jsonl", "[" * 100_000, "line 2 is nested too deeply"),
        ("command.json", '{"resume": 5}', "resume must be a list, got 5"),
        ("command.json", '{"train": 5}', "train must be a list, got 5"),
        ("command.json", "[5]", "the document must be a table of names"),
        ("command.json", '{"train": ["a"', "is not well-formed JSON"),
    ],
)
def test_what_no_run_writes_is_named_and_left_as_it_is(finished, name, text, said, refused):
    file = finished / name
    first = file.read_text().splitlines()[0] + "\n" if name == "metrics.jsonl" else ""
    file.write_bytes(f"{first}{text}\n".encode(errors="surrogateescape"))
    before = content_of(finished)
    told = refused("--resume", str(finished), "--steps", "20")
    assert name in told and said in told
    assert content_of(finished) == before | {finished / "lock": b""}
