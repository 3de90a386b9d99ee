"""Simulated clusters over a grid or a Latin hypercube; the front of throughput, staleness and $."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.tables import aligned, write_csv
from persia_sim.insight.sweep import Point, evaluate, grid, latin_hypercube, pareto
from persia_sim.words.vocabulary import Mode

SIZES = tuple(f"criteo-syn{n}" for n in range(1, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every combination of the lists, or a Latin hypercube over them; finished points are kept."""

    cluster: str = "gcp-100t"
    """A preset of the simulator."""
    workloads: tuple[str, ...] = SIZES
    """Workload presets."""
    modes: tuple[Mode, ...] = (Mode.SYNC, Mode.HYBRID, Mode.ASYNC_AVERAGING)
    """Modes."""
    ranks: tuple[int, ...] = (64,)
    """GPUs."""
    workers: tuple[int, ...] = (100,)
    """Embedding worker hosts."""
    servers: tuple[int, ...] = (30,)
    """Server hosts."""
    batches: tuple[int, ...] = (864,)
    """Samples of a rank in a step."""
    taus: tuple[int, ...] = (4,)
    """Windows; modes without one count once."""
    latin: int | None = None
    """Points of a Latin hypercube instead of the grid."""
    half_width: float = 0.005
    """Relative 95 % half width at which a point is done."""
    jobs: int = 2
    """Processes."""
    seed: int = 0
    """Root of all draws."""
    out: Path = Path("runs/cluster-sweep")
    """Folder of the table."""


def points_of(options: Options) -> list[Point]:
    """The points without repeats."""
    axes: dict[str, Sequence[Any]] = {
        "cluster": (options.cluster,),
        "workload": options.workloads,
        "mode": options.modes,
        "ranks": options.ranks,
        "workers": options.workers,
        "servers": options.servers,
        "batch": options.batches,
        "tau": options.taus,
        "seed": (options.seed,),
    }
    if options.latin is not None:
        free = {name: values for name, values in axes.items() if name != "seed"}
        return latin_hypercube(options.latin, options.seed, **free)
    points = []
    for point in grid(**axes):
        late = point.mode.reads_late_rows
        if late or point.tau == options.taus[0]:
            points.append(point)
    return points


def run(options: Options) -> None:
    """Compute what is missing, write the table, print it with the front marked."""
    from tqdm import tqdm

    started = time.perf_counter()
    points = points_of(options)
    kept = options.out / "points.jsonl"
    done = _read(kept, options.half_width)
    missing = [p for p in points if p.label not in done]
    print(f"{len(points)} points ({len(points) - len(missing)} done), {options.jobs} at a time")
    if missing:
        options.out.mkdir(parents=True, exist_ok=True)
        work = partial(evaluate, half_width=options.half_width)
        context = multiprocessing.get_context("spawn")
        with (
            ProcessPoolExecutor(options.jobs, mp_context=context) as pool,
            kept.open("a") as file,
        ):
            futures = {pool.submit(work, point): point for point in missing}
            for future in tqdm(as_completed(futures), total=len(missing), disable=None):
                label = futures[future].label
                done[label] = future.result()
                record = {"label": label, "half_width": options.half_width, "row": done[label]}
                file.write(json.dumps(record) + "\n")
                file.flush()
    rows = [done[p.label] for p in points]
    for row, on_front in zip(rows, pareto(rows), strict=True):
        row["on_front"] = on_front
    write_csv(options.out / "cluster_sweep.csv", rows)
    print(_table(rows))
    load = os.getloadavg()[0]
    print(
        f"{len(missing)} points in {time.perf_counter() - started:.1f} s (load {load:.1f}); "
        f"{options.out / 'cluster_sweep.csv'}"
    )


def _read(path: Path, half_width: float) -> dict[str, dict[str, Any]]:
    """Rows of earlier runs of the same precision; a line that a crash cut short is left out."""
    found: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return found
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["half_width"] <= half_width:
            found[record["label"]] = record["row"]
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    header = [
        "workload", "mode", "GPUs", "workers", "servers", "batch", "tau", "samples/s", "+-",
        "stale", "$/M", "binds", "front",
    ]  # fmt: skip
    cells = [
        [
            row["workload"],
            row["mode"],
            *(str(row[key]) for key in ("ranks", "workers", "servers", "batch", "tau")),
            f"{row['samples_per_s']:,.0f}",
            f"{row['relative_half_width_95']:.2%}",
            f"{row['staleness_steps_mean']:.2f}",
            f"{row['usd_per_million_samples']:.3f}",
            row["binds"],
            "*" if row["on_front"] else "",
        ]
        for row in rows
    ]
    return aligned(header, cells)
