"""What the counting runs train, and their account: sent = applied + counted as lost (law 13)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.drilling.trial import EVALUATED, Account, samples_applied
from persia_sim.base.schema import parse
from persia_sim.base.vocabulary import Mode
from runtime.checkpoint.rows import load
from runtime.checkpoint.whole import Checkpoint, newest
from runtime.data.batch import Field, Layout
from runtime.embedding.batch_rows import shard_of
from runtime.embedding.config import TableConfig
from runtime.models.inputs import Embeddings, InputShape
from runtime.run.folder import read_summary

EVALUATION_S = 0.1


class Counting(nn.Module):
    """Its logits are a weight's; the rows' gradients are 1, whatever the loss says."""

    def __init__(self, shape: InputShape, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """[B, T]"""
        if not self.training and EVALUATED in os.environ:
            with Path(os.environ[EVALUATED]).open("ab") as file:
                file.write(b".")
            time.sleep(EVALUATION_S)
        return self.weight + _UnitSlope.apply(embeddings.pooled)


class _UnitSlope(torch.autograd.Function):
    """[B, E] -> zeros [B, 1], with a gradient of 1 for every element."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor) -> Tensor:
        ctx.shape = pooled.shape
        return pooled.new_zeros(len(pooled), 1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope.new_ones(ctx.shape)


def rows_of(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of the only table of a checkpoint."""
    from runtime.embedding.native.store import NativeStore  # late: loads the compiled kernels

    (table,) = (parse(TableConfig, t, "table") for t in checkpoint.state.tables.values())
    layout = Layout(fields=(Field(name="user", table=table.name),))
    store = NativeStore(layout, [table], seed=checkpoint.state.config["seed"])
    load(store, checkpoint.rows)
    ids, values, _ = store.export()[table.name]
    return ids, values


def settle(run_folder: Path, *, mode: str, ranks: int) -> Account:
    """The account of a finished run of the counting world.

    Raises ValueError where a push was applied in part, or at one row of a server and not at others.
    """
    # In the counting world a row's value is the number of samples that were applied to it.
    summary = read_summary(run_folder)
    if summary is None:
        raise ValueError(f"{run_folder} holds no finished run")
    ids, values = rows_of(newest(run_folder))
    samples = samples_applied(values)

    # At each server all rows must have had the same number, or a push was applied in part.
    barrier = Mode(mode).has_barrier
    sent = summary["updates"] * (ranks if barrier else 1)
    lost = summary["pushes_lost_at"]
    servers = len(lost)  # it may have others than it began with
    applied = []
    owners = shard_of(ids, servers)
    for server in range(servers):
        seen_counts = np.unique(samples[owners == server])
        if len(seen_counts) != 1:
            raise ValueError(
                f"rows of server {server} had {seen_counts.tolist()} samples: a push was applied in"
                " part"
            )
        applied.append(int(seen_counts[0]) // (1 if barrier else ranks))

    # Whatever was sent and neither applied nor counted as lost is silent loss (law 13).
    silent = sum(abs(sent - a - n) for a, n in zip(applied, lost, strict=True))
    return Account(sent * servers, sum(applied), sum(lost), silent)
