"""`models`: a line for each data set and model, whose cost is that of its own runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.studies import models
from persia_sim.base.rules import Refused
from runtime.config import ModelConfig
from runtime.run.folder import read_summary

CLICKS = str(Path(__file__).parents[2] / "examples" / "clicks.toml")


@pytest.mark.multiproc
def test_each_cell_has_the_mean_difference_of_its_own_runs(tmp_path):
    options = models.Options(
        models=("mlp", "dlrm"), sets=(CLICKS, "no-such-set.toml"), tau=4, seeds=2, ranks=2,
        steps=6, batch=64, model=ModelConfig(hidden=(8,)), test_rows=400, out=tmp_path, jobs=2,
    )  # fmt: skip
    models.run(options)
    with (tmp_path / "models.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["model"] for line in lines] == ["mlp", "dlrm"]
    gaps_of = {}
    for line in lines:
        aucs = {}
        for mode in ("sync-", "hybrid-tau4-"):
            folders = sorted(tmp_path.glob(f"*-{line['model']}-{mode}seed*"))
            aucs[mode] = [read_summary(f)["tasks"]["clicked"]["auc"] for f in folders]
        gaps = np.subtract(aucs["hybrid-tau4-"], aucs["sync-"])
        assert len(gaps) == 2 and float(line["gap_to_sync"]) == pytest.approx(gaps.mean())
        gaps_of[line["model"]] = gaps
        assert float(line["sync_auc"]) == pytest.approx(np.mean(aucs["sync-"]))

    # Whether the cost depends on the model: its difference to the first, paired by seed.
    mlp, dlrm = lines
    assert float(mlp["beside_first"]) == 0 == float(mlp["beside_first_half_width_95"])
    difference = (gaps_of["dlrm"] - gaps_of["mlp"]).mean()
    assert float(dlrm["beside_first"]) == pytest.approx(difference)
    assert float(dlrm["beside_first_half_width_95"]) > 0


@pytest.mark.long
@pytest.mark.multiproc
def test_each_cell_is_trained_at_the_rates_that_its_search_chose(tmp_path, monkeypatch):
    """The best pair of sync's grid on validation samples; hybrid leaves it for a clear gain only.
    The runs of the table are judged by the test part, at those rates."""
    searches = []
    original = models.search_rates

    def search_rates(*arguments):
        chosen = original(*arguments)
        searches.append((chosen[0].search, chosen[0].tried))
        return chosen

    monkeypatch.setattr(models, "search_rates", search_rates)
    options = models.Options(
        models=("mlp", "dlrm"),
        sets=(CLICKS,),
        tau=4,
        seeds=2,
        search=True,
        trials=13,
        ranks=2,
        steps=6,
        batch=64,
        model=ModelConfig(hidden=(8,)),
        test_rows=400,
        out=tmp_path,
        jobs=2,
    )
    models.run(options)
    with (tmp_path / "models.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line, (search, tried) in zip(lines, searches, strict=True):
        # No run of the search was judged by the test part, and its best pair is the line's.
        assert search.base.evaluation.eval_split == "validation"
        best = max(tried, key=tried.get)
        assert (float(line["row_lr"]), float(line["dense_lr"])) == (best.row, best.dense)
        assert len(tried) >= 12 and line["rates"] == "found"

        # The runs of the table: at these rates, on the test part.
        for mode, row, dense in (
            ("sync-", line["row_lr"], line["dense_lr"]),
            ("hybrid-tau4-", line["late_row_lr"], line["late_dense_lr"]),
        ):
            folders = tmp_path.glob(f"*clicks*-{line['model']}-{mode}seed*")
            of_table = [folder for folder in folders if not folder.name.startswith("search-")]
            assert len(of_table) == 2
            for folder in of_table:
                config = json.loads((folder / "config.json").read_text())
                assert config["evaluation"]["eval_split"] == "test"
                rates = (config["rows"]["optimizer"]["lr"], config["model"]["lr"])
                assert rates == (float(row), float(dense))


def test_a_dry_run_counts_the_search_and_trains_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.sweep.minutes_left", lambda *_: "about 2 minutes")
    options = models.Options(
        models=("mlp", "dlrm"), sets=(CLICKS,), search=True, dry_run=True, out=tmp_path
    )
    models.run(options)
    # 12 pairs of sync's grid and 5 of hybrid, of two models, two seeds each
    assert f"{(12 + 5) * 2 * 2} runs" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("unread", [{"trials": 30}, {"search_seeds": 3}])
def test_an_option_of_the_search_is_refused_without_it(unread):
    with pytest.raises(Refused, match="is read with --search only"):
        models.Options(**unread)
    assert models.Options(search=True, **unread).search
