"""The gap by frequency of ids, tiny: every figure from the run folders and the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from sklearn.metrics import roc_auc_score

from experiments.staleness import frequency
from experiments.statistics import contrast
from experiments.studies import row_frequency as study
from runtime.data.open import open_source
from tests.experiments.raw_runs import close, paired, raw_runs, read_csv
from tests.paper_figs.read_back import curves, error_bars

pytestmark = [pytest.mark.multiproc, pytest.mark.long]  # its runs are made once, for all tests
SYNTHETIC, OTHER = "synthetic:avazu-ad:0.001", "kuairand-pure-14d"
PAPER = Path(__file__).parents[2] / "docs" / "results"
TAUS, BATCH, SAMPLES = (2, 6), 32, 640


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    from tests.experiments.clicks import clicks_file

    out = tmp_path_factory.mktemp("row-frequency")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERSIA_DATA_DIR", str(out / "data"))
        patch.setattr(frequency, "LEAST_OF_EACH_LABEL", 20)
        clicks_file(out / "data", 2000)
        options = study.Options(
            data=(SYNTHETIC, OTHER), taus=TAUS, seeds=2, samples=SAMPLES, batch=BATCH,
            test_rows=400, probes=2, out=out, jobs=2,
        )  # fmt: skip
        study.run(options)
        patch.setattr("experiments.result_cache.ProcessPoolExecutor", None)
        study.run(options)
    return out


@pytest.mark.long
def test_the_gap_of_every_bin_follows_from_predictions_and_counts(ran):
    source = open_source(SYNTHETIC)
    trained = np.concatenate([c.ids for c in source.chunks("train")][:1])[: SAMPLES * 22]
    counts = dict(zip(*np.unique(trained, return_counts=True), strict=True))
    tested = next(iter(source.chunks("test"))).ids[: 400 * 22].reshape(400, 22)
    rarest = np.array([min(counts.get(i, 0) for i in sample) for sample in tested])
    runs = raw_runs(ran, prefix="synthetic")
    rows = [r for r in read_csv(ran / "row_frequency.csv") if r["data"] == SYNTHETIC]
    assert {r["by"] for r in rows} == {"all", "rarest"}
    binned = 0
    for row in rows:
        of = {"all": np.zeros(400), "rarest": rarest}[row["by"]]
        here = (of >= int(row["count_from"])) & (of < float(row["count_below"]))
        assert int(row["test_samples"]) == here.sum()
        binned += row["by"] != "all"
        first = runs["sync", "0", 0]
        assert int(row["positives"]) == first.labels[here, 0].sum()
        fresh, late = (
            [
                roc_auc_score(r.labels[here, 0], r.predictions[here, 0])
                for r in (runs[mode, tau, seed] for seed in (0, 1))
            ]
            for mode, tau in (("sync", "0"), ("hybrid", row["tau"]))
        )
        mean, seeds_alone = paired(late, fresh)
        close(row["auc_sync"], np.mean(fresh))
        close(row["gap_to_sync"], mean, abs=1e-12)
        scores = (
            [runs[mode, tau, seed].predictions[here, 0] for seed in (0, 1)]
            for mode, tau in (("sync", "0"), ("hybrid", row["tau"]))
        )
        both = contrast(first.labels[here, 0], [*scores])
        close(row["gap_to_sync_half_width_95"], both.half_width, abs=1e-12)
        assert both.rows_error > 0 or both.half_width == pytest.approx(seeds_alone)
    assert binned >= 2


def test_no_row_misses_more_pushes_than_the_lookup_missed_steps(ran):
    rows = read_csv(ran / "row_frequency_staleness.csv")
    for row in rows:
        steps = float(row["missed_steps"])
        lags = [min(s, int(row["tau"])) for s in range(20)]
        close(row["missed_steps"], np.mean(lags))
        assert 0 <= float(row["missed_pushes"]) <= int(row["tau"])
        assert 0 < float(row["missed_pushes_model"]) <= steps
    own = [r for r in rows if r["data"] == SYNTHETIC and r["tau"] == "6"]
    assert float(own[0]["missed_pushes"]) < float(own[-1]["missed_pushes"])


def test_losses_are_ordered_by_the_ranks_of_a_measure():
    drifts, losses = (1.0, 10.0, 1000.0, 100.0), (1e-3, 2e-3, 3e-3, 4e-3)
    lines = [
        {"drift": d, "relative": -d, "predictions": loss, "gap_to_sync": -loss}
        for d, loss in zip(drifts, losses, strict=True)
    ]
    # one pair of neighbours is exchanged: 1 - 6 * 2 / (4 * 15)
    told = frequency.order_of_losses(lines)
    assert told == pytest.approx({"drift": 0.8, "relative": -0.8, "predictions": 1.0})


def test_the_figure_shows_the_real_sets_gap_and_every_drift(ran):
    from paper_figs.lateness import row_frequency_figure

    paths = [ran / f"row_frequency{part}.csv" for part in ("", "_staleness", "_drift")]
    figure = row_frequency_figure(*paths)
    gaps, stale, drift = figure.axes
    own = [r for r in read_csv(paths[0])
           if (r["data"], r["by"], r["tau"]) == (OTHER, "rarest", "6")]  # fmt: skip
    ((label, _, shown, _),) = error_bars(gaps)
    assert label == OTHER and shown == pytest.approx([1e3 * float(r["gap_to_sync"]) for r in own])
    missed = [r for r in read_csv(paths[1]) if (r["data"], r["tau"]) == (SYNTHETIC, "6")]
    assert curves(stale)["model, τ = 6"][1] == pytest.approx(
        [float(r["missed_pushes_model"]) for r in missed]
    )
    shown = [(x, y) for _, x, y, _ in error_bars(drift)]
    told = [r for r in read_csv(paths[2])]
    assert [x for xs, _ in shown for x in xs] == pytest.approx([float(r["drift"]) for r in told])
    assert [len(x) for x, _ in shown] == [2, 2]
    plt.close(figure)


@pytest.mark.parametrize(
    "stem", ["row_frequency", "row_frequency_staleness", "row_frequency_drift"]
)
def test_the_committed_table_has_the_columns_that_the_study_writes(ran, stem):
    assert list(read_csv(PAPER / f"{stem}.csv")[0]) == list(read_csv(ran / f"{stem}.csv")[0])


def test_too_few_test_rows_for_an_auc_are_told_in_a_sentence(tmp_path):
    options = study.Options(
        data=(SYNTHETIC,), taus=(2,), seeds=2, samples=64, batch=BATCH, test_rows=60, probes=1,
        out=tmp_path, jobs=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"test_rows 60 hold fewer than 100 samples of a label"):
        study.run(options)
