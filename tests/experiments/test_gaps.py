"""The table of gaps from summaries and predictions with known numbers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.gaps import (
    Run,
    columns_of,
    contrast_over_seeds,
    curve_records,
    finished,
    gap_table,
    paired_interval,
    thousandths,
)
from experiments.points import Line, Point, over_seeds, with_seed
from experiments.statistics import Interval, contrast
from experiments.tables import table
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.run.record import run_into

SYNC = SyncConfig(ranks=8)
SETTINGS = (
    (SYNC, 1e-3),
    (SyncConfig(mode="hybrid", tau=4, ranks=8), 1e-3),
    (SyncConfig(mode="hybrid", tau=0, ranks=8, dense_lag=7), 1e-3),
    (SyncConfig(mode="async", tau=0, ranks=8), 1e-3),
    (SyncConfig(mode="async", tau=0, ranks=8), 2.5e-4),
    (SyncConfig(mode="hybrid", tau=16, ranks=8), 1e-3),
    (SyncConfig(mode="hybrid", tau=9, ranks=8), 1e-3),
    (SyncConfig(mode="hybrid", tau=8, ranks=8, dense_lag=7), 1e-3),
)
SEEDS, TEST_ROWS = 3, 400
CLICK = 1
"""The place of the task that is asked for: what is of the first task alone shows."""


def runs(root: Path, own_rows: bool = False, users: bool = True, weights: str = "") -> list[Run]:
    """Scores of two tasks drawn at random; ``own_rows``: every seed has other test samples;
    ``weights``: one to three a row, as a column, or by the row so many times."""
    made = []
    for number, (sync, lr) in enumerate(SETTINGS):
        for seed in range(SEEDS):
            draw = np.random.default_rng([seed if own_rows else 0, 9])
            labels = (draw.random(TEST_ROWS) < 0.4).astype(np.int8)
            noise = np.random.default_rng([number, seed]).normal(size=TEST_ROWS)
            scores = (labels + (2 + 0.1 * number) * noise).astype(np.float32)
            config = TrainConfig(sync=sync, seed=seed, model=ModelConfig(lr=lr))
            point = Point(label=f"p{number}-{seed}", config=config)
            folder = point.folder(root)
            folder.mkdir(parents=True)
            other = (draw.random(TEST_ROWS) < 0.7).astype(np.int8)
            likes = (other + 9 * noise[::-1]).astype(np.float32)
            arrays = {
                "labels": np.column_stack([other, labels]),
                "predictions": np.column_stack([likes, scores]),
            }
            if users:
                arrays["groups"] = np.arange(TEST_ROWS) // 4
            counts = 1 + np.arange(TEST_ROWS) % 3
            if weights == "repeated":
                arrays = {name: np.repeat(array, counts, axis=0) for name, array in arrays.items()}
            elif weights == "a column":
                arrays["weights"] = counts.astype(float)
            np.savez(folder / "predictions.npz", **arrays)
            made.append(Run(point, summary(sync, seed, auc(labels, scores))))
    return made


def summary(sync: SyncConfig, seed: int, value: float | None) -> dict:
    return {
        "mode": str(sync.mode), "tau": sync.window, "seed": seed, "ranks": sync.ranks,
        "tasks": {
            "like": {"auc": 0.9 - seed / 10, "log_loss": 0.1},
            "click": {"auc": value, "log_loss": value and 1 - value},
        },
    }  # fmt: skip


def rows_of(made: list[Run], root: Path, task: str = "click", hybrid: str = "sync") -> list[dict]:
    """A row for each setting: held against sync, but for async at ``hybrid``."""
    by_setting: dict[str, list[Run]] = {}
    for run in made:
        by_setting.setdefault(name_of(run), []).append(run)
    lines = [
        Line(
            name=name,
            config=own[0].point.config,
            versus=() if name == "sync 0 0 0.001" else ("sync 0 0 0.001",),
        )
        for name, own in by_setting.items()
    ]
    lines = [replace(one, versus=(hybrid,)) if one.name == "async 0 0 0.00025" and hybrid != "sync"
             else one for one in lines]  # fmt: skip
    return gap_table(lines, list(by_setting.values()), task, root)


def name_of(run: Run) -> str:
    sync = run.point.config.sync
    return f"{sync.mode} {sync.window} {sync.dense_lag} {run.point.config.model.lr:g}"


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    u, _ = stats.mannwhitneyu(scores[labels > 0], scores[labels == 0])
    return float(u / (labels.sum() * (1 - labels).sum()))


def arrays(root: Path, own: list[Run], name: str) -> list[np.ndarray]:
    return [np.load(r.point.folder(root) / "predictions.npz")[name] for r in own]


def test_a_row_says_what_its_line_misses_and_at_which_rates(tmp_path):
    rows = rows_of(runs(tmp_path), tmp_path)
    assert [(r["mode"], r["tau"], r["rows_late"], r["dense_late"], r["lr"]) for r in rows] == [
        ("sync", 0, 0, 0, 1e-3), ("hybrid", 4, 4, 0, 1e-3), ("hybrid", 0, 0, 7, 1e-3),
        ("async", 0, 7, 7, 1e-3), ("async", 0, 7, 7, 2.5e-4), ("hybrid", 16, 16, 0, 1e-3),
        ("hybrid", 9, 9, 0, 1e-3), ("hybrid", 8, 8, 7, 1e-3),
    ]  # fmt: skip
    assert rows[0]["versus"] == "" and math.isnan(rows[0]["gap"])


def test_a_line_is_held_against_the_one_of_its_group(tmp_path):
    """Two groups with lines of equal names, of the same seeds."""
    made = runs(tmp_path)
    parts = [made[3 * n : 3 * n + 3] for n in (0, 1, 3, 5)]
    lines = [
        Line(name=name, config=part[0].point.config, group=(("batch", batch),), versus=versus)
        for part, (batch, name, versus) in zip(
            parts,
            [(1, "sync", ()), (1, "late", ("sync",)), (2, "sync", ()), (2, "late", ("sync",))],
            strict=True,
        )
    ]  # fmt: skip
    rows = gap_table(lines, parts, "click", tmp_path)
    aucs = [np.mean([run.auc("click") for run in part]) for part in parts]
    assert rows[1]["gap"] == pytest.approx(aucs[1] - aucs[0])
    assert rows[3]["gap"] == pytest.approx(aucs[3] - aucs[2])
    assert [row["group"] for row in rows] == ["batch=1", "batch=1", "batch=2", "batch=2"]

    # Beside the first group: a difference of two paired differences.
    beside = gap_table(lines, parts, "click", tmp_path, "batch")
    assert [math.isnan(row["beside"]) for row in beside] == [True, True, True, False]
    by_seed = [{run.summary["seed"]: run for run in part} for part in parts]
    want = contrast_over_seeds(by_seed, (1, -1, -1, 1), "click", tmp_path)
    assert beside[3]["beside"] == pytest.approx((aucs[3] - aucs[2]) - (aucs[1] - aucs[0]))
    assert beside[3]["beside_half_width_95"] == want.half_width > 0


def test_gaps_pair_equal_seeds_in_whatever_order_and_number_runs_have_ended(tmp_path):
    """Sync lacks seed 0 and hybrid seed 2, none comes in order: only seed 1 is in both."""
    lost = {("sync", 0): 0, ("hybrid", 4): 2}
    made = runs(tmp_path)
    some = [r for r in reversed(made) if lost.get(r.setting) != r.summary["seed"]]
    rows = {(r["mode"], r["tau"], r["lr"]): r for r in rows_of(some, tmp_path)}
    gaps = {n: made[3 * n + 1].auc("click") - made[1].auc("click") for n in (1, 3)}
    late = rows["hybrid", 4, 1e-3]
    assert (late["seeds"], late["gap"]) == (1, pytest.approx(gaps[1]))
    other = rows["async", 0, 1e-3]
    also = made[3 * 3 + 2].auc("click") - made[2].auc("click")
    assert (other["seeds"], other["gap"]) == (2, pytest.approx((gaps[3] + also) / 2))


@pytest.mark.parametrize("users", [True, False])
def test_seeds_that_share_test_rows_have_an_interval_over_both_by_user(tmp_path, users):
    made = runs(tmp_path, users=users)
    late = rows_of(made, tmp_path)[1]
    labels = arrays(tmp_path, made, "labels")[0][:, CLICK]
    sync, own = (
        [a[:, CLICK] for a in arrays(tmp_path, part, "predictions")]
        for part in (made[:3], made[3:6])
    )
    whose = np.arange(TEST_ROWS) // 4 if users else None
    want = contrast(labels, (sync, own), clusters=whose)
    assert late["gap"] == pytest.approx(want.mean, abs=1e-9)
    assert (late["gap_half_width_95"], late["gap_rows_error"]) == (
        want.half_width,
        want.rows_error,
    )
    assert late["gap_rows_error"] > 0


def test_what_a_row_counts_reaches_the_interval_as_so_many_rows_do(tmp_path):
    """One user's rows are one case, however often each stands there."""
    found = {}
    for how in ("a column", "repeated"):
        (late,) = rows_of(runs(tmp_path / how, weights=how), tmp_path / how)[1:2]
        found[how] = [late[name] for name in ("gap_half_width_95", "gap_rows_error")]
    assert found["a column"] == pytest.approx(found["repeated"], rel=1e-9)
    alone = rows_of(runs(tmp_path / "alone"), tmp_path / "alone")[1]
    assert found["a column"] != pytest.approx([alone[n] for n in ("gap_half_width_95",
                                               "gap_rows_error")], rel=1e-2)  # fmt: skip


def test_a_point_without_a_summary_is_no_finished_run(tmp_path):
    points = [run.point for run in runs(tmp_path)[:3]]
    few = {"data": DataConfig(name="synthetic", rows=64), "batch": 32, "steps": 1}
    run_into(
        points[1].folder(tmp_path), TrainConfig(evaluation=EvaluationConfig(test_rows=50), **few)
    )
    (run,) = finished(points, tmp_path)
    assert (run.point, run.summary["updates"]) == (points[1], 1)


def test_an_interval_is_of_the_second_minus_the_first_unless_signs_say_otherwise(tmp_path):
    made = runs(tmp_path)
    pairs = [[made[seed].point.folder(tmp_path), made[seed + 3].point.folder(tmp_path)]
             for seed in range(SEEDS)]  # fmt: skip
    gaps = [made[seed + 3].auc("click") - made[seed].auc("click") for seed in range(SEEDS)]
    plain = paired_interval(gaps, pairs, CLICK)
    assert plain == paired_interval(gaps, pairs, CLICK, (-1, 1))
    assert plain.rows_error != pytest.approx(paired_interval(gaps, pairs, CLICK, (1, 1)).rows_error)


def test_a_gap_of_one_seed_has_no_interval_and_says_so():
    assert thousandths(Interval(-0.0012, math.nan, 1)) == "-1.20 (1 seed)"


def test_each_task_has_its_own_figures(tmp_path):
    made = runs(tmp_path)
    for number, task in enumerate(("like", "click")):
        late = rows_of(made, tmp_path, task)[1]
        own = [run.summary["tasks"][task] for run in made[3:6]]
        assert late["auc"] == pytest.approx(np.mean([each["auc"] for each in own]))
        assert late["log_loss"] == pytest.approx(np.mean([each["log_loss"] for each in own]))
        labels = arrays(tmp_path, made, "labels")[0][:, number]
        sync, hybrid = (
            [a[:, number] for a in arrays(tmp_path, part, "predictions")]
            for part in (made[:3], made[3:6])
        )
        want = contrast(labels, (sync, hybrid), clusters=np.arange(TEST_ROWS) // 4)
        assert late["gap_rows_error"] == pytest.approx(want.rows_error)


def test_a_line_that_is_held_against_two_has_a_row_for_each(tmp_path):
    made = runs(tmp_path)
    parts = [made[3 * n : 3 * n + 3] for n in (0, 1, 3)]
    lines = [
        Line(name=name, config=part[0].point.config, versus=versus)
        for name, part, versus in zip("abc", parts, [(), ("a",), ("b", "a")], strict=True)
    ]
    rows = gap_table(lines, parts, "click", tmp_path)
    assert [(row["line"], row["versus"]) for row in rows] == [
        ("a", ""), ("b", "a"), ("c", "b"), ("c", "a"),
    ]  # fmt: skip
    aucs = [np.mean([run.auc("click") for run in part]) for part in parts]
    assert rows[2]["gap"] == pytest.approx(aucs[2] - aucs[1])
    assert rows[3]["gap"] == pytest.approx(aucs[2] - aucs[0])


def test_a_line_is_paired_with_whom_it_names(tmp_path):
    made = runs(tmp_path)
    rows = rows_of(made, tmp_path, hybrid="hybrid 9 0 0.001")
    labels = arrays(tmp_path, made, "labels")[0][:, CLICK]
    late, hybrid = (
        [a[:, CLICK] for a in arrays(tmp_path, made[3 * n : 3 * n + 3], "predictions")]
        for n in (4, 6)
    )
    want = contrast(labels, (hybrid, late), clusters=np.arange(TEST_ROWS) // 4)
    told = [rows[4][f"gap{end}"] for end in ("", "_half_width_95", "_rows_error")]
    assert told == pytest.approx([want.mean, want.half_width, want.rows_error], abs=1e-9)


def test_seeds_with_test_rows_of_their_own_stand_for_both_sources(tmp_path):
    made = runs(tmp_path, own_rows=True)
    late = rows_of(made, tmp_path)[1]
    gaps = [b.auc("click") - a.auc("click") for a, b in zip(made[:3], made[3:6], strict=True)]
    ends = stats.t.interval(0.95, df=2, loc=np.mean(gaps), scale=stats.sem(gaps))
    assert (late["gap"], late["gap_half_width_95"]) == pytest.approx(
        (np.mean(gaps), ends[1] - np.mean(gaps))
    )
    assert late["gap_rows_error"] == 0.0


def test_without_predictions_the_interval_is_over_seeds_alone_and_says_so(tmp_path):
    made = runs(tmp_path)
    (made[3].point.folder(tmp_path) / "predictions.npz").unlink()
    late = rows_of(made, tmp_path)[1]
    assert math.isnan(late["gap_rows_error"]) and late["gap_half_width_95"] > 0


@pytest.mark.parametrize("what", ["one of a label", "one user"])
def test_test_rows_that_tell_no_error_leave_the_interval_over_seeds(tmp_path, what):
    made = runs(tmp_path)
    labels = (np.arange(TEST_ROWS) == 7) if what == "one of a label" else None
    for run in made:
        path = run.point.folder(tmp_path) / "predictions.npz"
        own = dict(np.load(path)) | {"groups": np.zeros(TEST_ROWS, int)}
        if labels is not None:
            own["labels"][:, CLICK] = labels
        np.savez(path, **own)
    late = rows_of(made, tmp_path)[1]
    gaps = [made[3 + seed].auc("click") - made[seed].auc("click") for seed in range(SEEDS)]
    half_width = stats.t.ppf(0.975, SEEDS - 1) * stats.sem(gaps)
    assert late["gap_half_width_95"] == pytest.approx(half_width)
    assert math.isnan(late["gap_rows_error"]) and late["gap_seeds_error"] == pytest.approx(
        stats.sem(gaps)
    )


def test_a_gap_of_a_run_without_auc_is_no_gap_of_one_seed():
    assert thousandths(Interval(math.nan, math.nan, 5)) == "-"


def test_a_person_reads_the_updates_missed_and_the_gap_in_thousandths(tmp_path):
    rows = rows_of(runs(tmp_path), tmp_path)
    columns = columns_of(rows, "validation")
    lines = table(rows, columns).splitlines()[2:]
    cells = [re.split(r"  +", line) for line in lines]
    assert list(columns)[1:] == [
        "rows late", "dense late", "validation AUC", "log-loss", "gap to sync 0 0 0.001 [1e-3]",
    ]  # fmt: skip
    assert cells[0][5] == "-" and cells[4][:3] == ["async 0 0 0.00025", "7", "7"]
    gap, half = rows[1]["gap"], rows[1]["gap_half_width_95"]
    assert cells[1][5] == f"{1e3 * gap:+.2f} ± {1e3 * half:.2f}"
    several = columns_of(rows_of(runs(tmp_path / "more"), tmp_path, hybrid="hybrid 9 0 0.001"))
    assert "versus" in several and "gap [1e-3]" in several


def test_a_task_of_one_class_has_no_auc_and_does_not_break_the_table(tmp_path):
    made = runs(tmp_path)
    broken = [Run(r.point, summary(r.point.config.sync, r.point.config.seed, None)) for r in made]
    for row in rows_of(broken, tmp_path):
        assert math.isnan(row["auc"]) and math.isnan(row["gap_half_width_95"])


def test_curves_tell_snapshots_from_the_drained_end(tmp_path):
    run = runs(tmp_path)[0]
    scores = '"tasks": {"click": {"auc": 0.6, "log_loss": 0.7}}'
    (run.point.folder(tmp_path) / "metrics.jsonl").write_text(
        f'{{"updates": 1, "samples": 10, "drained": false, {scores}}}\n'
        f'{{"updates": 1, "samples": 10, "drained": true, {scores}}}\n'
    )
    assert [line["drained"] for line in curve_records([run], Path(tmp_path))] == [False, True]


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("synthetic", "synthetic:default:1:3"),
        ("synthetic:avazu-ad:0.01", "synthetic:avazu-ad:0.01:3"),
        ("synthetic:avazu-ad:0.01:7", "synthetic:avazu-ad:0.01:7"),
        ("kuairand-pure", "kuairand-pure"),
    ],
)
def test_a_seed_draws_a_synthetic_stream_anew_unless_its_name_says_which(name, drawn):
    config = TrainConfig(data=DataConfig(name=name))
    assert with_seed(config, 0).data.name == name
    for made in (
        with_seed(config, 2),
        over_seeds("x", config, 3, "")[2].config,
    ):
        assert (made.data.name, made.seed) == (drawn, 2)
