"""`tune` chooses each mode's rates by the rule of the study, and leaves files to train with."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.lateness.rates import DENSE_RATES, ROW_RATES, Rates, grid_around
from experiments.studies import tune
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, TrainConfig, read_config

pytestmark = pytest.mark.long  # its runs are made once, for all of its tests

CLICKS = Path(__file__).parents[2] / "examples" / "clicks.toml"


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def options_in(folder: Path, **changes: object) -> tune.Options:
    options = tune.Options(
        modes=(Mode.HYBRID, Mode.ASYNC),
        data=DataConfig(name=str(CLICKS)),
        steps=20,
        batch=64,
        ranks=2,
        seeds=2,
        out=folder,
        jobs=2,
        test_rows=400,
    )
    return replace(options, **changes)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    tune.run(options_in(folder))
    return folder


@pytest.mark.long
@pytest.mark.multiproc
def test_sync_is_searched_first_though_it_is_not_asked_for(tuned):
    tried = read(tuned / "tune_tried.csv")
    points = {(float(t["row_lr"]), float(t["dense_lr"])) for t in tried if t["mode"] == "sync"}
    assert points >= {(row, dense) for row in ROW_RATES for dense in DENSE_RATES}
    assert {line["mode"] for line in read(tuned / "tune.csv")} == {"hybrid", "async"}


@pytest.mark.multiproc
def test_a_late_mode_leaves_the_rates_of_sync_only_beyond_two_standard_errors(tuned):
    """Chosen again here, from the table of all that was tried."""
    tried = read(tuned / "tune_tried.csv")
    sync = max((t for t in tried if t["mode"] == "sync"), key=lambda t: float(t["validation_auc"]))
    for line in read(tuned / "tune.csv"):
        mine = [t for t in tried if t["mode"] == line["mode"]]
        best = max(mine, key=lambda t: float(t["validation_auc"]))
        leaves = float(best["gain"]) > 2 * float(best["standard_error"])
        expected = best if leaves else sync
        assert (line["row_lr"], line["dense_lr"]) == (expected["row_lr"], expected["dense_lr"])
        assert line["rates"] == ("of its own" if leaves else "sync's")


@pytest.mark.multiproc
def test_a_file_trains_the_mode_at_its_rates_and_tests_on_the_test_part(tuned):
    for line in read(tuned / "tune.csv"):
        config = read_config(tuned / f"tune_{line['mode']}-tau4.toml")
        assert (str(config.sync.mode), config.sync.tau, config.sync.ranks) == (line["mode"], 4, 2)
        assert config.rows.optimizer.lr == float(line["row_lr"])
        assert config.model.lr == float(line["dense_lr"])
        assert (config.evaluation.eval_split, config.evaluation.test_rows) == ("test", None)
        assert config.data.validation_fraction is None, "the validation samples train, too"


@pytest.mark.multiproc
def test_a_second_run_trains_nothing(tuned, monkeypatch):
    before = (tuned / "tune.csv").read_bytes()
    monkeypatch.setattr("experiments.sweep._carried_out", lambda *_: pytest.fail("it trains"))
    tune.run(options_in(tuned))
    assert (tuned / "tune.csv").read_bytes() == before


def test_a_dry_run_says_how_much_is_certain(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "minutes_left", lambda *_: "about 2 minutes of training")
    tune.run(options_in(tmp_path, dry_run=True))
    # 12 pairs of sync, 5 of each late mode, two seeds of each pair
    assert f"{(12 + 5 + 5) * 2} runs or more" in capsys.readouterr().out


@pytest.mark.parametrize("written", ["", "[evaluation]\npart = 'test'\n"])
def test_no_run_of_a_search_is_judged_by_the_test_part(tmp_path, written):
    """Nor by rows that train it: a tenth of the training samples is kept from it, in every mode."""
    file = tmp_path / "run.toml"
    file.write_text("[model]\nlr = 4e-3\n" + written)
    searches = tune.searches_of(options_in(tmp_path, config=file))
    assert [search.mode for search in searches] == [Mode.SYNC, Mode.HYBRID, Mode.ASYNC]
    for search in searches:
        (first, *_) = search.points(Rates(row=0.1, dense=0.1))
        judged = first.config.evaluation
        assert (judged.eval_split, judged.test_rows) == ("validation", 400)
        assert first.config.data.validation_fraction == tune.VALIDATION_FRACTION == 0.1
        assert judged.stop_after is judged.evaluate_every_steps is None


def test_the_rates_of_a_file_are_the_middle_of_the_search(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[model]\nlr = 4e-3\n[rows.optimizer]\nlr = 0.01\n")
    completed = tune.Options.completed({"config": file, "batch": 32})
    assert completed == {
        "config": file,
        "batch": 32,
        "model.lr": 4e-3,
        "rows.optimizer.lr": 0.01,
    }
    grid = grid_around(Rates(row=0.01, dense=4e-3))
    assert np.allclose(np.array(grid.row) / 0.01, np.array(ROW_RATES) / 0.05)
    assert np.allclose(np.array(grid.dense) / 4e-3, np.array(DENSE_RATES) / 1e-3)
    assert grid.row[0] == TrainConfig().rows.optimizer.lr / 5


@pytest.mark.long
@pytest.mark.multiproc
def test_given_rates_of_sync_are_kept_and_each_bound_is_searched_around_them(tmp_path):
    tune.run(options_in(tmp_path, modes=(Mode.SYNC, Mode.ASYNC), taus=(0, 2), search_sync=False))
    tried = read(tmp_path / "tune_tried.csv")
    given = TrainConfig().rows.optimizer.lr, TrainConfig().model.lr
    of_sync = [(float(t["row_lr"]), float(t["dense_lr"])) for t in tried if t["mode"] == "sync"]
    assert of_sync == [given]

    # A late mode tries five pairs at least, at both bounds, sync's among them.
    for tau in ("0", "2"):
        mine = [t for t in tried if (t["mode"], t["tau"]) == ("async", tau)]
        assert len(mine) >= 5
        assert (float(mine[0]["row_lr"]), float(mine[0]["dense_lr"])) == given
    lines = read(tmp_path / "tune.csv")
    assert [(line["mode"], line["tau"], line["rates"] == "given") for line in lines] == [
        ("sync", "", True),
        ("async", "0", False),
        ("async", "2", False),
    ]
