"""What a drawn figure shows, read back from its axes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def error_bars(axes: Axes) -> list[tuple[str, list[float], list[float], list[tuple[float, float]]]]:
    """Of each errorbar: label, x, y, and (low, high) of each bar along y."""
    found = []
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer):
            line, _, (bars,) = container.lines
            ends = [(s[0][1], s[1][1]) for s in bars.get_segments()]
            label = str(container.get_label())
            found.append((label, list(line.get_xdata()), list(line.get_ydata()), ends))
    return found


def intervals(axes: Axes) -> list[tuple[float, float, float]]:
    """(low, middle, high) of every error bar along x or y, sorted."""
    found = []
    for container in (c for c in axes.containers if isinstance(c, ErrorbarContainer)):
        along = 0 if container.has_xerr else 1
        line, _, (lines,) = container.lines
        middles = (line.get_xdata(), line.get_ydata())[along]
        ends = [(s[0][along], s[1][along]) for s in lines.get_segments()]
        found += [(low, float(at), high) for at, (low, high) in zip(middles, ends, strict=True)]
    return sorted(found)


def reference_lines(axes: Axes) -> dict[str, list[float]]:
    """Values of the lines that cross the whole panel: those at a y, and those at an x; sorted."""
    found: dict[str, list[float]] = {"y": [], "x": []}
    for line in axes.lines:
        in_data = line.get_transform().contains_branch_seperately(axes.transData)
        if in_data == (False, True):
            found["y"].append(line.get_ydata()[0])
        elif in_data == (True, False):
            found["x"].append(line.get_xdata()[0])
    return {which: sorted(values) for which, values in found.items()}


def intervals_of(
    rows: Sequence[Mapping[str, str]], column: str, half: str, unit: float = 1.0
) -> list[Any]:
    """What `intervals` is to find of these rows of a table."""
    told = [(unit * float(row[column]), unit * float(row[half])) for row in rows]
    return [pytest.approx(one) for one in sorted((m - h, m, m + h) for m, h in told)]


def bars(axes: Axes) -> tuple[list[float], list[tuple[float, float]]]:
    """Lengths of horizontal bars and the (low, high) of their errors along x."""
    (container,) = [c for c in axes.containers if isinstance(c, BarContainer)]
    lengths = [patch.get_width() for patch in container.patches]
    assert container.errorbar is not None
    (lines,) = container.errorbar.lines[2]
    return lengths, [(s[0][0], s[1][0]) for s in lines.get_segments()]


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> x, y of the labelled lines."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }


def tick_labels(axes: Axes, which: str = "x") -> list[str]:
    axis = axes.xaxis if which == "x" else axes.yaxis
    return [text.get_text() for text in axis.get_majorticklabels()]
