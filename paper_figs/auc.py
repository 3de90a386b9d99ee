"""AUC by mode: gaps to sync with their intervals, curves over samples and simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import (
    GAP_LABEL,
    in_order,
    legend_below,
    look_of,
    no_small_text,
    of_tables,
    show_ticks,
    spread_of,
)


@of_tables
def sweep_figure(rows: pd.DataFrame) -> Figure:
    """A dot for each line of a study with the 95 % interval of its gap, of the first task.

    Lines stand under their group and the line that they are held against. Where gaps are large,
    the axis is linear within a thousandth of AUC and logarithmic beyond.
    """
    # The first task, and what is held against something.
    rows = rows[rows.task == rows.task.iloc[0]]
    words = {name: rows[name].astype(object).where(rows[name].notna(), "") for name in _WORDS}
    rows = rows.assign(**words)
    data = ", ".join(dict.fromkeys(rows.data))
    held = rows[rows.versus != ""].groupby(["group", "versus"], sort=False)
    late = pd.concat([of_reference for _, of_reference in held], ignore_index=True)

    # A height for each line, with a heading, in bold, where group or reference change.
    labels: list[tuple[float, str, str]] = []
    places = []
    heading = None
    for row in late.itertuples():
        if (row.group, row.versus) != heading:
            heading = (row.group, row.versus)
            labels.append((len(labels), f"{row.group} minus {row.versus}".strip(), "bold"))
        places.append(len(labels))
        labels.append((len(labels), row.line, "normal"))

    # The dots, in the looks of their modes.
    figure, axes = plt.subplots(figsize=(7.0, 1.0 + 0.19 * len(labels)))
    axes.axvline(0, color="black", linewidth=0.8)
    for place, row in zip(places, late.itertuples(), strict=True):
        look = look_of(row.mode)
        axes.errorbar(
            1e3 * row.gap,
            place,
            xerr=1e3 * row.gap_half_width_95,
            fmt=look.marker,
            color=look.color,
            markersize=4,
            capsize=2.5,
        )
    axes.grid(axis="y", visible=False)
    axes.set_yticks([place for place, _, _ in labels], [name for _, name, _ in labels])
    for tick, (_, _, weight) in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_fontweight(weight)
    if late.gap.abs().max() > _MOST_LINEAR:
        axes.set_xscale("symlog", linthresh=1, linscale=1)
        show_ticks(axes, "x")
    axes.set(ylim=(len(labels) - 0.3, -0.7), xlabel="AUC gap [$10^{-3}$]")
    figure.suptitle(
        f"Test AUC ({rows.task.iloc[0]}, {data}) minus that of the line in bold\n"
        f"means of {rows.seeds.max():g} paired seeds, bars 95 % over seeds and test samples",
    )
    return figure


_MOST_LINEAR = 10e-3
_WORDS = ("group", "versus")
demo_figure = treatments_figure = sweep_figure


REFERENCE = "sync"
WHOLE = 0.85
"""Share of a pass from which on a published curve stands for its end."""
FOLLOWED = "hybrid"
"""The line whose gap is followed along the run."""


@of_tables
def convergence_figure(rows: pd.DataFrame, papers: pd.DataFrame, times: pd.DataFrame) -> Figure:
    """A panel a question: what is lost at the end, how long sync's AUC takes, and when hybrid's gap
    closes.

    The first task of each set is drawn. Bars are 95 % t intervals over seeds alone: of the paired
    gap, of the paired ratio of times; crosses are published, of other data and one run each. A
    mode with late dense weights has sync's rates here, which is unfair to it.
    """
    no_small_text()

    # Both upper panels have a line for each mode, set by set, from top to bottom.
    firsts = rows.groupby("data_set").task.transform("first")
    rows = rows[rows.task == firsts]
    sets = list(dict.fromkeys(rows.data_set))
    places = _places(rows, sets)
    figure = plt.figure(figsize=(7.0, 3.0 + 0.17 * (max(places.values()) + 2)))
    grid = figure.add_gridspec(2, 2, height_ratios=[0.17 * max(places.values()), 2.2])
    lost, time = (figure.add_subplot(grid[0, column]) for column in range(2))
    along = grid[1, :].subgridspec(1, len(sets)).subplots(sharey=True, squeeze=False)[0]

    _lost_at_the_end(lost, rows, papers, places)
    _times(time, times, places)
    names = [(at, name) for (_, name), at in places.items()]
    for axes, labels in ((lost, [name for _, name in names]), (time, [])):
        axes.set_yticks([at for at, _ in names], labels or [""] * len(names))
        axes.set_ylim(max(places.values()) + 0.6, -1.6)
        axes.grid(axis="y", visible=False)
        for data_set in sets:
            top = min(at for (of_set, _), at in places.items() if of_set == data_set)
            axes.axhline(top - 1.6, color="0.8", linewidth=0.6)
            if axes is lost:
                title = rows[rows.data_set == data_set].title.iloc[0].replace(";", ",")
                where = axes.get_yaxis_transform()
                axes.text(0.01, top - 1, title, transform=where, va="center", weight="bold")

    _gap_along_the_run(along, rows, sets)
    seeds = rows.seed.nunique()
    figure.suptitle(
        "What each mode learns from a sample, and in a second\n"
        f"True gradients in simulated orders: means of {seeds} paired seeds, bars 95 % over seeds"
        " alone.\nCrosses: published, of other data and one run each. async has sync's learning"
        " rates here.",
    )
    return figure


def _places(rows: pd.DataFrame, sets: list[str]) -> dict[tuple[str, str], float]:
    """Height of each data set's lines, with room for the set's title above them."""
    places: dict[tuple[str, str], float] = {}
    at = -1.0
    for data_set in sets:
        at += 1
        for name in in_order(rows[rows.data_set == data_set].line):
            at += 1
            places[data_set, name] = at
        at += 1
    first = min(places.values())
    return {key: place - first for key, place in places.items()}


def _aucs(rows: pd.DataFrame, name: str, by: str) -> pd.DataFrame:
    """AUC of a line, a row a seed, a column for each place along the run."""
    return rows[rows.line == name].pivot(index="seed", columns=by, values="auc")


def _lost_at_the_end(
    axes: Axes, rows: pd.DataFrame, papers: pd.DataFrame, places: dict[tuple[str, str], float]
) -> None:
    """Gaps to sync when all pushes are applied; a line in sync's own order has none."""
    axes.axvline(0, color="black", linewidth=0.8)
    ends = rows[rows.drained]
    for (data_set, name), at in places.items():
        of_set = ends[ends.data_set == data_set].set_index("seed")
        gaps = 1e3 * (of_set[of_set.line == name].auc - of_set[of_set.line == REFERENCE].auc)
        look = look_of(name)
        if (gaps == 0).all():
            own = "sync's own order"
            axes.plot(0, at, look.marker, color=look.color, markerfacecolor="white", label=own)
            continue
        mean, half = spread_of(gaps.to_frame("gap"))
        axes.errorbar(mean.gap, at, xerr=half.gap, fmt=look.marker, color=look.color)

        # What was published of the same line on the set of that name, at the end of its pass.
        curve = papers[(papers.data_set == data_set) & (papers.line == name)]
        curve = curve[curve.gap_to_sync.notna() & (curve.share_of_pass >= WHOLE)]
        curve = curve.sort_values("share_of_pass")
        if len(curve):
            gap = 1e3 * curve.gap_to_sync.iloc[-1]
            axes.plot(gap, at, "x", color="0.4", zorder=4, label="published")
    axes.set_title("What is lost at the end (open: sync's own order)")
    axes.set_xlabel("AUC gap to sync [$10^{-3}$], right is better")


def _times(axes: Axes, rows: pd.DataFrame, places: dict[tuple[str, str], float]) -> None:
    """Times to the target over those of XDL's sync, else sync; one that not every seed reaches has
    no point."""
    axes.axvline(1, color="black", linewidth=0.8)
    for line in rows[rows.ratio_to_sync.notna()].itertuples():
        at = places.get((line.data_set, line.mode))
        if at is None:
            continue
        low = line.ratio_to_sync - line.ratio_to_sync_low_95
        high = line.ratio_to_sync_high_95 - line.ratio_to_sync
        look = look_of(line.mode)
        bar = [[low], [high]]
        axes.errorbar(line.ratio_to_sync, at, xerr=bar, fmt=look.marker, color=look.color)
        if np.isfinite(line.published_ratio_to_sync):
            axes.plot(line.published_ratio_to_sync, at, "x", color="0.4", zorder=4)
    axes.set_xscale("log")
    show_ticks(axes, "x", (0.01, 0.03, 0.1, 0.3, 1, 3, 10))
    axes.set_title(f"Simulated time to {rows.target_share.iloc[0]:.0%} of sync's climb")
    axes.set_xlabel("over that of XDL's sync, else sync; left is better")


def _gap_along_the_run(panels: Sequence[Axes], rows: pd.DataFrame, sets: list[str]) -> None:
    """Paired gaps of one line to sync at each snapshot, a panel a data set."""
    snapshots = rows[~rows.drained]
    for axes, data_set in zip(panels, sets, strict=True):
        of_set = snapshots[snapshots.data_set == data_set]
        late, sync = (_aucs(of_set, name, "share_of_run") for name in (FOLLOWED, REFERENCE))
        look = look_of(FOLLOWED)
        if not late.empty:
            mean, half = spread_of(1e3 * (late - sync))
            axes.errorbar(mean.index, mean, yerr=half, marker=look.marker, color=look.color)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(of_set.title.iloc[0].replace("; ", "\n").replace(", field", "\nfield"))
        axes.set_xlabel("share of the run")

    # Axes of gaps, linear within a thousandth, are shared.
    panels[0].set_yscale("symlog", linthresh=1)
    show_ticks(panels[0], "y")
    panels[0].set_ylabel(f"{FOLLOWED}'s {GAP_LABEL}")
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)


@of_tables
def daily_figure(rows: pd.DataFrame) -> Figure:
    """AUC of each day by the model of the days before it; right, what of it late rows cost."""
    # A line for each mode and bound.
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.8))
    names = [
        m if m == "sync" else f"{m}, tau {t:g}" for m, t in zip(rows["mode"], rows.tau, strict=True)
    ]
    rows = rows.assign(label=names)
    for label in in_order(rows.label):
        of_mode, look = rows[rows.label == label], look_of(label)
        style = {"marker": look.marker, "linestyle": look.line, "color": look.color}
        axes[0].plot(of_mode.number, of_mode.auc, label=label, **style)
        if of_mode.gap.notna().any():
            axes[1].errorbar(
                of_mode.number,
                1e3 * of_mode.gap,
                yerr=1e3 * of_mode.gap_half_width_95,
                capsize=2.5,
                label=label,
                **style,
            )

    # Days by the names of their files.
    axes[1].axhline(0, color="black", linewidth=0.8)
    days = rows.drop_duplicates("number")
    for one in axes:
        one.set_xticks(days.number, days.judged_by.astype(str), rotation=60, ha="right")
    axes[0].set(ylabel="AUC of the day", xlabel="judged by")
    axes[1].set(ylabel=GAP_LABEL, xlabel="judged by")
    legend_below(figure, axes[0])
    return figure
