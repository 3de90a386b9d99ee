"""What late rows cost by the order of the samples, and the bound of theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs import SHORT
from paper_figs.style import GAP_LABEL, MODES, of_tables, show_ticks


@of_tables
def lateness_figure(gaps: pd.DataFrame) -> Figure:
    """The gap of rows 16 late, by stream and by the order of its training samples; bars 95 % of
    seeds and users.
    """
    figure, axes = plt.subplots(figsize=(5.5, 4.4))
    _by_order(axes, gaps)
    figure.suptitle(
        "What rows 16 updates late cost, by order of the samples\n"
        "Test AUC minus that of sync, bars 95 % over seeds and test users;\n"
        "the axis is linear within a thousandth, logarithmic beyond"
    )
    return figure


HYBRID = MODES["hybrid"]
Gap = tuple[str, float, float]
"""Name, gap, and half of its interval."""


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
    blocks: dict[str, list[Gap]] = {}
    for data, of_stream in rows.groupby("data", sort=False):
        each = of_stream.drop_duplicates("order")
        buffers = pd.to_numeric(each.order.str.removeprefix("buffer-"), errors="coerce")
        places = buffers.fillna(each.order.map({"time": 0.0, "shuffled": np.inf}))
        for line in each.assign(place=places).sort_values("place").itertuples():
            is_buffer = str(line.order).startswith("buffer")
            name = f"buffer of {int(line.place):,}" if is_buffer else f"{line.order}"
            name = "time order" if name == "time" else name
            gap = name, line.gap_to_sync, line.gap_to_sync_half_width_95
            blocks.setdefault(SHORT.get(str(data), str(data)), []).append(gap)
    _forest(axes, blocks)


def _forest(axes: Axes, blocks: Mapping[str, Sequence[Gap]]) -> None:
    """Gaps with their intervals, a line each, below headings in bold."""
    axes.axvline(0, color="black", linewidth=0.8)
    if not blocks:
        axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color="0.4")
    ticks: list[tuple[float, str]] = []
    at = 0.0
    for heading, lines in blocks.items():
        ticks.append((at, heading))
        for name, gap, half in lines:
            at += 1.0
            ticks.append((at, name))
            axes.errorbar(
                1e3 * gap,
                at,
                xerr=1e3 * half,
                capsize=2,
                marker=HYBRID.marker,
                color=HYBRID.color,
                markersize=3.5,
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
