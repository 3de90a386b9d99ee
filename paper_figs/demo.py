"""The AUC gap to sync: at the end per bound, and along the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, STYLE, SYNC, gaps_along


def demo_figure(table: Path, curves: Path) -> Figure:
    """Left: mean gap per setting with its 95 % interval. Right: the gap along the run.

    Of the first task of the table; the title names it and the data.
    """
    rows, lines = pd.read_csv(table), pd.read_csv(curves)
    task, data = rows.task.iloc[0], rows.data.iloc[0]
    rows, lines = rows[rows.task == task], lines[lines.task == task]
    settings = dict.fromkeys(zip(lines["mode"], lines.tau, strict=True))
    labels = {(m, tau): f"{m} τ={tau:g}" for m, tau in settings if (m, tau) != SYNC}
    with plt.style.context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.0, 2.9), layout="constrained")
        _ends(left, rows[rows["mode"] != "sync"])
        seeds = gaps_along(right, lines, labels, unit=1e3)
        right.set_xlabel("training samples [thousands]")
        right.set_title("along the run (snapshots, not drained)")
        figure.suptitle(
            f"Test AUC ({task}, {data}) minus that of sync; bars and bands: 95 % t interval over"
            f" {seeds} paired seeds",
            fontsize=8,
        )
    return figure


def _ends(axes: Axes, rows: pd.DataFrame) -> None:
    places = np.arange(len(rows))
    labels = [f"{mode}\nτ={tau:g}" for mode, tau in zip(rows["mode"], rows.tau, strict=True)]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.errorbar(
        places,
        1e3 * rows.gap_to_sync,
        yerr=1e3 * rows.gap_to_sync_half_width_95,
        fmt="o",
        color="black",
        capsize=3,
    )
    axes.set_xticks(places, labels)
    axes.set_ylabel(GAP_LABEL)
    axes.set_title("at the end of the run, all pushes applied")
