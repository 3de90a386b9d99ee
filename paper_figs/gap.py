"""The AUC gap to sync: at the end per bound, and along the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
MARKERS = "osD^vPX*"  # so that lines differ in grey, too


def gap_figure(table: Path, curves: Path, task: str, data: str) -> Figure:
    """Left: mean gap per setting with its 95 % interval. Right: the gap along the run."""
    with plt.style.context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.0, 2.9), layout="constrained")
        rows = pd.read_csv(table)
        rows = rows[(rows.task == task) & (rows["mode"] != "sync")]
        _gaps(left, rows)
        lines = pd.read_csv(curves)
        seeds = _curves(right, lines[lines.task == task])
        figure.suptitle(
            f"Test AUC ({task}, {data}) minus that of sync; bars and bands: 95 % t interval over"
            f" {seeds} paired seeds",
            fontsize=8,
        )
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write the figure and free it; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _gaps(axes: Axes, rows: pd.DataFrame) -> None:
    labels = [f"{mode}\nτ={tau}" for mode, tau in zip(rows["mode"], rows.tau, strict=True)]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.errorbar(
        np.arange(len(rows)),
        1e3 * rows.gap_to_sync,
        yerr=1e3 * rows.gap_to_sync_half_width_95,
        fmt="o",
        color="black",
        capsize=3,
    )
    axes.set_xticks(np.arange(len(rows)), labels)
    axes.set_ylabel("AUC gap to sync [$10^{-3}$]")
    axes.set_title("at the end of the run, all pushes applied")


def _curves(axes: Axes, lines: pd.DataFrame) -> int:
    """Returns the number of seeds."""
    from scipy.stats import t

    lines = lines[~lines.drained]
    wide = lines.pivot(index=["mode", "tau", "seed"], columns="samples", values="auc")
    seeds = lines.seed.nunique()
    axes.axhline(0, color="black", linewidth=0.8)
    settings = [s for s in dict.fromkeys(zip(lines["mode"], lines.tau, strict=True))]
    for number, (mode, tau) in enumerate(s for s in settings if s[0] != "sync"):
        gap = 1e3 * (wide.loc[(mode, tau)] - wide.loc[("sync", 0)])
        mean = gap.mean()
        half = t.ppf(0.975, max(1, seeds - 1)) * gap.std() / np.sqrt(seeds)
        samples = mean.index.to_numpy() / 1e3
        (line,) = axes.plot(samples, mean, marker=MARKERS[number], label=f"{mode} τ={tau}")
        axes.fill_between(samples, mean - half, mean + half, alpha=0.15, color=line.get_color())
    axes.set_xlabel("training samples [thousands]")
    axes.set_title("along the run (snapshots, not drained)")
    axes.legend(ncols=2)
    return seeds
