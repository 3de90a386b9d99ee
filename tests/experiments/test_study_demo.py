"""The demo, tiny and on the synthetic stream: its table recomputed from the run folders."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from experiments.statistics import delong
from experiments.studies import demo
from tests.experiments.raw_runs import check_gap_table, close, raw_runs, read_csv
from tests.paper_figs.read_back import curves, error_bars

pytestmark = pytest.mark.multiproc
STEPS = 10
SETTINGS = [(mode, str(tau)) for mode, tau in demo.SETTINGS]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a tiny demo, and what the second call of it printed: it only shows again."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(out))
        patch.setenv("XDG_CACHE_HOME", str(out))
        patch.delenv("PERSIA_DATA_DIR", raising=False)
        options = demo.Options(seeds=2, samples=STEPS * demo.BATCH, out=out, jobs=2)
        demo.run(options)
        patch.setattr("builtins.print", lambda *words, end="\n": told.append(" ".join(words) + end))
        told: list[str] = []
        demo.run(options)
    return out, "".join(told)


def test_without_real_data_it_says_that_it_is_synthetic_and_a_second_run_trains_nothing(ran):
    assert "no real data found: using the synthetic stream" in ran[1]
    assert "(21 done, 0 to run)" in ran[1]


def test_every_figure_of_the_table_follows_from_the_predictions(ran):
    rows = read_csv(ran[0] / "demo.csv")
    assert [(r["mode"], r["tau"]) for r in rows] == SETTINGS
    assert {(r["data"], r["ranks"], r["task"]) for r in rows} == {("synthetic", "8", "click")}
    check_gap_table(rows, raw_runs(ran[0]))


def test_staleness_of_the_constant_lag_is_tau_from_step_tau_on(ran):
    rows = {(r["mode"], r["tau"]): r for r in read_csv(ran[0] / "demo.csv")}
    for mode, tau in SETTINGS:
        if mode == "async":
            continue  # its staleness counts a rank's own steps
        missed = [min(step, int(tau)) for step in range(STEPS)]
        close(rows[mode, tau]["staleness_mean_steps"], np.mean(missed))
        assert int(rows[mode, tau]["staleness_max_steps"]) == max(missed)


def test_what_threads_did_stays_within_the_bound(ran):
    threads = raw_runs(ran[0], prefix="threads-")
    rows = read_csv(ran[0] / "demo.csv")
    assert {(mode, tau) for mode, tau, _ in threads} == set(SETTINGS)
    for row in rows:
        assert 0 <= int(row["concurrent_staleness_max_steps"]) <= int(row["tau"])
        mean = float(row["concurrent_staleness_mean_steps"])
        assert 0 <= mean <= int(row["concurrent_staleness_max_steps"])


def test_no_column_compares_speeds(ran):
    assert not any("samples_per_s" in name for name in read_csv(ran[0] / "demo.csv")[0])
    assert "samples/s" not in ran[1]


def test_the_printed_table_says_the_same_in_thousandths(ran):
    rows = {(r["mode"], r["tau"]): r for r in read_csv(ran[0] / "demo.csv")}
    for mode, tau in SETTINGS[1:]:
        (line,) = re.findall(rf"^{mode} +{tau} .*$", ran[1], re.MULTILINE)
        row = rows[mode, tau]
        gap, half = 1e3 * float(row["gap_to_sync"]), 1e3 * float(row["gap_to_sync_half_width_95"])
        assert f"{float(row['test_auc']):.4f}  " in line
        assert f"{gap:+.2f} ± {half:.2f}" in line
        assert f"{float(row['log_loss']):.4f}" in line


def test_the_footnote_compares_sync_with_hybrid_tau_64_by_delong(ran):
    runs = raw_runs(ran[0])
    one, other = runs["sync", "0", 0], runs["hybrid", "64", 0]
    found = delong(one.labels[:, 0], one.predictions[:, 0], other.predictions[:, 0])
    gap = 1e3 * (other.auc() - one.auc())
    assert f"difference {gap:+.2f}e-3" in ran[1]
    assert f"standard error {1e3 * found.difference_standard_error:.2f}e-3" in ran[1]
    assert f"set of {len(one.labels):,} rows" in ran[1]
    assert "2,000 rows" in ran[1], "a quick look does not evaluate the whole test part"
    assert "p = 0.00" not in ran[1]


@pytest.mark.parametrize(
    ("p", "said"), [(0.0099, "p < 0.01"), (0.012, "p = 0.01"), (0.5, "p = 0.50")]
)
def test_a_small_p_is_told_as_a_bound(p, said):
    assert demo._p(p) == said


def test_curves_are_the_lines_of_the_metrics(ran):
    runs, lines = raw_runs(ran[0]), read_csv(ran[0] / "demo_curves.csv")
    for key, run in runs.items():
        own = [r for r in lines if (r["mode"], r["tau"], int(r["seed"])) == key]
        want = run.lines()
        assert [(int(r["samples"]), r["drained"]) for r in own] == [
            (line["samples"], str(line["drained"])) for line in want
        ]
        assert [float(r["auc"]) for r in own] == [line["tasks"]["click"]["auc"] for line in want]
        close(own[-1]["auc"], run.auc())
        close(own[-1]["log_loss"], run.log_loss())
        assert int(own[-1]["samples"]) == STEPS * demo.BATCH


def test_the_figure_is_of_this_table(ran):
    from paper_figs.demo import demo_figure

    figure = demo_figure(ran[0] / "demo.csv", ran[0] / "demo_curves.csv")
    left, right = figure.axes
    rows = read_csv(ran[0] / "demo.csv")[1:]
    assert error_bars(left)[0][2] == pytest.approx([1e3 * float(r["gap_to_sync"]) for r in rows])
    assert list(curves(right)) == [f"{mode} τ={tau}" for mode, tau in SETTINGS[1:]]
    plt.close(figure)
    assert plt.imread(ran[0] / "demo.png").std() > 0.01
