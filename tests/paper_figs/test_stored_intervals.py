"""Every error bar and reference line of the figures of stored tables is what the table says."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paper_figs.auc import convergence_figure, sweep_figure
from paper_figs.lateness import (
    CASES,
    convergence_bound_figure,
)
from tests.paper_figs.read_back import intervals, intervals_of, reference_lines

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GAP = "gap_to_sync", "gap_to_sync_half_width_95", 1e3  # thousandths of AUC
ZERO = {"y": [0.0], "x": []}


def table(name: str, **values: str) -> list[dict[str, str]]:
    """The rows of a stored table that have these values."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def paths(*names: str) -> list[Path]:
    return [RESULTS / f"{name}.csv" for name in names]


@pytest.mark.parametrize("name", ["demo", "treatments"])
def test_a_study_has_the_intervals_of_its_gaps_against_a_line_at_zero(name):
    rows = table(name)
    rows = [row for row in rows if row["task"] == rows[0]["task"] and row["versus"]]
    order = list(dict.fromkeys(row["versus"] for row in rows))
    rows = sorted(rows, key=lambda row: order.index(row["versus"]))
    (axes,) = sweep_figure(*paths(name)).axes
    assert intervals(axes) == intervals_of(rows, "gap", "gap_half_width_95", 1e3)
    assert reference_lines(axes) == {"y": [], "x": [0.0]}


def test_the_bounds_figure_has_syncs_lines_and_every_measured_interval():
    figure = convergence_bound_figure(*paths("convergence_bound"))
    panels = figure.axes
    longest, largest = (
        max((row[size] for row in table("convergence_bound")), key=float)
        for size in ("updates", "batch")
    )
    assert len(panels) == 2
    of_title = {title: case for case, title in CASES.items()}
    for axes in panels:
        case = of_title[axes.get_title().split(":")[0]]
        rows = table("convergence_bound", case=case, updates=longest, batch=largest)
        late = [row for row in rows if row["mode"] in ("hybrid", "async")]
        assert intervals(axes) == intervals_of(late, "measured", "measured_half_width_95")
        (sync,) = [row for row in rows if row["mode"] == "sync"]
        told = sorted(float(sync[name]) for name in ("bound", "measured", "untrained"))
        assert reference_lines(axes) == {"y": told, "x": []}
        named = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
        assert named["bound, sync"] == float(sync["bound"])
        assert named["measured, sync"] == float(sync["measured"])


def test_convergences_gaps_stand_against_a_line_at_zero():
    names = (f"convergence{end}" for end in ("", "_published", "_targets"))
    axes = convergence_figure(*paths(*names)).axes
    lost, times, *along = axes
    assert reference_lines(lost)["x"] == [0.0]
    assert [reference_lines(one) for one in along] == 4 * [ZERO]
    assert reference_lines(times)["x"] == [1.0]
