"""What a drawn figure shows, read back from its axes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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


def bands(axes: Axes) -> list[dict[float, tuple[float, float]]]:
    """Of each filled band: x -> (low, high), in the order in which they were drawn."""
    found = []
    for band in axes.collections:
        if type(band).__name__ not in ("FillBetweenPolyCollection", "PolyCollection"):
            continue
        corners = band.get_paths()[0].vertices
        found.append(
            {
                x: (min(at := corners[corners[:, 0] == x, 1]), max(at))
                for x in np.unique(corners[:, 0])
            }
        )
    return found


def tick_labels(axes: Axes, which: str = "x") -> list[str]:
    axis = axes.xaxis if which == "x" else axes.yaxis
    return [text.get_text() for text in axis.get_majorticklabels()]


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]
