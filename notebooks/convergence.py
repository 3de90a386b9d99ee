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
# # Convergence: what each mode learns from a sample, and in a second
#
# Every line is trained with true gradients in the order of events that the simulator gave one host
# of 8 V100s, and timed by the simulated rate of that host. The tables are stored, made by
# `persia-experiments convergence`. Grey lines are published; their data are not ours, so only
# the gaps to sync are beside each other, not the AUCs.

# %%
from pathlib import Path

import pandas as pd

from paper_figs.auc import convergence_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
stored = root / "docs" / "results"
rows = pd.read_csv(stored / "convergence.csv")
convergence_figure(*(stored / f"convergence{end}.csv" for end in ("", "_published", "_targets")))

# %% [markdown]
# ## At the end of the run, all pushes applied
#
# Gaps to sync in thousandths of AUC, paired by seed, with 95 % t intervals. `xdl_sync` learns what
# sync learns; only its clock differs.

# %%
from experiments.statistics import t_interval

ends = rows[rows.drained & (rows.task == rows.groupby("data_set").task.transform("first"))]
wide = ends.pivot(index=["data_set", "seed"], columns="line", values="auc")
gaps = wide.sub(wide.sync, axis=0).drop(columns=["sync", "xdl_sync"], errors="ignore")


def told(values: pd.Series) -> str:
    found = t_interval((1e3 * values).tolist())
    return f"{found.mean:+.2f} ± {found.half_width:.2f}"


print(gaps.groupby("data_set", sort=False).agg(told).to_string())

# %% [markdown]
# ## What the clock adds
#
# Simulated samples per second of each line, and how many times as fast as sync with Persia's costs.

# %%
rates = rows.groupby(["data_set", "line"], sort=False).simulated_samples_per_s.first().unstack()
print(rates.round(-2).to_string(), "\n")
print(rates.div(rates.sync, axis=0).round(2).to_string())

# %% [markdown]
# ## Time to sync's AUC
#
# To 95 % of sync's climb from 0.5, over the time of XDL's sync where its costs were fitted, else of
# Persia's sync; published: samples of the curves over the rate of the bars.

# %%
times = pd.read_csv(stored / "convergence_targets.csv")
times = times[["data_set", "mode", "ratio_to_sync", "published_ratio_to_sync"]]
print(times.round(3).to_string(index=False))

# %% [markdown]
# ## What the published curves say of themselves
#
# Gaps to the published sync (XDL's on the public sets), in hundredths of AUC as the paper speaks.
# Its text says: hybrid always within 0.1, async 0.5 to 1.0 below. One run each, no seeds; reading a
# plot adds ± 0.06.

# %%
from experiments.published.curves import all_gaps, published_curves

table = {
    " ".join(key): {
        "at the end": 100 * gap.at_end,
        "mean of last 5": 100 * gap.mean_of_last,
        "largest": 100 * gap.largest,
        "at step": gap.largest_at_step,
        "at 4 M samples": 100 * gap.at_samples(4e6),
    }
    for key, gap in all_gaps(published_curves()).items()
}
print(pd.DataFrame(table).T.round(2).to_string())
