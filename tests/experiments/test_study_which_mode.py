"""Which mode to take: rates are the simulator's, losses the stored study's at the same lateness."""

from __future__ import annotations

import csv
import math

import pytest

from experiments.lateness.streams import TAU_CELLS
from experiments.studies import which_mode
from persia_sim.base.window import UpdatesMissed
from persia_sim.presets.catalogue import CLUSTERS
from persia_sim.report import sweep
from tests.experiments.raw_runs import printed_by, read_csv

MOVIES = "movielens-latest-small-2016"
CELLS = {
    # (order, rows late, dense late): gap to sync
    ("time", 4, 0): -0.010,
    ("time", 7, 0): -0.015,
    ("time", 16, 0): -0.021,
    ("time", 39, 7): -0.029,
    ("shuffled", 7, 0): -0.001,
    ("shuffled", 16, 0): -0.002,
    ("shuffled", 7, 7): -0.003,
}
STEP_S = {"sync": 4.0, "lookahead": 2.0, "hybrid, tau 4": 1.0, "hybrid, tau 16": 1.0, "async": 2.0}
MISSED = {"sync": 0.0, "lookahead": 0.0, "hybrid, tau 4": 3.0, "hybrid, tau 16": 15.0}

OTHERS = (
    {"row_lr": "0.2"}, {"dense_lr": "0.02"}, {"window": "validation"}, {"start": "0.1"},
    {"updates": "40"}, {"batch": "64"}, {"stream": "tennis"}, {"passes": "2"},
    {"split": "user"}, {"arithmetic": "flushed"},
)  # fmt: skip


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The study on made tables and rates: a rank has 100 samples a step, sync is at an AUC of 0.7
    after 10 updates and 0.8 after 20, what is late only at 0.6 and 0.7."""
    gap = {
        "data": MOVIES, "window": "test", "optimizer_start": "0.0", "task": "label",
        "rates": "of sync", "row_lr": "0.1", "lr": "0.01", "batch": "128", "updates": "20",
        "redrawn": "False", "gap_to_sync_half_width_95": "0.004",
    }  # fmt: skip
    cells = {("time", 0, 0): 0.0, ("shuffled", 0, 0): 0.0} | CELLS
    write(
        tmp_path / "lateness.csv",
        [
            gap | {"order": order, "rows_late": rows, "dense_late": dense, "gap_to_sync": value}
            for (order, rows, dense), value in cells.items()
        ]
        # An earlier window, whose gap is another.
        + [
            gap
            | {
                "order": "time",
                "rows_late": 16,
                "dense_late": 0,
                "gap_to_sync": 0.05,
                "window": "origin-1",
            }
        ],
    )
    # Of the second plan only a part is there, which is not quoted.
    tau = gap | {"order": "time", "passes": "1", "split": "own", "seeds": "2", "seeds_planned": "2"}
    part = [tau | {"rows_late": 4, "dense_late": 0, "gap_to_sync": 0.07}]
    write(tmp_path / "lateness_tau.csv", part)
    run = {
        "hash": "1", "stream": MOVIES, "window": "test", "start": "0.0", "batch": "128",
        "row_lr": "0.1", "dense_lr": "0.01", "updates": "", "trained_updates": "20",
        "train_samples": "2560", "test_rows": "9", "auc": "label=0.8", "log_loss": "label=0.5",
        "commit": "", "machine": "", "passes": "1", "split": "", "arithmetic": "denormals",
    }  # fmt: skip
    write(
        tmp_path / "lateness_runs.csv",
        [
            run | {"order": order, "rows_late": rows, "dense_late": dense, "seed": seed,
                   "snapshots": "10=0.7;20=0.8" if rows == 0 else "10=0.6;20=0.7"}
            for order, rows, dense in cells
            for seed in (0, 1)
        ]
        # Runs in which one thing is another do not count.
        + [
            run | {"order": order, "rows_late": rows, "dense_late": dense, "seed": seed,
                   "snapshots": "10=0.95;20=0.99"} | other
            for order, rows, dense in cells
            for seed in (0, 1)
            for other in OTHERS
        ],
    )  # fmt: skip

    def evaluate(point: sweep.Point, half_width: float) -> dict:
        of = {(mode, tau): label for label, (mode, tau) in which_mode.LABELS.items()}
        label = of[point.mode, point.tau]
        ranks = CLUSTERS["h100-host" if point.cluster != "v100-paper" else point.cluster]().ranks
        rows = MISSED.get(label, 5 * ranks - 1)
        return {
            "ranks": ranks, "batch": 100 * ranks, "workload": point.workload,
            "samples_per_s": 100 * ranks / STEP_S[label], "relative_half_width_95": 0.01,
            "binds": "", "dense_late": not point.mode.has_barrier,
            "staleness_steps_mean": rows, "staleness_pushes_mean": rows,
        }  # fmt: skip

    monkeypatch.setattr(which_mode, "STORED", tmp_path)
    monkeypatch.setattr(sweep, "evaluate", evaluate)
    options = which_mode.Options(streams=(MOVIES,), target=0.5, out=tmp_path / "out", jobs=1)
    monkeypatch.setattr(which_mode, "leave", keep_table)
    text = printed_by(which_mode.run, options)
    return text, read_csv(tmp_path / "out" / "which_mode.csv")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, list(rows[0]))
        lines.writeheader()
        lines.writerows(rows)


def keep_table(options, tables, drawn_first):
    for end, rows in tables.items():
        write(options.out / f"which_mode{end}.csv", rows)


def test_there_are_three_clusters_in_five_modes(told):
    lines = told[1]
    assert len({line["cluster"] for line in lines}) == 3
    assert [line["mode"] for line in lines] == 3 * list(which_mode.LABELS)


def test_a_loss_is_that_of_the_modes_own_lateness_or_empty(told):
    """Async's on 64 ranks, 319/63, was not trained, and rows 4 late not on shuffled samples."""
    names = "rows_late", "dense_late", "time_gap_to_sync", "shuffled_gap_to_sync"
    found = {
        (line["cluster"][:5], line["mode"]): tuple(line[name] for name in names) for line in told[1]
    }
    assert found["one h", "sync"] == found["paper", "lookahead"] == ("0", "0", "0.0", "0.0")
    assert found["one h", "hybrid, tau 4"] == ("4", "0", "-0.01", "nan")
    assert found["paper", "hybrid, tau 16"] == ("16", "0", "-0.021", "-0.002")
    assert found["one h", "async"] == ("39", "7", "-0.029", "nan")
    assert found["paper", "async"] == ("319", "63", "nan", "nan")
    assert "-29.0 ± 4.0 at 39/7" in told[0] and "not trained at 319/63" in told[0]
    assert "-15.0" not in told[0] and "70.0" not in told[0]


def test_the_second_plan_is_quoted_where_it_is_whole(tmp_path):
    gap = {
        "data": MOVIES, "order": "time", "window": "test", "optimizer_start": "0.0",
        "task": "label", "rates": "of sync", "redrawn": "False", "batch": "128", "updates": "20",
    }  # fmt: skip
    of_tau = {"passes": "1", "split": "own", "seeds": "8", "seeds_planned": "8"}
    cells = [(cell.rows_late, cell.dense_late) for cell in TAU_CELLS]
    write(
        tmp_path / "lateness.csv",
        [gap | {"rows_late": r, "dense_late": d, "gap_to_sync": 1} for r, d in cells],
    )
    (tmp_path / "lateness_runs.csv").write_text("hash\n")
    for seeds, told in (("8", "2"), ("7", "1")):
        lines = [
            gap | of_tau | {"rows_late": r, "dense_late": d, "gap_to_sync": 2} for r, d in cells
        ]
        lines[-1]["seeds"] = seeds
        write(tmp_path / "lateness_tau.csv", lines)
        found = which_mode.StoredStudy.read(tmp_path).measured(MOVIES, "time", UpdatesMissed(16, 0))
        assert found is not None and found["gap_to_sync"] == told


def test_seconds_are_the_updates_of_the_study_at_the_simulated_pace(told):
    # Half of the climb from 0.5 to 0.8 is 0.65: sync is there after 10 updates x 0.15 / 0.2.
    seconds = {
        line["mode"]: float(line["seconds"])
        for line in told[1]
        if line["cluster"].startswith("paper")
    }
    assert seconds["sync"] == pytest.approx(7.5 * STEP_S["sync"])
    assert seconds["lookahead"] == pytest.approx(7.5 * STEP_S["lookahead"])
    # What is late has 0.6 after 10 and 0.7 after 20: it is there after 15.
    assert seconds["hybrid, tau 4"] == pytest.approx(15 * STEP_S["hybrid, tau 4"])
    assert math.isnan(seconds["async"]), "as late as on 64 ranks it was not trained"


def test_dollars_are_those_of_all_hosts_at_list_price(told):
    line = next(x for x in told[1] if x["cluster"].startswith("one host"))
    cluster = CLUSTERS["h100-host"]()
    assert float(line["usd_per_hour"]) == pytest.approx(cluster.usd_per_hour)
    a_billion = cluster.usd_per_hour / 3600 / float(line["samples_per_s"]) * 1e9
    assert float(line["usd_per_billion_samples"]) == pytest.approx(a_billion)
    # 8 hosts of 8 V100 at 24.48, 100 of 52 cores at 1,007 / 730 a month for 30 cores.
    paper = next(x for x in told[1] if x["cluster"].startswith("paper"))
    assert float(paper["usd_per_hour"]) == pytest.approx(8 * 24.48 + 100 * 1007 / 730 * 52 / 30)


def test_your_own_cluster_takes_the_place_of_the_example(tmp_path):
    options = which_mode.Options(cluster="gcp-100t", workload="criteo-syn5", out=tmp_path)
    assert [*which_mode.points_of(options)][-1] == ("yours: gcp-100t", "async")


def test_every_test_window_stands_in_a_table_of_its_own_and_only_the_last_one_is_quoted(
    told, tmp_path
):
    """A gap of an earlier window is told beside those of the test part, never in their place."""
    windows = read_csv(tmp_path / "out" / "which_mode_windows.csv")
    assert [(w["data"], w["window"], w["order"], float(w["gap_to_sync"])) for w in windows] == [
        (MOVIES, "test", "time", -0.021),
        (MOVIES, "test", "shuffled", -0.002),
        (MOVIES, "origin-1", "time", 0.05),
    ]
