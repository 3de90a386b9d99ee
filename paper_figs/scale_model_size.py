"""Throughput against the size of the model: published points and the simulator's."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from paper_figs.style import of_tables


@of_tables
def scale_model_size_figure(rows: pd.DataFrame) -> Figure:
    """Left: five sizes in hybrid. Right: three modes at 100T. Bars: published; dots: the model."""
    sizes = rows[rows.series.str.endswith("hybrid")]
    modes = rows[rows.label == "100T"]
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 2.4), layout="constrained", sharey=True)
    for ax, part, labels, title in (
        (axes[0], sizes, list(sizes.label), "hybrid, parameters of the model"),
        (axes[1], modes, [s.split()[-1] for s in modes.series], "100T, mode"),
    ):
        x = np.arange(len(part))
        ax.bar(x, part.published / 1e6, 0.6, color="0.8", label="published")
        ax.plot(x, part.model / 1e6, "o", color=to_hex("C1"), label="simulator (fitted)")
        for k, error in zip(x, part.error, strict=True):
            ax.text(k, 0.08, f"{error:+.1%}", ha="center", fontsize=6.5)
        ax.set_xticks(x, labels)
        ax.set_xlabel(title)
        ax.grid(visible=False, axis="x")
    axes[0].set_ylabel("million samples per second")
    axes[1].legend(loc="upper center")
    return figure
