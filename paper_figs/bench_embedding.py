"""Rates of the store's kernels and their rivals on one core."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from paper_figs.style import of_tables


@of_tables
def bench_embedding_figure(rows: pd.DataFrame) -> Figure:
    """One panel a group: median M ids/s of each kernel, with extremes, on a logarithmic axis."""
    groups = list(rows.workload.unique())
    figure, panels = plt.subplots(
        1, len(groups), figsize=(4.2 * len(groups), 3.2), layout="constrained", squeeze=False
    )
    for axes, group in zip(panels[0], groups, strict=True):
        own = rows[rows.workload == group]
        names = list(own.name.unique())
        found = own.groupby("name").value.agg(["median", "min", "max"]).loc[names]
        error = [found["median"] - found["min"], found["max"] - found["median"]]
        places = np.arange(len(names))
        axes.barh(places, found["median"], xerr=error, color="0.75", capsize=2)
        axes.set_yticks(places, names)
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.set_xlabel("M ids/s on one core")
        axes.set_title(group)
    return figure
