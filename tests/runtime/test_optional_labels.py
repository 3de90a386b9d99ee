"""Labels that some rows lack count nothing: from the file to the scores."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from runtime.__main__ import main
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.data.schema import Column, Schema
from runtime.data.split import Split
from runtime.run.folder import read_predictions, read_summary

SCHEMA = """name = "sold"
file = "sold.csv"
labels = ["click", "buy"]
missing = ["", "-1"]
group = "user"
split = { column = "day", test_from = 8 }
columns = ["user", "item"]
"""
RUN = [
    "--checkpoint-every",
    "end",
    "--mode",
    "hybrid",
    "--tau",
    "2",
    "--ranks",
    "2",
    "--batch",
    "32",
    "--model.hidden",
    "8",
]


def frame(rows: int = 640) -> pd.DataFrame:
    draw = np.random.default_rng(4)
    user, item = draw.integers(0, 12, rows), draw.integers(0, 12, rows)
    click = (draw.random(rows) < 0.2 + user / 20).astype(int)
    buy = (draw.random(rows) < 0.1 + item / 15).astype(int)
    day = 10 * np.arange(rows) // rows
    return pd.DataFrame({"user": user, "item": item, "click": click, "buy": buy, "day": day})


def trained(folder, table: pd.DataFrame, more: str):
    folder.mkdir()
    table.to_csv(folder / "sold.csv", index=False)
    (folder / "sold.toml").write_text(more + SCHEMA)
    words = ["train", "--data.name", str(folder / "sold.toml"), "--out", str(folder / "run"), *RUN]
    assert main(words) == 0
    return folder / "run"


def test_a_row_without_any_label_counts_as_one_of_weight_zero(tmp_path):
    """Weights go another way through the loss and the scores, and say the same."""
    table = frame()
    lost = np.random.default_rng(5).random(len(table)) < 0.4
    weighted = trained(tmp_path / "w", table.assign(w=np.where(lost, 0, 1)), 'weight = "w"\n')
    absent = table.astype(object)
    absent.loc[lost, ["click", "buy"]] = -1
    optional = trained(tmp_path / "o", absent, 'optional = ["click", "buy"]\n')

    by_weight, by_absence = read_predictions(weighted), read_predictions(optional)
    np.testing.assert_array_equal(by_weight.predictions, by_absence.predictions)
    scores = [read_summary(run)["tasks"] for run in (weighted, optional)]
    for task in ("click", "buy"):
        for name in ("auc", "log_loss", "label_rate", "calibration"):
            rounded = 2**-22  # a mean of labels is a float32
            assert scores[0][task][name] == pytest.approx(scores[1][task][name], rel=rounded)


def test_a_task_is_scored_on_the_rows_that_have_its_label(tmp_path):
    table = frame().assign(buy=lambda t: t.buy.where(t.click == 1, -1))
    run = trained(tmp_path / "s", table, 'optional = ["buy"]\n')
    test = table[table.day >= 8]
    predictions = read_predictions(run).predictions
    known = (test.click == 1).to_numpy()
    assert 20 < known.sum() < len(test) - 20

    tasks = read_summary(run)["tasks"]
    assert tasks["click"]["auc"] == pytest.approx(roc_auc_score(test.click, predictions[:, 0]))
    sold, said = test.buy[known], predictions[known, 1]
    assert tasks["buy"]["auc"] == pytest.approx(roc_auc_score(sold, said))
    assert tasks["buy"]["log_loss"] == pytest.approx(log_loss(sold, said.astype(float)), rel=1e-5)
    assert tasks["buy"]["label_rate"] == pytest.approx(sold.mean())


def test_an_absent_label_of_a_task_that_is_not_optional_stays_a_bad_row(tmp_path):
    (tmp_path / "s.toml").write_text(SCHEMA.replace("sold.csv", "s.csv"))
    frame().assign(buy=lambda t: t.buy.where(t.click == 1, -1)).to_csv(tmp_path / "s.csv")
    with pytest.raises(DataError, match=r"column buy: '-1'; a label must be 0 or 1"):
        list(open_source(str(tmp_path / "s.toml")).chunks("train"))


def test_a_label_that_no_row_of_the_training_part_has_is_refused(tmp_path):
    (tmp_path / "s.toml").write_text('optional = ["buy"]\n' + SCHEMA.replace("sold.csv", "s.csv"))
    for table in (
        frame().assign(buy=lambda t: t.buy.where(t.day >= 8, -1)),
        frame().drop(columns="buy"),
    ):
        table.to_csv(tmp_path / "s.csv")
        with pytest.raises(DataError, match=r"no row of the train part has a value of label buy"):
            list(open_source(str(tmp_path / "s.toml")).chunks("test"))


@pytest.mark.parametrize("has_column", [True, False])
def test_a_file_without_an_optional_label_is_judged_by_the_others(has_column, tmp_path, capsys):
    run = trained(tmp_path / "o", frame(), 'optional = ["buy"]\n')
    whole = frame().assign(day=9)
    whole.to_csv(tmp_path / "o" / "whole.csv", index=False)
    lacking = whole.assign(buy="") if has_column else whole.drop(columns="buy")
    lacking.to_csv(tmp_path / "o" / "lacking.csv", index=False)

    scores = {}
    for name in ("whole", "lacking"):
        schema = tmp_path / "o" / f"{name}.toml"
        schema.write_text(
            f'like = "sold.toml"\nfile = "sold.csv"\nsplit = {{ test_file = "{name}.csv" }}\n'
        )
        out = tmp_path / f"{name}.json"
        assert main(["evaluate", str(run), "--data", str(schema), "--out", str(out)]) == 0
        scores[name] = json.loads(out.read_text())["tasks"]
    assert scores["lacking"]["click"] == scores["whole"]["click"]
    assert scores["lacking"]["buy"]["auc"] is None
    assert "buy: no sample that is evaluated has this label" in capsys.readouterr().out


def test_only_labels_are_optional():
    with pytest.raises(ValueError, match="optional names 'b', which is no label"):
        Schema(
            name="s", columns=(Column(name="x"),), split=Split(test_fraction=0.5), optional=("b",)
        )
