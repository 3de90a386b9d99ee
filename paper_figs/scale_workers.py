"""Throughput against GPUs: published points and the simulator's lines."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, legend_below, of_tables

SETS = ("taobao-ad", "avazu-ad", "criteo-ad", "kwai-video")


COLOURS = {
    "Persia hybrid": 1,
    "hybrid": 1,
    "PaddlePaddle heter": 2,
    "XDL async": 3,
    "async": 3,
    "XDL sync": 6,
    "sync": 6,
}


@of_tables
def scale_workers_figure(rows: pd.DataFrame) -> Figure:
    """One panel a data set, one colour a system and mode: open markers are published, lines are
    the model (full where a constant was fitted to the series, dashed where none was)."""
    # The bars of one GPU without all-reduce are another experiment than the scaling series.
    rows = rows[~rows.note.fillna("").str.contains("all-reduce")]
    figure, axes = plt.subplots(1, 4, figsize=(7.2, 2.7), layout="constrained")
    for ax, name in zip(axes, SETS, strict=True):
        _panel(ax, rows[rows.series.str.startswith(name)], name)
    axes[0].set_ylabel("thousand samples per second")
    legend_below(figure, axes[0], ncols=4)
    axes[3].legend(loc="lower right")
    figure.suptitle(
        "lines: simulator (full: constants fitted to the series, dashed: prediction);"
        " open markers: published; axes logarithmic",
        fontsize=8,
    )
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    for series, points in rows.groupby("series", sort=False):
        points = points.sort_values("gpus")
        style = "-" if (points.kind == "fit").any() else "--"
        label = str(series).removeprefix(f"{name} ")
        number = COLOURS[label]
        colour = to_hex(f"C{number}")  # now: the cycle of the style ends with its context
        ax.plot(points.gpus, points.model / 1e3, style, color=colour, label=label)
        ax.plot(points.gpus, points.published / 1e3, MARKERS[number], color=colour, mfc="none")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(rows.gpus.unique()), [str(g) for g in sorted(rows.gpus.unique())])
    ax.set_xlabel("GPUs")
    ax.set_title(name if rows.published.notna().any() else f"{name} (prediction)")
