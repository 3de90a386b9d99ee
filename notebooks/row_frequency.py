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

from paper_figs.row_frequency import row_frequency_figure

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
# ## Drift as a predictor of the gap
#
# $\sum_{id}p_{id}\|\delta_{id}\|^2$, what lookups miss of their rows, over
# $\sum_{id}p_{id}\|w_{id}\|^2$: one factor, fitted on the synthetic sets, tested on the others.
# Errors are predicted minus measured, in thousandths of AUC.

# %%
test = drift[drift.part == "test"]
errors = pd.DataFrame({
    "data": test.data, "tau": test.tau, "gap": 1e3 * test.gap_to_sync,
    "±": 1e3 * test.gap_to_sync_half_width_95,
    **{name: 1e3 * (test[f"predicted_{name}"] - test.gap_to_sync)
       for name in ("relative", "predictions", "mean")},
    "no gap": -1e3 * test.gap_to_sync,
})  # fmt: skip
print(errors.round(2).to_string(index=False))
print("\nmean absolute error:")
print(errors[["relative", "predictions", "mean", "no gap"]].abs().mean().round(2).to_string())

# %% [markdown]
# The *absolute* drift orders the losses, the one relative to the rows does not (Spearman's rank
# correlation over all points, and over those that were not fitted to). One factor does not turn it
# into thousandths.

# %%
from experiments.staleness.by_frequency import order_of_losses

for name, own in (("all", drift), ("not fitted to", test)):
    ranks = order_of_losses(own.to_dict("records"))
    print(f"{name}, {len(own)} points:", {key: round(value, 2) for key, value in ranks.items()})
