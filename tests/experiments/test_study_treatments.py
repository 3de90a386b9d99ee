"""The study of treatments, tiny and on the synthetic stream, recomputed from the run folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from scipy import stats

from experiments.studies import treatments
from experiments.studies.treatments import Options, settings
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig
from tests.experiments.raw_runs import printed_by, raw_runs, read_csv

pytestmark = [pytest.mark.multiproc, pytest.mark.long]  # its runs are made once, for all tests
ROWS = [
    ("sync", "untreated"),
    ("sync", "wire"),
    ("hybrid tau 3", "untreated"),
    ("hybrid tau 3", "sync_steps"),
    ("hybrid tau 3", "lr_by_staleness"),
    ("hybrid tau 3", "wire"),
    ("async tau 2", "untreated"),
    ("async tau 2", "lr_by_staleness"),
    ("async tau 2", "wire"),
    ("as others run it", "persia-default"),
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a tiny study, and what the second call of it printed: it only shows again."""
    out = tmp_path_factory.mktemp("treatments")
    options = Options(
        taus=(3,), async_tau=2, treatments=("sync_steps", "lr_by_staleness", "wire"),
        sync_steps=5, presets=("persia-default",), seeds=2, ranks=2, batch=16, samples=16 * 12,
        data=DataConfig(name="synthetic"), out=out, jobs=2,
    )  # fmt: skip
    treatments.run(options)
    return out, printed_by(treatments.run, options)


def aucs(folder: Path, base: str, treatment: str) -> list[float]:
    """By seed."""
    found = raw_runs(folder, prefix=f"{base}-{treatment}-seed".replace(" ", "-"))
    return [run.auc() for run in sorted(found.values(), key=lambda run: run.seed)]


@pytest.mark.long
def test_every_figure_follows_from_the_predictions_and_a_second_run_trains_nothing(ran):
    folder, told = ran
    assert "20 points (20 done, 0 to run)" in told
    rows = read_csv(folder / "treatments.csv")
    assert [(r["base"], r["treatment"]) for r in rows] == ROWS
    for row in rows:
        own = np.array(aucs(folder, row["base"], row["treatment"]))
        for name, base in (("gap_to_sync", "sync"), ("gap_to_untreated", row["base"])):
            if name == "gap_to_untreated" and row["treatment"] in ("untreated", "persia-default"):
                assert row[name] == "nan" or row[name] == ""
                continue
            gaps = own - aucs(folder, base, "untreated")
            half = stats.t.ppf(0.975, 1) * gaps.std(ddof=1) / np.sqrt(2)
            assert float(row[name]) == pytest.approx(gaps.mean(), abs=1e-12)
            assert float(row[f"{name}_half_width_95"]) == pytest.approx(half, abs=1e-12)


def test_each_row_says_the_updates_that_it_misses(ran):
    rows = {(r["base"], r["treatment"]): r for r in read_csv(ran[0] / "treatments.csv")}
    late = {key: (row["rows_late"], row["dense_late"]) for key, row in rows.items()}
    assert late["sync", "untreated"] == ("0", "0")
    assert late["hybrid tau 3", "sync_steps"] == ("3", "0")
    assert late["async tau 2", "untreated"] == ("5", "1"), "two ranks: (tau + 1) 2 - 1, and 2 - 1"
    assert late["as others run it", "persia-default"] == ("9", "0")


def test_the_figure_has_a_row_for_each_setting_and_a_dot_for_each_gap(ran):
    from paper_figs.lateness import treatments_figure

    rows = read_csv(ran[0] / "treatments.csv")[1:]
    figure = treatments_figure(ran[0] / "treatments.csv")
    left, right = figure.axes
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert labels == [
        "sync", "rows travel as float16",
        "hybrid tau 3", "untreated", "synchronous start (5 steps)", "row rate / steps missed",
        "rows travel as float16", "async tau 2", "untreated", "row rate / steps missed",
        "rows travel as float16", "as others run it", "persia-default",
    ]  # fmt: skip
    for axes, name, own in (
        (left, "gap_to_sync", rows),
        (right, "gap_to_untreated", [r for r in rows if r["treatment"] in treatments.EVERY]),
    ):
        drawn = [x for dots in axes.containers for x in dots.lines[0].get_xdata()]
        assert drawn == pytest.approx([1e3 * float(r[name]) for r in own])
    plt.close(figure)


def test_the_full_study_has_every_treatment_where_it_has_a_meaning():
    found = settings(Options())
    assert len(found) == 2 + 2 * 6 + 4 + 6
    assert {s.treatment for s in found if s.base == "async tau 4"} == {
        "untreated", "delay_compensation", "lr_by_staleness", "wire",
    }  # fmt: skip
    treated = {s.treatment: s.sync for s in found if s.base == "hybrid tau 64"}
    assert treated["sync_steps"].sync_steps == 300
    assert treated["dense_lag"].dense_lag == 1
    assert treated["delay_compensation"].delay_compensation == 128.0
    assert treated["lr_by_staleness"].lr_by_staleness is True
    assert {s.sync.wire for s in found if s.treatment == "wire"} == {"half"}
    assert {(s.sync.mode, s.sync.window) for s in found if s.base == "hybrid tau 64"} == {
        (Mode.HYBRID, 64)
    }
