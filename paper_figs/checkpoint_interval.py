"""Throughput lost to crashes and checkpoints, against the time between checkpoints, by mode."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, legend_below, of_tables


@of_tables
def checkpoint_interval_figure(rows: pd.DataFrame) -> Figure:
    """A panel for each rate of crashes, a line a mode with 95 % intervals over seeds; the grey line
    is Daly's formula for a job that goes back whole, at the intervals that the first mode kept."""
    from scipy.stats import t  # late: a second to import

    rates = sorted(rows.crashes_expected.unique())
    modes = list(rows["mode"].unique())
    seeds = rows.seed.nunique()
    size = (min(7.2, 2.6 * len(rates) + 1.2), 2.9)
    figure, axes = plt.subplots(
        1, len(rates), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for ax, rate in zip(axes[0], rates, strict=True):
        own = rows[rows.crashes_expected == rate]
        form = own[own["mode"] == modes[0]].groupby("factor").overhead_closed_form.mean()
        daly = 100 * form / (1 + form)
        ax.plot(daly.index, daly, color="0.6", linewidth=2.5, label="Daly's formula")
        for number, mode in enumerate(modes):
            lost = 100 * own[own["mode"] == mode].groupby("factor").throughput_lost.agg(
                ["mean", "std"]
            )
            half = np.zeros(len(lost))
            if seeds > 1:
                half = t.ppf(0.975, seeds - 1) * lost["std"] / np.sqrt(seeds)
            ax.errorbar(
                lost.index * 1.04 ** (number - 1), lost["mean"], half, capsize=2, label=mode,
                marker=MARKERS[number], linestyle=("-", "--", ":", "-.")[number % 4],
            )  # fmt: skip
        ax.set_xscale("log", base=2)
        factors = sorted(own.factor.unique())
        ax.set_xticks(factors, [f"{factor:g}" for factor in factors])
        ax.set_xlabel("time between checkpoints over Young's")
        ax.set_title(f"{rate:g} crashes expected in the run")
    axes[0, 0].set_ylim(bottom=0)  # of all panels, which share it
    axes[0, 0].set_ylabel("throughput lost [%]")
    legend_below(figure, axes[0, 0])
    figure.suptitle(f"simulated; 95 % intervals over {seeds} seeds", fontsize=8)
    return figure
