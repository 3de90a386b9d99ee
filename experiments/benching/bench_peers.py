"""Whole training steps: ours in three modes against FBGEMM, TorchRec, torch, and no embedding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from experiments.benching.peer_steps import (
    CEILING,
    OF_OPTIONS,
    ONE_STEP_LATE,
    OURS,
    PEERS,
    WARM_UP_STEPS,
    Shape,
    Steps,
    systems_of,
)
from experiments.benching.wide import FIELDS
from experiments.benching.windows import (
    Bench,
    Summary,
    Window,
    interleave,
    paired_ratio,
    summarize,
    verdict,
)
from experiments.options import MOST, Count, Some, within
from experiments.tables import Column, drawn, table, write_csv

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
    rows: Annotated[int, within(FIELDS, 10**9)] | None = None
    """Distinct ids instead of the workload's own number (for a quick look)."""
    batch: Count = 4096
    """Samples a step."""
    threads: Annotated[int, within(1, 1024)] = 2
    """Threads of one dense operation, and of the embedding kernels of sync and lookahead."""
    clock: Literal["wall", "cpu"] = "wall"
    """wall: what the goals mean. cpu: samples per second of CPU time over all threads, first steps
    included: what a machine shared with others can still tell; use it with --threads 1."""
    latency_s: Annotated[float, within(0, 60)] = 0.0
    """Seconds added to every lookup and every push of ours, as a network would; then the peers are
    left out and hybrid is compared with sync."""
    rounds: Count = 30
    """Interleaved rounds of windows."""
    window_steps: Annotated[int, within(WARM_UP_STEPS + 1, MOST)] = 8
    """Steps in a window, >= 3; the first two are not timed."""


def run(options: Options) -> None:
    """Measure, print table and goals, write CSV and figure."""
    all_windows: list[dict[str, object]] = []
    for name in options.workloads:
        systems = systems_of(_steps(options, SHAPES[name]))
        if options.clock == "cpu":
            samples = options.window_steps * options.batch
            systems = {one: _by_cpu(measure, samples) for one, measure in systems.items()}
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


def _by_cpu(measure: Callable[[], float], samples: int) -> Callable[[], float]:
    def per_cpu_s() -> float:
        began = time.process_time()
        measure()
        return samples / (time.process_time() - began)

    return per_cpu_s


def _steps(options: Options, shape: Shape) -> Steps:
    known = {name: getattr(options, name) for name in OF_OPTIONS}
    return Steps(**asdict(replace(shape, rows=options.rows or shape.rows)), **known)
