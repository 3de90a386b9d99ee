"""Whole training steps: ours in three modes against FBGEMM, TorchRec, torch, and no embedding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from experiments.benching.wide import (
    FIELDS,
    WideWorkload,
    concurrent_samples_per_s,
    full_store,
    plain_loop,
    wide_ids,
    wide_workload,
)
from experiments.benching.windows import (
    Bench,
    Summary,
    Window,
    by_cpu,
    interleave,
    paired_ratio,
    summarize,
    verdict,
)
from experiments.options import MOST, Count, Some
from experiments.tables import Column, drawn, table, write_csv
from persia_sim.words.schema import Within
from persia_sim.words.vocabulary import DEFAULT_TAU, Mode
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

OURS = ("ours sync", "ours lookahead", "ours hybrid")
PEERS = ("fbgemm tbe", "torchrec fused", "torch sparse")
ONE_STEP_LATE = ("ours hybrid tau 1", "torchrec semi-sync")
"""The same lateness of rows in both, see tests/experiments/test_semi_sync.py."""
CEILING = "dense-only"
WARM_UP_STEPS = 2  # of a window, not timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload, and the ratios to reach, set before the engine was built."""

    dim: int = 16
    hidden: tuple[int, ...] = (1024, 512, 256)
    ids_per_field: int = 1
    rows: int = 10_000_000
    goals: tuple[tuple[str, float], ...] = ()
    """(base, ratio of our best mode to it)."""


WorkloadName = Literal["wide", "wide-dim128", "small", "small-8ids", "paper"]


SHAPES: dict[WorkloadName, Shape] = {
    "wide": Shape(goals=((CEILING, 0.95),)),
    "wide-dim128": Shape(dim=128, rows=1_000_000, goals=((CEILING, 0.85), ("fbgemm tbe", 1.2))),
    "small": Shape(hidden=(256, 128, 64), goals=(("fbgemm tbe", 1.5),)),
    "small-8ids": Shape(
        hidden=(256, 128, 64),
        ids_per_field=8,
        goals=(("fbgemm tbe", 1.8), ("torchrec fused", 1.8)),
    ),
    "paper": Shape(hidden=(4096, 2048, 1024, 512, 256)),  # as runtime.models.networks.PAPER_MLP
}
UNITS = {"wall": "samples/s", "cpu": "samples per CPU second"}
LATENCY_GOAL = 1.4
"""Hybrid over sync with 10 ms of latency, set before the engine was built."""
KNOWN_SHARES = {"fbgemm tbe": 0.91, "torchrec fused": 0.82, "torch sparse": 0.74}
"""Of dense-only on `wide` (measured on 2 cores of an EPYC, 2026-11-21); a peer far from its share
was not set up as it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Samples/s of whole training steps, every system in turn, ratios with intervals."""

    workloads: Some[WorkloadName] = ("wide", "wide-dim128", "small", "small-8ids")
    """wide: 26 fields, 10 M rows, MLP 1024-512-256; small: 256-128-64; dim 128 has 1 M rows; paper:
    wide with the paper's MLP, which asks for a GPU."""
    device: str = "cpu"
    """Of the dense network, the rows stay in host memory; with cuda the peers are left out."""
    rows: Annotated[int, Within(FIELDS, 10**9)] | None = None
    """Distinct ids instead of the workload's own number (for a quick look)."""
    batch: Count = 4096
    """Samples a step."""
    threads: Annotated[int, Within(1, 1024)] = 2
    """Threads of one dense operation, and of the embedding kernels of sync and lookahead."""
    clock: Literal["wall", "cpu"] = "wall"
    """wall: what the goals mean. cpu: samples per second of CPU time over all threads, first steps
    included: what a machine shared with others can still tell; use it with --threads 1."""
    latency_s: Annotated[float, Within(0, 60)] = 0.0
    """Seconds added to every lookup and every push of ours, as a network would; then the peers are
    left out and hybrid is compared with sync."""
    rounds: Count = 30
    """Interleaved rounds of windows."""
    window_steps: Annotated[int, Within(WARM_UP_STEPS + 1, MOST)] = 8
    """Steps in a window, >= 3; the first two are not timed."""


def run(options: Options) -> None:
    """Measure, print table and goals, write CSV and figure."""
    all_windows: list[dict[str, object]] = []
    for name in options.workloads:
        shape = SHAPES[name]
        systems = systems_of(options, replace(shape, rows=options.rows or shape.rows))
        if options.clock == "cpu":
            samples = options.window_steps * options.batch
            systems = {one: by_cpu(measure, samples) for one, measure in systems.items()}
        windows = interleave(systems, options.rounds, options.most_foreign_cores, name)
        all_windows += [
            {"workload": name, "unit": UNITS[options.clock], **asdict(w)} for w in windows
        ]
        print(_report(name, windows, list(systems), options))
    path = write_csv(options.out / "bench_peers.csv", all_windows)
    print(f"{path}  {drawn(path, CEILING)}")


def _report(name: WorkloadName, windows: list[Window], systems: list[str], options: Options) -> str:

    def share(of: Summary) -> str:
        found = paired_ratio(windows, of.name, CEILING)
        return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"

    columns: dict[str, Column] = {
        f"{name}: k {UNITS[options.clock]}": "{name}",
        "median": lambda s: f"{s.median / 1e3:.1f}",
        "min": lambda s: f"{s.low / 1e3:.1f}",
        "max": lambda s: f"{s.high / 1e3:.1f}",
        "of dense-only": share,
        "quiet": "{quiet}/{windows}",
        "foreign": "{foreign_cores:.2f}",
    }
    lines = [table([summarize(windows, system) for system in systems], columns)]
    best = max(OURS, key=lambda one: summarize(windows, one).median)
    goals = [(best, base, goal) for base, goal in SHAPES[name].goals if base in systems]
    if options.latency_s:
        goals = [(OURS[2], OURS[0], LATENCY_GOAL)]
    for ours, base, goal in goals:
        ratio = paired_ratio(windows, ours, base)
        lines.append(
            f"goal: {ours} >= {goal:.2f} x {base}: {ratio.mean:.2f} [{ratio.low:.2f},"
            f" {ratio.high:.2f}], {ratio.pairs} pairs: {verdict(ratio, goal)}"
        )
    if set(ONE_STEP_LATE) <= set(systems):
        ratio = paired_ratio(windows, *ONE_STEP_LATE)
        lines.append(
            f"rows one step late: {ONE_STEP_LATE[0]} is {ratio.mean:.2f} [{ratio.low:.2f},"
            f" {ratio.high:.2f}] x {ONE_STEP_LATE[1]}, {ratio.pairs} pairs"
        )
    if name == "wide" and PEERS[0] in systems:
        for peer, known in KNOWN_SHARES.items():
            share = paired_ratio(windows, peer, CEILING).mean
            if abs(share / known - 1) > 0.1:
                lines.append(f"note: {peer} is at {share:.2f} of dense-only, known is {known:.2f}")
    return "\n".join(lines) + "\n"


def systems_of(options: Options, shape: Shape) -> dict[str, Callable[[], float]]:
    """Each system's name and what trains one window of it; returns samples/s."""
    import torch

    from experiments.benching.peers import fbgemm_tbe, row_numbers, torch_sparse, torchrec_fused
    from runtime.rank.learner import open_device

    open_device(options.device)
    torch.set_num_threads(options.threads)
    rows = shape.rows
    source = wide_workload(options.batch, rows, batches=16, ids_per_field=shape.ids_per_field)
    optimizer = RowOptimizer(kind="adagrad", lr=0.05, eps=1e-10)
    config = TableConfig(dim=shape.dim, optimizer=optimizer)
    store = full_store(source.layout, config, wide_ids(rows))
    systems: dict[str, Callable[[], float]] = {}
    blank = torch.zeros(options.batch, FIELDS * shape.dim, device=options.device)
    loop = partial(plain_loop, skip=WARM_UP_STEPS)
    systems[CEILING] = loop(_parts(options, shape, source), source, lambda _: blank.detach())
    for name, mode in zip(OURS, (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID), strict=True):
        systems[name] = _ours(options, shape, source, store, mode)
    if options.latency_s or options.device != "cpu":
        return systems
    numbers = row_numbers(source.batches, rows)
    for name, make in zip(PEERS, (fbgemm_tbe, torchrec_fused, torch_sparse), strict=True):
        look, step_rows = make(numbers, rows, shape.dim)
        systems[name] = loop(_parts(options, shape, source), source, look, step_rows=step_rows)
    late, semi_sync = ONE_STEP_LATE
    systems[late] = _ours(options, shape, source, store, Mode.HYBRID, tau=1)
    systems[semi_sync] = _semi_sync(options, shape, source, numbers)
    return systems


def _ours(
    options: Options,
    shape: Shape,
    source: WideWorkload,
    store: Any,
    mode: Mode,
    tau: int = DEFAULT_TAU,
) -> Callable[[], float]:
    from runtime.embedding.worker import EmbeddingWorker
    from runtime.rank.parts import assemble

    config = TrainConfig(
        sync=SyncConfig(mode=mode, tau=tau),
        batch=options.batch,
        steps=options.window_steps,
        engine=EngineConfig(
            executor="concurrent",
            threads=options.threads,
            device=options.device,
            queue_batches=2 if mode.reads_late_rows else None,
            latency_s=options.latency_s,
        ),
        rows=TableConfig(dim=shape.dim),
        model=ModelConfig(hidden=shape.hidden),
    )
    filled = replace(assemble(config, source), worker=EmbeddingWorker(store))
    return partial(concurrent_samples_per_s, filled, source, WARM_UP_STEPS)


def _semi_sync(
    options: Options, shape: Shape, source: WideWorkload, numbers: list[np.ndarray]
) -> Callable[[], float]:
    """TorchRec's pipeline around the same MLP, loss and optimiser."""
    import torch

    from experiments.benching.peers import SemiSync, batches_of

    dense = [torch.from_numpy(b.dense) for b in source.batches]
    labels = [torch.from_numpy(b.labels) for b in source.batches]
    endless = itertools.cycle(batches_of(numbers, dense, labels))
    tables = [shape.rows // FIELDS] * FIELDS
    network = _parts(options, shape, source).learner.model
    optimizer = torch.optim.Adam(
        network.parameters(), lr=ModelConfig().lr
    )  # the pipeline asks torch's
    pipeline = SemiSync(network, optimizer, tables, shape.dim)

    def measure() -> float:
        pipeline.steps(endless, WARM_UP_STEPS)
        timed = options.window_steps - WARM_UP_STEPS
        began = time.perf_counter()
        pipeline.steps(endless, timed)
        return timed * options.batch / (time.perf_counter() - began)

    return measure


def _parts(options: Options, shape: Shape, source: WideWorkload) -> Any:
    """A run with the MLP as ours has it."""
    from runtime.rank.parts import assemble

    config = TrainConfig(
        batch=options.batch,
        steps=options.window_steps,
        engine=EngineConfig(device=options.device),
        rows=TableConfig(dim=shape.dim),
        model=ModelConfig(hidden=shape.hidden),
    )
    return assemble(config, source)
