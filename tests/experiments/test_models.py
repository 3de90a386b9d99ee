"""`models`: a line for each data set and model, whose cost is that of its own runs."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from experiments.studies import models
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
