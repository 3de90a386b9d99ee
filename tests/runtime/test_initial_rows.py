"""Rows that begin with vectors of a file: what the file says, and nothing else (law 10)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from runtime.__main__ import main
from runtime.checkpoint.whole import find_checkpoint
from runtime.inference import open_model

SCHEMA = """name = "made"
file = "log.csv"
labels = ["clicked"]
split = { test_fraction = 0.25 }
columns = ["user", { name = "item", table = "items" }]
"""
STILL = ["--rows.optimizer.lr", "1e-30", "--model.lr", "1e-30"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    log = pd.DataFrame({"user": draw.integers(0, 20, 400), "item": draw.integers(0, 30, 400)})
    log.assign(clicked=draw.integers(0, 2, 400)).to_csv(tmp_path / "log.csv", index=False)
    (tmp_path / "made.toml").write_text(SCHEMA)
    vectors = draw.normal(size=(10, 8)).astype(np.float32)
    frame = pd.DataFrame({"item": np.arange(20, 30), "vector": list(vectors)})
    frame.to_parquet(tmp_path / "vectors.parquet")
    return tmp_path


def train(folder: Path, name: str, *words: str, every: str = "end") -> Path:
    out = folder / name
    options = ["--data", str(folder / "made.toml"), "--batch", "32", "--model.hidden", "8"]
    assert main(["train", *options, "--checkpoint-every", every, "--out", str(out), *words]) == 0
    return out


def initial(folder: Path) -> list[str]:
    return ["--tables.items.initial", str(folder / "vectors.parquet")]


@pytest.mark.law10
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "servers", [[], ["--shards", "3"], ["--executor", "concurrent", "--servers", "2"]]
)
def test_rows_of_the_file_have_its_vectors_and_all_others_are_drawn(folder, servers):
    """Nearly nothing is learned, so what a run ends with is what it began with."""
    plain = open_model(train(folder, "plain", *STILL, *servers))
    run = train(folder, "run", *STILL, *servers, *initial(folder))
    model = open_model(run)
    expected = pd.read_parquet(folder / "vectors.parquet")
    found = model.vectors("item", expected["item"].tolist())
    assert (found == np.stack(expected["vector"])).all()
    for column, values in (("item", [*range(20), 77]), ("user", [*range(20), 77])):
        assert (model.vectors(column, values) == plain.vectors(column, values)).all()
    facts = find_checkpoint(run).state.facts
    digest = hashlib.sha256((folder / "vectors.parquet").read_bytes()).hexdigest()
    assert facts["initial_rows"] == {"items": digest}


def test_what_began_so_needs_the_file_no_more(folder, capsys):
    """Stopped, gone on with and evaluated without the file: the bytes of the undisturbed run."""
    whole = train(folder, "whole", *initial(folder), every="5")
    first = train(folder, "first", *initial(folder), "--steps", "5", every="5")
    (folder / "vectors.parquet").unlink()
    assert main(["train", "--resume", str(first), "--steps", "none"]) == 0
    assert main(["evaluate", str(first)]) == 0
    one, other = open_model(whole), open_model(first)
    for table in one.tables:
        assert one.tables[table].values.tobytes() == other.tables[table].values.tobytes()


def test_an_exports_rows_begin_another_run(folder):
    run = train(folder, "run")
    assert main(["export", str(run), "--out", str(folder / "model")]) == 0
    vectors = folder / "model" / "rows" / "items.parquet"
    again = open_model(train(folder, "again", *STILL, "--tables.items.initial", str(vectors)))
    assert (again.vectors("item", range(30)) == open_model(run).vectors("item", range(30))).all()


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({"vector": [[1.0] * 7] * 10}, [], "dim is 8, and the vectors"),
        ({"vector": [[float("nan")] * 8] * 10}, [], "not finite"),
        ({"item": [1] * 10}, [], "stood there before"),
        ({}, ["--tables.items.capacity.rows", "5"], "capacity cannot go with it"),
        ({}, ["--rows.initial", "gama"], "uniform, normal, constant"),
    ],
)
def test_a_file_that_cannot_begin_rows_is_refused(folder, change, words, said, refused):
    frame = pd.read_parquet(folder / "vectors.parquet").assign(**change)
    frame.to_parquet(folder / "vectors.parquet")
    options = ["--data", str(folder / "made.toml"), "--out", str(folder / "run")]
    assert said in refused("train", *options, *initial(folder), *words)
