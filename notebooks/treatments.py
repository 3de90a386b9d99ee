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
# # What is done about late rows, and what it gives back
#
# Four treatments of late rows beside the same setting untreated, and what other systems run. The
# table is stored, made by `persia-experiments treatments` (command: `docs/results/README.md`);
# every gap is paired by seed, its 95 % interval over seeds and test users.

# %%
from pathlib import Path

import pandas as pd

from paper_figs.lateness import treatments_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
path = root / "docs" / "results" / "treatments.csv"
rows = pd.read_csv(path)
rows = rows[rows.task == rows.task.iloc[0]]
treatments_figure(path)

# %% [markdown]
# ## Which gaps are larger than their interval
#
# Left of the figure: against sync. Where the interval holds 0, these seeds have shown nothing.

# %%
gaps = 1e3 * rows[["gap_to_sync", "gap_to_sync_half_width_95"]]
shown = rows[gaps.gap_to_sync.abs() > gaps.gap_to_sync_half_width_95]
print(f"{rows.seeds.max()} seeds; the gap to sync is beyond its interval in {len(shown)} rows of")
print(f"{len(rows) - 1}:\n{shown[['base', 'treatment', 'gap_to_sync']].to_string(index=False)}")

# %% [markdown]
# ## What a treatment gives back
#
# Right of the figure: against the same mode and bound without it.

# %%
treated = rows.dropna(subset="gap_to_untreated").set_index(["base", "treatment"])
told = 1e3 * treated[["gap_to_untreated", "gap_to_untreated_half_width_95"]]
print(told.round(2).rename(columns=lambda name: f"{name} [1e-3]").to_string())

# %% [markdown]
# ## How late it was
#
# Updates that a batch misses, of rows and of dense weights.

# %%
late = rows[["base", "treatment", "rows_late", "dense_late", "log_loss"]]
print(late.round(4).to_string(index=False))
