# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tour of the demo
#
# A recommender has two parts: an *embedding layer* (rows looked up by user id, item id, ...) and a
# *dense network* above it. Hybrid training lets the rows be late and keeps the dense weights
# exact. This notebook trains one small model in a few modes and shows what lateness is, how it is
# measured, and what it costs in test AUC.
#
# Set `QUICK=0` in the environment for the size of the demo; the default is a tiny run of a minute.
# Real clicks are used where `PERSIA_DATA_DIR` (or `persia-runtime data get kuairand-pure`)
# provides them, else the synthetic stream.

# %%
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from experiments.studies.demo import find_data
from experiments.statistics import t_interval
from persia_sim.words.window import constant_lag
from persia_sim.words.staleness import staleness_in_steps
from persia_sim.words.trace import Kind
from persia_sim.words.vocabulary import Mode
from runtime.config import EngineConfig, EvaluationConfig, SyncConfig, TrainConfig
from runtime.run.session import train

QUICK = os.environ.get("QUICK", "1") != "0"
STEPS = 60 if QUICK else 1300
SEEDS = 2 if QUICK else 5
data = find_data(None)
judged = EvaluationConfig(test_rows=2_000 if QUICK else None)
base = TrainConfig(data=data, steps=STEPS, evaluation=judged)
print(base.data.name)

# %% [markdown]
# ## One run
#
# `train` takes a config and gives an outcome: final scores, the trace, the store, the model. AUC is
# per task; beside the log-loss stands what always predicting the click rate would give.

# %%
sync = train(base)
for task, score in sync.final.tasks.items():
    print(f"{task:10} AUC {score.auc:.4f}  log-loss {score.log_loss:.4f}"
          f"  (trivial {score.trivial_log_loss:.4f})")  # fmt: skip
print(f"{sync.figures.rows:,} rows were created, {len(sync.trace):,} events recorded")

# %% [markdown]
# ## What an order is
#
# A mode is an order of reads (`LOOKUP`), dense updates and writes (`PUSH`). With the bound tau = 2,
# the lookup of step 3 starts although the pushes of steps 1 and 2 are still on their way.

# %%
order = list(constant_lag(Mode.HYBRID, ranks=1, has_batch=lambda k: k < 5, tau=2))
print("  ".join(f"{Kind(e.kind).name.lower()} {e.step}" for e in order))

# %% [markdown]
# ## Staleness is read off the trace
#
# The constant-lag executor makes every lookup miss exactly tau steps, from step tau on. The
# concurrent executor (threads) can only promise *at most* tau; what it did stands in its trace.

# %%
hybrid = replace(base, sync=SyncConfig(mode=Mode.HYBRID, tau=4, ranks=2))
lag = train(hybrid)
threads = train(replace(hybrid, engine=EngineConfig(executor="concurrent")))
for name, outcome in (("constant lag", lag), ("threads", threads)):
    missing = staleness_in_steps(outcome.trace).missing_steps
    print(f"{name:12} missing steps: {np.bincount(missing).tolist()} lookups missed 0, 1, 2, ...")

# %% [markdown]
# ## A recorded run can be executed again
#
# Two concurrent runs of one seed differ in their order; each replays to its own bytes, so even
# asynchrony is reproducible.

# %%
path = Path(tempfile.mkdtemp()) / "trace.npz"
threads.trace.save(path)
again = train(replace(hybrid, engine=EngineConfig(executor="replay", trace=path)))
same_rows = all(
    np.array_equal(a, b)
    for table in again.store.tables
    for a, b in zip(again.store.export()[table], threads.store.export()[table], strict=True)
)
print("same rows to the last bit:", same_rows)
assert same_rows

# %% [markdown]
# ## What lateness costs
#
# Seeds are *paired*: the same initial weights and rows, the same samples in the same order; only
# the mode differs. So the seed's luck cancels in the difference, and a t interval over few seeds
# is narrow. It covers the training procedure on this one split, not another set of test users.

# %%
taus = [1, 4, 16, 64]
task = next(iter(sync.final.tasks))
gaps = {tau: [] for tau in taus}
for seed in range(SEEDS):
    reference = train(replace(base, seed=seed)).final.tasks[task].auc
    for tau in taus:
        late = SyncConfig(mode=Mode.HYBRID, tau=tau)
        run = train(replace(base, seed=seed, sync=late))
        gaps[tau].append(1e3 * (run.final.tasks[task].auc - reference))
intervals = {tau: t_interval(values) for tau, values in gaps.items()}
for tau, gap in intervals.items():
    print(f"tau {tau:3}: gap {gap.mean:+.2f} ± {gap.half_width:.2f} [1e-3 AUC], n = {gap.n}")

# %%
figure, axes = plt.subplots(figsize=(4.5, 2.8), layout="constrained")
axes.axhline(0, color="black", linewidth=0.8)
axes.errorbar(
    np.arange(len(taus)),
    [intervals[tau].mean for tau in taus],
    yerr=[intervals[tau].half_width for tau in taus],
    fmt="o",
    color="black",
    capsize=3,
)
axes.set_xticks(np.arange(len(taus)), [str(tau) for tau in taus])
axes.set_xlabel("bound τ [steps]")
axes.set_ylabel("AUC gap to sync [$10^{-3}$]")
axes.set_title(f"hybrid on {base.data.name}, {STEPS} steps, {SEEDS} paired seeds", fontsize=9)
plt.show()

# %% [markdown]
# After a few dozen steps the gap is large and after a whole pass it is small: late rows slow the
# *start*. `persia-experiments lateness` follows it along runs of 10,000 updates;
# `persia-runtime train --help` lists what its `--factor` can vary.
