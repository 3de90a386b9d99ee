"""What lateness costs: as a delay, as a dense rate that is too high, and on one ruler."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import GAP_LABEL, MARKERS, gap_dots, of_tables, show_ticks

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
        1, 3, figsize=(10.0, 3.4), layout="constrained", width_ratios=(1, 0.9, 1.1)
    )
    _along(left, delays)
    data, start = gaps.data.iloc[0], gaps.optimizer_start.iloc[0]
    _dense_rates(middle, _of(rates, data, start), data)
    _ruler(right, _of(gaps, data, start), data)
    return figure


def _of(table: pd.DataFrame, data: str, start: float) -> pd.DataFrame:
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
    axes.set_title("rows late: gap along the run", fontsize=8)
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
    axes.set_title(f"{data}: where the best rate lies", fontsize=8)
    axes.legend(fontsize=7)


def _ruler(axes: Axes, gaps: pd.DataFrame, data: str) -> None:
    found = []
    for rows, dense, kind, name in RULER:
        line = gaps[(gaps.rows_late == rows) & (gaps.dense_late == dense) & (gaps.rates == kind)]
        found.append((name, line[line.batch == gaps.batch.min()]))
    doubled = gaps[(gaps.batch > gaps.batch.min()) & (gaps.rates == "own")]
    found.append(("batch twice as large, own rates", doubled))
    found = [(name, line.iloc[:1]) for name, line in found if len(line)]
    places = np.arange(len(found))[::-1]
    gap_dots(axes, pd.concat(line for _, line in found), places)
    axes.set_yticks(places, [name for name, _ in found], fontsize=6.5)
    axes.set_xlabel(GAP_LABEL)
    axes.set_title(f"{data}: on one ruler", fontsize=8)
