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
# # What crashes and checkpoints cost
#
# Simulated runs with random crashes of ranks, at several times between checkpoints (in units of
# Young's formula) and rates of crashes. The table is stored, made by `persia-experiments
# checkpoint-interval`.

# %%
from pathlib import Path

import pandas as pd

from paper_figs.clusters import checkpoint_interval_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
path = root / "docs" / "results" / "checkpoint_interval.csv"
rows = pd.read_csv(path)
checkpoint_interval_figure(path)

# %% [markdown]
# ## By mode
#
# In modes with a common step one rank's crash takes all ranks back to the checkpoint, as Daly's
# formula assumes. In `async_averaging` only the crashed rank goes back; the run ends with its
# slowest rank. Lost throughput in per cent, means over seeds:

# %%
lost = 100 * rows.pivot_table(
    index=["crashes_expected", "factor"], columns="mode", values="throughput_lost", sort=False
)
print(lost.round(1).to_string())

# %% [markdown]
# ## What it is lost to, seconds over those of an undisturbed run (at Young's interval)

# %%
at = rows[rows.factor == 1]
parts = at[["redone_s", "down_s", "writing_s"]].div(at.useful_s, axis=0)
parts = parts.assign(mode=at["mode"], crashes=at.crashes_expected)
print((100 * parts.groupby(["crashes", "mode"], sort=False).mean()).round(1).to_string())
