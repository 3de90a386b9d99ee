"""Speeds of several systems on several workloads, as a share of a ceiling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.gap import STYLE, save

__all__ = ["save", "speeds_figure"]


def speeds_figure(table: Path, ceiling: str) -> Figure:
    """One panel a workload: median and extremes of samples/s; quiet windows where there are any."""
    rows = pd.read_csv(table)
    names = list(rows.workload.unique())
    with plt.style.context(STYLE):
        figure, panels = plt.subplots(
            1, len(names), figsize=(2.2 * len(names) + 1, 2.6), layout="constrained", squeeze=False
        )
        for axes, workload in zip(panels[0], names, strict=True):
            own = rows[rows.workload == workload]
            if (own.groupby("name").quiet.sum() >= 3).all():
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
            axes.set_xlabel("k samples/s")
        figure.suptitle(f"Medians and extremes; line: {ceiling}", fontsize=8)
    return figure


def kernels_figure(table: Path) -> Figure:
    """One panel a group: median M ids/s of each kernel, with extremes, on a logarithmic axis."""
    rows = pd.read_csv(table)
    groups = list(rows.workload.unique())
    with plt.style.context(STYLE):
        figure, panels = plt.subplots(
            1, len(groups), figsize=(4.2 * len(groups), 3.2), layout="constrained", squeeze=False
        )
        for axes, group in zip(panels[0], groups, strict=True):
            own = rows[rows.workload == group]
            names = list(own.name.unique())
            found = own.groupby("name").value.agg(["median", "min", "max"]).loc[names]
            error = [found["median"] - found["min"], found["max"] - found["median"]]
            places = np.arange(len(names))
            axes.barh(places, found["median"], xerr=error, color="0.75", capsize=2)
            axes.set_yticks(places, names)
            axes.set_xscale("log")
            axes.invert_yaxis()
            axes.set_xlabel("M ids/s on one core")
            axes.set_title(group)
    return figure
