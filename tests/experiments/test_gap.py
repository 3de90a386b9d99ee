"""The fair gap piece by piece: settings, tuning, table, decisions, from summaries made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from experiments.gap.data_sets import DATA_SETS, FIXED, RANKS, Found, Rates, find
from experiments.gap.decisions import LATENCIES, decide, decision_table, lower_end
from experiments.gap.settings import checks_of, points_of, settings_of
from experiments.gap.skew import Skew
from experiments.gap.table import delong_p, differing, gap_rows, group_of, too_wide
from experiments.gap.tuning import choose, grid, trials_of, tuning_records, validation_auc
from experiments.gaps import Run, Setting, finished
from experiments.points import Point
from persia_sim.words.vocabulary import Mode
from runtime.data.catalogue import CATALOGUE

SYNTHETIC = Found(data=DATA_SETS["synthetic"], train_rows=25_600)
WHERE: dict[str, Any] = {"data_dir": None, "samples": 25_600, "test_rows": 500}


def summary_of(point: Point, **scores: float | None) -> dict[str, Any]:
    sync = point.config.sync
    known = {"auc": 0.7, "log_loss": 0.5} | scores
    return {
        "mode": str(sync.mode), "tau": sync.window, "seed": point.config.seed, "ranks": RANKS,
        "tasks": {"click": known}, "staleness": {"mean_steps": 1.5, "max_steps": 2},
    }  # fmt: skip


def write(point: Point, root: Path, **scores: float | None) -> Run:
    folder = point.folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    summary = summary_of(point, **scores)
    (folder / "summary.json").write_text(json.dumps(summary))
    return Run(point, summary)


def test_there_are_five_real_sets_and_four_synthetic_ones_each_with_its_reason():
    real = [data for data in DATA_SETS.values() if not data.is_synthetic]
    assert (len(real), len(DATA_SETS) - len(real)) == (5, 4)
    assert {data.name for data in real} <= set(CATALOGUE)
    assert all(data.source for data in DATA_SETS.values())
    assert SYNTHETIC.steps == 100


def test_a_set_that_is_not_here_is_left_out_with_a_line(tmp_path):
    found, told = find(["adult", "synthetic"], tmp_path, samples=1000, batch=100)
    assert [one.data.name for one in found] == ["synthetic"]
    assert (found[0].samples, found[0].steps) == (1000, 10)
    assert len(told) == 1
    assert told[0].startswith("adult is left out: ")


def test_a_schema_of_the_readers_own_is_a_data_set(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "user,clicked,day\n" + "7,1,0\n8,0,0\n" * 150 + "7,1,1\n8,0,1\n"
    )
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nfile = "mine.csv"\nlabels = ["clicked"]\n'
        'split = { column = "day", test_from = 1 }\n[[columns]]\nname = "user"\n'
    )
    found, missing = find([str(tmp_path / "mine.toml")], None)
    assert not missing
    assert (found[0].data.label, found[0].train_rows, found[0].steps) == ("mine", 300, 3)
    gone, told = find([str(tmp_path / "gone.toml")], None)
    assert not gone and "gone.toml is left out" in told[0]
    with pytest.raises(ValueError, match=r"or the path of a schema \(.toml\), got 'mine'"):
        find(["mine"], None)


def test_settings_are_sync_first_then_each_bound_and_async_has_tau_0():
    settings, told = settings_of(SYNTHETIC, list(Mode), [16, 4])
    assert settings == [
        ("sync", 0), ("hybrid", 4), ("hybrid", 16), ("async", 0), ("async", 4),
        ("async_averaging", 0), ("async_averaging", 4),
    ]  # fmt: skip
    # 16 own steps of 8 ranks are 128 dense updates, and the run has 100
    assert [line.split(" is left out")[0] for line in told] == [
        "synthetic: async tau 16", "synthetic: async_averaging tau 16"
    ]  # fmt: skip
    checks = [(("lookahead", 0), ("sync", 0)), (("raw_hybrid", 16), ("hybrid", 16))]
    assert checks_of(settings, list(Mode)) == checks
    assert checks_of(settings, [Mode.SYNC, Mode.HYBRID]) == []


def test_tuning_trains_without_the_rows_that_it_is_judged_on_and_the_end_uses_all():
    real = Found(data=DATA_SETS["adult"], train_rows=1000)
    test = real.data.config(data_dir=None, samples=None, test_rows=None)
    tuning = real.data.config(data_dir=None, samples=None, test_rows=None, validate=True)
    assert (test.evaluation.part, test.data.validation_fraction) == ("test", None)
    assert (tuning.evaluation.part, tuning.data.validation_fraction) == ("validation", 0.1)
    trials = trials_of(SYNTHETIC, [("sync", 0), ("hybrid", 4)], grid([1, 2], [1]), [0, 1], **WHERE)
    assert [(t.setting[0], t.rates.row_lr) for t in trials] == [
        ("sync", 0.05), ("sync", 0.1), ("hybrid", 0.05), ("hybrid", 0.1)
    ]  # fmt: skip
    configs = [point.config for trial in trials for point in trial.points]
    assert {config.evaluation.part for config in configs} == {"validation"}
    assert {config.data.validation_fraction for config in configs} == {None}, "drawn anew"


def test_the_best_mean_over_the_validation_seeds_is_chosen_and_an_edge_is_told(tmp_path):
    candidates = grid([0.5, 1, 2], [1])
    trials = trials_of(SYNTHETIC, [("sync", 0), ("hybrid", 4)], candidates, [0, 1], **WHERE)
    aucs = {
        ("sync", 0): [(0.70, 0.70), (0.75, 0.71), (0.90, None)],
        ("hybrid", 4): [(0.6, 0.6), (0.6, 0.61), (0.61, 0.63)],
    }
    for trial in trials:
        values = aucs[trial.setting][candidates.index(trial.rates)]
        for point, auc in zip(trial.points, values, strict=True):
            write(point, tmp_path, auc=auc)
    chosen = choose(trials, "click", tmp_path)
    assert chosen["sync", 0].rates == FIXED, "0.90 diverged with its other seed"
    assert chosen["sync", 0].validation_auc == pytest.approx(0.73)
    assert not chosen["sync", 0].at_edge
    assert chosen["hybrid", 4].rates == Rates(row_lr=0.1)
    assert chosen["hybrid", 4].at_edge
    lines = tuning_records(trials, chosen, "click", tmp_path)
    assert len(lines) == 6
    assert [line["chosen"] for line in lines] == [False, True, False, False, False, True]
    assert lines[1]["validation_auc"] == pytest.approx(0.73)


def test_nothing_is_chosen_on_the_test_part(tmp_path):
    (point,) = points_of(SYNTHETIC, [("sync", 0)], [0], **WHERE)
    with pytest.raises(ValueError, match="judged on the test part; tuning reads none"):
        validation_auc([write(point, tmp_path)], "click")


AUC: Mapping[Setting, tuple[float, ...]] = {
    ("sync", 0): (0.70, 0.71, 0.72),
    ("hybrid", 4): (0.69, 0.71, 0.70),
    ("async", 0): (0.68, 0.69, 0.70),
    ("async", 4): (0.65, 0.67, 0.69),
}


def made(root: Path, **more: float) -> list[Run]:
    points = points_of(SYNTHETIC, list(AUC), range(3), **WHERE)
    runs = []
    for point in points:
        sync = point.config.sync
        auc = AUC[str(sync.mode), sync.window][point.config.seed]
        runs.append(write(point, root, auc=auc, **more))
    return runs


def test_a_line_of_the_table_has_both_gaps_with_their_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.gap.table.delong_p", lambda *_: 0.5)
    group = group_of(SYNTHETIC, "fixed", made(tmp_path, gauc=0.6, calibration=1.1), {})
    rows = {(r["mode"], r["tau"]): r for r in gap_rows(group, "click", tmp_path)}
    assert list(rows) == list(AUC)
    for setting, zero in ((("async", 4), ("async", 0)), (("hybrid", 4), ("sync", 0))):
        for name, reference in (("gap_to_sync", ("sync", 0)), ("gap_to_tau_0", zero)):
            test = stats.ttest_rel(AUC[setting], AUC[reference])
            ends = test.confidence_interval(0.95)
            assert rows[setting][name] == pytest.approx((ends.low + ends.high) / 2)
            half = rows[setting][f"{name}_half_width_95"]
            assert half == pytest.approx((ends.high - ends.low) / 2)
    late = rows["async", 4]
    assert late["test_auc_seed_sd"] == pytest.approx(0.02)
    assert (late["batch"], late["steps"], late["seeds"]) == (256, 100, 3)
    assert (late["row_lr"], late["lr"], late["calibration"]) == (0.05, 1e-3, pytest.approx(1.1))
    assert math.isnan(late["validation_auc"]), "nothing was tuned"
    assert too_wide(list(rows.values()), 0.02) == [("hybrid", 4), ("async", 4)]


def test_a_summary_from_before_the_new_scores_is_read_without_them(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.gap.table.delong_p", lambda *_: 0.5)
    rows = gap_rows(group_of(SYNTHETIC, "fixed", made(tmp_path), {}), "click", tmp_path)
    assert all(math.isnan(row["gauc"]) and math.isnan(row["calibration"]) for row in rows)
    assert rows[1]["gap_to_sync"] == pytest.approx(-0.01)


def test_delong_compares_the_two_models_of_seed_0_from_their_predictions(tmp_path):
    points = points_of(SYNTHETIC, [("sync", 0), ("hybrid", 4)], [0], **WHERE)
    draw = np.random.default_rng(2)
    labels = draw.integers(0, 2, (400, 1))
    runs = []
    for number, point in enumerate(points):
        scores = labels[:, 0] + draw.normal(size=400) * (1 + 3 * number)
        run = write(point, tmp_path, auc=float(roc_auc_score(labels[:, 0], scores)))
        folder = point.folder(tmp_path)
        np.savez(folder / "predictions.npz", labels=labels, predictions=scores[:, None])
        runs.append(run)
    worse = delong_p({0: runs[1]}, {0: runs[0]}, "click", tmp_path)
    assert 0 < worse < 1e-3
    assert math.isnan(delong_p({0: runs[0]}, {0: runs[0]}, "click", tmp_path))
    assert math.isnan(delong_p({1: runs[1]}, {0: runs[0]}, "click", tmp_path))


def test_runs_that_must_be_equal_and_are_not_are_named(tmp_path):
    points = points_of(SYNTHETIC, [("sync", 0), ("lookahead", 0)], [0], **WHERE)
    one, other = (write(point, tmp_path) for point in points)
    assert differing([(one, other)], "click") == []
    other.summary["tasks"]["click"]["log_loss"] = 0.51
    (line,) = differing([(one, other)], "click")
    assert "lookahead" in line
    assert "0.51" in line
    assert len(finished(points, tmp_path)) == 2


def row(mode: str, tau: int, gap: float, half: float, **more: Any) -> dict[str, Any]:
    return {
        "data": "d", "task": "click", "rates": "fixed", "mode": mode, "tau": tau, "batch": 128,
        "steps": 1300, "seeds": 5, "gap_to_sync": gap, "gap_to_sync_half_width_95": half,
    } | more  # fmt: skip


SYNC_ROW = row("sync", 0, 0.0, 0.0)
MEASURED = [
    SYNC_ROW,
    row("hybrid", 1, -0.0001, 0.0004),
    row("hybrid", 4, 0.0001, 0.0007),
    row("hybrid", 16, -0.0012, 0.001),
    row("async", 0, 0.0, 0.0001),
    row("async", 4, 0.0002, 0.0001),
]


@pytest.mark.parametrize(
    ("latency", "mode", "tau"),
    [
        (0.25, "hybrid", 1),  # (0.5 + 1) / 2 < 1: the smallest window that hides it
        (1.0, "hybrid", 4),  # 3 / 5 < 1, and 3 / 2 > 1; async with the same window comes second
        (4.0, "hybrid", 4),  # 9 / 5; 16 would be faster and is known to lose more
        (0.0, "sync", 0),  # nothing to hide
    ],
)
def test_the_fastest_that_is_known_to_be_good_enough_with_the_smallest_window(latency, mode, tau):
    best, why = decide(MEASURED, latency)
    assert (best["mode"], best["tau"]) == (mode, tau)
    assert ("1 faster ones are not known" in why) == (latency == 4.0)


def test_without_evidence_it_is_sync():
    unknown = [SYNC_ROW, row("hybrid", 4, 0.001, math.nan), row("hybrid", 16, 0.0, 0.002)]
    best, why = decide(unknown, 4.0)
    assert best is SYNC_ROW
    assert why == "no faster mode is known to lose less than 0.001"
    assert decide([*unknown, row("async", 0, 0.0, 0.0)], 4.0) == (SYNC_ROW, why), "no window"
    assert decide(unknown, 0.0)[1] == "no late mode is faster by the law"
    assert lower_end(unknown[1]) == -math.inf
    assert decide(unknown, 4.0, tolerance=0.003)[0]["tau"] == 16


def test_each_line_of_the_decision_table_names_its_row_and_prefers_tuned_rates():
    tuned = [replace_rates(r) for r in MEASURED]
    lines = decision_table([*MEASURED, *tuned], {"d": Skew(0.5, 0.25)})
    assert [line["latency_over_compute"] for line in lines] == list(LATENCIES)
    for line in lines:
        told = dict(part.split("=") for part in line["evidence"].split(": ")[1].split(", "))
        assert told["rates"] == "tuned"
        assert (told["mode"], int(told["tau"])) == (line["mode"], line["tau"])
        two_l_and_c = 2 * line["latency_over_compute"] + 1
        window = line["tau"] + 1 if line["mode"] != "sync" else 1
        assert line["step_over_compute"] == pytest.approx(max(1, two_l_and_c / window))
        speed_up = two_l_and_c / line["step_over_compute"]
        assert line["times_as_fast_as_sync"] == pytest.approx(speed_up)
        assert (line["hot_share"], line["rows_of_the_step_before"]) == (0.5, 0.25)


def replace_rates(line: dict[str, Any]) -> dict[str, Any]:
    return line | {"rates": "tuned"}


def test_other_samples_are_other_points():
    few = points_of(SYNTHETIC, [("sync", 0)], [0], **WHERE)[0]
    more = points_of(SYNTHETIC, [("sync", 0)], [0], **(WHERE | {"samples": 30_000}))[0]
    moved = replace(few, config=replace(few.config, data=replace(few.config.data, keep=False)))
    assert few.folder(Path()) != more.folder(Path())
    assert few.folder(Path()) == moved.folder(Path())
