"""The convergence bound, tiny: what was measured lies below it, and the table says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from experiments.studies import convergence_bound as study
from tests.experiments.raw_runs import close, printed_by, read_csv
from tests.paper_figs.read_back import curves, error_bars

pytestmark = pytest.mark.long  # its runs are made once, for all of its tests

PAPER = Path(__file__).parents[2] / "docs" / "results"


def options(out: Path) -> study.Options:
    return study.Options(
        seeds=3,
        taus=(1, 32),
        updates=(16, 128),
        batch=(2, 64),
        alphas=(0.03, 0.3),
        out=out,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a tiny study, and what a second call printed, which trains nothing."""
    out = tmp_path_factory.mktemp("convergence-bound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "POPULATION", 200)
        patch.setattr(study, "TURNED", ((40, 40), 400))
        study.run(options(out))
        patch.setattr(study, "train", None)
        return out, printed_by(study.run, options(out))


def rows(out: Path) -> list[dict[str, str]]:
    return read_csv(out / "convergence_bound.csv")


@pytest.mark.long
def test_a_second_run_only_shows_again(ran):
    assert "40 settings of 3 seeds and 18 largest steps, 58 of them done" in ran[1]


def test_measured_gradients_lie_below_the_bound_and_its_assumptions_hold(ran):
    found = rows(ran[0])
    assert len(found) == 2 * 2 * 2 * (1 + 2 * 2)
    for row in found:
        most = float(row["measured"]) + float(row["measured_half_width_95"])
        assert 0 < most < float(row["bound"]) <= float(row["bound_batch_alpha"]) * (1 + 1e-9)
        assert float(row["variance_met"]) <= float(row["variance"])
        parts = sum(float(row[f"bound_{part}"]) for part in ("start", "noise", "late"))
        close(row["bound"], parts)
        close(row["untrained"], 2 * float(row["smoothness"]) * float(row["loss_gap"]))
        assert (row["vacuous"] == "True") is (float(row["bound"]) >= float(row["untrained"]))


def test_the_vacuous_case_is_there_and_only_where_hot_ids_or_batches_make_it(ran):
    found = {(r["case"], r["mode"], r["tau"], r["updates"], r["batch"]): r for r in rows(ran[0])}
    hot = found["hot ids", "hybrid", "32", "16", "64"]
    cold = found["cold ids", "hybrid", "1", "128", "64"]
    assert (hot["vacuous"], cold["vacuous"]) == ("True", "False")
    assert float(hot["alpha_batch"]) == pytest.approx(1.0)
    assert found["cold ids", "async", "32", "16", "64"]["vacuous"] == "True"
    sync = found["hot ids", "sync", "0", "128", "2"]
    assert sync["bound"] == sync["bound_of_sync"] and sync["step"] == sync["sync_step"]


def test_the_figure_shows_bound_and_measured_of_the_longest_run(ran):
    from paper_figs.lateness import convergence_bound_figure

    figure = convergence_bound_figure(ran[0] / "convergence_bound.csv")
    cold, hot = figure.axes
    assert cold.get_title().startswith("ids all rare") and hot.get_title().startswith("popular ids")
    own = [
        r for r in rows(ran[0])
        if (r["case"], r["mode"], r["updates"], r["batch"]) == ("hot ids", "hybrid", "128", "64")
    ]  # fmt: skip
    assert curves(hot)["bound, hybrid"][1] == pytest.approx([float(r["bound"]) for r in own])
    label, _, measured, _ = error_bars(hot)[0]
    assert label == "measured, hybrid"
    assert measured == pytest.approx([float(r["measured"]) for r in own])
    plt.close(figure)


@pytest.mark.parametrize("stem", ["convergence_bound", "convergence_bound_steps"])
def test_the_committed_table_has_the_columns_that_the_study_writes(ran, stem):
    assert list(read_csv(PAPER / f"{stem}.csv")[0]) == list(read_csv(ran[0] / f"{stem}.csv")[0])
