"""Figures of simulated clusters: what their axes show is what stands in their tables."""

from __future__ import annotations

import math

import pytest

from paper_figs.clusters import (
    ablation_figure,
    modes_timeline_figure,
    which_mode_figure,
)
from paper_figs.throughput import predict_published_figure
from tests.paper_figs.read_back import bars, tick_labels, write_table


def test_a_timeline_has_a_panel_a_mode(tmp_path):
    rows = [
        {
            "system": "moon", "mode": mode, "step": step, "stage": stage,
            "start_s": start, "end_s": start + 0.002, "mean_step_s": 0.004,
        }
        for mode in ("hybrid", "sync", "raw_hybrid")
        for step in (3, 4)
        for stage, start in (("lookup", 0.001 * step), ("forward", 0.01 * step))
    ]  # fmt: skip
    figure = modes_timeline_figure(write_table(tmp_path / "modes_timeline.csv", rows))
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["sync: 4 ms a step", "hybrid: 4 ms a step"]
    panel = figure.axes[0]
    drawn = [(p.get_x(), p.get_width()) for p in panel.patches]
    assert len(drawn) == 4
    assert all(width == pytest.approx(2.0) for _, width in drawn), "milliseconds"
    heights = sorted({round(p.get_height(), 6) for p in panel.patches})
    assert heights == [0.45, 0.9], "lookups of 3 and 4 overlap, forwards do not"
    assert figure.axes[1].get_xlabel() == "time on moon [ms]"
    assert tick_labels(panel, "y") == ["lookup", "compute", "dense", "push"]
    assert panel.yaxis_inverted(), "a batch goes from the top downwards"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["lookup", "forward"]


def test_an_ablation_shows_shares_with_their_intervals(tmp_path):
    rows = [
        {
            "where": "moon, 8 GPUs", "variant": variant, "value": value, "difference": difference,
            "difference_half_width_95": half, "binds": "GPU",
        }
        for variant, value, difference, half in (
            ("all on", 2e5, 0.0, 0.0), ("no window", 1e5, -0.5, 0.01)
        )
    ]  # fmt: skip
    (rates,) = ablation_figure(write_table(tmp_path / "ablation.csv", rows)).axes
    lengths, ends = bars(rates)
    assert lengths == pytest.approx([1.0, 0.5]) and ends[1] == pytest.approx((0.49, 0.51))
    assert tick_labels(rates, "y") == ["all on", "no window"]
    assert rates.get_title() == "moon, 8 GPUs\n1: 200 k samples/s"


def test_predictions_lie_over_measurements_and_rows_without_one_are_left_out(tmp_path):
    def row(framework, accelerator, measured, predicted):
        error = "" if measured == "" else math.log(measured / predicted)
        return {
            "framework": framework, "accelerator": accelerator, "measured_step_ms": measured,
            "predicted_step_ms": predicted, "predicted_samples_per_s": 1e5, "high_90": 1.3e5,
            "ln_error": error,
        }  # fmt: skip

    rows = [
        row("torchrec", "A100-SXM4-40GB", 10.0, 8.0), row("hugectr", "H100-SXM5-80GB", 2.0, 3.0),
        row("hugectr", "V100-SXM2-16GB", 4.0, 4.0), row("torchrec", "A100-SXM4-40GB", "", 9.0),
    ]  # fmt: skip
    figure = predict_published_figure(write_table(tmp_path / "predict_published.csv", rows))
    steps, errors = figure.axes
    points = {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0])
        for line in steps.lines
        if not str(line.get_label()).startswith("_")
    }
    assert points == {"A100": (10.0, 8.0), "H100 / H200": (2.0, 3.0), "V100": (4.0, 4.0)}
    assert steps.get_xscale() == steps.get_yscale() == "log"
    assert tick_labels(errors, "y") == ["hugectr (2)", "torchrec (1)"], "the closest first"
    assert "3 published points" in figure.get_suptitle()


def test_which_mode_has_the_times_of_sync_and_the_gaps_of_each_window(tmp_path):
    """Each bar has its range in words. The test part of a stream first, then the windows
    before it, the newest first. Other rates, tasks and lateness have no dot."""
    ranges = {
        "sync": (1.0, 1.0, 1.0), "hybrid, tau 8": (8.0, 9.0, 10.0),
        "hybrid, tau 4": (2.0, 3.0, 6.0), "hybrid, tau 16": (2.0, 4.5, 6.5),
    }  # fmt: skip
    rows = [
        {"cluster": "my/moon.toml", "mode": mode, "times_sync": times, "times_sync_low": low,
         "times_sync_high": high}
        for mode, (low, times, high) in ranges.items()
    ]  # fmt: skip
    known = {
        ("time", "origin-1"): 0.004, ("time", "origin-2"): -0.009, ("time", "test"): -0.021,
        ("shuffled", "test"): -0.001,
    }  # fmt: skip
    plain = {
        "data": "tennis", "task": "won", "rates": "of sync", "redrawn": False,
        "optimizer_start": 0.0, "rows_late": 16, "dense_late": 0,
        "gap_to_sync_half_width_95": 0.002,
    }  # fmt: skip
    gaps = [
        plain | {"order": order, "window": window, "gap_to_sync": gap}
        for (order, window), gap in known.items()
    ]
    of_test = plain | {"order": "time", "window": "test", "gap_to_sync": 0.5}
    others = {"task": "other", "rates": "own", "redrawn": True, "rows_late": 7, "dense_late": 7}
    gaps += [of_test | {name: value} for name, value in others.items()]
    tables = write_table(tmp_path / "a.csv", rows), write_table(tmp_path / "b.csv", gaps)
    left, right = which_mode_figure(*tables).axes
    assert [bar.get_width() for bar in left.patches] == [1.0, 3.0, 4.5]
    assert [text.get_text() for text in left.texts] == [" 1", " 2.0 to 6.0", " 2.0 to 6.5"]
    ends = [path.vertices[:, 0].tolist() for bar in left.collections for path in bar.get_paths()]
    assert ends == [[1.0, 1.0], [2.0, 6.0], [2.0, 6.5]]
    assert tick_labels(left, "y") == ["moon.toml"] and left.get_xlim()[0] == 0
    drawn = [line.get_xdata().tolist() for line in right.lines if line.get_marker() in "os"]
    assert drawn == [pytest.approx([-21.0, -9.0, 4.0]), pytest.approx([-1.0])]
    (alone,) = which_mode_figure(tables[0]).axes
    assert [bar.get_width() for bar in alone.patches] == [1.0, 3.0, 4.5]
