"""The map of hybrid against tables on the GPUs: samples per second, and dollars a sample."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from paper_figs.style import of_tables

RATIOS = {
    "throughput_ratio": ("samples/s: hybrid over {}", 2.5),
    "dollar_ratio": ("dollars a sample: {} over hybrid", 16.0),
}
"""Column -> what it is, and the gain at which the shade ends."""


@of_tables
def sharded_map_figure(rows: pd.DataFrame) -> Figure:
    """A column of panels a GPU, a row a ratio and rival; the darker, the more hybrid gains.

    Numbers are ratios above 1 where hybrid wins, the thick line is break-even. A star says that the
    sharded side needs more GPUs than hybrid has for the memory of its rows.
    """
    gpus, rivals = list(rows.gpu.unique()), list(rows.software.unique())
    lines = [(ratio, rival) for ratio in RATIOS for rival in rivals]
    size = (min(7.2, 2.2 * len(gpus) + 1.0), 2.0 * len(lines) + 0.5)
    figure, axes = plt.subplots(
        len(lines), len(gpus), figsize=size, layout="constrained", squeeze=False
    )
    for line, (ratio, rival) in enumerate(lines):
        for column, gpu in enumerate(gpus):
            own = rows[(rows.gpu == gpu) & (rows.software == rival)]
            _panel(axes[line, column], own, ratio)
            axes[line, column].set_title(gpu.upper())
        axes[line, 0].set_ylabel(f"{RATIOS[ratio][0].format(rival)}\nparameters", fontsize=6.5)
    for ax in axes[-1]:
        ax.set_xlabel("NIC of a host [Gbit/s]")
    figure.suptitle(
        "above 1 (dark) hybrid wins; line: break-even;\n"
        "*: the other side needs more GPUs for memory",
        fontsize=8,
    )
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, ratio: str) -> None:
    grid = rows.pivot(index="parameters", columns="nic_gbit_per_s", values=ratio)
    need = rows.pivot(index="parameters", columns="nic_gbit_per_s", values="sharded_gpus")
    logs, most = np.log2(grid.to_numpy()), np.log2(RATIOS[ratio][1])
    ax.imshow(
        logs, cmap="Greys", norm=TwoSlopeNorm(0.0, -most, most), origin="lower", aspect="auto"
    )
    for y, x in np.ndindex(logs.shape):
        many = "*" if need.to_numpy()[y, x] > rows.hybrid_gpus.iloc[0] else ""
        colour = "white" if logs[y, x] > 0.3 * most else "black"
        ax.text(
            x, y, f"{grid.iat[y, x]:.2g}{many}", ha="center", va="center", fontsize=5.5,
            color=colour, zorder=5,
        )  # fmt: skip
    if min(logs.shape) > 1 and logs.min() < 0 < logs.max():
        ax.contour(logs, levels=[0.0], colors="#D55E00", linewidths=2.0, alpha=0.7)
    ax.set_xticks(range(len(grid.columns)), [f"{nic:g}" for nic in grid.columns])
    ax.set_yticks(range(len(grid.index)), [_size(size) for size in grid.index])
    ax.grid(visible=False)


def _size(parameters: float) -> str:
    """The number of parameters in words.

    >>> _size(1e10), _size(6.25e12)
    ('10 G', '6.25 T')
    """
    return f"{parameters / 1e12:g} T" if parameters >= 1e12 else f"{parameters / 1e9:g} G"
