"""The gap against the bound, and along the run, for a fast- and a slow-starting row optimiser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, MARKERS, STYLE, gaps_along


def synthetic_gap_figure(table: Path, curves: Path) -> Figure:
    """Left: final gap per tau, a line per optimiser. Then the gap along the run of each."""
    rows, lines = pd.read_csv(table), pd.read_csv(curves)
    starts = list(dict.fromkeys(rows.row_optimizer))
    taus = sorted(set(lines.tau) - {0})
    labels = {("hybrid", tau): f"τ={tau:g}" for tau in taus}
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, 1 + len(starts), figsize=(7.0, 2.7), layout="constrained")
        _ends(axes[0], rows[rows["mode"] != "sync"], starts)
        for ax, start in zip(axes[1:], starts, strict=True):
            seeds = gaps_along(ax, lines[lines.row_optimizer == start], labels, unit=1e6)
            ax.set_xlabel("training samples [millions]")
            ax.set_title(f"{start}: along the run")
            ax.sharey(axes[1])
        figure.suptitle(
            "Test AUC of hybrid minus that of sync, synthetic stream; bars and bands: 95 % t"
            f" interval over {seeds} paired seeds",
            fontsize=8,
        )
    return figure


def _ends(axes: Axes, rows: pd.DataFrame, starts: list[str]) -> None:
    axes.axhline(0, color="black", linewidth=0.8)
    for number, start in enumerate(starts):
        mine = rows[rows.row_optimizer == start]
        axes.errorbar(
            np.log2(mine.tau) + 0.15 * number,  # side by side, so that bars do not cover each other
            1e3 * mine.gap_to_sync,
            yerr=1e3 * mine.gap_to_sync_half_width_95,
            marker=MARKERS[number],
            linestyle=("-", "--")[number % 2],
            capsize=3,
            label=start,
        )
    taus = sorted(set(rows.tau))
    axes.set_xticks(np.log2(taus), [f"{tau:g}" for tau in taus])
    axes.set_xlabel("bound τ [steps]")
    axes.set_ylabel(GAP_LABEL)
    axes.set_title("at the end of the run")
    axes.legend()
