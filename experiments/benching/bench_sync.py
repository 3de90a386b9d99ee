"""The concurrent sync executor against the dense network alone, in one interleaved run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.benching.wide import FIELDS, WideWorkload, wide_workload
from experiments.benching.windows import interleave, paired_ratio, summarize, verdict
from experiments.checks import COUNT, between, each_between, not_empty
from experiments.tables import aligned, write_csv
from runtime.config import EngineConfig, ModelConfig, TrainConfig
from runtime.embedding.config import TableConfig

GOAL = 0.70
WARM_UP_STEPS = 2  # of a window, not timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Samples/s of sync on workload `wide` as a share of dense-only, pairs of windows in turn."""

    rows: int = 1_000_000
    """Distinct ids of the workload."""
    batch: int = 4096
    """Samples a step."""
    dim: int = 16
    """Floats in a row."""
    hidden: tuple[int, ...] = (1024, 512, 256)
    """Widths of the MLP's layers."""
    threads: int = 2
    """Threads of one dense operation, in both."""
    pairs: int = 12
    """Interleaved pairs of windows."""
    window_steps: int = 12
    """Steps in a window, >= 3; the first two are not timed."""
    most_foreign_cores: float = 0.15
    """A window in which other processes used more cores than this is refused."""
    out: Path = Path("runs/bench-sync")
    """Folder of the CSV."""

    def __post_init__(self) -> None:
        between(FIELDS, 10**9, rows=self.rows)
        between(*COUNT, batch=self.batch, pairs=self.pairs)
        between(1, 1024, threads=self.threads)
        between(1, 4096, dim=self.dim)
        not_empty(hidden=self.hidden)
        each_between(1, 1_000_000, hidden=self.hidden)
        between(WARM_UP_STEPS + 1, COUNT[1], window_steps=self.window_steps)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)


def run(options: Options) -> None:
    """Measure, print the ratio with its spread and the machine's load."""
    import torch
    from tqdm import tqdm

    torch.set_num_threads(options.threads)
    config = TrainConfig(
        engine=EngineConfig(executor="concurrent", threads=options.threads),
        batch=options.batch,
        steps=options.window_steps,
        rows=TableConfig(dim=options.dim),
        model=ModelConfig(hidden=options.hidden),
    )
    source = wide_workload(options.batch, options.rows)
    bench = _Bench(config, source)
    bench.sync_samples_per_s()  # creates the rows; not counted
    candidates = {"dense-only": bench.dense_samples_per_s, "sync": bench.sync_samples_per_s}
    with tqdm(total=2 * options.pairs, desc="windows", disable=None) as bar:
        windows = interleave(
            candidates, options.pairs, options.most_foreign_cores, lambda: bar.update() and None
        )
    write_csv(options.out / "bench_sync.csv", [asdict(w) for w in windows])
    cells = []
    for name in candidates:
        s = summarize(windows, name)
        spread = f"{s.low:,.0f} to {s.high:,.0f}"
        cells.append(
            [name, f"{s.median:,.0f}", spread, f"{s.quiet}/{s.windows}", f"{s.foreign_cores:.2f}"]
        )
    print(aligned(["", "samples/s", "range", "quiet windows", "foreign cores"], cells))
    ratio = paired_ratio(windows, "sync", "dense-only")
    print(
        f"sync / dense-only: {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] over"
        f" {ratio.pairs} pairs; goal {GOAL:.2f}: {verdict(ratio, GOAL)}"
        f"\n{options.out / 'bench_sync.csv'}"
    )


class _Bench:
    """One model, one store, two loops over the same batches."""

    def __init__(self, config: TrainConfig, source: WideWorkload) -> None:
        import torch

        from runtime.dense.optimizer import make_optimizer
        from runtime.rank.parts import assemble

        self._config, self._source = config, source
        self._parts = assemble(config, source)
        self._optimizer = make_optimizer(config.model, self._parts.learner.model)
        width = len(source.layout.fields) * config.rows.dim
        self._pooled = torch.zeros(config.batch, width)

    def sync_samples_per_s(self) -> float:
        """A window of the concurrent executor in mode sync with one rank."""
        from runtime.engines.threads import ConcurrentRun

        parts = self._parts.again(self._source)
        parts.meter.start()
        ConcurrentRun(parts).run()
        return parts.meter.samples_per_s(skip=WARM_UP_STEPS)

    def dense_samples_per_s(self) -> float:
        """The same MLP, loss and optimiser on ready-made vectors: no embedding work at all."""
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
