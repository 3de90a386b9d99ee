"""Whether the ranks of a step may be computed as one batch (law 14).

With a constant lag and merged pushes all ranks of a step read the same rows, and their gradients
are summed before anything is written. One lookup, one forward and backward pass and one push then
serve them all: what changes is the order in which floats are summed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import nn

from runtime.config import TrainConfig
from runtime.embedding.config import TableConfig
from runtime.models.build import BUILT_IN
from runtime.rank.learner import draws_random_numbers

FUSED = "ranks_fused"
"""What a trace says of itself when its run was computed so: its replay is, too."""


def why_one_by_one(config: TrainConfig, model: nn.Module, tables: Iterable[TableConfig]) -> str:
    """Why the ranks of this run are computed one by one; "" when they are one batch."""
    sync, engine = config.sync, config.engine
    if engine.executor == "replay" and engine.trace is not None:
        return "" if _was_fused(engine.trace) else "the recorded run did so"
    name = config.model.name
    independent = name in BUILT_IN or getattr(model, "samples_are_independent", False)
    reasons = {
        "it was asked for": not engine.fuse_ranks,
        "there is one rank": sync.ranks == 1,
        "only executor lag reads the same rows for all": engine.executor != "lag",
        f"mode {sync.mode} has no common step": not sync.mode.has_barrier,
        "pushes are applied on arrival": not sync.merges,
        "nonfinite skip leaves out single ranks": config.nonfinite == "skip",
        f"precision {engine.precision} rounds more than sums": engine.precision
        not in ("float32", "float64"),
        "the model draws random numbers for each rank": draws_random_numbers(model),
        f"model {name} does not say samples_are_independent = True": not independent,
        "what a table holds depends on the order of its lookups": any(
            table.depends_on_lookup_order for table in tables
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _was_fused(trace: Path) -> bool:
    """What the trace says; of a file that is none, whoever reads it whole says what is wrong."""
    try:
        with np.load(trace, allow_pickle=False) as arrays:
            return bool(json.loads(str(arrays["meta"])).get(FUSED))
    except Exception:
        return False
