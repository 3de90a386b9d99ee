"""Each optimisation off in turn: throughput on simulated clusters, and AUC where it may move."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import of_tables

ALL_ON = "all on"


COLUMNS = 3


@of_tables
def ablation_figure(rows: pd.DataFrame) -> Figure:
    """A panel a cluster: throughput as a share of that with everything on, and what then binds; the
    last panel is the test AUC minus that with everything on. Bars at the points are 95 %."""
    rates = rows[rows.kind == "throughput"]
    aucs = rows[rows.kind == "auc"]
    variants = list(dict.fromkeys(rows.variant))
    panels = [own for _, own in rates.groupby("where", sort=False)]
    panels += [aucs] if len(aucs) else []
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    size = (7.2, lines * (0.2 * len(variants) + 0.9))
    figure, grid = plt.subplots(
        lines, columns, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for ax, own in zip(grid.flat, panels, strict=False):
        if own.kind.iloc[0] == "auc":
            _aucs(ax, own, variants)
        else:
            _rates(ax, own, variants)
        ax.set_ylim(len(variants) - 0.4, -0.6)
        ax.set_yticks(range(len(variants)), variants)
    for ax in grid.flat[len(panels) :]:
        ax.remove()
    return figure


def _rates(ax: Axes, rows: pd.DataFrame, variants: list[str]) -> None:
    at = [variants.index(name) for name in rows.variant]
    shares = 1 + rows.difference
    half = rows.difference_half_width_95.replace(float("inf"), 0.0)  # of a run too short for one
    ax.axvline(1, color="black", linewidth=0.8)
    ax.barh(
        at, shares, 0.62, color="0.8", edgecolor="black", linewidth=0.4,
        xerr=half, error_kw={"elinewidth": 0.8, "capsize": 1.5},
    )  # fmt: skip
    most = max(1.0, (shares + half).max())
    for place, share, binds in zip(at, shares, rows.binds, strict=True):
        ax.text(
            0.02 * most, place, f"{share:.2f}  {binds}", fontsize=5.5, va="center", zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.7},
        )  # fmt: skip
    ax.set_xlim(0, 1.12 * most)
    base = rows.value.iloc[0]
    ax.set_title(f"{rows['where'].iloc[0]}\n1: {base / 1e3:,.0f} k samples/s")
    ax.set_xlabel("throughput over that with all on")


def _aucs(ax: Axes, rows: pd.DataFrame, variants: list[str]) -> None:
    rows = rows[rows.variant != ALL_ON]
    at = [variants.index(name) for name in rows.variant]
    ax.axvline(0, color="black", linewidth=0.8)
    ax.errorbar(
        1e3 * rows.difference, at, xerr=1e3 * rows.difference_half_width_95, fmt="o",
        color="black", capsize=2,
    )  # fmt: skip
    ax.set_title(f"{rows['where'].iloc[0]}, {rows.n.iloc[0]} paired seeds")
    ax.set_xlabel("AUC minus all on [$10^{-3}$]")
