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
# # What lateness costs, measured fairly
#
# Nine data sets, each mode with each bound, at fixed learning rates and at rates tuned for that
# mode and bound on a validation part. The tables are stored in `docs/results`, made by
# `python -m experiments gap-study`; its options make it as small or as large as wanted.

# %%
from pathlib import Path

import pandas as pd

from paper_figs.gap_study import gap_study_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
results = root / "docs" / "results"
rows = pd.read_csv(results / "gap_study.csv")
gap_study_figure(results / "gap_study.csv", results / "gap_study_curves.csv")

# %% [markdown]
# ## Gaps in thousandths of AUC
#
# Mean over the paired seeds and half the width of the 95 % t interval. `lateness` is the gap to
# the same mode at tau 0: what the late rows alone cost. `p` is DeLong's, of seed 0's two models on
# other test rows; seeds and test rows are two different sources of doubt.

# %%
late = rows[rows["mode"] != "sync"].copy()
for name, short in (("gap_to_sync", "gap"), ("gap_to_tau_0", "lateness")):
    late[short] = [
        f"{1e3 * mean:+.2f} ± {1e3 * half:.2f}"
        for mean, half in zip(late[name], late[f"{name}_half_width_95"], strict=True)
    ]
first = late[late.task == late.groupby("data").task.transform("first")]
for data, mine in first.groupby("data", sort=False):
    one = mine.iloc[0]
    print(f"\n{data}: {one.seeds} seeds, {one.steps} steps of {one.batch}")
    shown = mine[["rates", "mode", "tau", "row_lr", "lr", "gap", "lateness", "delong_p_seed_0"]]
    print(shown.rename(columns={"delong_p_seed_0": "p"}).round(4).to_string(index=False))

# %% [markdown]
# ## What tuning each mode changes
#
# At learning rates that are the same for all, a late mode may pay twice: for its lateness, and for
# rates that were not chosen for it. `recovered` is the gap at the tuned rates minus that at the
# fixed ones (sync is tuned, too).

# %%
wide = first.pivot_table(
    index=["data", "mode", "tau"], columns="rates", values="gap_to_sync", sort=False
)
if "tuned" in wide:
    wide["recovered"] = wide.tuned - wide.fixed
print((1e3 * wide).round(2).to_string())

# %% [markdown]
# ## Other scores
#
# GAUC orders the samples of one user among themselves, where the schema names the user; normalised
# entropy is the log-loss over that of always predicting the label rate; calibration is the mean
# prediction over the label rate.

# %%
scores = ["test_auc", "gauc", "log_loss", "normalized_entropy", "calibration"]
print(rows.set_index(["data", "task", "rates", "mode", "tau"])[scores].round(4).to_string())

# %% [markdown]
# ## Which mode and bound
#
# By batch, skew, steps and latency: the fastest mode, by the law of the window, whose loss is known
# to be below a thousandth of AUC. Each line names the row of the table that it goes by.

# %%
decisions = pd.read_csv(results / "gap_study_decisions.csv")
columns = ["data", "batch", "hot_share", "steps", "latency_over_compute", "mode", "tau",
           "times_as_fast_as_sync", "why"]  # fmt: skip
print(decisions[columns].round(2).to_string(index=False))

# %% [markdown]
# The same rule on the demo's table: a whole pass over KuaiRand, five seeds, fixed rates.

# %%
from experiments.gap.decisions import decision_table
from experiments.gap.skew import Skew

demo = pd.read_csv(results / "demo.csv").assign(rates="fixed", batch=128, steps=1305)
unknown = Skew(float("nan"), float("nan"))
lines = decision_table(demo.to_dict("records"), {demo.data.iloc[0]: unknown})
columns = ["latency_over_compute", "mode", "tau", "times_as_fast_as_sync", "gap_to_sync",
           "gap_to_sync_half_width_95", "why", "exact_alternative"]  # fmt: skip
print(pd.DataFrame(lines)[columns].round(5).to_string(index=False))
