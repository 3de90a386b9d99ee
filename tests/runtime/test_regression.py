"""A number to predict, and samples that count more than others: from a file to a prediction."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from runtime.__main__ import main
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.run.folder import read_summary

SCHEMA = """name = "watched"
file = "watched.csv"
labels = ["clicked", "watch_s"]
regression = ["watch_s"]
weight = "importance"
group = "user"
split = { column = "day", test_from = 8 }
columns = ["user", "item", { name = "price", kind = "numeric" }]
"""


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    """Rows whose time is a function of user and item; rows of weight 0 say the contrary."""
    draw, rows = np.random.default_rng(0), 3_000
    user, item = draw.integers(0, 12, rows), draw.integers(0, 12, rows)
    wrong = draw.random(rows) < 0.3
    watch_s = np.where(wrong, -9.0, user / 6 - item / 12)
    frame = pd.DataFrame({"user": user, "item": item, "price": draw.random(rows)})
    frame["clicked"] = np.where(wrong, user % 2 == 0, user % 2 == 1).astype(int)
    frame["watch_s"], frame["importance"] = watch_s, np.where(wrong, 0, 1.5)
    frame["day"] = 10 * np.arange(rows) // rows
    folder = tmp_path_factory.mktemp("watched")
    frame.to_csv(folder / "watched.csv", index=False)
    (folder / "watched.toml").write_text(SCHEMA)
    return folder / "watched.toml"


@pytest.fixture(scope="module")
def run(schema, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    words = [
        "train", "--data.name", str(schema), "--out", str(out), "--batch", "32", "--model.lr",
        "0.01", "--data.epochs", "4", "--mode", "hybrid", "--tau", "2", "--ranks", "2",
        "--checkpoint-every", "20", "--evaluate-every-steps", "20",
        "--eval-split", "validation", "--data.validation-fraction", "0.2", "--keep-best", "auc",
    ]  # fmt: skip
    assert main(words) == 0
    return out


def test_what_counts_is_learned_and_what_weighs_nothing_is_not(run, schema, tmp_path, capsys):
    out = tmp_path / "scores.json"
    assert main(["evaluate", str(run), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "watch_s: RMSE 0." in told and "recall@10" in told and "ndcg@10" in told
    scores = json.loads(out.read_text())["tasks"]
    assert scores["clicked"]["auc"] > 0.95 and scores["watch_s"]["auc"] is None
    assert scores["watch_s"]["mse"] < 0.2 * scores["watch_s"]["trivial_mse"]
    summary = read_summary(run)
    assert set(summary["tasks"]["watch_s"]) >= {"mse", "mae", "rmse"}


def test_a_number_is_predicted_as_it_is(run, schema, tmp_path):
    model = tmp_path / "exported"
    assert main(["export", str(run), "--out", str(model)]) == 0
    unlabelled = pd.read_csv(schema.parent / "watched.csv")[["user", "item", "price"]]
    unlabelled.to_csv(tmp_path / "new.csv", index=False)
    words = ["predict", str(model), "--data", str(tmp_path / "new.csv")]
    assert main([*words, "--out", str(tmp_path / "out.csv")]) == 0
    found = pd.read_csv(tmp_path / "out.csv")
    truth = unlabelled.user / 6 - unlabelled.item / 12
    assert np.corrcoef(found.watch_s, truth)[0, 1] > 0.9
    assert found.watch_s.min() < -0.2 and found.watch_s.max() > 1.2  # no probabilities
    assert found.clicked.between(0, 1).all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("importance", "weight = -1"), "a weight must be a finite number >= 0"),
        (("importance", "weight = inf"), "a weight must be a finite number >= 0"),
        (("watch_s", "label = long"), "a label of a regression must be a finite number"),
        (("clicked", "label = 2"), "a label must be 0 or 1"),
    ],
)
def test_a_value_that_breaks_its_rule_is_named(change, told, schema, tmp_path):
    column, value = change[0], change[1].partition(" = ")[2]
    frame = pd.read_csv(schema.parent / "watched.csv", dtype=str)
    frame.loc[7, column] = value
    frame.to_csv(tmp_path / "watched.csv", index=False)
    (tmp_path / "watched.toml").write_text(SCHEMA)
    with pytest.raises(DataError, match=f"column {column}: .{value}.; {told}"):
        list(open_source(str(tmp_path / "watched.toml")).chunks("train"))


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("importance", "0", "every row of the test part that is evaluated has weight 0"),
        ("clicked", "2", "column clicked: '2'; a label must be 0 or 1"),
        ("price", "dear", "column price: 'dear'"),
    ],
)
def test_a_fault_of_the_test_part_is_seen_before_the_first_step(
    column, value, told, schema, tmp_path, refused
):
    frame = pd.read_csv(schema.parent / "watched.csv", dtype=str)
    frame.loc[frame.index[-1] if column != "importance" else frame.day > "7", column] = value
    frame.to_csv(tmp_path / "watched.csv", index=False)
    (tmp_path / "watched.toml").write_text(SCHEMA)
    words = ["--data", str(tmp_path / "watched.toml"), "--out", str(tmp_path / "run")]
    assert told in refused("train", *words)
    assert not (tmp_path / "run" / "config.json").exists()  # nothing has begun


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('["watch_s"]\nw', '["watched_s"]\nw', "regression names 'watched_s', which is no label"),
        ('"importance"', '"price"', "weight 'price' is a column or a label, too"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(old, new, told, tmp_path):
    (tmp_path / "watched.toml").write_text(SCHEMA.replace(old, new))
    with pytest.raises(DataError, match=told):
        open_source(str(tmp_path / "watched.toml"))


def test_a_score_that_the_task_does_not_have_is_refused(schema, tmp_path, capsys):
    words = [
        "train",
        "--data.name",
        str(schema),
        "--out",
        str(tmp_path),
        "--eval-split",
        "validation",
    ]
    words += ["--data.validation-fraction", "0.2", "--checkpoint-every", "end"]
    assert main([*words, "--keep-best", "mse"]) == 2
    assert "task clicked is no regression" in capsys.readouterr().err
