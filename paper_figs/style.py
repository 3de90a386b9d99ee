"""What the figures share: reading tables, the style, the looks of modes, axes of gaps, as bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")
MARKERS = "osD^vPX*"  # so that lines differ in grey, too
TICKS = (-1000, -100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100, 1000)
"""Ticks of an axis of gaps that is linear within a thousandth of AUC, logarithmic beyond."""
GAP_LABEL = "AUC gap to sync [$10^{-3}$]"


@dataclass(frozen=True, slots=True)
class ModeLook:
    """How a mode is drawn, in every figure; markers, lines and hatching differ in grey, too."""

    color: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    hatch: str


MODES = {
    "sync": ModeLook("#000000", "o", "-", ""),
    "lookahead": ModeLook("#0072B2", "s", "--", "////"),
    "raw_hybrid": ModeLook("#56B4E9", "P", (0, (1, 1)), "++++"),
    "hybrid": ModeLook("#009E73", "D", "-", ""),
    "async": ModeLook("#E69F00", "^", "-.", "xxxx"),
    "async_averaging": ModeLook("#CC79A7", "v", ":", "...."),
}
"""The looks of the modes, in the order in which every figure has them."""
OTHER = ModeLook("#D55E00", "X", ":", "||||")
"""The look of a system that has no mode of these."""


def mode_of(name: str) -> str:
    """The mode that a name of a line says; empty where it says none.

    >>> mode_of("hybrid, tau 16"), mode_of("xdl_async"), mode_of("PaddlePaddle heter")
    ('hybrid', 'async', '')
    """
    words = name.removeprefix("xdl_").replace(",", " ").split()
    return next((word for word in words if word in MODES), "")


def look_of(name: str) -> ModeLook:
    """The look of a line by its name."""
    return MODES.get(mode_of(name), OTHER)


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once, modes in the order of `MODES`, those of rivals behind all others.

    >>> in_order(["async", "xdl_sync", "hybrid, tau 4", "sync", "async"])
    ['sync', 'hybrid, tau 4', 'async', 'xdl_sync']
    """
    order = [*MODES, ""]
    each = dict.fromkeys(names)
    return sorted(each, key=lambda name: (name.startswith("xdl_"), order.index(mode_of(name))))


def of_tables(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Turn a function that draws tables into one that draws their CSVs, in the house's style.

    pyplot forgets the figure that is returned: a notebook would show it a second time.
    """

    @wraps(draw)
    def drawn(*given: Path | str) -> Figure:
        with plt.style.context(STYLE):
            figure = draw(*(pd.read_csv(one) if isinstance(one, Path) else one for one in given))
        plt.close(figure)
        return figure

    return drawn


def no_small_text() -> None:
    """Draw what comes in this style with ticks and legends as large as all other text."""
    names = "xtick.labelsize", "ytick.labelsize", "legend.fontsize"
    plt.rcParams.update(dict.fromkeys(names, plt.rcParams["font.size"]))


def legend_below(figure: Figure, axes: Axes, **options: Any) -> None:
    """The legend of one panel as that of the figure; in one line, unless ``options`` differ."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        options = {"loc": "outside lower center", "ncols": len(labels)} | options
        figure.legend(handles, labels, **options)


def show_ticks(axes: Axes, which: str, ticks: Iterable[float] = TICKS) -> None:
    """Show those of the ticks that lie on the axis (x or y), in plain numbers; no minor ones."""
    low, high = getattr(axes, f"get_{which}lim")()
    shown = [tick for tick in ticks if low <= tick <= high]
    if len(shown) > 13:  # there is no room for all
        shown = [tick for tick in shown if f"{abs(tick):e}"[0] in "01"]
    getattr(axes, f"set_{which}ticks")(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()


def spread_of(table: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Mean of the columns, and half of their 95 % t interval over the rows (seeds)."""
    from scipy.stats import t  # late: a second to import

    half = t.ppf(0.975, max(1, len(table) - 1)) * table.std() / len(table) ** 0.5
    return table.mean(), half


def as_png(figure: Figure) -> bytes:
    """The figure as bytes of a PNG; it is freed."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    return content.getvalue()
