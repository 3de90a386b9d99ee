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
# # What overlaps in each mode
#
# The stages of four steps of two ranks (the paper's figure 3). Left: a simulated cluster of 16
# GPUs. Middle and right: this host, with a latency added to each lookup and each push, simulated
# from the stages of its sync run, and as it ran. The table is stored, made by `python -m
# experiments modes-timeline` (under a minute).

# %%
from pathlib import Path

import pandas as pd

from paper_figs.clusters import modes_timeline_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
path = root / "docs" / "results" / "modes_timeline.csv"
rows = pd.read_csv(path)
modes_timeline_figure(path)

# %% [markdown]
# ## How to read it
#
# - In sync a step is one line of stages: lookup, forward, backward, all-reduce, push, and only
#   then the next lookup.
# - `raw_hybrid` keeps several lookups and pushes on their way (bars above each other), so that
#   their latency is hidden; the all-reduce is still exposed.
# - `hybrid` hides the all-reduce behind the backward pass, too. Ranks that are threads of this
#   host add their gradients up in memory: there is nothing to hide, and `hybrid` looks like
#   `raw_hybrid`.
# - In `async` the ranks drift apart: nobody waits for the other's step.
# - `lookahead` prefetches, then reads rows again that were written meanwhile: exact, and exposed.

# %%
steps = rows.groupby(["mode", "source", "system"], sort=False).mean_step_s.first().unstack([1, 2])
print((1e3 * steps).round(2).to_string())

# %% [markdown]
# ## How long each stage takes, simulated over recorded (this host, means of the shown steps)

# %%
host = rows[rows.system == "this host"].assign(seconds=lambda r: r.end_s - r.start_s)
mean = host.pivot_table(index=["mode", "stage"], columns="source", values="seconds", sort=False)
print((1e3 * mean).round(2).to_string())
