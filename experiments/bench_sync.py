"""The concurrent sync executor against the dense network alone, in one interleaved run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.checks import at_least
from experiments.machine_load import ForeignLoad
from experiments.tables import aligned, write_csv
from experiments.workload_w import WorkloadW, workload_w
from runtime.config import ModelConfig, TrainConfig
from runtime.embedding.config import TableConfig

GOAL = 0.70
WARM_UP_STEPS = 2  # of a window, not timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Samples/s of sync on workload W as a share of dense-only, pairs of windows in turn."""

    rows: int = 1_000_000
    """Distinct ids of the workload."""
    batch: int = 4096
    """Samples a step."""
    dim: int = 16
    """Floats in a row."""
    hidden: tuple[int, ...] = (1024, 512, 256)
    """The tower."""
    threads: int = 2
    """Threads of one dense operation, in both."""
    pairs: int = 12
    """Interleaved pairs of windows."""
    window_steps: int = 12
    """Steps in a window; the first two are not timed."""
    out: Path = Path("runs/bench-sync")
    """Folder of the CSV."""

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows, batch=self.batch, threads=self.threads, pairs=self.pairs)
        at_least(WARM_UP_STEPS + 1, window_steps=self.window_steps)


def run(options: Options) -> None:
    """Measure, print the ratio with its spread and the machine's load."""
    import torch
    from tqdm import tqdm

    torch.set_num_threads(options.threads)
    config = TrainConfig(
        executor="concurrent",
        batch=options.batch,
        steps=options.window_steps,
        threads=options.threads,
        rows=TableConfig(dim=options.dim),
        model=ModelConfig(hidden=options.hidden),
    )
    source = workload_w(options.batch, options.rows)
    bench = _Bench(config, source)
    bench.sync_samples_per_s()  # creates the rows; not counted
    records = []
    for pair in tqdm(range(options.pairs), desc="pairs", disable=None):
        with ForeignLoad() as load:
            dense, sync = bench.dense_samples_per_s(), bench.sync_samples_per_s()
        records.append(
            {
                "pair": pair,
                "dense_only_samples_per_s": dense,
                "sync_samples_per_s": sync,
                "ratio": sync / dense,
                "foreign_cores": load.cores,
            }
        )
    write_csv(options.out / "bench_sync.csv", records)
    header = ["", "dense-only", "sync", "ratio", "foreign cores"]
    columns = [[r[k] for r in records] for k in list(records[0])[1:]]
    print(
        aligned(
            header,
            [
                [name, *(f"{f(c):,.2f}" if max(c) < 100 else f"{f(c):,.0f}" for c in columns)]
                for name, f in (("min", np.min), ("median", np.median), ("max", np.max))
            ],
        )
    )
    median = float(np.median(columns[2]))
    verdict = "met" if median >= GOAL else "MISSED"
    print(f"goal: ratio >= {GOAL:.2f}: {verdict} ({median:.2f}); {options.out / 'bench_sync.csv'}")


class _Bench:
    """One model, one store, two loops over the same batches."""

    def __init__(self, config: TrainConfig, source: WorkloadW) -> None:
        import torch

        from runtime.training.dense import make_optimizer
        from runtime.training.parts import assemble

        self._config, self._source = config, source
        self._parts = assemble(config, source)
        self._optimizer = make_optimizer(config.model, self._parts.learner.model)
        width = len(source.layout.fields) * config.rows.dim
        self._pooled = torch.zeros(config.batch, width)

    def sync_samples_per_s(self) -> float:
        """A window of the concurrent executor in mode sync with one rank."""
        from runtime.training.concurrent import ConcurrentRun

        parts = self._parts.again(self._source)
        parts.meter.start()
        ConcurrentRun(parts).run()
        return parts.meter.samples_per_s(skip=WARM_UP_STEPS)

    def dense_samples_per_s(self) -> float:
        """The same tower, loss and optimiser on ready-made vectors: no embedding work at all."""
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        from runtime.models.inputs import Embeddings

        model, steps = self._parts.learner.model, self._config.steps or 0
        began = 0.0
        for step in range(steps):
            if step == WARM_UP_STEPS:
                began = time.perf_counter()
            batch = self._source.batches[step % len(self._source.batches)]
            pooled = self._pooled.detach().requires_grad_()
            logits = model(torch.from_numpy(batch.dense), Embeddings(pooled, {}, {}))
            loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return (steps - WARM_UP_STEPS) * self._config.batch / (time.perf_counter() - began)
