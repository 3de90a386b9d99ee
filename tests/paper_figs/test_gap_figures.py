"""The figures of AUC gaps, drawn from small tables and read back from their axes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from paper_figs import figure_of
from paper_figs.auc import sweep_figure, time_to_auc_figure
from paper_figs.style import as_png, look_of
from tests.paper_figs.read_back import bands, curves, error_bars, legend, tick_labels, write_table


def test_a_table_without_a_figure_is_named():
    with pytest.raises(LookupError, match="nothing_figure"):
        figure_of("nothing")


def end(
    line: str, versus: str, gap: float, half: float, mode: str = "hybrid", task: str = "click"
) -> dict[str, object]:
    return {
        "data": "clicks", "group": "", "line": line, "mode": mode, "task": task, "seeds": 3,
        "versus": versus, "gap": gap, "gap_half_width_95": half,
    }  # fmt: skip


def sweep(tmp_path: Path, last: float = 0.003):
    rows = [
        end("sync", "", math.nan, math.nan, "sync"),
        end("hybrid", "sync", -0.0015, 0.0005),
        end("async", "sync", 0.002, 0.004, "async"),
        end("weighed", "async", last, 0.001),
        end("hybrid", "sync", 9.0, 9.0, task="like"),
    ]
    return sweep_figure(write_table(tmp_path / "demo.csv", rows))


def test_a_study_shows_each_lines_gap_under_what_it_is_held_against(tmp_path):
    figure = sweep(tmp_path)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [
        "minus sync", "hybrid", "async", "minus async", "weighed",
    ]  # fmt: skip
    dots = [container.lines[0] for container in axes.containers]
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx([-1.5, 2.0, 3.0])
    assert [dot.get_ydata()[0] for dot in dots] == [1, 2, 4]
    looks = [look_of(mode) for mode in ("hybrid", "async", "hybrid")]
    assert [dot.get_color() for dot in dots] == [look.color for look in looks]
    ends = [[path.vertices[:, 0].tolist() for path in c.lines[2][0].get_paths()] for c in
            axes.containers]  # fmt: skip
    assert ends[0][0] == pytest.approx([-2.0, -1.0]) and ends[1][0] == pytest.approx([-2.0, 6.0])
    told = figure.get_suptitle()
    assert "click, clicks" in told and "3 paired seeds" in told
    assert axes.get_xscale() == "linear"
    assert sweep(tmp_path, last=0.03).axes[0].get_xscale() == "symlog"


def test_time_to_auc_puts_the_same_aucs_on_seconds_and_on_samples(tmp_path):
    rows = []
    for mode, seconds in (("sync", (1.0, 2.0)), ("hybrid", (0.4, 0.9))):
        for number, (samples, at) in enumerate(zip((1000, 2000), seconds, strict=True)):
            for seed, offset in enumerate((-0.01, 0.0, 0.04)):
                auc = (0.6 if mode == "sync" else 0.5) + 0.1 * number + offset
                own = {"cluster": "moon", "mode": mode, "seed": seed, "samples": samples,
                       "drained": False, "task": "click", "auc": auc,
                       "simulated_s": at}  # fmt: skip
                late = [{**own, "auc": 0.2}] if number else []  # the same instant, not drained yet
                rows += [*late, {**own, "drained": bool(number)}]
    rows.append({**rows[0], "task": "like", "auc": 0.99, "simulated_s": 50.0})
    ends = [
        {"mode": mode, "target_share": share, "target_auc": 0.5 + share / 10, "seeds": 3,
         "reached": reached, "seconds": seconds, "seconds_half_width_95": 0.25,
         "not_before_s": watched}
        for mode, share, reached, seconds, watched in (
            ("sync", 0.9, 3, 1.5, ""), ("hybrid", 0.9, 3, 0.5, ""),
            ("sync", 0.95, 3, 1.75, ""), ("hybrid", 0.95, 2, "", 0.9),
        )
    ]  # fmt: skip
    figure = time_to_auc_figure(
        write_table(tmp_path / "time_to_auc.csv", rows),
        write_table(tmp_path / "time_to_auc_targets.csv", ends),
    )
    left, right, waits = figure.axes
    (_, x, seconds, ends_of), hybrid = error_bars(waits)
    assert x == pytest.approx([-0.075, 0.925]) and seconds == [1.5, 1.75]
    assert ends_of == [(1.25, 1.75), (1.5, 2.0)]
    assert hybrid[1:3] == ([pytest.approx(0.075)], [0.5])
    (watched,) = [y for label, (_, y) in curves(waits).items() if "not reached" in label]
    assert watched == [0.9]
    assert tick_labels(waits) == ["90%\n0.5900", "95%\n0.5950"]
    assert curves(left)["sync"] == ([1.0, 2.0], pytest.approx([0.61, 0.71]))
    assert curves(left)["hybrid"] == ([0.4, 0.9], pytest.approx([0.51, 0.61]))
    assert curves(right)["hybrid"] == ([1.0, 2.0], pytest.approx([0.51, 0.61]))
    assert bands(left)[0][2.0] == pytest.approx((0.69, 0.74))
    assert bands(right)[1][1.0] == pytest.approx((0.49, 0.54))
    assert left.get_xlabel() == "simulated time on moon [s]"
    assert right.get_xlabel() == "training samples [thousands]"
    assert left.get_ylabel() == "test AUC" and legend(left) == ["sync", "hybrid"]
    assert "bands: range, bars: 95 % t interval, over 3 seeds" in figure.get_suptitle()


def test_a_saved_figure_is_a_picture_in_the_styles_resolution_and_is_freed(tmp_path):
    figure = sweep(tmp_path)
    (tmp_path / "demo.png").write_bytes(as_png(figure))
    assert plt.imread(tmp_path / "demo.png").shape[1] > 500
    assert not plt.fignum_exists(figure.number)
