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
# # What each optimisation is worth
#
# Hybrid with everything on, then one thing off at a time: throughput on four simulated clusters,
# and the AUC of real training runs (constant lag, paired seeds) where learning may change. The
# table is stored, made by `persia-experiments ablation`.

# %%
from pathlib import Path

import pandas as pd

from paper_figs.clusters import ablation_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
path = root / "docs" / "results" / "ablation.csv"
rows = pd.read_csv(path)
ablation_figure(path)

# %% [markdown]
# ## In numbers
#
# `binds` is the resource with the largest share of the run's critical path. With a window of four
# steps what travels hides behind the GPUs and the all-reduce, so that merging duplicates, pooling
# and short numbers change nothing on the published clusters; with NICs of 10 Gbit/s they do.

# %%
rates = rows[rows.kind == "throughput"]
told = rates.assign(share=(1 + rates.difference).round(3))
print(told.pivot(index="variant", columns="where", values="share").reindex(rates.variant.unique()))

# %%
print(told.pivot(index="variant", columns="where", values="binds").reindex(rates.variant.unique()))

# %% [markdown]
# ## Learning
#
# AUC minus that with everything on, in thousandths, with 95 % t intervals over paired seeds. Rows
# in two bytes are rounded in the store at each update here, which is more than rounding them on a
# wire.

# %%
aucs = rows[rows.kind == "auc"]
for row in aucs.itertuples():
    wide = 1e3 * row.difference_half_width_95
    print(f"{row.variant:28} {row.value:.4f}  {1e3 * row.difference:+.2f} ± {wide:.2f} (n={row.n})")
