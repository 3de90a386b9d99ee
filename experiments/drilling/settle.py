"""Sent = applied + counted as lost, per server (law 13), read from what a run left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.drilling.account import Account
from experiments.drilling.world import samples_applied
from persia_sim.words.records import parse
from persia_sim.words.vocabulary import Mode
from runtime.checkpoint.rows import load
from runtime.checkpoint.whole import Checkpoint, newest
from runtime.data.batch import Field, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.shard import shard_of
from runtime.run.folder import read_summary


def rows_of(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of the only table of a checkpoint."""
    from runtime.embedding.native.store import NativeStore  # late: loads the compiled kernels

    (table,) = (parse(TableConfig, t, "table") for t in checkpoint.state.tables.values())
    layout = Layout(fields=(Field(name="user", table=table.name),))
    store = NativeStore(layout, [table], seed=checkpoint.state.config["seed"])
    load(store, checkpoint.rows)
    ids, values, _ = store.export()[table.name]
    return ids, values


def settle(run_folder: Path, *, mode: str, ranks: int, servers: int) -> Account:
    """The account of a finished run of the counting world.

    Raises ValueError where a push was applied in part, or at one row of a server and not at others.
    """
    summary = read_summary(run_folder)
    if summary is None:
        raise ValueError(f"{run_folder} holds no finished run")
    ids, values = rows_of(newest(run_folder))
    samples = samples_applied(values)
    barrier = Mode(mode).has_barrier
    sent = summary["updates"] * (ranks if barrier else 1)
    lost = summary["pushes_lost_at"]
    applied = []
    owners = shard_of(ids, servers)
    for server in range(servers):
        found = np.unique(samples[owners == server])
        if len(found) != 1:
            raise ValueError(
                f"rows of server {server} had {found.tolist()} samples: a push was applied in part"
            )
        applied.append(int(found[0]) // (1 if barrier else ranks))
    silent = sum(abs(sent - a - n) for a, n in zip(applied, lost, strict=True))
    return Account(sent * servers, sum(applied), sum(lost), silent)
