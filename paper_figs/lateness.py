"""What late rows and dense weights cost, on which rows, what treats it, and the bound of theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs import SHORT
from paper_figs.style import (
    GAP_LABEL,
    MARKERS,
    MODES,
    ModeLook,
    of_tables,
    show_ticks,
)

WINDOWS = {"origin-2": "the last sixth", "origin-1": "the sixth before the last"}
"""What an earlier test window is called: a part of the training samples."""


def _short(name: str) -> str:
    name = name.removeprefix("synthetic:")
    return SHORT.get(name, name)


@of_tables
def lateness_figure(gaps: pd.DataFrame, moderator: pd.DataFrame, forest: pd.DataFrame) -> Figure:
    """Left: the gap of rows 16 late, by stream and by the order of its training samples. Middle:
    the gap of rows 7 late, against s, the accumulator that Adagrad starts from over the squared
    gradients. Right: the gaps of rows 16 late and of both 7 late, by stream and window. Bars 95 %
    of seeds and users.
    """
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(10.0, 4.4), width_ratios=(1, 0.9, 1.1)
    )
    _by_order(left, gaps)
    _against_scale(middle, moderator)
    _by_window(right, forest)
    figure.suptitle(
        "What late rows cost: test AUC minus that of sync, below 0 a loss\n"
        "Bars 95 % over seeds and test users; axes of AUC are linear within a thousandth,"
        " logarithmic beyond"
    )
    return figure


def _not_yet(axes: Axes) -> None:
    """What a panel says whose part of the study has not run."""
    axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color="0.4")


HYBRID, ASYNC = (MODES[mode] for mode in ("hybrid", "async"))


def _by_order(axes: Axes, gaps: pd.DataFrame) -> None:
    """Rows 16 late at sync's rates, of the first task of each stream: in time order, behind shuffle
    buffers from the smallest on, and shuffled."""
    rows = gaps[
        (gaps.rows_late == 16)
        & (gaps.dense_late == 0)
        & (gaps.rates == "of sync")
        & (gaps.optimizer_start == 0)
        & (gaps.window == "test")
    ]
    rows = rows[rows.task == rows.groupby("data", sort=False).task.transform("first")]
    rows = rows[rows.groupby("data").order.transform("nunique") > 1]  # of drawn ones no order is
    blocks: dict[str, list[ForestLine]] = {}
    for data, of_stream in rows.groupby("data", sort=False):
        each = of_stream.drop_duplicates("order")
        buffers = pd.to_numeric(each.order.str.removeprefix("buffer-"), errors="coerce")
        places = buffers.fillna(each.order.map({"time": 0.0, "shuffled": np.inf}))
        for line in each.assign(place=places).sort_values("place").itertuples():
            is_buffer = str(line.order).startswith("buffer")
            name = f"buffer of {int(line.place):,}" if is_buffer else f"{line.order}"
            name = "time order" if name == "time" else name
            half = line.gap_to_sync_half_width_95
            blocks.setdefault(_short(str(data)), []).append((name, line.gap_to_sync, half, HYBRID))
    _forest(axes, blocks)
    axes.set_title("Rows 16 updates late, by order of the samples")


def _against_scale(axes: Axes, moderator: pd.DataFrame) -> None:
    # Losses over the scale, each data set with its mark.
    rows = moderator[(moderator.rows_late == 7) & (moderator.dense_late == 0)]
    for number, (data, of_stream) in enumerate(rows.groupby("data", sort=False)):
        axes.errorbar(
            of_stream.s + 0.1 * number,  # beside each other at 0
            -1e3 * of_stream.loss,
            yerr=1e3 * of_stream.loss_half_width_95,
            linestyle="none",
            capsize=2,
            marker=MARKERS[number],
            color=HYBRID.color,
            markerfacecolor=HYBRID.color if number == 0 else "white",
            label=_short(str(data)),
        )

    # From 0 on, where a logarithm alone would have no place for it.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel("s: start of Adagrad's accumulator over the\nmean squared row gradient of sync")
    axes.set_title("Rows 7 updates late, by start of Adagrad")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1)
    show_ticks(axes, "y")
    axes.set_ylabel(GAP_LABEL)
    if moderator.empty:
        _not_yet(axes)
    else:
        axes.legend(loc="lower left")


def _by_window(axes: Axes, forest: pd.DataFrame) -> None:
    """Every stream and window below the heading of what is late."""
    blocks: dict[str, list[ForestLine]] = {}
    for line in forest.itertuples():
        heading = f"rows {line.rows_late}, dense {line.dense_late} late"
        where = "" if line.window in ("test", "pooled") else f", {WINDOWS[line.window]}"
        name = f"{_short(line.data)}{where}{', pooled' if line.window == 'pooled' else ''}"
        look = ASYNC if line.dense_late else HYBRID
        blocks.setdefault(heading, []).append((name, -line.loss, line.loss_half_width_95, look))
    _forest(axes, blocks)
    axes.set_title("By stream and test window")


ForestLine = tuple[str, float, float, ModeLook]
"""Name, gap, half of its interval, and how it is drawn."""


def _forest(axes: Axes, blocks: Mapping[str, Sequence[ForestLine]]) -> None:
    """Gaps with their intervals, a line each, below headings in bold; what is pooled is hollow."""
    axes.axvline(0, color="black", linewidth=0.8)
    if not blocks:
        _not_yet(axes)
    ticks: list[tuple[float, str]] = []
    at = 0.0
    for heading, lines in blocks.items():
        ticks.append((at, heading))
        for name, gap, half, look in lines:
            at += 1.0
            ticks.append((at, name))
            axes.errorbar(
                1e3 * gap,
                at,
                xerr=1e3 * half,
                capsize=2,
                marker=look.marker,
                color=look.color,
                markersize=3.5,
                markerfacecolor="white" if name.endswith("pooled") else look.color,
            )
        at += 1.5

    # The names stand at the left.
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=6.5)
    for tick in axes.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in blocks else "normal")
    axes.set_ylim(max(at, 1.0) - 0.8, -0.8)
    axes.set_xscale("symlog", linthresh=1)
    show_ticks(axes, "x", (-30, -10, -3, -1, 0, 1, 3, 10, 30))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(GAP_LABEL)


CASES = {"cold ids": "ids all rare", "hot ids": "popular ids"}
"""Case of the study -> what its ids are."""


@of_tables
def convergence_bound_figure(rows: pd.DataFrame) -> Figure:
    """A panel per case at the largest T and B: bound and measured."""
    # The longest runs with the largest batches; a panel a case.
    rows = rows[(rows.updates == rows.updates.max()) & (rows.batch == rows.batch.max())]
    cases = list(dict.fromkeys(rows.case))
    figure, axes = plt.subplots(1, len(cases), figsize=(7.0, 3.4), sharey=True, squeeze=False)
    panels = axes[0]
    for ax, case in zip(panels, cases, strict=True):
        _bounds(ax, rows[rows.case == case])
        alpha = rows[(rows.case == case) & (rows["mode"] == "hybrid")].alpha.max()
        ax.set_title(f"{CASES.get(case, case)}: $\\alpha$ = {alpha:.2g}")

    # One legend for the cases.
    panels[0].set_ylabel("mean of ‖∇f‖² over the run")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    updates, batch, seeds = (int(rows[c].iloc[0]) for c in ("updates", "batch", "seeds"))
    figure.suptitle(
        "How much late rows slow a convex problem down: proved (lines) and measured (markers)\n"
        f"Logistic regression, {updates:,} updates of {batch} samples, {seeds} seeds, bars 95 %;"
        " axes logarithmic"
    )
    return figure


def _bounds(axes: Axes, rows: pd.DataFrame) -> None:
    plain = rows[rows["mode"] == "sync"].iloc[0]
    sync = MODES["sync"].color
    axes.axhline(plain.bound, linestyle=":", color=sync, linewidth=1, label="bound, sync")
    axes.axhline(plain.measured, linestyle="-", color=sync, linewidth=1, label="measured, sync")

    # What is late: its bound as a line, what was measured as markers beside each other.
    for number, mode in enumerate(("hybrid", "async")):
        of_mode = rows[rows["mode"] == mode].sort_values("tau")
        look = MODES[mode]
        line = look.line if mode == "async" else "--"
        axes.plot(of_mode.tau, of_mode.bound, ls=line, color=look.color, label=f"bound, {mode}")
        axes.errorbar(
            of_mode.tau * (1 + 0.12 * number),
            of_mode.measured,
            yerr=of_mode.measured_half_width_95,
            marker=look.marker,
            color=look.color,
            linestyle="none",
            capsize=2,
            label=f"measured, {mode}",
        )

    # Hybrid at the step of sync, which the theorem may not allow.
    bold = rows[rows["mode"] == "hybrid"].sort_values("tau")
    axes.plot(
        bold.tau,
        bold.measured_at_sync_step,
        MODES["hybrid"].marker,
        color=MODES["hybrid"].color,
        markersize=6,
        linestyle="none",
        markerfacecolor="none",
        label="hybrid, step of sync",
    )
    axes.axhline(plain.untrained, color="0.6", linewidth=0.8)
    axes.annotate(
        "most before training",
        (1, plain.untrained),
        textcoords="offset points",
        xytext=(0, -8),
        fontsize=7,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    taus = sorted(set(bold.tau))
    axes.set_xticks(taus, [f"{tau:g}" for tau in taus])
    axes.minorticks_off()
    axes.set_xlabel("lateness τ [updates]")
