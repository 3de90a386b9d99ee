"""Speeds of several systems on several workloads, beside a ceiling."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.style import of_tables

QUIET_WINDOWS = 3  # fewer than this of one system: a panel shows the loaded ones, too


@of_tables
def bench_peers_figure(rows: pd.DataFrame, ceiling: str) -> Figure:
    """One panel a workload: median and extremes of each system, of quiet windows if enough are."""
    names = list(rows.workload.unique())
    figure, panels = plt.subplots(
        1, len(names), figsize=(2.2 * len(names) + 1, 2.6), layout="constrained", squeeze=False
    )
    for axes, workload in zip(panels[0], names, strict=True):
        own = rows[rows.workload == workload]
        if (own.groupby("name").quiet.sum() >= QUIET_WINDOWS).all():
            own = own[own.quiet]
        systems = list(own.name.unique())
        values = [own[own.name == s].value.to_numpy() / 1e3 for s in systems]
        median = np.array([np.median(v) for v in values])
        low, high = (np.array([f(v) for v in values]) for f in (np.min, np.max))
        places = np.arange(len(systems))
        axes.barh(places, median, xerr=[median - low, high - median], color="0.75", capsize=2)
        axes.axvline(median[systems.index(ceiling)], color="black", linewidth=0.8)
        axes.set_yticks(places, systems if axes is panels[0][0] else [""] * len(systems))
        axes.invert_yaxis()
        axes.set_title(workload)
        axes.set_xlabel(f"thousand {rows.unit.iloc[0]}")
    figure.suptitle(f"Medians and extremes; line: {ceiling}", fontsize=8)
    return figure
