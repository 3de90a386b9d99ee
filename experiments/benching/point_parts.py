"""Where the core-seconds of one point go, beside the least that this machine needs for each part.

    python -m experiments.benching.point_parts DATA DATA_DIR W BATCH TAU EVALUATE_EVERY

Prints JSON: a list of {part, core_s, bound_s, bound}. The parts are those of `PARTS`; what is left
is `other` (the order, the trace, the executor).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

PARTS = ("start-up", "data", "ids", "rows", "dense", "evaluation", "other")


class Clock:
    """CPU seconds by part; of nested parts the outermost counts."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._busy = False

    def watch(self, part: str, owner: Any, name: str) -> None:
        """Count every call of ``owner.name`` to ``part`` from now on."""
        inner: Callable[..., Any] = getattr(owner, name)

        @wraps(inner)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._busy:
                return inner(*arguments, **named)
            self._busy = True
            began = time.process_time()
            try:
                return inner(*arguments, **named)
            finally:
                self.spent[part] += time.process_time() - began
                self._busy = False

        setattr(owner, name, timed)


def main(words: list[str]) -> None:
    """Train one point under the clock, then measure the bounds."""
    name, folder = words[:2]
    ranks, batch, tau, every = (int(word) for word in words[2:])
    began = time.process_time()
    import runtime.run.record  # noqa: F401 - what a run imports

    torch_s = _import_torch_s()
    from runtime.config import DataConfig, EvaluationConfig, SyncConfig, TrainConfig

    config = TrainConfig(
        sync=SyncConfig(mode="hybrid", tau=tau, ranks=ranks),  # type: ignore[arg-type]
        batch=batch,
        data=DataConfig(name=name, dir=Path(folder) if folder else None),
        evaluation=EvaluationConfig(evaluate_every_steps=every),
    )
    clock = Clock()
    _watch(clock)
    started = time.process_time()
    from runtime.run.session import train

    outcome = train(config)
    ended = time.process_time()
    clock.spent["start-up"] += started - began
    clock.spent["other"] = ended - began - sum(clock.spent.values())
    bounds = _bounds(config, outcome, torch_s)
    parts = [
        {"part": p, "core_s": clock.spent[p], "bound_s": b, "bound": why}
        for p, (b, why) in zip(PARTS, bounds, strict=True)
    ]
    print(json.dumps(parts))


def _watch(clock: Clock) -> None:
    """Each part by the functions that do its work, whoever calls them."""
    import torch
    from torch import nn

    from runtime.data.kept import KeptSource
    from runtime.embedding.native.pooling import NativePooling
    from runtime.embedding.native.store import NativeStore
    from runtime.embedding.server import EmbeddingServer
    from runtime.order import executor
    from runtime.rank.feed import Feed
    from runtime.run import session

    for owner, name in ((Feed, "take"), (Feed, "has_batch"), (KeptSource, "provenance")):
        clock.watch("data", owner, name)
    clock.watch("ids", NativeStore, "begin")
    for owner, name in (
        (EmbeddingServer, "read"),
        (EmbeddingServer, "apply"),
        (NativePooling, "forward"),
        (NativePooling, "backward"),
    ):
        clock.watch("rows", owner, name)
    for owner, name in ((nn.Module, "__call__"), (torch.Tensor, "backward")):
        clock.watch("dense", owner, name)
    clock.watch("dense", executor, "apply_gradients")
    clock.watch("start-up", session, "assemble_for")
    clock.watch("start-up", executor, "make_optimizer")
    clock.watch("evaluation", session, "evaluate")


def _import_torch_s() -> float:
    """CPU seconds of a process that only imports torch."""
    before = os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    return after.children_user + after.children_system - before[2] - before[3]


def _bounds(config: Any, outcome: Any, torch_s: float) -> list[tuple[float | None, str]]:
    """The least core-seconds of each part, in the order of `PARTS`."""
    from runtime.data.open import open_source
    from runtime.data.source import rebatch

    source = open_source(config.data.name, config.data.dir)
    first = next(iter(rebatch(source.chunks("train"), config.batch)))
    flops_per_s, bytes_per_s = _product_rate(first.size), _copy_rate()
    samples, updates = outcome.figures["samples"], outcome.figures["updates"]
    weights = sum(p.numel() for p in outcome.model.parameters())
    handle = outcome.store.begin(0, 0, first)
    dim = next(iter(outcome.store.tables.values())).dim
    distinct = sum(len(plan.ids) for plan in handle.plans.values())
    plan_s = _best_s(lambda: outcome.store.begin(0, 0, first))
    data_bytes = updates * (first.ids.nbytes + first.labels.nbytes)
    # A row's values are read and copied, then read again with its state and written back.
    rows_bytes = updates * (distinct * 4 * (5 * dim + 2) + 4 * len(first.ids) * 4 * dim)
    tested = len(outcome.final.labels) * (1 + len(outcome.curve))
    return [
        (torch_s, "a process that imports torch"),
        (data_bytes / bytes_per_s, f"its bytes once at {bytes_per_s / 1e9:.1f} GB/s"),
        (updates * plan_s, "the plan of a batch, hot, once an update"),
        (rows_bytes / bytes_per_s, f"rows and vectors at {bytes_per_s / 1e9:.1f} GB/s"),
        (6 * weights * samples / flops_per_s, f"products at {flops_per_s / 1e9:.0f} GFLOP/s"),
        (2 * weights * tested / flops_per_s, "its products at the same rate"),
        (None, ""),
    ]


def _product_rate(batch: int) -> float:
    """FLOP/s of one thread in a product of the size of the first layer."""
    import torch

    one, other = torch.randn(batch, 320), torch.randn(320, 256)
    seconds = _best_s(lambda: one @ other)
    return 2 * batch * 320 * 256 / seconds


def _copy_rate() -> float:
    """Bytes a second of a copy that lies in no cache."""
    import numpy as np

    source = np.ones(1 << 24)
    target = np.empty_like(source)
    return source.nbytes / _best_s(lambda: np.copyto(target, source), repeats=5)


def _best_s(work: Callable[[], Any], repeats: int = 50) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main(sys.argv[1:])
