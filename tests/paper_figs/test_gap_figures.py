"""The figures of AUC gaps, drawn from small tables and read back from their axes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from paper_figs import figure_of
from paper_figs.auc import sweep_figure
from paper_figs.style import as_png, look_of
from tests.paper_figs.read_back import write_table


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


def test_a_saved_figure_is_a_picture_in_the_styles_resolution_and_is_freed(tmp_path):
    figure = sweep(tmp_path)
    (tmp_path / "demo.png").write_bytes(as_png(figure))
    assert plt.imread(tmp_path / "demo.png").shape[1] > 500
    assert not plt.fignum_exists(figure.number)
