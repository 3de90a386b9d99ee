"""The gap against the bound, and along the run, for a fast- and a slow-starting row optimiser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.gap import MARKERS, STYLE, save

__all__ = ["gap_against_tau_figure", "save"]


def gap_against_tau_figure(table: Path, curves: Path) -> Figure:
    """Left: final gap per tau, a line per optimiser. Then the gap along the run of each."""
    rows, lines = pd.read_csv(table), pd.read_csv(curves)
    starts = list(dict.fromkeys(rows.row_optimizer))
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, 1 + len(starts), figsize=(7.0, 2.7), layout="constrained")
        _final(axes[0], rows, starts)
        for ax, start in zip(axes[1:], starts, strict=True):
            seeds = _along(ax, lines[lines.row_optimizer == start])
            ax.set_title(f"{start}: along the run")
            ax.sharey(axes[1])
        figure.suptitle(
            "Test AUC of hybrid minus that of sync, synthetic stream; bars and bands: 95 % t"
            f" interval over {seeds} paired seeds",
            fontsize=8,
        )
    return figure


def _final(axes: Axes, rows: pd.DataFrame, starts: list[str]) -> None:
    axes.axhline(0, color="black", linewidth=0.8)
    for number, start in enumerate(starts):
        mine = rows[(rows.row_optimizer == start) & (rows["mode"] != "sync")]
        axes.errorbar(
            np.log2(mine.tau) + 0.15 * number,
            1e3 * mine.gap_to_sync,
            yerr=1e3 * mine.gap_to_sync_half_width_95,
            marker=MARKERS[number],
            linestyle=("-", "--")[number % 2],
            capsize=3,
            label=start,
        )
    taus = sorted(set(rows.tau) - {0})
    axes.set_xticks(np.log2(taus), [str(int(t)) for t in taus])
    axes.set_xlabel("bound τ [steps]")
    axes.set_ylabel("AUC gap to sync [$10^{-3}$]")
    axes.set_title("at the end of the run")
    axes.legend()


def _along(axes: Axes, lines: pd.DataFrame) -> int:
    """Returns the number of seeds."""
    from scipy.stats import t

    lines = lines[~lines.drained]
    wide = lines.pivot(index=["mode", "tau", "seed"], columns="samples", values="auc")
    seeds = lines.seed.nunique()
    axes.axhline(0, color="black", linewidth=0.8)
    for number, tau in enumerate(sorted(set(lines.tau) - {0})):
        gap = 1e3 * (wide.loc[("hybrid", tau)] - wide.loc[("sync", 0)])
        mean, half = gap.mean(), t.ppf(0.975, max(1, seeds - 1)) * gap.std() / np.sqrt(seeds)
        samples = mean.index.to_numpy() / 1e6
        (line,) = axes.plot(samples, mean, marker=MARKERS[number], label=f"τ={tau}")
        axes.fill_between(samples, mean - half, mean + half, alpha=0.15, color=line.get_color())
    axes.set_xlabel("training samples [millions]")
    axes.legend(ncols=2)
    return seeds
