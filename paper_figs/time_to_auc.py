"""AUC against simulated seconds, and against samples, for each mode."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, STYLE


def time_to_auc_figure(table: Path) -> Figure:
    """Left: what a person waiting for the cluster sees. Right: what a sample teaches."""
    rows = pd.read_csv(table)
    rows = rows[rows.task == rows.task.iloc[0]]
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.8), layout="constrained", sharey=True)
        for ax, column, unit, label in (
            (axes[0], "simulated_s", 1.0, f"simulated time on {rows.cluster.iloc[0]} [s]"),
            (axes[1], "samples", 1e3, "training samples [thousands]"),
        ):
            for number, mode in enumerate(dict.fromkeys(rows["mode"])):
                curves = rows[rows["mode"] == mode].groupby(column).auc
                x = curves.mean().index.to_numpy() / unit
                (line,) = ax.plot(x, curves.mean(), marker=MARKERS[number], label=mode)
                ax.fill_between(x, curves.min(), curves.max(), alpha=0.15, color=line.get_color())
            ax.set_xlabel(label)
        axes[0].set_ylabel("test AUC")
        axes[0].legend()
        figure.suptitle(
            "True gradients in the simulated order of reads and writes; bands: range over"
            f" {rows.seed.nunique()} seeds",
            fontsize=8,
        )
    return figure
