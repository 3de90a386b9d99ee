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
# # Hybrid, or tables on the GPUs?
#
# The same workload (26 fields of one id, rows of 128, an MLP of 25 M weights, 55,296 samples a
# dense update) trained in hybrid with 64 GPUs and rented CPU hosts, and synchronously with the
# tables spread over GPUs: 64, or as many as the rows need memory (a star). The table is stored,
# made by `persia-experiments sharded-map` (about a minute).

# %%
from pathlib import Path

import pandas as pd

from paper_figs.clusters import sharded_map_figure

root = Path.cwd() if Path("paper_figs").is_dir() else Path.cwd().parent
path = root / "docs" / "results" / "sharded_map.csv"
rows = pd.read_csv(path)
sharded_map_figure(path)

# %% [markdown]
# ## What is assumed
#
# - Equal on both sides: fields, rows, row width, MLP, global batch, seconds of the dense network
#   and of launching it, all-reduce, NICs of all hosts. Loading costs nothing on either side.
# - Rows have 4 bytes a number and row-wise Adagrad; 80 % of a GPU's memory is for rows. Sharded
#   takes the faster of a plan by columns, where it fits, and one by rows. Tables in the memory of
#   the GPU hosts (UVM) are not in this map.
# - Hybrid's rows travel by TCP, the GPUs' exchanges by RDMA. Hybrid rents the cheapest CPU hosts
#   with which it is within 5 % of the fastest.
# - List prices of machines of eight GPUs and of CPU hosts, with their dates; a machine costs the
#   same with every NIC. Check them before you spend.
# - Sharded training is exact; hybrid's rows are up to four steps late.
# - Hybrid's hosts are chosen by the closed form and then simulated. By how much the closed form
#   would have been too high:

# %%
off = rows.hybrid_bound_samples_per_s / rows.hybrid_samples_per_s - 1
print(f"{len(off)} cells: median {off.median():+.1%}, largest {off.max():+.1%}")

# %% [markdown]
# ## At 100 Gbit/s: GPUs that the rows of the sharded side need, dollars an hour, what binds

# %%
some = rows[(rows.nic_gbit_per_s == 100) & (rows.software == rows.software.iloc[0])]
print(
    some[
        [
            "gpu",
            "parameters",
            "sharded_gpus",
            "sharded_usd_per_hour",
            "hybrid_workers",
            "hybrid_servers",
            "hybrid_server_host",
            "hybrid_usd_per_hour",
            "sharded_binds",
            "hybrid_binds",
        ]
    ].to_string(index=False, float_format="{:,.0f}".format)
)
print("prices:", ", ".join(f"{g} {p}" for g, p in some.groupby("gpu").prices.first().items()))
