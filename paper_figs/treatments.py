"""What each treatment of late rows gives back, as dots with intervals: a row per treatment."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, gap_dots, of_tables, show_ticks

NAMES = {
    "untreated": "untreated",
    "sync_steps": "synchronous start ({sync_steps:g} steps)",
    "dense_lag": "dense update {dense_lag:g} late, too",
    "delay_compensation": "delay compensation (λ = {delay_compensation:g})",
    "lr_by_staleness": "row rate / steps missed",
}


@of_tables
def treatments_figure(rows: pd.DataFrame) -> Figure:
    """Left: gap to sync. Right: gap to the same setting untreated. Of the first task of the table.

    A base's rows stand together under its name; dots are means, bars 95 % t intervals. Gaps span
    two orders of magnitude: linear within a thousandth of AUC, logarithmic beyond.
    """
    task, data, seeds = rows.task.iloc[0], rows.data.iloc[0], rows.seeds.max()
    rows = rows[(rows.task == task) & (rows.base != "sync")].reset_index(drop=True)
    labels, places = _places(rows)
    height = 1.0 + 0.19 * len(labels)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(7.0, height), layout="constrained", sharey=True
    )
    _dots(left, places, rows, "gap_to_sync")
    treated = rows.gap_to_untreated.notna().to_numpy()
    _dots(right, places[treated], rows[treated], "gap_to_untreated")
    left.set_yticks([place for place, _ in labels], [name for _, name in labels])
    for tick in left.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in set(rows.base) else "normal")
    left.set_ylim(max(places) + 0.8, -0.8)
    left.set_xlabel(GAP_LABEL)
    right.set_xlabel("AUC gap to untreated [$10^{-3}$]")
    figure.suptitle(
        f"Test AUC ({task}, {data}): dots are means over {seeds} paired seeds, bars 95 %"
        " intervals;\naxes linear within a thousandth of AUC, logarithmic beyond",
        fontsize=8,
    )
    return figure


def _places(rows: pd.DataFrame) -> tuple[list[tuple[float, str]], np.ndarray]:
    """Tick labels with their heights, a heading a base; and the height of each row."""
    labels: list[tuple[float, str]] = []
    places, at, base = [], -1.0, ""
    for row in rows.itertuples():
        if row.base != base:
            base, at = row.base, at + 1.0
            labels.append((at, base))
        at += 1.0
        places.append(at)
        labels.append((at, NAMES.get(row.treatment, row.treatment).format(**row._asdict())))
    return labels, np.array(places)


def _dots(axes: Axes, places: np.ndarray, rows: pd.DataFrame, name: str) -> None:
    gap_dots(axes, rows, places, name)
    axes.set_xscale("symlog", linthresh=1, linscale=1)
    show_ticks(axes, "x")
