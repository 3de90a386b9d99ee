"""The demo, tiny and on the synthetic stream: its table recomputed from the run folders."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from experiments.paper.record import STORED
from experiments.studies import demo, tune
from persia_sim.base.command_line import read_options
from runtime.config import TrainConfig
from tests.experiments.raw_runs import RawRun, check_gap_line, printed_by, raw_runs, read_csv

pytestmark = [pytest.mark.multiproc, pytest.mark.long]  # its runs are made once, for all tests
STEPS = 10


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
        return out, printed_by(demo.run, options)


def trained(out: Path, setting: demo.ModeAtRate) -> list[RawRun]:
    found = raw_runs(out, prefix=f"{setting.label}-")
    return [found[str(setting.sync.mode), str(setting.sync.window), seed] for seed in (0, 1)]


@pytest.mark.long
def test_without_real_data_it_says_that_it_is_synthetic_and_a_second_run_trains_nothing(ran):
    assert "no real data found: using the synthetic stream" in ran[1]
    assert "(18 done, 0 to run)" in ran[1]


def test_every_figure_of_the_table_follows_from_the_predictions(ran):
    rows = read_csv(ran[0] / "demo.csv")
    assert {(r["data"], r["ranks"], r["task"]) for r in rows} == {("synthetic", "8", "click")}
    sync = trained(ran[0], demo.SETTINGS[0])
    for row, setting in zip(rows, demo.SETTINGS, strict=True):
        check_gap_line(row, trained(ran[0], setting), sync)
        assert float(row["lr"]) == setting.lr


def test_a_seed_of_the_synthetic_stream_has_test_rows_of_its_own(ran):
    one, other = trained(ran[0], demo.SETTINGS[0])
    assert (one.labels != other.labels).any()
    assert {r["rows_error"] for r in read_csv(ran[0] / "demo.csv")[1:]} == {"0.0"}


def test_rows_and_dense_weights_are_late_alone_and_together_as_in_async(ran):
    late = [(r["mode"], int(r["rows_late"]), int(r["dense_late"])) for r in
            read_csv(ran[0] / "demo.csv")]  # fmt: skip
    assert late == [
        ("sync", 0, 0), ("hybrid", 4, 0), ("hybrid", 7, 0), ("hybrid", 16, 0), ("hybrid", 64, 0),
        ("hybrid", 0, 7), ("async", 7, 7), ("async", 7, 7), ("async", 39, 7),
    ]  # fmt: skip


def test_the_rate_of_async_is_what_the_stored_tuning_chose():
    words = shlex.split(demo.TUNING)
    assert words[:2] == ["persia-experiments", "tune"]
    typed = read_options(tune.Options, words[2:], "")
    assert typed.start.evaluation.eval_split == "validation"

    # The rule around the demo's rates of sync, for each bound.
    stored = {int(line["tau"]): line for line in read_csv(STORED / "tune.csv")}
    assert set(stored) == set(typed.taus) == set(demo.RATE_OF_ASYNC)
    for tau, line in stored.items():
        assert float(line["dense_lr"]) == demo.RATE_OF_ASYNC[tau]
        assert float(line["row_lr"]) == TrainConfig().rows.optimizer.lr
    tried = read_csv(STORED / "tune_tried.csv")
    of_sync = [(float(t["row_lr"]), float(t["dense_lr"])) for t in tried if t["mode"] == "sync"]
    assert of_sync == [(TrainConfig().rows.optimizer.lr, demo.SYNC_RATE)]


def test_no_column_compares_speeds(ran):
    assert not any("samples_per_s" in name for name in read_csv(ran[0] / "demo.csv")[0])
    assert "samples/s" not in ran[1]


def test_the_printed_table_says_the_same_in_thousandths(ran):
    lines = [line for line in ran[1].splitlines() if line.startswith(("hybrid ", "async "))]
    for line, row in zip(lines, read_csv(ran[0] / "demo.csv")[1:], strict=True):
        gap, half = 1e3 * float(row["gap_to_sync"]), 1e3 * float(row["gap_to_sync_half_width_95"])
        assert line.split()[:4] == [row["mode"], row["tau"], row["rows_late"], row["dense_late"]]
        assert f"{float(row['test_auc']):.4f}  " in line
        assert f"{gap:+.2f} ± {half:.2f}" in line
        assert f"{float(row['log_loss']):.4f}" in line


def test_the_figure_is_of_this_table(ran):
    from paper_figs.auc import demo_figure

    figure = demo_figure(ran[0] / "demo.csv")
    (axes,) = figure.axes
    rows = read_csv(ran[0] / "demo.csv")[1:]
    drawn = [dot.lines[0].get_xdata()[0] for dot in axes.containers]
    assert drawn == pytest.approx([1e3 * float(r["gap_to_sync"]) for r in rows])
    plt.close(figure)
    assert plt.imread(ran[0] / "demo.png").std() > 0.01
