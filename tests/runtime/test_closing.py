"""The report at the end of a run: each figure of a summary, on the screen and as JSON."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from persia_sim.base.trace import Trace
from runtime.__main__ import main
from runtime.run.closing import as_json, whole
from runtime.run.training import Training

CLICKS = {
    "auc": 0.75, "log_loss": 0.5, "label_rate": 0.25, "trivial_log_loss": 0.625,
    "normalized_entropy": 0.8, "calibration": 1.1, "gauc": 0.7, "gauc_groups": 12,
    "gauc_groups_left_out": 1013, "group_recall@10": 0.9, "group_ndcg@10": 0.6,
}  # fmt: skip
PRICES = {"rmse": 3.5, "mae": 2.5, "trivial_mse": 16.0, "label_rate": 20.0}


def summary_of(**changes: Any) -> dict[str, Any]:
    """A run by hand: 8,000 samples of two ranks in async."""
    return {
        "mode": "async", "tau": 4, "ranks": 2, "executor": "concurrent", "ranks_fused": False,
        "samples": 8000, "updates": 125, "samples_per_s": 21028.4, "rows": 2979,
        "evaluated_on": "test part, after the last update", "tasks": {"click": CLICKS},
        "best_reachable_auc": None, "ids_with_row": {"user": 0.997, "item": 1.0},
        "staleness": SimpleNamespace(mean_steps=2.2, max_steps=4), "bound_by": "its rows",
        "checkpoints_written": 0, "longest_pause_s": 0.0125, "best_checkpoint": None,
        "data": SimpleNamespace(rows_skipped=0, skipped_where=""), "rows_evicted": 0,
        "rows_expired": 0, "lookups_not_admitted": 0, "row_gradients_dropped": 0,
        "batches_skipped": 0, "pushes_lost": 0, "checkpoints_failed": 0, "pushes_lost_at": [0, 0],
        "notes": [], "warnings": [],
    } | changes  # fmt: skip


def facts_of(said: str) -> dict[str, str]:
    """Fact -> what the first line of it says."""
    return dict(re.findall(r"^  (\S.*?) {2,}(.*)$", said, flags=re.M))


def test_every_fact_has_a_line_and_its_name_in_full():
    assert facts_of(whole(summary_of())) == {
        "mode": "async, tau 4", "ranks": "2", "executor": "concurrent", "samples": "8,000",
        "updates": "125 of the dense weights", "throughput": "21,028 samples/s", "rows": "2,979",
        "AUC": "0.7500", "log-loss": "0.5000",
        "log-loss of the rate": "0.6250, of always saying 0.250",
        "normalised entropy": "0.8000, log-loss over that of the rate",
        "calibration": "1.100, mean prediction over mean label",
        "GAUC": "0.7000, mean of the AUC within 12 groups",
        "groups of one label": "1,013, left out of GAUC", "group_recall@10": "0.9000",
        "group_ndcg@10": "0.6000", "ids with a row": "99.7 %  of user",
        "staleness": "2.20 steps of the rank's own on average; no lookup missed more than 4",
        "bound by": "its rows",
    }  # fmt: skip


def test_a_regression_says_what_always_saying_the_mean_would_give():
    found = facts_of(whole(summary_of(tasks={"price": PRICES})))
    assert found["RMSE"] == "3.5" and found["MAE"] == "2.5" and "AUC" not in found
    assert found["RMSE of the mean"] == "4, of always saying 20"


def test_each_task_has_its_scores_below_its_name():
    said = whole(summary_of(tasks={"click": CLICKS, "price": PRICES}))
    first, second = said.index("is click predicted"), said.index("is price predicted")
    assert first < said.index("AUC") < second < said.index("RMSE")


def test_many_tables_are_told_by_those_with_the_fewest_rows():
    shares = {f"t{number}": number / 10 for number in range(9)}
    said = whole(summary_of(ids_with_row=shares))
    lines = [line.split("  ")[-1] for line in said.splitlines() if "%" in line]
    assert lines == [f"of t{n}" for n in range(6)] + ["or more of 3 other tables"]
    assert "   60 %  or more of" in said
    assert "warning: fewer than half of the ids of t0, t1, t2, t3" in said


def test_an_order_that_is_not_known_gives_no_number():
    """Of servers that kept no order, as after the death of one: null in every field, never 0."""
    engine, recorder = SimpleNamespace(servers=2), SimpleNamespace(keeps=False)
    components = SimpleNamespace(config=SimpleNamespace(engine=engine), recorder=recorder)
    run: Any = SimpleNamespace(components=components, is_whole=False)
    unknown = Training.staleness(run, Trace(np.zeros((0, 5), np.int64)))
    assert facts_of(whole(summary_of(staleness=unknown)))["staleness"].startswith("not known: ")
    document = json.loads(as_json({"staleness": unknown}, "runs/a"))
    fields = ("mean_steps", "max_steps", "oldest_steps", "mean_pushes")
    assert document["staleness"] == dict.fromkeys(fields)


def test_what_was_left_out_and_what_is_to_be_said():
    said = whole(summary_of(
        data=SimpleNamespace(rows_skipped=3, skipped_where="3 of test"), rows_evicted=1234,
        pushes_lost_at=[2, 3], notes=["tau 4 was never reached"],
        warnings=["the loss is no number"], checkpoints_written=8, best_checkpoint="checkpoints/7",
    ))  # fmt: skip
    found = facts_of(said)
    assert found["bad rows"] == "3 skipped: 3 of test" and found["rows evicted"] == "1,234"
    assert found["pushes lost in part"] == "5, at servers, with those left out"
    assert found["checkpoints"] == "8 written" and found["longest pause for one"] == "0.013 s"
    assert found["best checkpoint"] == "checkpoints/7, which evaluate takes"
    assert said.endswith("note: tau 4 was never reached\nwarning: the loss is no number")


TINY = ("--data.name", "synthetic", "--data.rows", "256", "--test-rows", "50", "--batch", "64")


def test_the_command_prints_the_summary_as_one_document(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *TINY, "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    stored = json.loads((out / "summary.json").read_text())
    assert told == {"folder": str(out)} | stored
    assert "data: synthetic" in printed.err and f"run folder: {out}" in printed.err

    # Who starts it again and again gets the same document.
    again = ["train", *TINY, "--json", "--out", str(out), "--resume", "auto"]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out) == told


@pytest.mark.parametrize("other", [["--dry-run"], ["--ray", "local:1"]])
def test_json_is_refused_where_it_would_not_be_alone(other, capsys):
    assert main(["train", "--json", *other]) == 2
    rule = f"error: --json and {other[0]} do not go together; remove one of them"
    assert capsys.readouterr().err.strip() == rule
