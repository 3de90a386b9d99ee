"""A tiny study, trained: its tables recomputed from the run folders; its search of rates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

import experiments
from experiments.__main__ import main
from experiments.line_search import VALIDATION_FRACTION, searches_of
from experiments.paper.record import STORED
from experiments.search import DENSE_RATES, ROW_RATES, Rates
from experiments.studies import sweep
from experiments.study_file import SearchTable, read_study
from runtime.config import TrainConfig, read_config
from runtime.run.folder import read_summary
from tests.experiments.raw_runs import close, paired, raw_runs, read_csv

CLICKS = str(Path(__file__).parents[2] / "examples" / "clicks.toml")
TINY = """versus = "sync"
seeds = 2
[base]
data.name = "synthetic"
steps = 8
sync.ranks = 2
model.hidden = [8]
rows.optimizer.lr = [0.05, 0.2]
evaluation.test_rows = 600
[[line]]
name = "sync"
[[line]]
name = "{sync.mode} tau {sync.tau}"
sync.mode = ["hybrid", "async"]
sync.tau = [0, 3]
[[line]]
name = "float16"
versus = "hybrid tau 3"
sync = { mode = "hybrid", tau = 3, wire = "half" }
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a tiny study, and what a second call of it printed: it only shows again."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.toml").write_text(TINY)
    options = sweep.Options(file=folder / "tiny.toml", out=folder / "out", jobs=2)
    from tests.experiments.raw_runs import printed_by

    sweep.run(options)
    return folder / "out", printed_by(sweep.run, options)


@pytest.mark.multiproc
def test_every_figure_of_the_table_follows_from_the_predictions(ran):
    out, told = ran
    rows = read_csv(out / "tiny.csv")
    assert "24 points (24 done, 0 to run)" in told
    for group in ("rows.optimizer.lr=0.05", "rows.optimizer.lr=0.2"):
        rate = group.partition("=")[2]
        own = {row["line"]: row for row in rows if row["group"] == group}
        assert list(own) == [
            "sync", "hybrid tau 0", "hybrid tau 3", "async tau 0", "async tau 3", "float16",
        ]  # fmt: skip
        runs = {name: raw_runs(out, prefix=f"{rate}-{name.replace(' ', '-')}-seed") for name in own}
        for name, row in own.items():
            close(row["auc"], np.mean([run.auc() for run in runs[name]]))
            close(row["log_loss"], np.mean([run.log_loss() for run in runs[name]]))
            assert row["row_lr"] == rate and row["seeds"] == "2"
            if not row["versus"]:
                assert name == "sync" and row["gap"] == "nan"
                continue
            assert row["versus"] == ("hybrid tau 3" if name == "float16" else "sync")
            aucs = [[run.auc() for run in runs[one]] for one in (name, row["versus"])]
            if aucs[0] == aucs[1]:
                assert float(row["gap"]) == 0.0
                continue
            mean, half = paired(*aucs)
            close(row["gap"], mean)
            close(row["gap_half_width_95"], half)
        assert float(own["hybrid tau 0"]["gap"]) == 0.0, "merged: tau = 0 is sync in its bytes"
        assert [(own[n]["rows_late"], own[n]["dense_late"]) for n in list(own)[2:5]] == [
            ("3", "0"), ("1", "1"), ("7", "1"),
        ]  # fmt: skip


@pytest.mark.multiproc
def test_the_printed_table_says_the_same_and_warns_of_short_runs(ran):
    out, told = ran
    row = next(r for r in read_csv(out / "tiny.csv") if r["line"] == "async tau 3")
    gap, half = 1e3 * float(row["gap"]), 1e3 * float(row["gap_half_width_95"])
    (line, *_) = [line for line in told.splitlines() if line.startswith("async tau 3 ")]
    assert f"{float(row['auc']):.4f}" in line and line.endswith(f"{gap:+.2f} ± {half:.2f}")
    assert told.count("rows 1, 3, 7 updates late miss 12, 38, 88 % of the run's 8 updates.") == 1


@pytest.mark.multiproc
def test_the_figure_has_a_dot_for_each_gap_under_what_it_is_held_against(ran):
    from paper_figs.auc import sweep_figure

    figure = sweep_figure(ran[0] / "tiny.csv")
    (axes,) = figure.axes
    late = [row for row in read_csv(ran[0] / "tiny.csv") if row["versus"]]
    drawn = [container.lines[0].get_xdata()[0] for container in axes.containers]
    assert drawn == pytest.approx([1e3 * float(row["gap"]) for row in late])
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels[:2] == ["rows.optimizer.lr=0.05 minus sync", "hybrid tau 0"]
    assert labels[5:7] == ["rows.optimizer.lr=0.05 minus hybrid tau 3", "float16"]
    plt.close(figure)
    assert plt.imread(ran[0] / "tiny.png").std() > 0.01


def test_options_from_python_are_crossed_and_refused_as_typed_ones(tmp_path):
    study = {"line": [{"name": "sync"}]}
    with pytest.raises(ValueError, match=r"set has model\.lrr = 1.*did you mean"):
        experiments.sweep(study, set={"model.lrr": 1}, out=tmp_path)
    with pytest.raises(ValueError, match="line 'x' has versus = 'y', the name of no line"):
        experiments.sweep({"line": [{"name": "x", "versus": "y"}]}, out=tmp_path)


SEARCHED = """versus = "sync"
seeds = 2
beside = "model.name"
[base]
steps = 6
batch = 64
sync.ranks = 2
model = { hidden = [8], name = ["mlp", "dlrm"] }
evaluation.test_rows = 400
[search]
trials = 13
seeds = 2
[[line]]
name = "sync"
[[line]]
name = "hybrid"
sync = { mode = "hybrid", tau = 4 }
[[line]]
name = "own"
model.lr = 0.02
sync = { mode = "hybrid", tau = 4 }
"""


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    (folder / "rates.toml").write_text(SEARCHED)
    typed = (f"data.name={CLICKS}",)
    sweep.run(sweep.Options(file=folder / "rates.toml", set=typed, out=folder / "out", jobs=2))
    return folder / "out"


@pytest.mark.long
@pytest.mark.multiproc
def test_each_line_is_trained_at_the_rates_that_its_search_chose(searched):
    """The best pair of the reference's grid on validation samples; another line leaves it for a
    clear gain only, and one with rates of its own keeps them."""
    tried = read_csv(searched / "rates_rates.csv")
    rows = read_csv(searched / "rates.csv")
    for group in ("model.name=mlp", "model.name=dlrm"):
        of_sync = [t for t in tried if (t["group"], t["line"]) == (group, "sync")]
        points = {(float(t["row_lr"]), float(t["lr"])) for t in of_sync}
        assert points >= {(row, dense) for row in ROW_RATES for dense in DENSE_RATES}
        best = max(of_sync, key=lambda t: float(t["validation_auc"]))
        late = [t for t in tried if (t["group"], t["line"]) == (group, "hybrid")]
        first = max(late, key=lambda t: float(t["validation_auc"]))
        leaves = float(first["gain"]) > 2 * float(first["standard_error"])
        want = {"sync": best, "hybrid": first if leaves else best}
        for row in (one for one in rows if one["group"] == group):
            rates = (row["row_lr"], row["lr"])
            if row["line"] == "own":
                assert rates == ("0.05", "0.02")
                continue
            expected = want[row["line"]]
            found = next(t for t in tried if (t["group"], t["line"]) == (group, row["line"])
                         and t["rates"])  # fmt: skip
            if found["rates"] != "no rate found":
                assert rates == (expected["row_lr"], expected["lr"])

            # The runs of the table: at these rates, on the test part.
            name = f"{group.partition('=')[2]}-{row['line']}-seed"
            folders = list(searched.glob(f"{name}*"))
            assert len(folders) == 2
            for folder in folders:
                config = json.loads((folder / "config.json").read_text())
                assert config["evaluation"]["eval_split"] == "test"
                assert config["rows"]["optimizer"]["lr"] == float(row["row_lr"])
                assert config["model"]["lr"] == float(row["lr"])


@pytest.mark.long
@pytest.mark.multiproc
def test_the_cost_of_a_model_is_held_against_that_of_the_first(searched):
    rows = [r for r in read_csv(searched / "rates.csv") if r["line"] == "hybrid"]
    gaps = {}
    for row in rows:
        model = row["group"].partition("=")[2]
        aucs = {
            name: [read_summary(folder)["tasks"]["clicked"]["auc"]
                   for folder in sorted(searched.glob(f"{model}-{name}-seed*"))]
            for name in ("sync", "hybrid")
        }  # fmt: skip
        gaps[model] = np.subtract(aucs["hybrid"], aucs["sync"])
        assert float(row["gap"]) == pytest.approx(gaps[model].mean())
    first, second = rows
    assert first["beside"] == "nan"
    assert float(second["beside"]) == pytest.approx((gaps["dlrm"] - gaps["mlp"]).mean())
    assert float(second["beside_half_width_95"]) > 0


@pytest.mark.long
@pytest.mark.multiproc
def test_a_file_trains_a_line_at_its_rates_and_tests_on_the_test_part(searched):
    for row in read_csv(searched / "rates_rates.csv"):
        if row["rates"] in ("", "no rate found"):
            continue
        config = read_config(searched / f"{row['group'].partition('=')[2]}-{row['line']}.toml")
        assert config.sync.ranks == 2 and config.steps == 6
        assert (config.rows.optimizer.lr, config.model.lr) == (
            float(row["row_lr"]), float(row["lr"]),
        )  # fmt: skip
        assert (config.evaluation.eval_split, config.evaluation.test_rows) == ("test", None)
        assert config.data.validation_fraction is None, "the validation samples train, too"


def test_no_run_of_a_search_is_judged_by_the_test_part(tmp_path):
    """Nor by rows that train it: a tenth of the training samples is kept from it, in every line."""
    study = read_study("tune.toml", typed={"data.name": [CLICKS], "model.lr": [4e-3]})
    (family,) = searches_of(study.lines, SearchTable(), tmp_path)
    assert [one.line.name for one in family] == ["sync", "hybrid tau 4", "async tau 4"]
    for search in family:
        assert search.middle == Rates(row=0.05, dense=4e-3)
        config = search.points(Rates(row=0.1, dense=0.1))[0].config
        assert config.evaluation.eval_split == "validation"
        assert config.data.validation_fraction == VALIDATION_FRACTION == 0.1
        assert config.evaluation.stop_after is config.evaluation.evaluate_every_steps is None


def test_a_dry_run_says_how_much_of_a_search_is_certain_and_trains_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("experiments.line_search.minutes_left", lambda *_: "about 2 minutes")
    words = ["tune", "--set", f"data.name={CLICKS}", "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(words) == 0
    # 12 pairs of sync, 5 of each late mode, three seeds of each pair
    assert f"{(12 + 5 + 5) * 3} runs or more" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_rate_of_async_in_the_demo_is_what_the_stored_search_chose():
    study = read_study("demo_rates.toml", typed={"data.name": ["synthetic"]})
    assert study.file.search.only and study.file.search.reference == "given"
    rates = {row["line"]: row for row in read_csv(STORED / "demo_rates.csv") if row["rates"]}
    demo = {
        line.name: line
        for line in read_study("demo.toml", typed={"data.name": ["synthetic"]}).lines
    }
    assert list(rates) == [line.name for line in study.lines]
    for name, line in (("async tau 0", "async tau 0, rate of its own"), ("async tau 4",) * 2):
        assert float(rates[name]["lr"]) == demo[line].config.model.lr
        assert float(rates[name]["row_lr"]) == TrainConfig().rows.optimizer.lr
