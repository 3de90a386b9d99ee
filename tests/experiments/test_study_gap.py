"""The gap study, tiny and synthetic: its tables recomputed from the run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from experiments.studies import gap_study
from persia_sim.words.vocabulary import Mode
from tests.experiments.raw_runs import RawRun, check_gap_table, close, raw_runs, read_csv
from tests.paper_figs.read_back import curves, error_bars

pytestmark = pytest.mark.multiproc
SETTINGS = [("sync", "0"), ("hybrid", "2"), ("async", "0")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str, str]:
    """Its folder, and what its dry run and its second call printed."""
    out = tmp_path_factory.mktemp("gap-study")
    options = {
        "data_sets": ("adult", "synthetic"), "data_dir": out, "taus": (2,), "seeds": 2,
        "most_seeds": 2, "samples": 6 * 256, "test_rows": 600, "row_factors": (1.0, 4.0),
        "dense_factors": (1.0,), "tuning_seeds": 1, "snapshots": 1, "jobs": 2, "out": out / "gap",
        "modes": (Mode.SYNC, Mode.LOOKAHEAD, Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC),
    }  # fmt: skip
    told: list[list[str]] = [[], []]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *words, end="\n": told[0].append(" ".join(words)))
        gap_study.run(gap_study.Options(**options, dry_run=True))
        gap_study.run(gap_study.Options(**options))
        patch.setattr("builtins.print", lambda *words, end="\n": told[1].append(" ".join(words)))
        gap_study.run(gap_study.Options(**options))
    return out / "gap", "\n".join(told[0]), "\n".join(told[1])


def runs_of(root: Path, rates: str) -> dict:
    """The final runs with the rates that the table names, by mode, tau and seed."""
    wanted = {
        (r["mode"], r["tau"]): (float(r["row_lr"]), float(r["lr"]))
        for r in read_csv(root / "gap_study.csv")
        if r["rates"] == rates
    }
    found = {}
    for mode, tau in wanted:
        prefix = f"synthetic-{mode}-tau{tau}-" if mode != "sync" else "synthetic-sync-"
        for folder in root.glob(f"{prefix}seed*"):
            config = json.loads((folder / "config.json").read_text())
            assert config["evaluation"]["part"] == "test"
            own = (config["rows"]["optimizer"]["lr"], config["model"]["lr"])
            if own == wanted[mode, tau]:
                (run,) = raw_runs(root, prefix=folder.name).values()
                found[mode, tau, run.seed] = run
    return found


def test_the_plan_is_told_and_what_is_not_here_is_left_out(ran):
    _, first, second = ran
    assert "adult is left out: " in first
    assert "async tau 2 is left out, its window of 16 dense updates is as long as the run" in first
    # fixed 3 settings x 2 seeds, two checks of a pair each, tuning 3 settings x 2 rates
    assert "synthetic: 1,536 samples in 6 steps of 256; 14 points (0 done)" in first
    assert "14 points (14 done)" in second
    assert "found equal with seed 0: lookahead = sync, raw_hybrid = hybrid" in second


@pytest.mark.parametrize("rates", ["fixed", "tuned"])
def test_every_figure_of_the_table_follows_from_the_predictions(ran, rates):
    rows = [r for r in read_csv(ran[0] / "gap_study.csv") if r["rates"] == rates]
    assert [(r["mode"], r["tau"]) for r in rows] == SETTINGS
    runs = runs_of(ran[0], rates)
    check_gap_table(rows, runs)
    for row in rows:
        own: list[RawRun] = [runs[row["mode"], row["tau"], seed] for seed in (0, 1)]
        for run in own:
            rate = run.labels[:, 0].mean()
            close(run.told["calibration"], run.predictions[:, 0].mean() / rate, rel=1e-5)
        close(row["calibration"], sum(run.told["calibration"] for run in own) / 2)


def test_what_was_tuned_was_judged_on_validation_and_its_best_was_taken(ran):
    root = ran[0]
    tried = read_csv(root / "gap_study_tuning.csv")
    assert [(t["mode"], t["tau"], t["row_lr"]) for t in tried] == [
        (*setting, rate) for setting in SETTINGS for rate in ("0.05", "0.2")
    ]
    folders = list(root.glob("synthetic-tuning-*"))
    assert len(folders) == len(tried)
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        assert config["evaluation"]["part"] == "validation"
    for row in read_csv(root / "gap_study.csv"):
        mine = [t for t in tried if (t["mode"], t["tau"]) == (row["mode"], row["tau"])]
        best = max(mine, key=lambda t: float(t["validation_auc"]))
        told = (row["row_lr"], row["validation_auc"])
        tuned = row["rates"] == "tuned"
        assert told == ((best["row_lr"], best["validation_auc"]) if tuned else ("0.05", "nan"))
        assert best["chosen"] == "True"


def test_each_decision_names_a_line_of_the_table(ran):
    rows = read_csv(ran[0] / "gap_study.csv")
    lines = read_csv(ran[0] / "gap_study_decisions.csv")
    assert {line["data"] for line in lines} == {"synthetic"}
    for line in lines:
        told = dict(part.split("=") for part in line["evidence"].split(": ")[1].split(", "))
        (row,) = [r for r in rows if all(r[key] == value for key, value in told.items())]
        assert row["gap_to_sync"] == line["gap_to_sync"]


def test_the_figure_is_of_these_tables(ran):
    from paper_figs.gap_study import gap_study_figure

    figure = gap_study_figure(ran[0] / "gap_study.csv", ran[0] / "gap_study_curves.csv")
    above, below = (part.axes[0] for part in figure.subfigs)
    rows = read_csv(ran[0] / "gap_study.csv")
    series = {label: gaps for label, _, gaps, _ in error_bars(above)}
    for rates in ("fixed", "tuned"):
        for mode in ("hybrid", "async"):
            want = [1e3 * float(r["gap_to_sync"]) for r in rows
                    if r["mode"] == mode and r["rates"] == rates]  # fmt: skip
            assert series[f"{mode}, {rates} rates"] == pytest.approx(want)
    assert list(curves(below)) == ["hybrid τ=2", "async τ=0"]
    plt.close(figure)
    assert plt.imread(ran[0] / "gap_study.png").std() > 0.01
