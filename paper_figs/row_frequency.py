"""The gap by how often a sample's ids occur, missed pushes of a row, and the gap by drift."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, MARKERS, of_tables


@of_tables
def row_frequency_figure(gaps: pd.DataFrame, stale: pd.DataFrame, drifts: pd.DataFrame) -> Figure:
    """Gap by frequency at the largest bound; missed pushes of the first data set; drift of all."""
    data = gaps.data.iloc[0]
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.9), layout="constrained")
    _gaps(axes[0], gaps[(gaps.tau == gaps.tau.max()) & (gaps.by == "rarest")])
    _staleness(axes[1], stale[stale.data == data])
    _drift(axes[2], drifts)
    figure.suptitle(
        f"Hybrid against sync, bars: 95 % over {int(gaps.seeds.iloc[0])} paired seeds and test"
        f" rows; middle: {data}",
        fontsize=8,
    )
    return figure


def _gaps(axes: Axes, rows: pd.DataFrame) -> None:
    """The real data sets; the synthetic ones where there is no other."""
    real = rows[~rows.data.str.startswith("synthetic")]
    rows = real if len(real) else rows
    axes.axhline(0, color="black", linewidth=0.8)
    starts = sorted(set(rows.count_from))
    place = {start: number for number, start in enumerate(starts)}
    for number, (data, own) in enumerate(rows.groupby("data", sort=False)):
        axes.errorbar(
            [place[start] + 0.1 * number for start in own.count_from],
            1e3 * own.gap_to_sync,
            yerr=1e3 * own.gap_to_sync_half_width_95,
            marker=MARKERS[number % len(MARKERS)],
            linestyle=("-", "--", ":", "-.")[number % 4],
            capsize=2,
            label=data,
        )
    names = [f"{s:g}" if s < 1024 else f"{s / 1024:g}k" for s in starts]
    axes.set_xticks(range(len(starts)), names)
    axes.set_xlabel("occurrences of the rarest id, from")
    axes.set_ylabel(GAP_LABEL)
    axes.set_title(f"gap by a sample's rarest id, τ = {rows.tau.iloc[0]:g}")
    axes.legend(fontsize=5.5, loc="lower left", handlelength=1.5)


def _staleness(axes: Axes, rows: pd.DataFrame) -> None:
    for number, (tau, own) in enumerate(rows.groupby("tau")):
        axes.plot(
            own.count_from, own.missed_pushes, MARKERS[number], label=f"measured, τ = {tau:g}"
        )
        axes.plot(
            own.count_from,
            own.missed_pushes_model,
            ("-", "--")[number % 2],
            color="0.35",
            label=f"model, τ = {tau:g}",
        )
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xlabel("occurrences of the row, from")
    axes.set_xticks([4.0**n for n in (0, 2, 4, 6)], ["1", "16", "256", "4k"])
    axes.minorticks_off()
    axes.set_ylabel("missed pushes of a row, per read")
    axes.set_title("row staleness")
    axes.legend()


def _drift(axes: Axes, rows: pd.DataFrame) -> None:
    """Points of one data set have one colour; what one of them is called stands beside it."""
    for number, (data, own) in enumerate(rows.groupby("data", sort=False)):
        axes.errorbar(
            own.drift,
            1e3 * own.gap_to_sync,
            yerr=1e3 * own.gap_to_sync_half_width_95,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            linestyle="none",
            capsize=2,
            label=data.replace("synthetic:", "as "),
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("drift of rows, $\\sum p\\,\\Vert d\\Vert^2$")
    axes.set_ylabel(GAP_LABEL)
    axes.set_title("drift orders the losses")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.45 * (high - low), high)  # room for the legend
    axes.legend(fontsize=5, handlelength=1.0, loc="lower left", ncols=2, columnspacing=0.8)
