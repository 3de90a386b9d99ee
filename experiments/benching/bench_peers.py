"""Whole training steps: ours in three modes against FBGEMM, TorchRec, torch, and no embedding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from experiments.benching.peer_steps import (
    CEILING,
    ONE_STEP_LATE,
    OURS,
    PEERS,
    WARM_UP_STEPS,
    Steps,
    systems_of,
)
from experiments.benching.wide import FIELDS
from experiments.benching.windows import Window, interleave, paired_ratio, summarize, verdict
from experiments.checks import COUNT, between, not_empty
from experiments.tables import aligned, write_csv

WorkloadName = Literal["wide", "wide-dim128", "small", "small-8ids", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One workload, and the ratios to reach, set before the engine was built."""

    dim: int
    hidden: tuple[int, ...]
    ids_per_field: int
    rows: int
    goals: tuple[tuple[str, float], ...]
    """(base, ratio of our best mode to it)."""


SHAPES: dict[WorkloadName, Shape] = {
    "wide": Shape(
        dim=16,
        hidden=(1024, 512, 256),
        ids_per_field=1,
        rows=10_000_000,
        goals=((CEILING, 0.95),),
    ),
    "wide-dim128": Shape(
        dim=128,
        hidden=(1024, 512, 256),
        ids_per_field=1,
        rows=1_000_000,
        goals=((CEILING, 0.85), ("fbgemm tbe", 1.2)),
    ),
    "small": Shape(
        dim=16,
        hidden=(256, 128, 64),
        ids_per_field=1,
        rows=10_000_000,
        goals=(("fbgemm tbe", 1.5),),
    ),
    "small-8ids": Shape(
        dim=16,
        hidden=(256, 128, 64),
        ids_per_field=8,
        rows=10_000_000,
        goals=(("fbgemm tbe", 1.8), ("torchrec fused", 1.8)),
    ),
    "paper": Shape(
        dim=16,
        hidden=(4096, 2048, 1024, 512, 256),  # as runtime.models.networks.PAPER_MLP
        ids_per_field=1,
        rows=10_000_000,
        goals=(),
    ),
}
UNITS = {"wall": "samples/s", "cpu": "samples per CPU second"}
LATENCY_GOAL = 1.4
"""Hybrid over sync with 10 ms of latency, set before the engine was built."""
KNOWN_SHARES = {"fbgemm tbe": 0.91, "torchrec fused": 0.82, "torch sparse": 0.74}
"""Of dense-only on `wide` (measured on 2 cores of an EPYC, 2026-11-21); a peer far from its share
was not set up as it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Samples/s of whole training steps, every system in turn, ratios with intervals."""

    workloads: tuple[WorkloadName, ...] = ("wide", "wide-dim128", "small", "small-8ids")
    """wide: 26 fields, 10 M rows, MLP 1024-512-256; small: 256-128-64; dim 128 has 1 M rows; paper:
    wide with the paper's MLP, which asks for a GPU."""
    device: str = "cpu"
    """Of the dense network, the rows stay in host memory; with cuda the peers are left out."""
    rows: int | None = None
    """Distinct ids instead of the workload's own number (for a quick look)."""
    batch: int = 4096
    """Samples a step."""
    threads: int = 2
    """Threads of one dense operation, and of the embedding kernels of sync and lookahead."""
    clock: Literal["wall", "cpu"] = "wall"
    """wall: what the goals mean. cpu: samples per second of CPU time over all threads, first steps
    included: what a machine shared with others can still tell; use it with --threads 1."""
    latency_s: float = 0.0
    """Seconds added to every lookup and every push of ours, as a network would; then the peers are
    left out and hybrid is compared with sync."""
    rounds: int = 30
    """Interleaved rounds of windows."""
    window_steps: int = 8
    """Steps in a window, >= 3; the first two are not timed."""
    most_foreign_cores: float = 0.15
    """Windows with more foreign load are measured again once, then left out if others suffice."""
    out: Path = Path("runs/bench-peers")
    """Folder of the CSV and the figure."""

    def __post_init__(self) -> None:
        not_empty(workloads=self.workloads)
        between(FIELDS, 10**9, rows=self.rows)
        between(*COUNT, batch=self.batch, rounds=self.rounds)
        between(1, 1024, threads=self.threads)
        between(WARM_UP_STEPS + 1, COUNT[1], window_steps=self.window_steps)
        between(0, 60, latency_s=self.latency_s)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)


def run(options: Options) -> None:
    """Measure, print table and goals, write CSV and figure."""
    from tqdm import tqdm

    all_windows: list[dict[str, object]] = []
    for name in options.workloads:
        systems = systems_of(_steps(options, SHAPES[name]))
        if options.clock == "cpu":
            samples = options.window_steps * options.batch
            systems = {one: _by_cpu(measure, samples) for one, measure in systems.items()}
        with tqdm(total=options.rounds * len(systems), desc=name, disable=None) as bar:
            windows = interleave(systems, options.rounds, options.most_foreign_cores, bar.update)
        all_windows += [
            {"workload": name, "unit": UNITS[options.clock], **asdict(w)} for w in windows
        ]
        print(_report(name, windows, list(systems), options))
    table = options.out / "bench_peers.csv"
    write_csv(table, all_windows)
    from paper_figs.bench_peers import bench_peers_figure  # late: pyplot takes seconds
    from paper_figs.style import save

    figure = save(bench_peers_figure(table, CEILING), options.out / "bench_peers.png")
    print(f"{table}  {figure}")


def _report(name: WorkloadName, windows: list[Window], systems: list[str], options: Options) -> str:
    rows = []
    for system in systems:
        found = summarize(windows, system)
        share = paired_ratio(windows, system, CEILING)
        rows.append(
            [
                system,
                *(f"{v / 1e3:.1f}" for v in (found.median, found.low, found.high)),
                f"{share.mean:.2f} [{share.low:.2f}, {share.high:.2f}]",
                f"{found.quiet}/{found.windows}",
                f"{found.foreign_cores:.2f}",
            ]
        )
    header = [
        f"{name}: k {UNITS[options.clock]}",
        "median",
        "min",
        "max",
        "of dense-only",
        "quiet",
        "foreign",
    ]
    lines = [aligned(header, rows)]
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


def _by_cpu(measure: Callable[[], float], samples: int) -> Callable[[], float]:
    def per_cpu_s() -> float:
        began = time.process_time()
        measure()
        return samples / (time.process_time() - began)

    return per_cpu_s


def _steps(options: Options, shape: Shape) -> Steps:
    return Steps(
        dim=shape.dim,
        hidden=shape.hidden,
        ids_per_field=shape.ids_per_field,
        rows=options.rows or shape.rows,
        batch=options.batch,
        window_steps=options.window_steps,
        threads=options.threads,
        device=options.device,
        latency_s=options.latency_s,
    )
