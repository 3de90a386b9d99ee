"""What the figures share: the style sheet, markers, the label of a gap, saving."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
MARKERS = "osD^vPX*"  # so that lines differ in grey, too
TICKS = (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100)
"""Of an axis of gaps that is linear within a thousandth of AUC, logarithmic beyond."""
GAP_LABEL = "AUC gap to sync [$10^{-3}$]"


def show_ticks(axes: Axes, which: str, ticks: Iterable[float] = TICKS) -> None:
    """Of these the ones that lie on the axis (x or y), in plain numbers; no minor ones."""
    low, high = getattr(axes, f"get_{which}lim")()
    shown = [tick for tick in ticks if low <= tick <= high]
    getattr(axes, f"set_{which}ticks")(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()


def save(figure: Figure, path: Path) -> Path:
    """Write the figure and free it; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path
