"""Trained runs on disk, small enough for a test."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.checkpoint.whole import Checkpoint, RunState, write_checkpoint
from runtime.dense.state import capture
from runtime.models.inputs import Embeddings, InputShape, flatten
from runtime.run.folder import plain
from tests.runtime.embedding.conftest import save
from tests.runtime.worlds import World


class Branches(nn.Module):
    """A model whose path depends on its numbers, which torch.export does not take."""

    def __init__(self, shape: InputShape, hidden: Any) -> None:
        super().__init__()
        self.head = nn.Linear(shape.width, shape.tasks)

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        flat = flatten(dense, embeddings)
        if float(flat.sum().detach()) > 1e9:
            flat = -flat
        logits: torch.Tensor = self.head(flat)
        return logits


class Plain(nn.Module):
    """A class that torch.export takes, with a tensor in it that is no weight, and dropout."""

    def __init__(self, shape: InputShape, hidden: Any) -> None:
        super().__init__()
        self.first = nn.Linear(shape.width, hidden[0])
        self.drop, self.norm = nn.Dropout(0.5), nn.LayerNorm(hidden[0])
        self.head = nn.Linear(hidden[0], shape.tasks)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, hidden[0]), persistent=False)

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        wide = self.norm(self.first(flatten(dense, embeddings))) * self.scale
        wide = self.drop(torch.relu(wide) + torch.tensor(0.25))
        logits: torch.Tensor = self.head(wide)
        return logits


def checkpoint_of(world: World, folder: Path, *, layout: bool = True) -> Checkpoint:
    """What a run leaves at its end: a checkpoint that names its config and its layout."""
    store, learner = world.store, world.learner
    state = RunState(
        samples=world.meter.samples,
        updates=world.meter.updates,
        config=plain(learner.config),
        tables={name: asdict(table) for name, table in store.tables.items()},
        layout=plain(store.layout) if layout else None,
        facts={"ranks": 1, "shards": store.shards, "data_sha256": ""},
        servers=store.server_counters(),
        learner={
            "drew_unseeded": learner.drew_unseeded,
            "rows": world.worker.state_dict(),
        },
        meter=plain(world.meter.state_dict()),
        history={},
        files={},
    )
    dense = capture(world.model, [], version=world.meter.updates)
    return write_checkpoint(folder, state, dense, None, lambda rows: save(store, rows))
