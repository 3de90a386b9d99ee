"""What late rows and dense weights cost, on which rows, what treats it, and the bound of theory."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, MARKERS, gap_dots, legend_below, of_tables, show_ticks

DECADES = [m * 10.0**n for n in range(-7, 3) for m in (1, 3)]
"""Ticks of a logarithmic x axis."""
RULER = (
    # Rows late, dense late, rates, name; a batch of twice the samples has a name of its own.
    (4, 0, "own", "rows 4 late"),
    (16, 0, "own", "rows 16 late"),
    (64, 0, "own", "rows 64 late"),
    (7, 7, "of sync", "both 7 late (async), sync's rates"),
    (7, 7, "own", "both 7 late (async), own rates"),
    (39, 7, "of sync", "rows 39, dense 7, sync's rates"),
    (39, 7, "own", "rows 39, dense 7, own rates"),
)


@of_tables
def lateness_figure(gaps: pd.DataFrame, rates: pd.DataFrame, delays: pd.DataFrame) -> Figure:
    """Left: the gap of late rows along each run, against lateness over updates so far. Middle:
    validation AUC against the dense rate, dense weights 0, 1 and 7 late (first stream). Right: what
    each lateness costs there, beside a doubling of the batch; bars 95 % of seeds and test rows.
    """
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(10.0, 3.4), width_ratios=(1, 0.9, 1.1)
    )
    _along(left, delays)
    data, start = gaps.data.iloc[0], gaps.optimizer_start.iloc[0]
    _dense_rates(middle, _of_stream(rates, data, start), data)
    _ruler(right, _of_stream(gaps, data, start), data)
    figure.suptitle(
        f"Means over paired seeds: of gaps {gaps.seeds.max()}, of rates {rates.seeds.max()}; bars"
        " at right: 95 % over seeds and test rows"
    )
    return figure


def _of_stream(table: pd.DataFrame, data: str, start: float) -> pd.DataFrame:
    return table[(table.data == data) & (table.optimizer_start == start)]


def _along(axes: Axes, delays: pd.DataFrame) -> None:
    axes.axhline(0, color="black", linewidth=0.8)
    streams = list(delays.groupby(["data", "optimizer_start"], sort=False))
    for number, ((data, start), mine) in enumerate(streams):
        share = mine.rows_late / mine.updates
        axes.plot(
            share, 1e3 * mine.gap, linestyle="none", markersize=3.5, alpha=0.8,
            marker=MARKERS[number % len(MARKERS)],
            label=data.removeprefix("synthetic:") + (f", start {start:g}" if start else ""),
        )  # fmt: skip
    axes.set_xscale("log")
    low, high = axes.get_ylim()[0], max(1.0, 1.2e3 * delays.gap.max())
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(low, high)
    show_ticks(axes, "y")
    show_ticks(axes, "x", DECADES)
    axes.set_xlabel("rows late / updates so far (logarithmic)")
    axes.set_ylabel(GAP_LABEL + ", linear within 1")
    axes.set_title("rows late: gap along the run")
    axes.legend(fontsize=6)


def _dense_rates(axes: Axes, rates: pd.DataFrame, data: str) -> None:
    rates = rates[(rates.rows_late == 0) & (rates.batch_factor == 1)]
    for number, (late, mine) in enumerate(rates.groupby("dense_late")):
        row_lr = mine[mine.chosen].row_lr.iloc[0]
        line = mine[mine.row_lr == row_lr].sort_values("lr")
        axes.plot(
            line.lr, line.validation_auc, marker=MARKERS[number % len(MARKERS)],
            label=f"dense {late} late",
        )  # fmt: skip
    axes.set_xscale("log")
    show_ticks(axes, "x", DECADES)
    axes.set_xlabel("dense learning rate (Adam, logarithmic)")
    axes.set_ylabel("validation AUC")
    axes.set_title(f"{data}: where the best rate lies")
    axes.legend()


def _ruler(axes: Axes, gaps: pd.DataFrame, data: str) -> None:
    found = []
    for rows, dense, kind, name in RULER:
        line = gaps[(gaps.rows_late == rows) & (gaps.dense_late == dense) & (gaps.rates == kind)]
        found.append((name, line[line.batch == gaps.batch.min()]))
    doubled = gaps[(gaps.batch > gaps.batch.min()) & (gaps.rates == "own")]
    found.append(("batch twice as large, own rates", doubled))
    found = [(name, line.iloc[:1]) for name, line in found if len(line)]
    places = np.arange(len(found))[::-1]
    _gaps_of(axes, places, pd.concat(line for _, line in found), "gap_to_sync")
    axes.set_yticks(places, [name for name, _ in found], fontsize=6.5)
    axes.set_xlabel(GAP_LABEL + ", linear within 1")
    axes.set_title(f"{data}: on one ruler")


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
    task, data, seeds = rows.task.iloc[0], rows.data.iloc[0], rows.seeds.max()
    is_reference = (rows.base == "sync") & (rows.treatment == "untreated")
    rows = rows[(rows.task == task) & ~is_reference].reset_index(drop=True)
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
    places, at, base = [], -1.0, ""
    for row in rows.itertuples():
        if row.base != base:
            base, at = row.base, at + 1.0
            labels.append((at, base))
        at += 1.0
        places.append(at)
        labels.append((at, TREATMENTS.get(row.treatment, row.treatment).format(**row._asdict())))
    return labels, np.array(places)


def _gaps_of(axes: Axes, places: np.ndarray, rows: pd.DataFrame, name: str) -> None:
    gap_dots(axes, rows, places, name)
    axes.set_xscale("symlog", linthresh=1, linscale=1)
    show_ticks(axes, "x")


@of_tables
def row_frequency_figure(gaps: pd.DataFrame, stale: pd.DataFrame, drifts: pd.DataFrame) -> Figure:
    """Gap by frequency at the largest bound; missed pushes of the first data set; drift of all."""
    data = gaps.data.iloc[0]
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.9))
    _gaps_by_frequency(axes[0], gaps[(gaps.tau == gaps.tau.max()) & (gaps.by == "rarest")])
    _staleness(axes[1], stale[stale.data == data])
    _drift(axes[2], drifts)
    figure.suptitle(
        f"Hybrid against sync, bars: 95 % over {int(gaps.seeds.iloc[0])} paired seeds and test"
        f" rows; middle: {data}",
    )
    return figure


def _gaps_by_frequency(axes: Axes, rows: pd.DataFrame) -> None:
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
    axes.set_title("gap by drift of rows")
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.45 * (high - low), high)  # room for the legend
    axes.legend(fontsize=5, handlelength=1.0, loc="lower left", ncols=2, columnspacing=0.8)


BATCHES = (128, 4096)
LINES = ("-", "--", "-.", ":")


@of_tables
def convergence_bound_figure(rows: pd.DataFrame, shares: pd.DataFrame) -> Figure:
    """A panel per case at the largest T and B: bound and measured; then alpha of the data sets."""
    rows = rows[(rows.updates == rows.updates.max()) & (rows.batch == rows.batch.max())]
    cases = list(dict.fromkeys(rows.case))
    count = len(cases) + 1
    widths = [1.0] * len(cases) + [1.35]
    figure, axes = plt.subplots(1, count, figsize=(7.0, 3.5), width_ratios=widths)
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
