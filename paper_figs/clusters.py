"""Simulated clusters: steps drawn, what each optimisation gives, which mode to take."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from paper_figs import SHORT
from paper_figs.style import GAP_LABEL, in_order, legend_below, look_of, of_tables

STAGE_LOOKS = {
    "lookup": ("#56B4E9", ""),
    "forward": ("#F7E3A1", ""),
    "backward": ("#E69F00", "////"),
    "dense_sync": ("black", ""),
    "dense_pull": ("0.6", "xxxx"),
    "push": ("#009E73", "\\\\\\\\"),
}
"""Stage -> fill and hatching, which differ in grey, too."""
STAGE_ROWS = {
    "lookup": "lookup",
    "forward": "compute",
    "backward": "compute",
    "dense_sync": "dense",
    "dense_pull": "dense",
    "push": "push",
}
"""Stage -> the line of the rank on which it is drawn."""
RESOURCES = ("lookup", "compute", "dense", "push")
LEAST_SHOWN = 0.01
"""Share of a panel's width; a stage whose widest bar is less is in no legend: nobody sees it."""
NUMBERS_ACROSS = 48
"""How many numbers fit side by side into a panel."""


TIMELINE_MODES = ("sync", "lookahead", "hybrid", "async")
"""Modes that are drawn; the table has raw_hybrid, too."""


@of_tables
def modes_timeline_figure(rows: pd.DataFrame) -> Figure:
    """A panel a mode, of one rank. Bars are stages, their numbers are steps.

    Panels share their axis of time, so that the same steps end earlier in a faster mode. Batches
    that are in flight together lie above each other. A bar that is too narrow or too flat for its
    number has none.
    """
    rows = rows[rows.stage.isin(STAGE_ROWS) & rows["mode"].isin(TIMELINE_MODES)]
    modes = in_order(rows["mode"])
    size = (7.2, 1.1 * len(modes) + 1.1)
    figure, axes = plt.subplots(
        len(modes), 1, figsize=size, sharex=True, sharey=True, squeeze=False
    )

    # A bar's number must fit on the time axis that all share.
    for ax, mode in zip(axes[:, 0], modes, strict=True):
        of_mode = rows[rows["mode"] == mode]
        _mode_panel(ax, of_mode, 1e3 * rows.end_s.max() / NUMBERS_ACROSS)
        ax.set_title(f"{mode}: {1e3 * of_mode.mean_step_s.iloc[0]:.3g} ms a step")
    axes[0, 0].invert_yaxis()  # of all panels, which share it
    axes[-1, 0].set_xlabel(f"time on {rows.system.iloc[0]} [ms]")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(5, prune="upper"))  # a label there is cut off

    # The legend has only stages that can be seen somewhere.
    shares = (rows.end_s - rows.start_s) / rows.end_s.max()
    widest = shares.groupby(rows.stage).max()
    shown = [stage for stage in STAGE_LOOKS if widest.get(stage, 0.0) > LEAST_SHOWN]
    looks = (STAGE_LOOKS[stage] for stage in shown)
    marks = [Patch(facecolor=f, hatch=h, edgecolor="black", linewidth=0.4) for f, h in looks]
    names = [s.replace("_", " ") for s in shown]
    figure.legend(marks, names, loc="outside lower center", ncols=len(marks))
    figure.suptitle("What overlaps in each mode: some steps of one rank, by stage")
    return figure


def _mode_panel(ax: Axes, rows: pd.DataFrame, least_ms: float) -> None:
    for place, resource in enumerate(RESOURCES):
        bars = rows[rows.stage.map(STAGE_ROWS) == resource]
        _bars(ax, bars.sort_values("start_s"), place, least_ms)
    ax.set_yticks(range(len(RESOURCES)), RESOURCES)
    ax.grid(axis="y", visible=False)


def _bars(ax: Axes, rows: pd.DataFrame, y: float, least_ms: float) -> None:
    """Bars of one resource of one rank; those that overlap share its height. Bars from ``least_ms``
    on have their number."""
    # Each bar lies in the first lane that is free when it begins.
    lanes: list[float] = []
    placed = []
    for bar in rows.itertuples():
        lane = next((k for k, end in enumerate(lanes) if end <= bar.start_s + 1e-6), len(lanes))
        lanes[lane : lane + 1] = [bar.end_s]
        placed.append((lane, bar))

    # The lanes share the height of one; a number stands only where it fits.
    height = 0.9 / max(1, len(lanes))
    for lane, bar in placed:
        fill, hatch = STAGE_LOOKS[bar.stage]
        start = 1e3 * bar.start_s
        width = 1e3 * (bar.end_s - bar.start_s)
        middle = y - 0.45 + (lane + 0.5) * height
        ax.barh(
            middle,
            width,
            height,
            left=start,
            color=fill,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.3,
        )
        if bar.stage in ("lookup", "push", "forward") and width >= least_ms and len(lanes) < 3:
            ax.text(
                start + width / 2,
                middle,
                str(bar.step),
                fontsize=6,
                ha="center",
                va="center",
                clip_on=True,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8},
            )


PANELS_ACROSS = 2


@of_tables
def ablation_figure(rows: pd.DataFrame) -> Figure:
    """A panel a cluster: throughput as a share of that with everything on, and what then binds.
    Bars at the ends are 95 %."""
    variants = list(dict.fromkeys(rows.variant))
    panels = [panel for _, panel in rows.groupby("where", sort=False)]
    columns = min(PANELS_ACROSS, len(panels))
    lines = -(-len(panels) // columns)
    size = (7.2, lines * (0.23 * len(variants) + 0.9))
    figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for ax, panel in zip(grid.flat, panels, strict=False):
        _rates_of_all_on(ax, panel, variants)
        ax.set_ylim(len(variants) - 0.4, -0.6)
        ax.set_yticks(range(len(variants)), variants)
    for ax in grid.flat[len(panels) :]:
        ax.remove()
    figure.suptitle(
        "What each part of the design is worth: simulated throughput with one of them off\n"
        "Above a bar: its share of the throughput with all on, and what then holds up the rest",
    )
    return figure


def _rates_of_all_on(ax: Axes, rows: pd.DataFrame, variants: list[str]) -> None:
    # Bars of shares of the base; words stand above them, not across them.
    at = [variants.index(name) + 0.2 for name in rows.variant]
    shares = 1 + rows.difference
    half = rows.difference_half_width_95.replace(float("inf"), 0.0)  # of a run too short for one
    ax.axvline(1, color="black", linewidth=0.8)
    ax.barh(
        at,
        shares,
        0.4,
        color="0.8",
        edgecolor="black",
        linewidth=0.4,
        xerr=half,
        error_kw={"elinewidth": 0.8, "capsize": 1.5},
    )

    # What binds, beside the share.
    most = max(1.0, (shares + half).max())
    for place, share, binds in zip(at, shares, rows.binds, strict=True):
        ax.text(
            0.01 * most,
            place - 0.42,
            f"{share:.2f}  {binds}",
            fontsize=6.5,
            va="center",
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.1},
        )
    ax.set_xlim(0, 1.12 * most)
    base = rows.value.iloc[0]
    ax.set_title(f"{rows['where'].iloc[0]}\n1: {base / 1e3:,.0f} k samples/s")
    ax.set_xlabel("throughput over that with all on")


SHOWN = ("sync", "lookahead", "hybrid, tau 4", "hybrid, tau 16", "async, tau 4")
"""Modes and windows that have bars, of all that the table has."""
CLUSTERS = {
    "v100-paper": "paper: 64 V100,\n100 CPU hosts",
    "h100-host": "one host of 8 H100,\nrows on CPU servers",
}


@of_tables
def which_mode_figure(rows: pd.DataFrame, gaps: pd.DataFrame | None = None) -> Figure:
    """Left: samples/s over those of sync, a group of bars a cluster. Right, of the gaps of the
    study of lateness: what rows 16 updates late lose in each test window of each stream, in time
    order (filled) and shuffled (open)."""
    if gaps is None:
        figure, left = plt.subplots(figsize=(4.6, 3.4))
        _gains(left, rows)
        return figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.4), width_ratios=(1.15, 1))
    _gains(left, rows)
    _losses(right, gaps)
    return figure


def _gains(axes: Axes, rows: pd.DataFrame) -> None:
    """A bar is one simulation; across its end lies its range over what is not known. Behind that
    stand the ends of the range."""
    rows = rows[rows["mode"].isin(SHOWN)]
    clusters = [*rows.cluster.unique()]
    modes = in_order(rows["mode"])
    height = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        of_mode = rows[rows["mode"] == mode].set_index("cluster").loc[clusters]
        times, high = of_mode.times_sync.to_numpy(), of_mode.times_sync_high.to_numpy()
        ends = times - of_mode.times_sync_low.to_numpy(), high - times
        at = np.arange(len(clusters)) + (place - (len(modes) - 1) / 2) * height
        look = look_of(mode)
        hatch = "...." if mode.endswith("tau 16") else look.hatch
        looks = {"color": look.color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(at, times, height, label=mode, **looks)
        lines = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
        axes.errorbar(times, at, xerr=np.clip(ends, 0, None), **lines)
        for y, low, end in zip(at, times - ends[0], high, strict=True):
            words = f"{low:.1f} to {end:.1f}" if low < end else f"{low:g}"
            axes.text(end, y, f" {words}", va="center", fontsize=6)
    names = [CLUSTERS.get(name, name.rpartition("/")[2]) for name in clusters]
    axes.set_yticks(range(len(clusters)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * rows.times_sync_high.max())
    axes.set_xlabel("samples/s over those of sync, with ranges (more is better)")
    axes.set_title("What it gains (simulated)")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, fontsize=6)


def _losses(axes: Axes, gaps: pd.DataFrame) -> None:
    # Of real streams, at sync's rates, with Adagrad from 0: rows 16 late, of the first task.
    gaps = gaps[gaps.task == gaps.groupby("data", sort=False).task.transform("first")]
    windows = gaps[
        ~gaps.redrawn
        & (gaps.rates == "of sync")
        & (gaps.optimizer_start == 0)
        & (gaps.rows_late == 16)
        & (gaps.dense_late == 0)
    ]

    # A test window a line, the newest of each stream first.
    places = [
        (data, window)
        for data in windows.data.unique()
        for window in ("test", "origin-2", "origin-1")
        if ((windows.data == data) & (windows.window == window)).any()
    ]
    for order, shift, face in (("time", -0.14, "black"), ("shuffled", 0.14, "white")):
        of_order = windows[windows.order == order].set_index(["data", "window"])
        here = [place for place in places if place in of_order.index]
        axes.errorbar(
            1e3 * of_order.gap_to_sync.loc[here],
            [places.index(place) + shift for place in here],
            xerr=1e3 * of_order.gap_to_sync_half_width_95.loc[here],
            fmt="o" if order == "time" else "s",
            color="black",
            markerfacecolor=face,
            markersize=3.5,
            capsize=2,
            label="samples in time order" if order == "time" else "samples shuffled",
        )
    axes.axvline(0, color="black", linewidth=0.8)
    names = {"test": "{}", "origin-2": "earlier window", "origin-1": "still earlier"}
    labels = [names[window].format(SHORT.get(data, data)) for data, window in places]
    axes.set_yticks(range(len(places)), labels)
    for label, (_, window) in zip(axes.get_yticklabels(), places, strict=True):
        label.set_fontweight("bold" if window == "test" else "normal")
    axes.invert_yaxis()
    axes.set_xlabel(f"{GAP_LABEL} (right is better)")
    axes.set_title("What rows 16 updates late lose (trained)")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=6)


@of_tables
def which_mode_of_log_figure(rows: pd.DataFrame) -> Figure:
    """Dollars a billion samples of each mode (samples/s where prices are not known) against its AUC
    minus sync's; bars are what the simulator does not know, and 95 % of the gap. Of a mode that
    stands twice the later one is open and dashed."""
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    priced = rows.usd_per_billion_samples.notna().all()
    name = "usd_per_billion_samples" if priced else "samples_per_s"
    known = rows[rows.gap.notna()]
    drawn: set[str] = set()
    for row in known.itertuples():
        value, low, high = (getattr(row, f"{name}{end}") for end in ("", "_low", "_high"))
        half = 0.0 if np.isnan(row.gap_half_width_95) else 1e3 * row.gap_half_width_95
        mode = row.mode.split(",")[0]
        look = look_of(mode)
        again = mode in drawn
        drawn.add(mode)
        _, _, bars = axes.errorbar(
            value,
            1e3 * row.gap,
            xerr=[[value - low], [high - value]],
            yerr=half,
            marker=look.marker,
            color=look.color,
            markerfacecolor="white" if again else look.color,
            capsize=2,
            label=row.mode,
        )
        for bar in bars:
            bar.set_linestyle("--" if again else "-")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("$ for a billion samples" if priced else "samples/s")
    axes.set_ylabel(GAP_LABEL)
    first = "What each mode costs" if priced else "How fast each mode is"
    axes.set_title(f"{first}, and how it changes the AUC of this log")
    legend_below(figure, axes)
    return figure
