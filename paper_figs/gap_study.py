"""What lateness costs on each data set: the gap against the bound, and along the run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, MARKERS, STYLE, SYNC, Setting, gaps_along

_MOST_COLUMNS = 3
_LINEAR = 1.0
"""Thousandths of AUC around 0 that are drawn to scale; beyond, the axis is logarithmic."""


def gap_study_figure(table: Path, curves: Path) -> Figure:
    """A panel per data set, twice: gap to sync against tau, and along the run at the fixed rates.

    Of the first task of each data set. Filled markers and solid lines: fixed rates; open markers
    and dashes: rates tuned per mode and bound.
    """
    rows, lines = pd.read_csv(table), pd.read_csv(curves)
    names = list(dict.fromkeys(rows.data))
    across = min(_MOST_COLUMNS, math.ceil(math.sqrt(len(names))))
    high = -(-len(names) // across)
    with plt.style.context(STYLE):
        figure = plt.figure(figsize=(7.0, 1.0 + 3.6 * high), layout="constrained")
        above, below = figure.subfigures(2, 1)
        panels = above.subplots(high, across, squeeze=False).flat
        for axes, name in zip(panels, names, strict=False):
            _against_tau(axes, _first_task(rows, name))
            axes.set_title(name)
        handles, labels = above.axes[0].get_legend_handles_labels()
        above.legend(handles, labels, loc="outside lower center", ncols=4)
        above.suptitle(_title(rows), fontsize=8)
        panels = below.subplots(high, across, squeeze=False).flat
        ends = _ends_of_every_mode(lines)
        for axes, name in zip(panels, names, strict=False):
            mine = _first_task(lines, name)
            _along(axes, mine[mine.rates == "fixed"], ends)
            axes.set_title(name)
        handles, labels = below.axes[0].get_legend_handles_labels()
        below.legend(handles, labels, loc="outside lower center", ncols=4)
        below.suptitle("Along the run, fixed rates; snapshots, not drained", fontsize=8)
        for part in (above, below):
            for axes in part.axes[len(names) :]:
                axes.set_visible(False)
            for axes in part.axes[: len(names) : across]:
                axes.set_ylabel(GAP_LABEL)
    return figure


def _first_task(table: pd.DataFrame, name: str) -> pd.DataFrame:
    mine = table[table.data == name]
    return mine[mine.task == mine.task.iloc[0]]


def _title(rows: pd.DataFrame) -> str:
    least, most = rows.seeds.min(), rows.seeds.max()
    seeds = f"{least}" if least == most else f"{least} to {most}"
    return (
        "Test AUC minus that of sync at the same kind of rates; bars: 95 % t interval over"
        f" {seeds} paired seeds;\nin async the bound counts a rank's own steps"
    )


def _against_tau(axes: Axes, rows: pd.DataFrame) -> None:
    """A line per mode and kind of rates; bounds stand side by side, without a scale between."""
    late = rows[rows["mode"] != "sync"]
    taus = sorted(set(late.tau))
    modes = list(dict.fromkeys(late["mode"]))
    axes.axhline(0, color="black", linewidth=0.8)
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    series = [(mode, rates) for mode in modes for rates in dict.fromkeys(late.rates)]
    for number, (mode, rates) in enumerate(series):
        mine = late[(late["mode"] == mode) & (late.rates == rates)].sort_values("tau")
        tuned = rates == "tuned"
        place = np.array([taus.index(tau) for tau in mine.tau])
        color = colors[modes.index(mode)]
        axes.errorbar(
            place + 0.12 * (number - (len(series) - 1) / 2),
            1e3 * mine.gap_to_sync,
            yerr=1e3 * mine.gap_to_sync_half_width_95,
            color=color,
            marker=MARKERS[modes.index(mode)],
            markerfacecolor="white" if tuned else color,
            linestyle="--" if tuned else "-",
            linewidth=0.8,
            elinewidth=0.8,
            capsize=2,
            label=f"{mode}, {rates} rates",
        )
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.0)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(taus)), [f"{tau:g}" for tau in taus])
    axes.set_xlabel("bound τ [steps]")


def _ends_of_every_mode(lines: pd.DataFrame) -> dict[Setting, str]:
    """Each mode at the smallest and the largest bound that every data set was run with."""
    labels: dict[Setting, str] = {}
    for mode in dict.fromkeys(lines["mode"]):
        own = lines[lines["mode"] == mode]
        shared = set.intersection(*(set(group.tau) for _, group in own.groupby("data")))
        for tau in sorted({min(shared), max(shared)}) if shared else []:
            if (mode, tau) != SYNC:
                labels[mode, tau] = f"{mode} τ={tau:g}"
    return labels


def _along(axes: Axes, lines: pd.DataFrame, labels: dict[Setting, str]) -> None:
    gaps_along(axes, lines, labels, unit=1e3)
    axes.get_legend().remove()  # one for all panels
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=1.0)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("training samples [thousands]")
