"""Clusters of a sweep: samples a second against dollars, staleness by colour, the front ringed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, legend_below, of_tables


@of_tables
def cluster_sweep_figure(rows: pd.DataFrame) -> Figure:
    """A panel a workload, a marker a mode; what no other cluster beats is ringed and says its
    hosts. Clusters that were not simulated are not there."""
    rows = rows[rows.simulated]
    names = list(rows.workload.unique())
    figure, axes = plt.subplots(
        1, max(1, len(names)), figsize=(3.4 * max(1, len(names)) + 1.4, 3.1),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    scale = plt.Normalize(0, max(1.0, rows.staleness_steps_mean.max() if len(rows) else 1.0))
    for ax, name in zip(axes[0], names, strict=False):
        own = rows[rows.workload == name]
        for place, mode in enumerate(rows["mode"].unique()):
            points = own[own["mode"] == mode]
            ax.scatter(
                points.usd_per_million_samples, points.samples_per_s, label=mode, norm=scale,
                c=points.staleness_steps_mean, marker=MARKERS[place % len(MARKERS)],
            )  # fmt: skip
        for best in own[own.on_front].itertuples():
            at = best.usd_per_million_samples, best.samples_per_s
            ax.plot(*at, "o", markersize=11, markerfacecolor="none", color="black")
            late = f", tau {best.tau:g}" if best.staleness_steps_mean else ""
            text = f"{best.workers:g} + {best.servers:g}{late}"
            ax.annotate(text, at, (7, 5), textcoords="offset points", fontsize=5)
        ax.set_xscale("log")
        ax.margins(0.15)
        ax.set_title(Path(name).stem)
        ax.set_xlabel("$ a million samples (ringed: worker + server hosts)")
    axes[0, 0].set_ylabel("samples/s")
    colours = plt.cm.ScalarMappable(norm=scale)
    figure.colorbar(colours, ax=axes, label="steps that a lookup misses")
    legend_below(figure, axes[0, 0])
    return figure
