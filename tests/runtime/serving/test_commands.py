"""`evaluate` and `export` on the command line: what they print and write, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.config import DataConfig
from runtime.data.open import open_source
from runtime.inference import open_model
from runtime.model_commands import describe
from runtime.run.evaluate import HeldOut, evaluate
from tests.runtime.clicks_of_a_user import EDITS, edited, write_clicks
from tests.runtime.serving.trained_runs import checkpoint_of
from tests.runtime.worlds import World, config, run

TEST_ROWS = 3000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    settings = config(steps=20, test_rows=TEST_ROWS)
    settings = replace(settings, data=DataConfig(name="synthetic", rows=2000))
    world = run(settings, open_source("synthetic", rows=2000))
    folder = tmp_path_factory.mktemp("runs") / "mine"
    checkpoint_of(world, folder)
    return world, folder


@pytest.mark.parametrize("rows", [None, 500])
def test_evaluate_prints_and_writes_the_scores_of_the_test_part(trained, rows, tmp_path, capsys):
    world, folder = trained
    out = tmp_path / "new" / "found.json"
    limit = [] if rows is None else ["--test-rows", str(rows)]
    for _ in range(2):  # an earlier evaluation is replaced
        assert main(["evaluate", str(folder), "--out", str(out), *limit]) == 0
    told, found = capsys.readouterr().out, json.loads(out.read_text())
    held_out = HeldOut(open_source("synthetic", rows=2000), rows or TEST_ROWS)
    ours = evaluate(world.learner, world.model, world.worker, held_out).tasks["click"]
    assert found["tasks"]["click"]["auc"] == ours.auc
    assert found["tasks"]["click"]["log_loss"] == ours.log_loss
    assert found["rows_evaluated"] == (rows or TEST_ROWS)
    assert (found["samples"], found["updates"]) == (480, 20)
    line = rf"^click +{ours.auc:.4f} +{ours.log_loss:.4f} +{ours.label_rate:.4f} "
    assert re.search(line, told, re.MULTILINE)
    assert found["checkpoint"] == str(next((folder / "checkpoints").iterdir()))


@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "hybrid", "--ranks", "2", "--shards", "3", "--executor", "concurrent"],
        ["--mode", "async_averaging", "--ranks", "2", "--checkpoint-every", "7"],
    ],
    ids=["hybrid", "averaging"],
)
def test_a_finished_run_is_evaluated_to_its_own_figures(tmp_path, capsys, options):
    out, run_folder = tmp_path / "found.json", tmp_path / "run"
    words = ["train", "--data.name", "synthetic", "--data.rows", "1000", "--steps", "15"]
    words += ["--batch", "32", "--test-rows", "400", "--model.hidden", "8"]
    end = [] if "--checkpoint-every" in options else ["--checkpoint-every", "end"]
    assert main([*words, *end, "--out", str(run_folder), *options]) == 0
    assert main(["evaluate", str(run_folder), "--out", str(out)]) == 0
    capsys.readouterr()
    summary = json.loads((run_folder / "summary.json").read_text())
    found = json.loads(out.read_text())
    assert found["tasks"]["click"] == summary["tasks"]["click"]
    assert (found["samples"], found["updates"]) == (summary["samples"], summary["updates"])
    assert found["warnings"] == summary["warnings"]
    kept = np.load(run_folder / "predictions.npz")["predictions"]
    held_out = HeldOut(open_source("synthetic", rows=1000), 400)
    predictions = np.concatenate([open_model(run_folder).predict(b) for b in held_out])
    np.testing.assert_allclose(predictions, kept, rtol=0, atol=1e-6)


@pytest.mark.long
def test_export_says_what_it_wrote(trained, tmp_path, capsys, refused):
    world, folder = trained
    out = tmp_path / "exported"
    assert main(["export", str(folder), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "dense network: dense.safetensors, the weights of mlp\n" in told
    assert "dense.onnx" in told and "1,000 test samples" in told
    assert f"table rows: {len(world.store):,} rows" in told
    told = refused("export", str(folder), "--out", str(out))
    assert f"{out} is there already; nothing is overwritten" in told


def test_a_newcomers_mistakes_are_sentences(trained, tmp_path, refused):
    _, folder = trained
    assert "does not exist" in refused("evaluate", str(tmp_path / "no"))
    assert "neither the folder of a run" in refused("evaluate", str(tmp_path))
    said = refused("export", str(tmp_path), "--out", str(tmp_path / "x"))
    assert "neither the folder of a run" in said
    assert not (tmp_path / "x").exists()
    said = refused("evaluate", str(folder), "--data", "sintetic")
    assert "no data set is called 'sintetic'; did you mean synthetic?" in said
    said = refused("evaluate", str(folder), "--out", str(tmp_path))
    assert "it is a folder; name a file" in said
    (tmp_path / "letter.txt").write_text("dear")
    said = refused("evaluate", str(folder), "--out", str(tmp_path / "letter.txt"))
    assert "it is a file, and no evaluation: it would be lost" in said
    said = refused("export", str(folder), "--out", str(tmp_path / "letter.txt" / "x"))
    assert "letter.txt" in said
    assert "--out is missing" in refused("export", str(folder))


@pytest.mark.parametrize("damage", ["dense.pt", "rows/manifest.json", "state.json"])
def test_damage_is_named_and_an_older_checkpoint_serves_with_a_warning(
    trained, tmp_path, capsys, damage, refused
):
    world, _ = trained
    older = checkpoint_of(world, tmp_path).folder
    newer = older.with_name("000000000009999")
    older.rename(newer)
    checkpoint_of(world, tmp_path)
    file = newer / damage
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = refused("evaluate", str(newer))
    assert str(file) in said
    assert main(["evaluate", str(tmp_path), "--test-rows", "100"]) == 0
    found: Any = capsys.readouterr()
    assert f"warning: {file} " in found.err
    assert str(older) in found.out


@pytest.mark.parametrize("groups", [0, 3])
def test_gauc_is_told_where_samples_have_groups_alone(groups):
    score = {"auc": 0.7, "log_loss": 0.5, "label_rate": 0.3, "trivial_log_loss": 0.6}
    score |= {"calibration": 1.0} | ({"gauc": 0.6, "gauc_groups": groups} if groups else {})
    found = {"checkpoint": "c", "samples": 9, "data_says": "d", "rows_evaluated": 5, "warnings": [],
             "rows_trained_on": 0, "rows_alike": 0,
             "ids_with_row": {}, "data": {"rows_skipped": 0}}  # fmt: skip
    said = describe({**found, "tasks": {"click": score}})
    assert ("GAUC" in said, "nan" in said) == (groups > 0, False)
    assert len({len(line) for line in said.splitlines()[2:]}) == 1, "aligned"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on a user's own data, of 512 rows of the 640 that train, and the schema."""
    home = tmp_path_factory.mktemp("own")
    schema = write_clicks(home)
    words = ["--data.name", str(schema), "--batch", "32", "--model.hidden", "8", "--steps", "16"]
    assert main(["train", *words, "--checkpoint-every", "end", "--out", str(home / "run")]) == 0
    return home / "run", schema


@pytest.mark.parametrize("edit", [name for name in EDITS if name != "split"])
def test_a_model_is_not_judged_on_columns_that_mean_something_else(own, edit, refused):
    run_folder, schema = own
    known = schema.read_text()
    schema.write_text(edited(known, EDITS[edit]))
    try:
        told = refused("evaluate", str(run_folder))
    finally:
        schema.write_text(known)
    assert "has another schema than the model was trained on" in told
    if edit == "log":
        assert "column price: log was true, is false; correct the schema, or train" in told


def test_bad_rows_are_skipped_where_asked_and_counted(own, tmp_path, refused, capsys):
    run_folder, schema = own
    text = (schema.parent / "clicks.csv").read_text()
    (tmp_path / "clicks.csv").write_text(f"{text}u1,2,3|4,dear,p1,9,1\n")
    (tmp_path / "other.toml").write_text(schema.read_text())
    words = ["evaluate", str(run_folder), "--data", str(tmp_path / "other.toml")]
    assert "--data.skip-bad-rows" in refused(*words)
    assert main([*words, "--data.skip-bad-rows"]) == 0
    assert "bad rows skipped: 1 of test (whole file read)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("split", "test_rows", "leaked", "of"),
    [
        ('{ column = "day", test_from = 5 }', None, 512 - 400, 400),
        ('{ column = "day", test_from = 5 }', 100, 100, 100),
        ('{ column = "day", test_from = 7 }', None, 0, 240),
        ('{ column = "day", test_from = 9 }', None, 0, 80),
        ("{ test_fraction = 0.5 }", None, 512 - 400, 400),
        ('{ column = "day", test_from = 8, validation_fraction = 0.1 }', None, 0, 160),
    ],
)
def test_rows_that_were_trained_on_are_counted_and_said(
    own, split, test_rows, leaked, of,
    tmp_path, capsys,
):  # fmt: skip
    """By hand: 80 rows a day in order of time, of which the first 512 were trained on."""
    run_folder, schema = own
    text = edited(schema.read_text(), ('{ column = "day", test_from = 8 }', split))
    (tmp_path / "clicks.csv").write_bytes((schema.parent / "clicks.csv").read_bytes())
    (tmp_path / "other.toml").write_text(text)
    out = tmp_path / "found.json"
    words = ["evaluate", str(run_folder), "--data", str(tmp_path / "other.toml")]
    words += [] if test_rows is None else ["--test-rows", str(test_rows)]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["rows_trained_on"], found["rows_evaluated"]) == (leaked, of)
    said = (
        f"warning: {leaked} of the {of} samples trained this model, or one that it was started from"
    )
    assert (said in capsys.readouterr().out) == bool(leaked)
