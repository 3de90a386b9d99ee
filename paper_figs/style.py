"""What the figures share: the style sheet, markers, saving, and the gap to sync along a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
MARKERS = "osD^vPX*"  # so that lines differ in grey, too
GAP_LABEL = "AUC gap to sync [$10^{-3}$]"

Setting = tuple[str, float]
"""Mode and bound tau, as a table has them."""
SYNC: Setting = ("sync", 0)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure and free it; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def gaps_along(axes: Axes, lines: pd.DataFrame, labels: Mapping[Setting, str], unit: float) -> int:
    """Draw each setting's mean AUC minus that of sync at each snapshot, in thousandths.

    ``lines`` has a row per mode, tau, seed and number of samples; drained ends are left out, being
    no point of the curve. The x axis counts samples in ``unit``. Bands are 95 % t intervals over
    the paired seeds, whose number is returned.
    """
    from scipy.stats import t  # late: a second to import

    lines = lines[~lines.drained]
    wide = lines.pivot(index=["mode", "tau", "seed"], columns="samples", values="auc")
    seeds: int = lines.seed.nunique()
    axes.axhline(0, color="black", linewidth=0.8)
    for number, (setting, label) in enumerate(labels.items()):
        gap = 1e3 * (wide.loc[setting] - wide.loc[SYNC])
        mean = gap.mean()
        half = t.ppf(0.975, max(1, seeds - 1)) * gap.std() / np.sqrt(seeds)
        samples = mean.index.to_numpy() / unit
        (line,) = axes.plot(samples, mean, marker=MARKERS[number % len(MARKERS)], label=label)
        axes.fill_between(samples, mean - half, mean + half, alpha=0.15, color=line.get_color())
    axes.legend(ncols=2)
    return seeds
