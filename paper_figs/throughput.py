"""Samples a second: measured beside rivals, and published beside what the simulator says."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, in_order, legend_below, look_of, of_tables


def _medians(axes: Axes, rows: pd.DataFrame) -> pd.Series:
    """Medians by name, from top to bottom, as bars with the extremes."""
    medians = rows.groupby("name", sort=False).value.agg(["median", "min", "max"])
    error = [medians["median"] - medians["min"], medians["max"] - medians["median"]]
    axes.barh(range(len(medians)), medians["median"], xerr=error, color="0.75")
    axes.set_yticks(range(len(medians)), medians.index)
    axes.invert_yaxis()
    return medians["median"]


QUIET_WINDOWS = 3  # fewer than this of one system: a panel shows the loaded ones, too


@of_tables
def bench_peers_figure(rows: pd.DataFrame, ceiling: str) -> Figure:
    """One panel a workload: median and extremes of each system, of quiet windows if enough are."""
    names = list(rows.workload.unique())
    figure, panels = plt.subplots(1, len(names), figsize=(2.2 * len(names) + 1, 2.6), squeeze=False)
    for axes, workload in zip(panels[0], names, strict=True):
        windows = rows[rows.workload == workload]
        if (windows.groupby("name").quiet.sum() >= QUIET_WINDOWS).all():
            windows = windows[windows.quiet]
        medians = _medians(axes, windows.assign(value=windows.value / 1e3))
        axes.axvline(medians[ceiling], color="black", linewidth=0.8)
        axes.tick_params(labelleft=axes is panels[0][0])
        axes.set(title=workload, xlabel=f"thousand {rows.unit.iloc[0]}")
    figure.suptitle(f"Medians and extremes; line: {ceiling}")
    return figure


@of_tables
def scale_model_size_figure(rows: pd.DataFrame) -> Figure:
    """Left: five sizes in hybrid. Right: three modes at 100T. Bars: published; dots: the model."""
    sizes = rows[rows.series.str.endswith("hybrid")]
    modes = rows[rows.label == "100T"]
    modes = modes.assign(name=[_mode(series.split()[-1]) for series in modes.series])
    modes = modes.set_index("name").loc[in_order(modes.name)]
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.4), sharey=True)
    # Each bar has its dot, and the error of the dot in words at its foot.
    for ax, part, labels, title in (
        (axes[0], sizes, list(sizes.label), "hybrid, parameters of the model"),
        (axes[1], modes, list(modes.index), "100T, mode"),
    ):
        x = np.arange(len(part))
        colors = [look_of(name).color for name in (labels if ax is axes[1] else part.series)]
        ax.bar(x, part.published / 1e6, 0.6, color=colors, alpha=0.4)
        ax.plot(x, part.model / 1e6, "o", color="black", mfc="white")
        for k, error in zip(x, part.error, strict=True):
            ax.text(k, 0.08, f"{error:+.1%}", ha="center", fontsize=6.5)
        ax.set_xticks(x, labels)
        ax.set_xlabel(title)
        ax.grid(visible=False, axis="x")
    axes[0].set_ylabel("million samples per second")
    figure.suptitle(
        "Up to 100 trillion parameters: published (bars), simulated (dots), and the error"
    )
    return figure


def _mode(published: str) -> str:
    """What a mode of the paper's own figures is simulated as."""
    return "async_averaging" if published == "async" else published


DATA_SETS = ("taobao-ad", "avazu-ad", "criteo-ad", "kwai-video")


@of_tables
def scale_workers_figure(rows: pd.DataFrame) -> Figure:
    """One panel a data set, one colour a mode: open markers are published, lines are the model
    (full where a constant was fitted to the series, dashed where none was)."""
    # The bars of one GPU without all-reduce are another experiment than the scaling series.
    rows = rows[~rows.note.fillna("").str.contains("all-reduce")]
    figure, axes = plt.subplots(1, 4, figsize=(7.2, 3.2))
    for ax, name in zip(axes, DATA_SETS, strict=True):
        _workers_panel(ax, rows[rows.series.str.startswith(name)], name)
    axes[0].set_ylabel("thousand samples per second")
    # Kwai has modes of one system instead of systems: a legend of its own.
    legend_below(figure, axes[0], loc="outside lower left")
    legend_below(figure, axes[3], loc="outside lower right")
    figure.suptitle(
        "Throughput with more GPUs: published (open markers) and simulated (lines)\n"
        "full lines: constants fitted to the series; dashed: prediction; axes logarithmic",
    )
    return figure


def _workers_panel(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    rows = rows.assign(label=[_mode(series.removeprefix(f"{name} ")) for series in rows.series])
    for label in in_order(rows.label):
        points = rows[rows.label == label].sort_values("gpus")
        color, marker = look_of(label).color, look_of(label).marker
        style = "-" if (points.kind == "fit").any() else "--"
        style += marker if points.published.isna().all() else ""  # tell them apart in grey
        ax.plot(points.gpus, points.model / 1e3, style, color=color, markersize=3)
        ax.plot(points.gpus, points.published / 1e3, marker, mfc="none", color=color, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(rows.gpus.unique()), [str(g) for g in sorted(rows.gpus.unique())])
    ax.set_xlabel("GPUs")
    ax.set_title(name if rows.published.notna().any() else f"{name} (prediction)")


MACHINE_NOISE = 0.045
"""Spread of one machine: 22 submissions of MLPerf on a node of eight H100 (rounds 3.0 to 5.1)."""
HARDWARE = {
    "V100": "V100",
    "A100": "A100",
    "H100": "H100 / H200",
    "H200": "H100 / H200",
    "B200": "B200",
    "L4": "other",
}
"""Word in a GPU's name -> the class that its points are drawn as."""
FILLS = "full", "left", "top", "none", "bottom"


@of_tables
def predict_published_figure(rows: pd.DataFrame) -> Figure:
    """Left: each point once, a colour and a filling a class of GPU, the dark band being what one
    machine differs by from itself. Right: the same points as errors, a line a framework."""
    rows = rows.dropna(subset=["measured_step_ms"])
    rows = rows.assign(hardware=[hardware_class(name) for name in rows.accelerator])
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.9))
    _steps(left, rows)
    _errors(right, rows)
    legend_below(figure, left, ncols=4)
    error = np.expm1(rows.ln_error.abs())
    figure.suptitle(
        f"Predicted beside {len(rows)} published points, repeats counted: median error"
        f" {error.median():.1%},\nnine in ten below {error.quantile(0.9):.0%}"
        " (most constants were fitted to them)",
    )
    return figure


def hardware_class(accelerator: str) -> str:
    """The class of a GPU by its name.

    >>> hardware_class("V100-SXM2-16GB"), hardware_class("TITAN")
    ('V100', 'other')
    """
    return next((label for word, label in HARDWARE.items() if word in accelerator), "other")


def _hardware_looks(rows: pd.DataFrame) -> dict[str, dict[str, str]]:
    """The look of each class of GPU: a colour and, as some are one grey, a filled marker."""
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    looks = [
        {"color": c, "marker": m, "fillstyle": f, "linestyle": ""}
        for c, m, f in zip(colours, MARKERS, FILLS, strict=False)
    ]
    return dict(zip(sorted(rows.hardware.unique()), looks, strict=False))


def _steps(ax: Axes, rows: pd.DataFrame) -> None:
    # The diagonal, within what one machine differs by from itself.
    looks = _hardware_looks(rows)
    ends = np.array([rows.measured_step_ms.min() / 1.5, rows.measured_step_ms.max() * 1.5])
    ax.plot(ends, ends, color="black", linewidth=0.8)
    wide = f"one machine's own spread, {MACHINE_NOISE:.1%}"
    ax.fill_between(
        ends, ends / (1 + MACHINE_NOISE), ends * (1 + MACHINE_NOISE), color="0.6", label=wide
    )

    # Bands that hold nine points in ten: of the point that is known best, on top, and least.
    widths = rows.high_90 / rows.predicted_samples_per_s
    for band, grey, which in (
        (widths.min(), "0.85", "narrowest"),
        (widths.max(), "0.93", "widest"),
    ):
        label = f"{which} 90 % band, x {band:.2f}"
        ax.fill_between(ends, ends / band, ends * band, color=grey, zorder=-band, label=label)
    for hardware, points in rows.groupby("hardware"):
        looked = looks[str(hardware)]
        ax.plot(points.measured_step_ms, points.predicted_step_ms, label=str(hardware), **looked)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured step [ms]")
    ax.set_ylabel("predicted step [ms]")


def _errors(ax: Axes, rows: pd.DataFrame) -> None:
    """Predicted over measured rate, point by point, a line a framework."""
    # Frameworks by their median error; points of one class of GPU spread over their line.
    looks = _hardware_looks(rows)
    order = rows.groupby("framework").ln_error.apply(lambda e: e.abs().median()).sort_values()
    ax.axvline(1, color="black", linewidth=0.8)
    ax.axvspan(1 / (1 + MACHINE_NOISE), 1 + MACHINE_NOISE, color="0.6")
    for place, framework in enumerate(order.index):
        of_framework = rows[rows.framework == framework]
        for hardware, points in of_framework.groupby("hardware"):
            offsets = place + np.linspace(-0.25, 0.25, len(points)) * (len(points) > 1)
            ax.plot(np.exp(points.ln_error), offsets, **looks[str(hardware)])
    names = [f"{name} ({(rows.framework == name).sum()})" for name in order.index]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xscale("log", base=2)
    ticks = [0.5, 0.7, 1.0, 1.5, 2.0, 3.0]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xlabel("predicted over measured samples/s")
