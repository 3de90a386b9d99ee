"""What a replay must match to give the same bytes, and refuses when it does not."""

from __future__ import annotations

from typing import Any

import torch

from persia_sim.words.trace import Trace
from runtime.config import TrainConfig
from runtime.data.source import Source


def trace_meta(config: TrainConfig, source: Source) -> dict[str, Any]:
    """Everything beside the order that decides a byte; kept in the trace."""
    data = source.provenance()
    return {
        "mode": str(config.mode),
        "ranks": config.ranks,
        "tau": config.window,
        "merge_pushes": config.merges,
        "seed": config.seed,
        "batch": config.batch_per_push,
        "batch_per_rank": config.batch_per_push // (config.ranks if config.mode.has_barrier else 1),
        "steps": config.steps,
        "shards": config.shards,
        "passes": config.data.passes,
        "shuffle": config.data.shuffle,
        "rows_read": config.data.rows,
        "skip_bad_rows": config.data.skip_bad_rows,
        "model": f"{config.model}",
        "rows": f"{config.rows}",
        "row_gradients": config.row_gradients,
        "nonfinite": config.nonfinite,
        "precision": config.precision,
        "loss_scale": config.loss_scale,
        "device": config.device,
        "threads": config.threads,
        "torch": torch.__version__,
        "data": data.name,
        "data_sha256": data.sha256,
    }


def refuse_other_run(trace: Trace, meta: dict[str, Any], name: str) -> None:
    """Raise ValueError when the trace cannot be executed with these settings.

    A recorded trace must agree in everything that decides a byte. A simulated one knows neither
    seed nor data: its mode, its ranks and the samples of one rank's batch must agree.
    """
    if trace.meta.get("order") == "simulated":
        meta = {"mode": meta["mode"], "ranks": meta["ranks"], "batch": meta["batch_per_rank"]}
    elif meta["precision"] == "float16":
        raise ValueError(f"trace {name} cannot be replayed: float16 scales its loss by timing")
    differences = [
        f"{key}: trace {trace.meta.get(key)!r}, this run {value!r}"
        for key, value in meta.items()
        if key != "tau" and trace.meta.get(key) != value
    ]
    if differences:
        raise ValueError(f"trace {name} is of another run; " + "; ".join(differences))


def refuse_cut_short(trace: Trace, updates: int) -> None:
    """Raise ValueError when a recorded order ends before its run did."""
    recorded = trace.meta.get("updates")
    if recorded is not None and recorded != updates:
        raise ValueError(
            f"the trace was made by {recorded} dense updates and holds {updates}; it is cut short"
        )
