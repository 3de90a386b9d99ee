"""The convergence bound and measured gradients against tau; shares of samples that read a row."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, legend_below, of_tables

BATCHES = (128, 4096)
LINES = ("-", "--", "-.", ":")


@of_tables
def convergence_bound_figure(rows: pd.DataFrame, shares: pd.DataFrame) -> Figure:
    """A panel per case at the largest T and B: bound and measured; then alpha of the data sets."""
    rows = rows[(rows.updates == rows.updates.max()) & (rows.batch == rows.batch.max())]
    cases = list(dict.fromkeys(rows.case))
    count = len(cases) + 1
    widths = [1.0] * len(cases) + [1.35]
    figure, axes = plt.subplots(
        1, count, figsize=(7.0, 3.5), layout="constrained", width_ratios=widths
    )
    for ax, case in zip(axes, cases, strict=False):
        _bounds(ax, rows[rows.case == case])
        ax.sharey(axes[0])
        alpha = rows[(rows.case == case) & (rows["mode"] == "hybrid")].alpha.max()
        ax.set_title(f"{case}: $\\alpha$ = {alpha:.2g}")
    axes[0].set_ylabel("mean of ‖∇f‖² over the run")
    legend_below(figure, axes[0], loc="outside lower left", ncols=4)
    _alphas(axes[-1], shares[shares.field == "all"])
    updates, batch, seeds = (int(rows[c].iloc[0]) for c in ("updates", "batch", "seeds"))
    figure.suptitle(
        f"Left: logistic regression, {updates:,} updates of {batch} samples, {seeds} seeds;"
        " bars: 95 % t interval; axes logarithmic.\n"
        "Right: lookups at rows that at most a share p of the samples read; vertical: p = 1/B.",
        fontsize=8,
    )
    return figure


def _bounds(axes: Axes, rows: pd.DataFrame) -> None:
    for number, mode in enumerate(("hybrid", "async")):
        own = rows[rows["mode"] == mode].sort_values("tau")
        axes.plot(own.tau, own.bound, LINES[number], color="0.35", label=f"bound, {mode}")
        axes.errorbar(
            own.tau * (1 + 0.12 * number),
            own.measured,
            yerr=own.measured_half_width_95,
            marker=MARKERS[number],
            linestyle="none",
            capsize=2,
            label=f"measured, {mode}",
        )
    bold = rows[rows["mode"] == "hybrid"].sort_values("tau")
    axes.plot(
        bold.tau,
        bold.measured_at_sync_step,
        MARKERS[5],
        markersize=4,
        linestyle="none",
        markerfacecolor="none",
        label="hybrid, step of sync",
    )
    plain = rows[rows["mode"] == "sync"].iloc[0]
    axes.axhline(plain.bound, linestyle=":", color="0.35", linewidth=1, label="bound, sync")
    axes.axhline(plain.measured, linestyle="-", color="0.7", linewidth=1, label="measured, sync")
    axes.axhline(plain.untrained, color="black", linewidth=0.8)
    axes.annotate(
        "2LD: not trained", (1, plain.untrained), textcoords="offset points", xytext=(0, 2),
        fontsize=6,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    taus = sorted(set(bold.tau))
    axes.set_xticks(taus, [f"{tau:g}" for tau in taus])
    axes.minorticks_off()
    axes.set_xlabel("τ [updates]")


def _alphas(axes: Axes, shares: pd.DataFrame) -> None:
    for number, (name, own) in enumerate(shares.groupby("data", sort=False)):
        axes.plot(
            own.share_of_lookups,
            own.level,
            LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            markevery=(number % 4, 5),
            markersize=3,
            label=name.replace("synthetic:", "syn. ").replace("kuairand-pure-14d", "kuairand"),
        )
    for batch in BATCHES:
        axes.axvline(1 / batch, color="black", linewidth=0.8)
        axes.annotate(
            f"1/{batch:,}", (1 / batch, 1.01), xycoords=("data", "axes fraction"), fontsize=6,
            ha="center",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("share p of samples that read the row")
    axes.set_ylabel("share of lookups")
    axes.legend(fontsize=5.5, loc="upper left", handlelength=2.5, frameon=True, framealpha=1)
