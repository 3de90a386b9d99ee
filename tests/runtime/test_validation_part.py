"""The validation part: what it takes off training, and that the test part is left alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from runtime.config import CheckpointConfig, DataConfig, EvaluationConfig, TrainConfig
from runtime.data.batch import Batch, Field, Layout
from runtime.data.open import open_source
from runtime.data.schema import Column, Schema
from runtime.data.source import Part
from runtime.data.split import Split
from runtime.run.folder import read_predictions
from runtime.run.record import run_into
from runtime.run.session import train
from runtime.serving.trained import evaluate_run
from tests.runtime.worlds import ArraySource, changed, config

SCHEMA = """
name = "numbered"
file = "d.csv"
group = "user"
split = { column = "day", test_from = 2 }
[[columns]]
name = "user"
[[columns]]
name = "n"
kind = "numeric"
log = false
"""
N_TRAIN, N_TEST = 40, 12


class CountingSource(ArraySource):
    """Counts how often each part is asked for; a part's samples are those of the others."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.asked: Counter[str] = Counter()

    def chunks(self, part: Part) -> Iterator[Batch]:
        self.asked[part] += 1
        return super().chunks(part)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Rows 1 to 52; the last 12 test. Column n holds the row's number."""
    lines = ["user,n,day,label"]
    lines += [f"u{n % 5},{n},{1 + (n > N_TRAIN)},{n // 5 % 2}" for n in range(1, 53)]
    (tmp_path / "d.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "d.toml").write_text(SCHEMA)
    return str(tmp_path / "d.toml")


def numbers(name: str, part: Part, **options: Any) -> list[int]:
    return [int(n) for b in open_source(name, **options).chunks(part) for n in b.dense[:, 0]]


def test_a_run_judged_on_validation_never_asks_for_the_test_part():
    chosen = config(eval_split="validation", steps=4, evaluate_every_steps=2)
    source = CountingSource(96)
    train(chosen, source)
    assert source.asked["test"] == 0
    assert source.asked["validation"] > 0
    judged_on_test = CountingSource(96)
    train(config(steps=4), judged_on_test)
    assert judged_on_test.asked["test"] > 0
    assert judged_on_test.asked["validation"] == 0


def test_a_share_for_validation_is_taken_from_the_end_of_the_training_rows(data):
    share = {"validation_fraction": 0.25}
    assert numbers(data, "train") == list(range(1, 41))
    assert numbers(data, "train", **share) == list(range(1, 31))
    assert numbers(data, "validation", **share) == list(range(31, 41))
    assert numbers(data, "test", **share) == list(range(41, 53))


def test_the_first_rows_of_the_training_part_are_split_into_both(data):
    options = {"validation_fraction": 0.25, "rows": 20}
    assert numbers(data, "train", **options) == list(range(1, 16))
    assert numbers(data, "validation", **options) == list(range(16, 21))
    assert numbers(data, "test", **options) == list(range(41, 53))


def test_who_judges_by_some_of_the_rows_is_told(data, tmp_path):
    chosen = TrainConfig(
        batch=8, data=DataConfig(name=data), evaluation=EvaluationConfig(test_rows=7)
    )
    chosen = changed(chosen, wire="half")
    notes = run_into(tmp_path / "run", chosen)["notes"]
    halved = "rows and their gradients travelled as float16"
    assert notes == ["judged by the first 7 samples of the test part", halved]


def test_a_run_folder_says_the_part_and_has_its_labels(data, tmp_path):
    chosen = TrainConfig(
        batch=8,
        data=DataConfig(name=data, validation_fraction=0.25),
        evaluation=EvaluationConfig(eval_split="validation"),
    )
    chosen = replace(chosen, checkpoint=CheckpointConfig(checkpoint_every="end"))
    summary = run_into(tmp_path / "run", chosen)
    again = evaluate_run(tmp_path / "run")
    assert again["data"]["split"] == summary["data"].split, "rows are placed as they trained"
    assert again["rows_trained_on"] == 0 and again["rows_evaluated"] == 12
    assert summary["evaluated_on"].startswith("validation part") and summary["notes"] == []
    assert summary["samples"] == 30
    with np.load(tmp_path / "run" / "predictions.npz") as arrays:
        assert arrays["labels"][:, 0].tolist() == [n // 5 % 2 for n in range(31, 41)]
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]["label"]
    # rows 31 to 40: labels 0 0 0 0 1 1 1 1 1 0; each of the five users has one of both labels but
    # u0 (rows 35 and 40: 1 and 0), u1 (31, 36: 0, 1), u2, u3, u4 alike: nobody is left out.
    assert (told["gauc_groups"], told["gauc_groups_left_out"]) == (5, 0)
    assert told["normalized_entropy"] == pytest.approx(told["log_loss"] / told["trivial_log_loss"])


def test_without_a_validation_part_the_run_is_refused_before_it_trains(data, tmp_path, refused):
    words = [
        "train",
        "--eval-split",
        "validation",
        "--data.name",
        data,
        "--out",
        str(tmp_path / "r"),
    ]
    told = refused(*words)
    assert "--data.validation-fraction" in told


def test_the_group_is_one_id_of_each_sample():
    columns = (Column(name="user"), Column(name="tags", kind="multi"))
    split = Split(test_fraction=0.5)
    assert Schema(name="x", columns=columns, split=split, group="user").layout.group == "user"
    with pytest.raises(ValueError, match=r"group must be a column of one value .*got 'tags'"):
        Schema(name="x", columns=columns, split=split, group="tags")
    layout = Layout(fields=(Field(name="user"), Field(name="tags")), group="user")
    ids = np.array([7, 1, 2, 8, 7, 3], np.uint64)
    batch = Batch(ids, np.array([0, 1, 3, 4, 4, 5, 6]), np.empty((3, 0)), np.zeros((3, 1)))
    groups = layout.groups(batch)
    assert groups is not None
    assert groups.tolist() == [7, 8, 7]
    with pytest.raises(ValueError, match="group tags must have exactly one id in every sample"):
        Layout(fields=layout.fields, group="tags").groups(batch)
    session = Layout(fields=layout.fields, group="session")  # no feature: the batch carries it
    apart = replace(batch, groups=np.array([4, 4, 5], np.uint64))
    assert session.groups(apart).tolist() == [4, 4, 5]


def test_samples_without_a_user_are_in_no_group(tmp_path):
    """Two thirds of them: GAUC, recall and NDCG are of the others, by scikit-learn; each anonymous
    one is a user of its own where users are drawn again for an interval."""
    draw = np.random.default_rng(3)
    user, item = draw.integers(0, 30, 900), draw.integers(0, 20, 900)
    frame = pd.DataFrame({"user": user, "item": item, "label": draw.integers(0, 2, 900)})
    frame["user"] = frame["user"].astype(object).where(user < 10, "")
    frame.to_csv(tmp_path / "a.csv", index=False)
    schema = 'name = "a"\nfile = "a.csv"\nlabels = ["label"]\ngroup = "user"\n'
    schema += 'split = { test_fraction = 0.5 }\ncolumns = ["user", "item"]\n'
    (tmp_path / "a.toml").write_text(schema)
    data = DataConfig(name=str(tmp_path / "a.toml"))
    run_into(tmp_path / "run", TrainConfig(batch=32, data=data))

    found = read_predictions(tmp_path / "run")
    test = frame[450:].assign(p=found.predictions[:, 0], group=found.groups)
    known = test[test["user"] != ""]
    anonymous = test[test["user"] == ""]
    aucs = [
        (len(of), roc_auc_score(of["label"], of["p"]))
        for _, of in known.groupby("user")
        if of["label"].nunique() == 2
    ]
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]["label"]
    mean = sum(size * auc for size, auc in aucs) / sum(size for size, _ in aucs)
    assert told["gauc"] == pytest.approx(mean, abs=1e-12)
    assert (told["gauc_groups"], told["gauc_groups_left_out"]) == (len(aucs), 10 - len(aucs))
    assert told["without_group"] == len(anonymous) > 200
    assert anonymous["group"].nunique() == len(anonymous)
    assert not set(anonymous["group"]) & set(known["group"])
