"""AUC against simulated seconds and against samples, and seconds to each target, for each mode."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, of_tables


@of_tables
def time_to_auc_figure(rows: pd.DataFrame, ends: pd.DataFrame) -> Figure:
    """Left: what a person waiting for the cluster sees. Middle: what a sample teaches.

    Right: the wait for each target with its 95 % interval; an arrow where a seed never reaches it.
    """
    rows = rows[rows.task == rows.task.iloc[0]]
    modes = list(dict.fromkeys(rows["mode"]))
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.8), layout="constrained")
    axes[1].sharey(axes[0])
    for ax, column, unit, label in (
        (axes[0], "simulated_s", 1.0, f"simulated time on {rows.cluster.iloc[0]} [s]"),
        (axes[1], "samples", 1e3, "training samples [thousands]"),
    ):
        for number, mode in enumerate(modes):
            curves = rows[rows["mode"] == mode].groupby(column).auc
            x = curves.mean().index.to_numpy() / unit
            (line,) = ax.plot(x, curves.mean(), marker=MARKERS[number], label=mode)
            ax.fill_between(x, curves.min(), curves.max(), alpha=0.15, color=line.get_color())
        ax.set_xlabel(label)
    axes[0].set_ylabel("test AUC")
    axes[0].legend()
    _waits(axes[2], ends, modes)
    figure.suptitle(
        "True gradients in the simulated order of reads and writes; bands: range, bars: 95 % t"
        f" interval, over {rows.seed.nunique()} seeds",
        fontsize=8,
    )
    return figure


def _waits(axes: Axes, ends: pd.DataFrame, modes: list[str]) -> None:
    shares = sorted(set(ends.target_share))
    for number, mode in enumerate(modes):
        own = ends[ends["mode"] == mode].sort_values("target_share")
        place = np.searchsorted(shares, own.target_share) + 0.15 * (number - (len(modes) - 1) / 2)
        whole = (own.reached == own.seeds).to_numpy()
        drawn = axes.errorbar(
            place[whole], own.seconds[whole], yerr=own.seconds_half_width_95[whole],
            fmt=MARKERS[number], capsize=2, label=mode,
        )  # fmt: skip
        if not whole.all():
            axes.plot(
                place[~whole], own.not_before_s[~whole], marker="^", linestyle="none",
                fillstyle="none", color=drawn.lines[0].get_color(), label=f"{mode}: not reached by",
            )  # fmt: skip
    aucs = [ends.target_auc[ends.target_share == share].iloc[0] for share in shares]
    labels = [f"{share:.0%}\n{auc:.4f}" for share, auc in zip(shares, aucs, strict=True)]
    axes.set_xticks(range(len(shares)), labels)
    axes.set_xlabel("share of sync's climb, AUC")
    axes.set_ylabel("simulated time to it [s]")
    axes.set_ylim(bottom=0)
