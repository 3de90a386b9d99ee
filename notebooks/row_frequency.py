# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Who pays for late rows: rare ids or popular ones?
#
# Sync and hybrid with paired seeds; test samples sorted by how often their rarest id occurs in the
# training part. The tables are stored; `docs/results/README.md` has their command.

# %%
from pathlib import Path

import pandas as pd

from paper_figs.lateness import row_frequency_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
paths = [root / "docs" / "results" / f"row_frequency{part}.csv"
         for part in ("", "_staleness", "_drift")]  # fmt: skip
gaps, stale, drift = (pd.read_csv(path) for path in paths)
row_frequency_figure(*paths)

# %% [markdown]
# ## The gap by the rarest id of a sample
#
# AUC of hybrid minus that of sync inside each bin, in thousandths.

# %%
own = gaps[gaps.by == "rarest"].assign(gap=1e3 * gaps.gap_to_sync)
print(
    own.pivot_table(index=["data", "tau"], columns="count_from", values="gap").round(2).to_string()
)

# %% [markdown]
# ## Row staleness
#
# Pushes of a row that a read of it missed. The model (that of the simulator) takes samples as
# independent: of the missed steps, a share $1-(1-p)^B$ touched a row of share $p$ (of the other
# samples). Ratio of measured to model:

# %%
stale["ratio"] = stale.missed_pushes / stale.missed_pushes_model
latest = stale[stale.tau == stale.tau.max()]
print(latest.pivot_table(index="data", columns="count_from", values="ratio").round(2).to_string())

# %% [markdown]
# ## Does drift foresee the loss?
#
# $\sum_{id}p_{id}\|\delta_{id}\|^2$, what lookups miss of their rows, *orders* the losses; the same
# relative to the size of the rows does not (Spearman's rank correlation over all points, and over
# those of real sets). No one factor turns it into thousandths: see the gap over the drift.

# %%
from experiments.staleness.frequency import order_of_losses

real = drift[~drift.data.str.startswith("synthetic")]
print(drift.assign(gap_over_drift=drift.gap_to_sync / drift.drift).to_string(index=False))
for name, own in (("all", drift), ("real sets", real)):
    ranks = order_of_losses(own.to_dict("records"))
    print(f"{name}, {len(own)} points:", {key: round(value, 2) for key, value in ranks.items()})
