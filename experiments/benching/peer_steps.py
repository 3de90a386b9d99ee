"""One step of each system that bench-peers compares: ours, the peers', and no embedding at all."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from experiments.benching.wide import FIELDS, WideWorkload, wide_workload
from persia_sim.words.vocabulary import DEFAULT_TAU, Mode
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.embedding.verbs import EmbeddingStore

if TYPE_CHECKING:
    from torch import nn

OURS = ("ours sync", "ours lookahead", "ours hybrid")
PEERS = ("fbgemm tbe", "torchrec fused", "torch sparse")
ONE_STEP_LATE = ("ours hybrid tau 1", "torchrec semi-sync")
"""The same lateness of rows in both, see tests/experiments/test_semi_sync.py."""
CEILING = "dense-only"
WARM_UP_STEPS = 2  # of a window, not timed


OF_OPTIONS = ("batch", "window_steps", "threads", "device", "latency_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload, and the ratios to reach, set before the engine was built."""

    dim: int = 16
    hidden: tuple[int, ...] = (1024, 512, 256)
    ids_per_field: int = 1
    rows: int = 10_000_000
    goals: tuple[tuple[str, float], ...] = ()
    """(base, ratio of our best mode to it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Shape):
    """What a window trains, with the options of the bench."""

    batch: int
    window_steps: int
    threads: int
    device: str
    latency_s: float


def systems_of(steps: Steps) -> dict[str, Callable[[], float]]:
    """Each system's name and what trains one window of it; returns samples/s."""
    import torch

    from experiments.benching.peers import fbgemm_tbe, row_numbers, torch_sparse, torchrec_fused
    from runtime.rank.learner import open_device

    open_device(steps.device)
    torch.set_num_threads(steps.threads)
    rows = steps.rows
    source = wide_workload(steps.batch, rows, batches=16, ids_per_field=steps.ids_per_field)
    store = _full_store(source, steps.dim, rows)
    systems: dict[str, Callable[[], float]] = {}
    blank = torch.zeros(steps.batch, FIELDS * steps.dim, device=steps.device)
    systems[CEILING] = _loop(steps, source, lambda _: blank.detach(), lambda: None)
    for name, mode in zip(OURS, (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID), strict=True):
        systems[name] = _ours(steps, source, store, mode)
    if steps.latency_s or steps.device != "cpu":
        return systems
    numbers = row_numbers(source.batches, rows)
    for name, make in zip(PEERS, (fbgemm_tbe, torchrec_fused, torch_sparse), strict=True):
        systems[name] = _loop(steps, source, *make(numbers, rows, steps.dim))
    late, semi_sync = ONE_STEP_LATE
    systems[late] = _ours(steps, source, store, Mode.HYBRID, tau=1)
    systems[semi_sync] = _semi_sync(steps, source, numbers)
    return systems


def _full_store(source: WideWorkload, dim: int, rows: int) -> EmbeddingStore:
    """Our store with every row of the workload, as the peers' tables have."""
    from runtime.data.batch import Batch
    from runtime.data.ids import hash_integers, tag
    from runtime.embedding.open import open_store

    optimizer = RowOptimizer(kind="adagrad", lr=0.05, eps=1e-10)
    store = open_store(source.layout, [TableConfig(dim=dim, optimizer=optimizer)])
    values = rows // FIELDS
    order = np.random.default_rng(1).permutation(FIELDS)
    for field in order:
        ids = np.random.default_rng(int(field)).permutation(
            tag(int(field), hash_integers(np.arange(values)))
        )
        for start in range(0, values, 1 << 17):
            part = ids[start : start + (1 << 17)]
            empty = np.zeros((len(part), 0), np.float32)
            handle = store.begin(0, 0, Batch(part, np.arange(len(part) + 1), empty, empty))
            store.read(handle, 0)
    return store


def _ours(
    steps: Steps,
    source: WideWorkload,
    store: EmbeddingStore,
    mode: Mode,
    tau: int = DEFAULT_TAU,
) -> Callable[[], float]:
    from runtime.embedding.worker import EmbeddingWorker
    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    config = TrainConfig(
        sync=SyncConfig(mode=mode, tau=tau),
        batch=steps.batch,
        steps=steps.window_steps,
        engine=EngineConfig(
            executor="concurrent",
            threads=steps.threads,
            device=steps.device,
            queue_batches=2 if mode.reads_late_rows else None,
            latency_s=steps.latency_s,
        ),
        rows=TableConfig(dim=steps.dim),
        model=ModelConfig(hidden=steps.hidden),
    )
    filled = replace(assemble(config, source), worker=EmbeddingWorker(store))

    def measure() -> float:
        parts = filled.again(source)
        parts.meter.start()
        ConcurrentRun(parts).run()
        return parts.meter.samples_per_s(skip=WARM_UP_STEPS)

    return measure


def _loop(
    steps: Steps,
    source: WideWorkload,
    look: Callable[[int], object],
    step_rows: Callable[[], None],
) -> Callable[[], float]:
    """The plain loop around the same MLP, loss and optimiser."""
    import torch
    from torch import Tensor
    from torch.nn.functional import binary_cross_entropy_with_logits

    from runtime.dense.optimizer import make_optimizer
    from runtime.models.inputs import Embeddings

    model = _network(steps, source)
    optimizer = make_optimizer(ModelConfig(hidden=steps.hidden), model)
    dense = [torch.from_numpy(b.dense).to(steps.device) for b in source.batches]
    labels = [torch.from_numpy(b.labels).to(steps.device) for b in source.batches]
    at = [0]

    def measure() -> float:
        began = 0.0
        for number in range(steps.window_steps):
            if number == WARM_UP_STEPS:
                began = time.perf_counter()
            at[0] = (at[0] + 1) % len(dense)
            pooled = look(at[0])
            assert isinstance(pooled, Tensor)
            if not pooled.requires_grad:
                pooled.requires_grad_()
            logits = model(dense[at[0]], Embeddings(pooled, {}, {}))
            loss = binary_cross_entropy_with_logits(logits, labels[at[0]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step_rows()
        loss.item()  # on a GPU: wait for the last step
        return (steps.window_steps - WARM_UP_STEPS) * steps.batch / (time.perf_counter() - began)

    return measure


def _semi_sync(
    steps: Steps, source: WideWorkload, numbers: list[np.ndarray]
) -> Callable[[], float]:
    """TorchRec's pipeline around the same MLP, loss and optimiser."""
    import torch

    from experiments.benching.semi_sync import SemiSync, batches_of

    dense = [torch.from_numpy(b.dense) for b in source.batches]
    labels = [torch.from_numpy(b.labels) for b in source.batches]
    endless = itertools.cycle(batches_of(numbers, dense, labels))
    tables = [steps.rows // FIELDS] * FIELDS
    network = _network(steps, source)
    optimizer = torch.optim.Adam(
        network.parameters(), lr=ModelConfig().lr
    )  # the pipeline asks torch's
    pipeline = SemiSync(network, optimizer, tables, steps.dim)

    def measure() -> float:
        pipeline.steps(endless, WARM_UP_STEPS)
        timed = steps.window_steps - WARM_UP_STEPS
        began = time.perf_counter()
        pipeline.steps(endless, timed)
        return timed * steps.batch / (time.perf_counter() - began)

    return measure


def _network(steps: Steps, source: WideWorkload) -> nn.Module:
    """The MLP as ours has it."""
    from runtime.rank.parts import assemble

    config = TrainConfig(
        batch=steps.batch,
        engine=EngineConfig(device=steps.device),
        rows=TableConfig(dim=steps.dim),
        model=ModelConfig(hidden=steps.hidden),
    )
    return assemble(config, source).learner.model
