"""AUC by mode: gaps to sync with their intervals, curves over samples and simulated time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, MARKERS, legend_below, of_tables, show_ticks, spread_of


@of_tables
def demo_figure(rows: pd.DataFrame) -> Figure:
    """A dot per setting with its 95 % interval, of the first task of the table.

    Settings stand under what is late in them; an open dot has a dense rate of its own.
    """
    # The first task; sync is the zero line, and its dense rate the shared one.
    task = rows.task.iloc[0]
    data = rows.data.iloc[0]
    seeds = rows.seeds.max()
    rows = rows[rows.task == task].reset_index(drop=True)
    shared = rows.lr.iloc[0]
    rows = rows[rows["mode"] != "sync"]

    # A line each, headings in bold.
    figure, axes = plt.subplots(figsize=(7.0, 3.3))
    labels = _demo_dots(axes, rows, shared)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks([place for place, _ in labels], [name for _, name in labels])
    for tick in axes.get_yticklabels():
        tick.set_fontweight("normal" if "rate" in tick.get_text() else "bold")
    axes.set(ylim=(labels[-1][0] + 0.7, -0.7), xlabel=GAP_LABEL)
    axes.grid(axis="y", visible=False)
    figure.suptitle(
        f"Test AUC ({task}, {data}) minus that of sync: means of {seeds} paired seeds, 95 %"
        " over seeds and test rows.\nUpdates that rows / dense weights miss; filled: sync's"
        " dense rate, open: a rate of its own",
    )
    return figure


def what_is_late(rows_late: float, dense_late: float) -> str:
    """The heading that a setting stands under."""
    if rows_late and dense_late:
        return "both late (async)"
    return "rows late alone" if rows_late else "dense weights late alone"


def _demo_dots(axes: Axes, rows: pd.DataFrame, shared: float) -> list[tuple[float, str]]:
    """The dots; returns the tick labels with their heights."""
    labels: list[tuple[float, str]] = []
    heading = ""
    at = -1.0
    for row in rows.itertuples():
        # A new heading where something else is late.
        late = what_is_late(row.rows_late, row.dense_late)
        if late != heading:
            heading = late
            at += 1
            labels.append((at, heading))

        # The setting's dot, open where its dense rate is not that of sync.
        at += 1
        has_other_rate = not np.isclose(row.lr, shared)
        labels.append((at, f"{row.rows_late:g} / {row.dense_late:g}, rate {row.lr:g}"))
        axes.errorbar(
            1e3 * row.gap_to_sync,
            at,
            xerr=1e3 * row.gap_to_sync_half_width_95,
            fmt="o",
            color="black",
            markerfacecolor="white" if has_other_rate else "black",
            capsize=3,
        )
    return labels


@of_tables
def time_to_auc_figure(rows: pd.DataFrame, ends: pd.DataFrame) -> Figure:
    """Left: what a person waiting for the cluster sees. Middle: what a sample teaches. Last: ends.

    Right: the wait for each target with its 95 % interval; an arrow where a seed never reaches it.
    """
    # The first task; of several evaluations at one instant the last.
    rows = rows[rows.task == rows.task[0]].drop_duplicates(["mode", "seed", "samples"], keep="last")
    modes = list(dict.fromkeys(rows["mode"]))
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.8))
    axes[1].sharey(axes[0])

    # The same curves over the cluster's clock and over samples: means, and the range of seeds.
    for ax, column, unit, label in (
        (axes[0], "simulated_s", 1.0, f"simulated time on {rows.cluster.iloc[0]} [s]"),
        (axes[1], "samples", 1e3, "training samples [thousands]"),
    ):
        for number, mode in enumerate(modes):
            curves = rows[rows["mode"] == mode].groupby(rows[column] / unit).auc
            x = curves.mean().index
            (line,) = ax.plot(x, curves.mean(), marker=MARKERS[number], label=mode)
            ax.fill_between(x, curves.min(), curves.max(), alpha=0.15, color=line.get_color())
        ax.set_xlabel(label)
    axes[0].set_ylabel("test AUC")
    axes[0].legend()

    _waits(axes[2], ends, modes)
    figure.suptitle(
        "True gradients in the simulated order of reads and writes; bands: range, bars: 95 % t"
        f" interval, over {rows.seed.nunique()} seeds",
    )
    return figure


def _waits(axes: Axes, ends: pd.DataFrame, modes: list[str]) -> None:
    # Modes beside each other at each target; those that a seed never reaches are arrows.
    shares = sorted(set(ends.target_share))
    for number, mode in enumerate(modes):
        of_mode = ends[ends["mode"] == mode].sort_values("target_share")
        place = np.searchsorted(shares, of_mode.target_share) + 0.15 * (
            number - (len(modes) - 1) / 2
        )
        whole = (of_mode.reached == of_mode.seeds).to_numpy()
        drawn = axes.errorbar(
            place[whole],
            of_mode.seconds[whole],
            yerr=of_mode.seconds_half_width_95[whole],
            fmt=MARKERS[number],
            label=mode,
        )
        if not whole.all():
            axes.plot(
                place[~whole],
                of_mode.not_before_s[~whole],
                marker="^",
                linestyle="none",
                fillstyle="none",
                color=drawn.lines[0].get_color(),
                label=f"{mode}: not reached by",
            )

    # Targets as shares of sync's climb, and as AUC.
    aucs = [ends.target_auc[ends.target_share == share].iloc[0] for share in shares]
    labels = [f"{share:.0%}\n{auc:.4f}" for share, auc in zip(shares, aucs, strict=True)]
    axes.set_xticks(range(len(shares)), labels)
    axes.set(xlabel="share of sync's climb, AUC", ylabel="simulated time to it [s]")
    axes.set_ylim(bottom=0)


REFERENCE = "sync"
SETTLED = 0.15
"""Share of a run from which on its gaps set the scale of the third row."""
_LOWEST = -60.0  # thousandths; a published gap below is left out of the scale
_PUBLISHED = {"hybrid": "-", "xdl_async": "--", "async_averaging": "--"}


@of_tables
def convergence_figure(rows: pd.DataFrame, papers: pd.DataFrame, times: pd.DataFrame) -> Figure:
    """A column a data set. Rows: AUC by samples, simulated time to a share of sync's climb over
    that of XDL's sync (else sync), and gaps along the run.

    The first task of each set is drawn. Bands and bars are 95 % t intervals over seeds, of the mean
    in the first row, of the paired ratio in the second and of the paired gap in the third; what is
    grey is published, of other data.
    """
    # A column of three panels a data set.
    rows = rows[~rows.drained]  # the ends, all pushes applied, are no points of the curves
    sets = list(dict.fromkeys(rows.data_set))
    names = list(dict.fromkeys(rows.line))
    figure, grid = plt.subplots(
        3, len(sets), figsize=(max(5.0, 2.3 * len(sets)), 6.6), squeeze=False
    )
    for column, data_set in zip(grid.T, sets, strict=True):
        of_set = rows[rows.data_set == data_set]
        of_set = of_set[of_set.task == of_set.task.iloc[0]]
        _aucs(column[0], of_set, names)
        _times(column[1], times[times.data_set == data_set], names)
        _gaps(column[2], of_set, names, papers[papers.data_set == data_set])
        column[0].set_title(of_set.title.iloc[0].replace("; ", "\n"))
        column[0].set_xlabel("training samples [thousands]")
        column[1].set_xlabel(
            f"time to {times.target_share.iloc[0]:.0%} of sync's climb,\n"
            f"over {_reference(set(of_set.line))}'s"
        )
        column[2].set_xlabel("share of the run (grey: pass)")

    # Labels stand at the left column only, and one legend below serves all.
    for row, label in ((0, "test AUC"), (2, GAP_LABEL)):
        grid[row, 0].set_ylabel(label)
    for axes in grid[1, 1:]:
        axes.set_yticklabels([])
    shown = {
        label: handle
        for axes in grid[0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=len(shown))
    figure.suptitle(
        f"True gradients in simulated orders; bands: 95 % t intervals over"
        f" {rows.seed.nunique()} paired seeds\n(scaled by the means). Grey: published, of other"
        " data and without seeds (times: crosses; gaps to sync: solid Persia's hybrid,\ndashed"
        " async). Times are logarithmic; gaps are linear within a thousandth, logarithmic"
        " beyond",
    )
    return figure


def _look(names: list[str], name: str) -> dict[str, object]:
    place = names.index(name)
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    dashed = name in ("xdl_sync", "xdl_async", "paddle")
    return {
        "marker": MARKERS[place % len(MARKERS)],
        "color": colours[place % len(colours)],
        "linestyle": "--" if dashed else "-",
        "markersize": 3,
    }


def _scale(axes: Axes, values: list[float]) -> None:
    """Scale the axis to these values; wider bands are cut off."""
    shown = [x for x in values if np.isfinite(x) and x > _LOWEST]
    if shown:
        room = 0.15 * (max(shown) - min(shown)) or 1.0
        axes.set_ylim(min(shown) - room, max(shown) + room)


def _reference(names: set[str]) -> str:
    return "xdl_sync" if "xdl_sync" in names else REFERENCE


def _times(axes: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    """Times to the target, a line each, from top to bottom; one that not every seed reaches has no
    point."""
    places = dict(zip(names, range(len(names), 0, -1), strict=True))
    axes.axvline(1, color="black", linewidth=0.8)
    # Simulated times with their intervals, then what was published.
    for line in rows[rows.ratio_to_sync.notna()].itertuples():
        low = line.ratio_to_sync - line.ratio_to_sync_low_95
        high = line.ratio_to_sync_high_95 - line.ratio_to_sync
        axes.errorbar(
            line.ratio_to_sync,
            places[line.mode],
            xerr=[[low], [high]],
            **_look(names, line.mode) | {"linestyle": "none"},
        )
    published = rows[rows.published_ratio_to_sync.notna()]
    axes.plot(
        published.published_ratio_to_sync,
        published["mode"].map(places),
        "x",
        color="0.3",
        zorder=4,
        label="published",
    )
    axes.set_xscale("log")
    show_ticks(axes, "x", (0.01, 0.03, 0.1, 0.3, 1, 3, 10))
    axes.set_yticks([*places.values()], names, fontsize=6)
    axes.set_ylim(0.4, len(names) + 0.6)


def _aucs(axes: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    means: list[float] = []
    for name in [name for name in names if name in set(rows.line)]:
        lines = rows[rows.line == name]
        mean, half = spread_of(lines.pivot(index="seed", columns="samples", values="auc"))
        x = mean.index.to_numpy() / 1e3
        (line,) = axes.plot(x, mean, label=name, **_look(names, name))
        axes.fill_between(x, mean - half, mean + half, alpha=0.15, color=line.get_color())
        means += mean.tolist()
    _scale(axes, means)


def _gaps(axes: Axes, rows: pd.DataFrame, names: list[str], papers: pd.DataFrame) -> None:
    seen: list[float] = []
    for name, style in _PUBLISHED.items():
        line = papers[(papers.line == name) & papers.gap_to_sync.notna()]
        if len(line):
            gap = 1e3 * line.gap_to_sync.to_numpy()
            axes.plot(
                line.share_of_pass,
                gap,
                color="0.6",
                linestyle=style,
                linewidth=1.6,
                label=f"published {line.system.iloc[0]}",
                zorder=1,
            )
            seen += gap[line.share_of_pass.to_numpy() >= SETTLED].tolist()

    # AUC of each line by seed and share of the run, for differences to sync seed by seed.
    wide = {
        name: rows[rows.line == name].pivot(index="seed", columns="share_of_run", values="auc")
        for name in names
        if name in set(rows.line)
    }
    axes.axhline(0, color="black", linewidth=0.8)
    for name in wide:
        if name == REFERENCE or wide[name].equals(wide[REFERENCE]):
            continue  # the same order, hence the same AUC
        mean, half = spread_of(1e3 * (wide[name] - wide[REFERENCE]))
        share = mean.index.to_numpy()
        (line,) = axes.plot(share, mean, label=name, **_look(names, name))
        axes.fill_between(share, mean - half, mean + half, alpha=0.15, color=line.get_color())
        seen += mean[share >= SETTLED].tolist()
    _scale(axes, [0.0, *seen])
    low, high = axes.get_ylim()
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(low, high)
    show_ticks(axes, "y")


@of_tables
def daily_figure(rows: pd.DataFrame) -> Figure:
    """AUC of each day by the model of the days before it; right, what of it late rows cost."""
    # A line for each mode and bound.
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.8))
    for marker, (name, of_mode) in zip(
        MARKERS, rows.groupby(["mode", rows.tau.fillna(0)], sort=False), strict=False
    ):
        mode, tau = name
        label = f"{mode}, tau {tau:g}" if of_mode.tau.notna().any() else str(mode)
        axes[0].plot(of_mode.number, of_mode.auc, marker=marker, label=label)
        if of_mode.gap_to_sync.notna().any():
            axes[1].errorbar(
                of_mode.number,
                1e3 * of_mode.gap_to_sync,
                yerr=1e3 * of_mode.gap_to_sync_half_width_95,
                marker=marker,
                capsize=2.5,
                label=label,
            )

    # Days by the names of their files.
    axes[1].axhline(0, color="black", linewidth=0.8)
    names = rows.drop_duplicates("number")
    for one in axes:
        one.set_xticks(names.number, names.judged_by.astype(str), rotation=60, ha="right")
    axes[0].set(ylabel="AUC of the day", xlabel="judged by")
    axes[1].set(ylabel=GAP_LABEL, xlabel="judged by")
    legend_below(figure, axes[0])
    return figure
