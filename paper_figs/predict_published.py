"""Predicted against measured steps of published GPU-sharded training."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import MARKERS, legend_below, of_tables

NOISE = 0.045
"""Spread of one machine: 22 submissions of MLPerf on a node of eight H100 (rounds 3.0 to 5.1)."""
CLASSES = {"V100": "V100", "A100": "A100", "H100": "H100 / H200", "H200": "H100 / H200",
           "B200": "B200", "L4": "other"}  # fmt: skip
"""Word in a GPU's name -> what its points are drawn as."""


@of_tables
def predict_published_figure(rows: pd.DataFrame) -> Figure:
    """Left: each point once, a colour a class of GPU, a marker a framework, the dark band being
    what one machine differs by from itself. Right: the same points as errors."""
    rows = rows.dropna(subset=["measured_step_ms"])
    rows = rows.assign(hardware=[hardware_class(name) for name in rows.accelerator])
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.9), layout="constrained")
    _steps(left, rows)
    _errors(right, rows)
    legend_below(figure, left, ncols=4, fontsize=6.5)
    error = np.expm1(rows.ln_error.abs())
    figure.suptitle(
        f"{len(rows)} published points, repeats counted: median error"
        f" {error.median():.1%}, nine in ten below {error.quantile(0.9):.0%}"
        " (most constants were fitted to them)",
        fontsize=8,
    )
    return figure


def hardware_class(accelerator: str) -> str:
    """The class of a GPU by its name.

    >>> hardware_class("V100-SXM2-16GB"), hardware_class("TITAN")
    ('V100', 'other')
    """
    return next((label for word, label in CLASSES.items() if word in accelerator), "other")


def _looks(rows: pd.DataFrame) -> tuple[dict[str, str], dict[str, str]]:
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    kinds = sorted(rows.hardware.unique())
    frameworks = sorted(rows.framework.unique())
    return (
        {kind: colours[k % len(colours)] for k, kind in enumerate(kinds)},
        {name: (MARKERS + "<>p")[k % 11] for k, name in enumerate(frameworks)},
    )


def _steps(ax: Axes, rows: pd.DataFrame) -> None:
    colours, markers = _looks(rows)
    ends = np.array([rows.measured_step_ms.min() / 1.5, rows.measured_step_ms.max() * 1.5])
    ax.plot(ends, ends, color="black", linewidth=0.8)
    wide = f"one machine's own spread, {NOISE:.1%}"
    ax.fill_between(ends, ends / (1 + NOISE), ends * (1 + NOISE), color="0.6", label=wide)
    band = (rows.high_90 / rows.predicted_samples_per_s).median()
    ax.fill_between(
        ends, ends / band, ends * band, color="0.85", zorder=0, label=f"90 % band, x {band:.2f}"
    )
    for (framework, hardware), own in rows.groupby(["framework", "hardware"]):
        ax.plot(
            own.measured_step_ms, own.predicted_step_ms, markers[framework], mfc="none",
            color=colours[hardware], label=f"{framework}, {hardware}",
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured step [ms]")
    ax.set_ylabel("predicted step [ms]")


def _errors(ax: Axes, rows: pd.DataFrame) -> None:
    """Predicted over measured rate, point by point, a line a framework."""
    colours, markers = _looks(rows)
    order = rows.groupby("framework").ln_error.apply(lambda e: e.abs().median()).sort_values()
    ax.axvline(1, color="black", linewidth=0.8)
    ax.axvspan(1 / (1 + NOISE), 1 + NOISE, color="0.6")
    for place, framework in enumerate(order.index):
        own = rows[rows.framework == framework]
        for hardware, some in own.groupby("hardware"):
            offsets = place + np.linspace(-0.25, 0.25, len(some)) * (len(some) > 1)
            ax.plot(
                np.exp(some.ln_error), offsets, markers[framework], mfc="none",
                color=colours[str(hardware)],
            )  # fmt: skip
    names = [f"{name} ({(rows.framework == name).sum()})" for name in order.index]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xscale("log", base=2)
    ticks = [0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xlabel("predicted over measured samples/s")
