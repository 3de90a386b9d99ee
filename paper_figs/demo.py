"""The AUC gap to sync: rows late alone, dense weights late alone, both, also at an own rate."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, of_tables


@of_tables
def demo_figure(rows: pd.DataFrame) -> Figure:
    """A dot per setting with its 95 % interval, of the first task of the table.

    Settings stand under what is late in them; an open dot has a dense rate of its own.
    """
    task, data, seeds = rows.task.iloc[0], rows.data.iloc[0], rows.seeds.max()
    rows = rows[rows.task == task].reset_index(drop=True)
    shared = rows.lr.iloc[0]
    rows = rows[rows["mode"] != "sync"]
    figure, axes = plt.subplots(figsize=(7.0, 3.3), layout="constrained")
    labels = _draw(axes, rows, shared)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks([place for place, _ in labels], [name for _, name in labels])
    for tick in axes.get_yticklabels():
        tick.set_fontweight("normal" if "rate" in tick.get_text() else "bold")
    axes.set_ylim(labels[-1][0] + 0.7, -0.7)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(GAP_LABEL)
    figure.suptitle(
        f"Test AUC ({task}, {data}) minus that of sync: means of {seeds} paired seeds, 95 %"
        " over seeds and test rows.\nUpdates that rows / dense weights miss; filled: sync's"
        " dense rate, open: a rate of its own",
        fontsize=8,
    )
    return figure


def what_is_late(rows_late: float, dense_late: float) -> str:
    """The heading that a setting stands under."""
    if rows_late and dense_late:
        return "both late (async)"
    return "rows late alone" if rows_late else "dense weights late alone"


def _draw(axes: Axes, rows: pd.DataFrame, shared: float) -> list[tuple[float, str]]:
    """The dots; returns the tick labels with their heights."""
    labels: list[tuple[float, str]] = []
    heading, at = "", -1.0
    for row in rows.itertuples():
        if heading != (heading := what_is_late(row.rows_late, row.dense_late)):
            at += 1
            labels.append((at, heading))
        at += 1
        own = not np.isclose(row.lr, shared)
        labels.append((at, f"{row.rows_late:g} / {row.dense_late:g}, rate {row.lr:g}"))
        axes.errorbar(
            1e3 * row.gap_to_sync,
            at,
            xerr=1e3 * row.gap_to_sync_half_width_95,
            fmt="o",
            color="black",
            markerfacecolor="white" if own else "black",
            capsize=3,
        )
    return labels
