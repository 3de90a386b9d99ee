"""The table of gaps from summaries with known numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.gaps import Run, curve_records, gap_table, record, table_cells
from experiments.points import Point
from experiments.studies import treatments
from runtime.config import SyncConfig, TrainConfig

AUC = {
    ("sync", 0): [0.70, 0.71, 0.72],
    ("hybrid", 4): [0.69, 0.71, 0.70],
    ("async", 0): [0.68, 0.69, 0.70],
    ("async", 4): [0.65, 0.67, 0.69],
}


def runs(**merge: bool) -> list[Run]:
    made = []
    for (mode, tau), aucs in AUC.items():
        bound = {} if mode == "sync" else {"tau": tau}
        choice = merge if mode == "hybrid" else {}
        sync = SyncConfig(mode=mode, **bound, **choice)
        for seed, auc in enumerate(aucs):
            point = Point(label="x", config=TrainConfig(sync=sync, seed=seed))
            summary = {
                "mode": mode, "tau": tau, "seed": seed, "ranks": 8,
                "tasks": {"click": {"auc": auc, "log_loss": 0.6}},
                "staleness": {"mean_steps": tau - 0.5 if tau else 0.0, "max_steps": tau},
            }  # fmt: skip
            made.append(Run(point, summary))
    return made


def test_gaps_are_paired_by_seed_and_signed_setting_minus_sync():
    rows = {(r.mode, r.tau): r for r in gap_table(runs(), [], "click")}
    hybrid = rows["hybrid", 4]
    assert hybrid.gap_to_sync.mean == pytest.approx((-0.01 + 0.0 - 0.02) / 3)
    # Differences -0.01, 0, -0.02: standard deviation 0.01; t(2) is 4.303.
    assert hybrid.gap_to_sync.half_width == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-3)
    assert hybrid.gap_to_sync.n == 3


def test_gaps_pair_equal_seeds_in_whatever_order_and_number_runs_have_ended():
    """Of each setting another seed is missing, and none comes in order: only seed 1 is in both."""
    lost = {("sync", 0): 0, ("hybrid", 4): 2, ("async", 4): 0, ("async", 0): 1}
    some = [run for run in reversed(runs()) if lost[run.setting] != run.summary["seed"]]
    some[0], some[1] = some[1], some[0]
    rows = {(r.mode, r.tau): r for r in gap_table(some, [], "click")}
    assert rows["hybrid", 4].gap_to_sync.n == 1
    assert rows["hybrid", 4].gap_to_sync.mean == pytest.approx(0.71 - 0.71)
    assert rows["async", 4].gap_to_sync.n == 2
    assert rows["async", 4].gap_to_sync.mean == pytest.approx((0.67 - 0.71 + 0.69 - 0.72) / 2)
    assert rows["async", 4].gap_to_tau_0.mean == pytest.approx(0.69 - 0.70)
    mine, others = ([r for r in some if r.setting == (mode, 4)] for mode in ("async", "hybrid"))
    assert treatments._paired(mine, others, "click").mean == pytest.approx(0.67 - 0.71)


def test_the_own_tau_0_of_a_merged_hybrid_is_sync_and_of_async_is_a_run_of_its_own():
    rows = {(r.mode, r.tau): r for r in gap_table(runs(), [], "click")}
    assert rows["hybrid", 4].gap_to_tau_0 == rows["hybrid", 4].gap_to_sync
    assert rows["async", 4].gap_to_tau_0.mean == pytest.approx(-0.02)
    on_arrival = {(r.mode, r.tau): r for r in gap_table(runs(merge_pushes=False), [], "click")}
    assert on_arrival["hybrid", 4].gap_to_tau_0.n == 0, "unmerged at tau 0 is not sync"


def test_what_threads_do_comes_from_the_concurrent_runs_alone():
    lag, threads = runs(), [r for r in runs() if r.setting == ("hybrid", 4)]
    for number, run in enumerate(threads):
        run.summary["staleness"] = {"mean_steps": 1.0 + number, "max_steps": 2 + number}
    rows = {(r.mode, r.tau): r for r in gap_table(lag, threads, "click")}
    assert rows["hybrid", 4].thread_staleness == (2.0, 4)
    assert (rows["hybrid", 4].staleness_mean_steps, rows["hybrid", 4].staleness_max_steps) == (
        3.5,
        4,
    )
    assert rows["sync", 0].thread_staleness is None
    header, cells = table_cells(list(rows.values()))
    assert all(len(line) == len(header) for line in cells)
    assert cells[1][3] == "-10.00 ± 24.84"


def test_a_task_of_one_class_has_no_auc_and_does_not_break_the_table():
    broken = runs()
    for run in broken:
        run.summary["tasks"]["click"] = {"auc": None, "log_loss": None}
    rows = gap_table(broken, [], "click")
    assert all(math.isnan(row.auc.mean) and math.isnan(row.log_loss) for row in rows)
    assert record(rows[0])["seeds"] == 3


def test_curves_tell_snapshots_from_the_drained_end(tmp_path):
    run = runs()[0]
    folder = run.point.folder(tmp_path)
    folder.mkdir()
    scores = '"tasks": {"click": {"auc": 0.6, "log_loss": 0.7}}'
    (folder / "metrics.jsonl").write_text(
        f'{{"updates": 1, "samples": 10, "drained": false, {scores}}}\n'
        f'{{"updates": 1, "samples": 10, "drained": true, {scores}}}\n'
    )
    assert [line["drained"] for line in curve_records([run], Path(tmp_path))] == [False, True]


def test_a_line_of_the_csv_holds_each_interval_in_columns_of_its_own():
    made = runs()
    made[-1].summary["staleness"] = {"mean_steps": 3.5, "max_steps": 9}
    lines = {(r.mode, r.tau): record(r) for r in gap_table(made, [], "click")}
    late = lines["async", 4]
    want = {
        "test_auc": AUC["async", 4],
        "gap_to_sync": [-0.05, -0.04, -0.03],
        "gap_to_tau_0": [-0.03, -0.02, -0.01],
    }
    for name, values in want.items():
        assert late[name] == pytest.approx(np.mean(values))
        ends = stats.t.interval(0.95, df=2, loc=0.0, scale=stats.sem(values))
        assert late[f"{name}_half_width_95"] == pytest.approx(ends[1])
    assert (late["staleness_mean_steps"], late["staleness_max_steps"]) == (3.5, 9)
    assert (late["ranks"], late["task"], late["log_loss"]) == (8, "click", pytest.approx(0.6))
    assert not any(name.startswith("concurrent") for name in late), "no threads ran"
