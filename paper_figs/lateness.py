"""What late rows and dense weights cost, on which rows, what treats it, and the bound of theory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from paper_figs import SHORT
from paper_figs.style import (
    GAP_LABEL,
    MARKERS,
    gap_dots,
    legend_below,
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
    """Left: the gap of rows 16 late, against the share of lookups of young ids, in time order
    (filled) and shuffled (open), small behind a shuffle buffer. Middle: the gap of rows 7 late,
    against s, the accumulator that Adagrad starts from over the squared gradients. Right: the
    gaps of rows 16 late and of both 7 late, by stream and window. Bars 95 % of seeds and users.
    """
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(10.0, 4.4), width_ratios=(1, 0.9, 1.1)
    )
    _against_bursts(left, gaps)
    _against_scale(middle, moderator)
    _forest(right, forest)
    figure.suptitle(
        "Test AUC minus that of sync, below 0 a loss; bars 95 % over seeds and test users."
        " Axes of AUC are linear within a thousandth, logarithmic beyond"
    )
    return figure


def _not_yet(axes: Axes) -> None:
    """What a panel says whose part of the study has not run."""
    axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color="0.4")


def _gap_dots_at(axes: Axes, x: pd.Series, rows: pd.DataFrame, **style: Any) -> None:
    """Dots of gaps with their intervals; a loss is a gap with the other sign."""
    axes.errorbar(
        x,
        -1e3 * rows.loss,
        yerr=1e3 * rows.loss_half_width_95,
        linestyle="none",
        capsize=2,
        **style,
    )


def _gap_axis(axes: Axes) -> None:
    """The axis of gaps, linear within a thousandth."""
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1)
    show_ticks(axes, "y")
    axes.set_ylabel(GAP_LABEL)


def _against_bursts(axes: Axes, gaps: pd.DataFrame) -> None:
    rows = gaps[
        (gaps.rows_late == 16)
        & (gaps.dense_late == 0)
        & (gaps.rates == "of sync")
        & (gaps.optimizer_start == 0)
        & (gaps.window == "test")
        & gaps.b_16.notna()
    ]

    # Only the first task of each stream; a loss is a gap with the other sign.
    first = rows.groupby("data", sort=False).task.transform("first")
    rows = rows[rows.task == first]
    rows = rows.assign(loss=-rows.gap_to_sync, loss_half_width_95=rows.gap_to_sync_half_width_95)

    # A colour a stream: filled in time order, hollow shuffled, small through a buffer.
    for number, (data, of_stream) in enumerate(rows.groupby("data", sort=False)):
        color = to_hex(f"C{number}")  # now: the cycle of colours is that of the style
        marker = MARKERS[number % len(MARKERS)]
        for order, fill, size in (("time", color, 6), ("shuffled", "none", 6)):
            dots = of_stream[of_stream.order == order].iloc[:1]
            name = f"{_short(data)}, {'time order' if order == 'time' else order}"
            if len(dots):
                _gap_dots_at(
                    axes,
                    dots.b_16,
                    dots,
                    marker=marker,
                    color=color,
                    markersize=size,
                    markerfacecolor=fill,
                    label=name,
                )
        behind = of_stream[of_stream.order.str.startswith("buffer")]
        if len(behind):
            _gap_dots_at(
                axes,
                behind.b_16,
                behind,
                marker=marker,
                color=color,
                markersize=2.5,
                elinewidth=0.6,
            )

    # Shares over four powers of ten.
    axes.set_xscale("log")
    show_ticks(axes, "x", [m * 10.0**n for n in range(-4, 1) for m in (1, 2, 5)])
    axes.set_xlabel("b(16): share of lookups whose id was\nfirst seen < 16 updates before")
    axes.set_title("rows 16 updates late (small: buffers)")
    _gap_axis(axes)
    _legend_under(axes)


def _against_scale(axes: Axes, moderator: pd.DataFrame) -> None:
    # Losses over the scale, each data set with its mark.
    rows = moderator[(moderator.rows_late == 7) & (moderator.dense_late == 0)]
    for number, (data, of_stream) in enumerate(rows.groupby("data", sort=False)):
        _gap_dots_at(
            axes,
            of_stream.s,
            of_stream,
            marker=MARKERS[number],
            color=to_hex(f"C{number}"),
            label=_short(data),
        )
    if moderator.empty:
        _not_yet(axes)

    # From 0 on, where a logarithm alone would have no place for it.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlabel("s: start of Adagrad's accumulator over the\nmean squared row gradient of sync")
    axes.set_title("rows 7 updates late, by the start of Adagrad")
    _gap_axis(axes)
    if not moderator.empty:
        _legend_under(axes)


def _legend_under(axes: Axes) -> None:
    """The legend below the label of the axis, where no dot lies."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2)


def _forest(axes: Axes, forest: pd.DataFrame) -> None:
    axes.axvline(0, color="black", linewidth=0.8)
    if forest.empty:
        _not_yet(axes)
    # A heading for each lateness, and below it a line for each stream and the pooled one.
    ticks: list[tuple[float, str]] = []
    at = 0.0
    for (rows, dense), of_lateness in forest.groupby(["rows_late", "dense_late"], sort=False):
        ticks.append((at, f"rows {rows}, dense {dense} late"))
        for line in of_lateness.itertuples():
            at += 1.0
            is_pooled = line.window == "pooled"
            where = "" if line.window == "test" else f", {WINDOWS.get(line.window, line.window)}"
            ticks.append((at, f"{_short(line.data)}{where}"))
            axes.errorbar(
                -1e3 * line.loss,
                at,
                xerr=1e3 * line.loss_half_width_95,
                capsize=2,
                marker="D" if is_pooled else "o",
                color="black",
                markersize=5 if is_pooled else 3.5,
                markerfacecolor="none" if is_pooled else "black",
            )
        at += 1.5
    # The names stand at the left, headings in bold.
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=6)
    for tick in axes.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text().startswith("rows") else "normal")
    axes.set_ylim(max(at, 1.0), -0.8)
    axes.set_xscale("symlog", linthresh=1)
    show_ticks(axes, "x")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(GAP_LABEL)
    axes.set_title("by stream and window")


TREATMENTS = {
    "untreated": "untreated",
    "sync_steps": "synchronous start ({sync_steps:g} steps)",
    "dense_lag": "dense update {dense_lag:g} late, too",
    "delay_compensation": "delay compensation (λ = {delay_compensation:g})",
    "lr_by_staleness": "row rate / steps missed",
    "wire": "rows travel as float16",
}


@of_tables
def treatments_figure(rows: pd.DataFrame) -> Figure:
    """Left: gap to sync. Right: gap to the same setting untreated. Of the first task of the table.

    A base's rows stand together under its name; dots are means, bars 95 % t intervals. Gaps span
    two orders of magnitude: linear within a thousandth of AUC, logarithmic beyond.
    """
    # The first task, without sync, which is the zero line.
    task = rows.task.iloc[0]
    data = rows.data.iloc[0]
    seeds = rows.seeds.max()
    is_reference = (rows.base == "sync") & (rows.treatment == "untreated")
    rows = rows[(rows.task == task) & ~is_reference].reset_index(drop=True)

    # Both panels share their lines; rows without an untreated twin are in the left one only.
    labels, places = _places(rows)
    height = 1.0 + 0.19 * len(labels)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.0, height), sharey=True)
    _gaps_of(left, places, rows, "gap_to_sync")
    treated = rows.gap_to_untreated.notna().to_numpy()
    _gaps_of(right, places[treated], rows[treated], "gap_to_untreated")
    left.set_yticks([place for place, _ in labels], [name for _, name in labels])
    for tick in left.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in set(rows.base) else "normal")
    left.set_ylim(max(places) + 0.8, -0.8)
    left.set_xlabel(GAP_LABEL)
    right.set_xlabel("AUC gap to untreated [$10^{-3}$]")
    figure.suptitle(
        f"Test AUC ({task}, {data}): dots are means over {seeds} paired seeds, bars 95 %"
        " intervals;\naxes linear within a thousandth of AUC, logarithmic beyond",
    )
    return figure


def _places(rows: pd.DataFrame) -> tuple[list[tuple[float, str]], np.ndarray]:
    """Tick labels with their heights, a heading a base; and the height of each row."""
    labels: list[tuple[float, str]] = []
    places = []
    at = -1.0
    base = ""
    for row in rows.itertuples():
        if row.base != base:
            base = row.base
            at += 1.0
            labels.append((at, base))
        at += 1.0
        places.append(at)
        labels.append((at, TREATMENTS.get(row.treatment, row.treatment).format(**row._asdict())))
    return labels, np.array(places)


def _gaps_of(axes: Axes, places: np.ndarray, rows: pd.DataFrame, name: str) -> None:
    gap_dots(axes, rows, places, name)
    axes.set_xscale("symlog", linthresh=1, linscale=1)
    show_ticks(axes, "x")


CASES = {"cold ids": "ids all rare", "hot ids": "popular ids"}
"""Case of the study -> what its ids are."""

BATCHES = (128, 4096)
LINES = ("-", "--", "-.", ":")


@of_tables
def convergence_bound_figure(rows: pd.DataFrame, shares: pd.DataFrame) -> Figure:
    """A panel per case at the largest T and B: bound and measured; then alpha of the data sets."""
    # The longest runs with the largest batches; a panel a case.
    rows = rows[(rows.updates == rows.updates.max()) & (rows.batch == rows.batch.max())]
    cases = list(dict.fromkeys(rows.case))
    count = len(cases) + 1
    widths = [1.0] * len(cases) + [1.35]
    figure, axes = plt.subplots(1, count, figsize=(7.0, 3.5), width_ratios=widths)
    for ax, case in zip(axes, cases, strict=False):
        _bounds(ax, rows[rows.case == case])
        ax.sharey(axes[0])
        alpha = rows[(rows.case == case) & (rows["mode"] == "hybrid")].alpha.max()
        ax.set_title(f"{CASES.get(case, case)}: $\\alpha$ = {alpha:.2g}")

    # One legend for the cases; alpha has its own.
    axes[0].set_ylabel("mean of ‖∇f‖² over the run")
    legend_below(figure, axes[0], loc="outside lower left", ncols=4)
    _alphas(axes[-1], shares[shares.field == "all"])
    updates, batch, seeds = (int(rows[c].iloc[0]) for c in ("updates", "batch", "seeds"))
    figure.suptitle(
        f"Left: logistic regression, {updates:,} updates of {batch} samples, {seeds} seeds;"
        " bars: 95 % t interval; axes logarithmic.\n"
        "Right: lookups at rows that at most a share p of the samples read; vertical: p = 1/B.",
    )
    return figure


def _bounds(axes: Axes, rows: pd.DataFrame) -> None:
    for number, mode in enumerate(("hybrid", "async")):
        of_mode = rows[rows["mode"] == mode].sort_values("tau")
        axes.plot(of_mode.tau, of_mode.bound, LINES[number], color="0.35", label=f"bound, {mode}")
        axes.errorbar(
            of_mode.tau * (1 + 0.12 * number),
            of_mode.measured,
            yerr=of_mode.measured_half_width_95,
            marker=MARKERS[number],
            linestyle="none",
            capsize=2,
            label=f"measured, {mode}",
        )

    # Hybrid at the step of sync, which the theorem may not allow.
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

    # Lines that do not depend on the lateness.
    plain = rows[rows["mode"] == "sync"].iloc[0]
    axes.axhline(plain.bound, linestyle=":", color="0.35", linewidth=1, label="bound, sync")
    axes.axhline(plain.measured, linestyle="-", color="0.7", linewidth=1, label="measured, sync")
    axes.axhline(plain.untrained, color="black", linewidth=0.8)
    axes.annotate(
        "most before training",
        (1, plain.untrained),
        textcoords="offset points",
        xytext=(0, 2),
        fontsize=6,
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    taus = sorted(set(bold.tau))
    axes.set_xticks(taus, [f"{tau:g}" for tau in taus])
    axes.minorticks_off()
    axes.set_xlabel("τ [updates]")


def _alphas(axes: Axes, shares: pd.DataFrame) -> None:
    for number, (name, of_data) in enumerate(shares.groupby("data", sort=False)):
        axes.plot(
            of_data.share_of_lookups,
            of_data.level,
            LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            markevery=(number % 4, 5),
            markersize=3,
            label=name.replace("synthetic:", "syn. ").replace("kuairand-pure-14d", "kuairand"),
        )
    # Left of these lines a row is read once a batch at most.
    for batch in BATCHES:
        axes.axvline(1 / batch, color="black", linewidth=0.8)
        axes.annotate(
            f"1/{batch:,}",
            (1 / batch, 1.01),
            xycoords=("data", "axes fraction"),
            fontsize=6,
            ha="center",
        )
    axes.set_xscale("log")
    axes.set_xlabel("share p of samples that read the row")
    axes.set_ylabel("share of lookups")
    axes.legend(fontsize=5.5, loc="upper left", handlelength=2.5, frameon=True, framealpha=1)
