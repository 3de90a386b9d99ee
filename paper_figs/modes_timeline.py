"""The stages of a few steps in every mode: simulated beside recorded."""

from __future__ import annotations

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from paper_figs.style import of_tables

LOOKS = {
    "load": ("white", "...."),
    "lookup": ("#56B4E9", ""),
    "forward": ("#F7E3A1", ""),
    "backward": ("#E69F00", "////"),
    "dense_sync": ("black", ""),
    "dense_pull": ("0.6", "xxxx"),
    "dense_push": ("0.6", ""),
    "push": ("#009E73", "\\\\\\\\"),
}
"""Stage -> fill and hatching, which differ in grey, too."""
ROWS = {
    "load": "lookup", "lookup": "lookup", "forward": "compute", "backward": "compute",
    "dense_sync": "dense", "dense_pull": "dense", "dense_push": "dense", "push": "push",
}  # fmt: skip
"""Stage -> the line of the rank on which it is drawn."""
RESOURCES = ("lookup", "compute", "dense", "push")
LEAST_SHOWN = 0.01
"""Of a panel's width: a stage whose widest bar is less cannot be seen, and is in no legend."""
NUMBERS_ACROSS = 32
"""So many numbers fit side by side into a panel."""


@of_tables
def modes_timeline_figure(rows: pd.DataFrame) -> Figure:
    """A row of panels a mode, a column a system; bars are stages, their numbers are steps.

    Panels of a column share their axis of time, so that the same steps end earlier in a faster
    mode. Batches of a rank that are in flight together lie above each other. A bar that is too
    narrow for its number has none.
    """
    rows = rows[rows.stage.isin(ROWS)]
    modes = [*dict.fromkeys(rows["mode"])]
    columns = [*dict.fromkeys(zip(rows.source, rows.system, strict=True))]
    columns.sort(key=lambda c: (c[1] == "this host", c[0] == "recorded"))
    size = (7.2, 1.15 * len(modes) + 0.9)
    figure, axes = plt.subplots(
        len(modes), len(columns), figsize=size, layout="constrained", sharex="col",
        squeeze=False,
    )  # fmt: skip
    for line, mode in enumerate(modes):
        for place, (source, system) in enumerate(columns):
            own = rows[(rows["mode"] == mode) & (rows.source == source) & (rows.system == system)]
            ax = axes[line, place]
            _panel(ax, own, _span_ms(rows, source, system) / NUMBERS_ACROSS)
            step_ms = 1e3 * own.mean_step_s.iloc[0]
            head = f"{source}, {system}\n" if line == 0 else ""
            ax.set_title(f"{head}{mode}: {step_ms:.3g} ms a step")
            if place:
                ax.tick_params(labelleft=False)
    for ax in axes[-1]:
        ax.set_xlabel("time [ms]")
        ax.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))  # a label there is cut off
    shares = (rows.end_s - rows.start_s) / rows.groupby(["source", "system"]).end_s.transform("max")
    widest = shares.groupby(rows.stage).max()
    shown = [stage for stage in LOOKS if widest.get(stage, 0.0) > LEAST_SHOWN]
    marks = [
        Patch(facecolor=LOOKS[s][0], hatch=LOOKS[s][1], edgecolor="black", linewidth=0.4)
        for s in shown
    ]
    names = [s.replace("_", " ") for s in shown]
    figure.legend(marks, names, loc="outside lower center", ncols=len(marks))
    return figure


def _span_ms(rows: pd.DataFrame, source: str, system: str) -> float:
    own = rows[(rows.source == source) & (rows.system == system)]
    return 1e3 * float(own.end_s.max())


def _panel(ax: Axes, rows: pd.DataFrame, least_ms: float) -> None:
    ranks = sorted(rows["rank"].unique())
    for number, rank in enumerate(ranks):
        for place, resource in enumerate(RESOURCES):
            y = number * (len(RESOURCES) + 0.5) + place
            own = rows[(rows["rank"] == rank) & (rows.stage.map(ROWS) == resource)]
            _bars(ax, own.sort_values("start_s"), y, least_ms)
    ax.set_yticks(
        [n * (len(RESOURCES) + 0.5) + p for n in range(len(ranks)) for p in range(len(RESOURCES))],
        [f"{resource} {rank}" for rank in ranks for resource in RESOURCES],
        fontsize=4.5,
    )
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def _bars(ax: Axes, rows: pd.DataFrame, y: float, least_ms: float) -> None:
    """Bars of one resource of one rank; those that overlap share its height. Bars from ``least_ms``
    on have their number."""
    lanes: list[float] = []
    placed = []
    for bar in rows.itertuples():
        lane = next((k for k, end in enumerate(lanes) if end <= bar.start_s + 1e-6), len(lanes))
        lanes[lane : lane + 1] = [bar.end_s]
        placed.append((lane, bar))
    height = 0.9 / max(1, len(lanes))
    for lane, bar in placed:
        fill, hatch = LOOKS[bar.stage]
        start, width = 1e3 * bar.start_s, 1e3 * (bar.end_s - bar.start_s)
        middle = y - 0.45 + (lane + 0.5) * height
        ax.barh(
            middle, width, height, left=start, color=fill, hatch=hatch, edgecolor="black",
            linewidth=0.3,
        )  # fmt: skip
        if bar.stage in ("lookup", "push", "forward") and width >= least_ms:
            ax.text(
                start + width / 2, middle, str(bar.step), fontsize=4, ha="center", va="center",
                clip_on=True,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8},
            )  # fmt: skip
