"""Simulated clusters over a grid or a Latin hypercube; fronts of throughput, staleness and $."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

from experiments.choosing.speeds import label_of
from experiments.options import PAPER_MODES, Count, Parallel, Ranks, Some, Tau, hold
from experiments.result_cache import ResultCache
from experiments.tables import Column, leave, table
from persia_sim.base.command_line import TypedAs, Unset
from persia_sim.base.rules import price
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import DEFAULT_TAU, Mode
from persia_sim.cluster.memory import Capacity, capacity, lasting
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import find_cluster, find_rows, find_workload
from persia_sim.report import sweep
from persia_sim.report.measure import NARROW

SIZES = tuple(f"criteo-syn{n}" for n in range(1, 6))
MOST_POINTS = 100_000
LEAST_HALF_WIDTH = 1e-4
"""No point knows its rate better in as many steps as it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Every combination of the lists, or a Latin hypercube over them; finished points are kept."""

    cluster: str = "gcp-100t"
    """A preset of the simulator, or a .toml file as `persia-sim init` writes it."""
    workloads: Some[str] = SIZES
    """Presets or .toml files."""
    modes: Some[Mode] = PAPER_MODES
    """Modes to compare."""
    ranks: tuple[Ranks, ...] = ()
    """GPUs; none given, here and of hosts: as many as the cluster has."""
    workers: Annotated[tuple[Ranks, ...], TypedAs("worker-hosts")] = ()
    """Embedding worker hosts."""
    servers: Annotated[tuple[Ranks, ...], TypedAs("server-hosts")] = ()
    """Server hosts."""
    batch_per_rank: tuple[Count, ...] = ()
    """Samples of a rank in a step; none given: the workload's."""
    taus: Some[Tau] = (DEFAULT_TAU,)
    """Windows; modes without one count once."""
    row_format: Annotated[str | None, Unset("f32-adagrad; fp16-lean for criteo-syn1 to 5")] = None
    """How servers keep rows: fp16-lean, f32-adagrad, f32-adam, f32-sgd or a .toml file."""
    evict: bool = False
    """Simulate points whose rows do not all fit, too; else they only say what they would need."""
    latin: Annotated[int, Within(1, MOST_POINTS)] | None = None
    """Points of a Latin hypercube instead of the grid."""
    precision: Annotated[float, Within(LEAST_HALF_WIDTH, 1, without="most")] = NARROW
    """A point is done where half of its 95 % interval is this share of its throughput, as 1%."""
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    """Root of all draws."""

    def _check(self) -> None:
        if len(self.taus) > 1 and not any(mode.reads_late_rows for mode in self.modes):
            raise ValueError("taus is only used by a mode that reads late rows; add one")
        find_cluster(self.cluster)
        for name in self.workloads:
            find_workload(name), find_rows(self.row_format or rows_of(name))
        if self.latin is None:
            lists = ("workloads", "modes", "ranks", "workers", "servers", "batch_per_rank", "taus")
            points = math.prod(len(getattr(self, name)) or 1 for name in lists)
            hold("the number of points", points, Within(1, MOST_POINTS))


def points_of(options: Options) -> list[sweep.Point]:
    """The points without repeats."""
    # A list that is not given leaves the cluster's or the workload's number.
    axes: dict[str, Sequence[Any]] = {
        "cluster": (options.cluster,),
        "workload": options.workloads,
        "mode": options.modes,
        "ranks": options.ranks or (None,),
        "workers": options.workers or (None,),
        "servers": options.servers or (None,),
        "batch_per_rank": options.batch_per_rank or (None,),
        "tau": options.taus,
    }

    # The design and the simulations are drawn from one seed.
    seed = options.seed
    if options.latin:
        design = sweep.latin_hypercube(options.latin, seed, **axes)
    else:
        design = sweep.grid(**axes)

    # A mode without a window is the same point under every tau, and is one.
    points = [
        replace(point, seed=seed, tau=point.tau if point.mode.reads_late_rows else None)
        for point in design
    ]
    return list({point.label: point for point in points}.values())


def run(options: Options) -> None:
    """Compute what is missing, write the table, print it with the front marked."""
    # A point is simulated where its rows fit, or where servers may evict them.
    started = time.perf_counter()
    points = points_of(options)
    memory = {p.label: _memory(p, options.row_format) for p in points}
    rooms = {label: room for label, room in memory.items() if isinstance(room, Capacity)}
    simulated = [p for p in points if p.label in rooms and (options.evict or rooms[p.label].fits)]

    # The plan.
    results = ResultCache(options.out / "points.jsonl")
    missing = [p for p in simulated if _label(p, options) not in results]
    print(
        f"{len(points)} points ({len(simulated) - len(missing)} done, {len(missing)} to run,"
        f" {len(points) - len(simulated)} that cannot be), {options.jobs} at a time"
    )
    if options.dry_run:
        for point in points:
            print(f"  {'to run' if point in missing else '-':<7} {point.label}")
        if missing:
            began = time.perf_counter()
            sweep.evaluate(missing[0], half_width=options.precision)
            expected_s = (time.perf_counter() - began) * len(missing) / options.jobs
            print(f"  about {lasting(max(1.0, expected_s))}, as long as the first took")
        return

    # Simulate what is missing.
    work = {
        _label(p, options): partial(
            sweep.evaluate, p, half_width=options.precision, miss_rate=rooms[p.label].miss_rate
        )
        for p in simulated
    }
    filled = results.fill(work, "simulations", options.jobs)
    results_of = dict(zip((p.label for p in simulated), filled, strict=True))

    # Show and write all points, also those that cannot be.
    rows = [_row(p, results_of.get(p.label), memory[p.label]) for p in points]
    _mark_fronts(rows)
    print(table(rows, COLUMNS))
    print(_notes(rows, options), end="")
    print(
        f"{len(missing)} points in {time.perf_counter() - started:.1f} s "
        f"(load {os.getloadavg()[0]:.1f})"
    )
    leave(options, {"": rows}, drawn_first=1)


def _memory(point: sweep.Point, rows: str | None) -> Capacity | str:
    """Memory of the point's servers, as `persia-sim` has it; or why there cannot be such a
    point."""
    try:
        scenario = sweep.scenario_of(point, 1)
    except ValueError as error:
        return str(error)
    return capacity(scenario.cluster, scenario.workload, find_rows(rows or rows_of(point.workload)))


def _label(point: sweep.Point, options: Options) -> str:
    return label_of(point, options.row_format or rows_of(point.workload), options.precision)


ROW_KEYS = (
    "samples_per_s",
    "relative_half_width_95",
    "steps",
    "dense_late",
    "staleness_steps_mean",
    "staleness_pushes_mean",
    "usd_per_hour",
    "usd_per_million_samples",
    "bound_samples_per_s",
    "binds",
)
"""Columns that `evaluate` computes of a point."""


def _row(
    point: sweep.Point, result: dict[str, Any] | None, memory: Capacity | str
) -> dict[str, Any]:
    """One line of the table; without ``result`` the point was not simulated: ``why_not`` says
    it."""
    # Figures of a point that was not simulated stay empty.
    figures: dict[str, Any] = dict.fromkeys(ROW_KEYS)
    figures["updates_missed_mean"] = None
    if result is not None:
        figures = {key: result[key] for key in ROW_KEYS}
        figures["updates_missed_mean"] = sweep.updates_missed(result)

    # Why it was not: there cannot be such a point, or its rows do not fit.
    why = ""
    if result is None and isinstance(memory, str):
        why = memory
    elif result is None and isinstance(memory, Capacity):
        why = (
            f"a server needs {memory.bytes_per_server / 2**30:,.0f} GiB"
            f" of {memory.limit_bytes_per_server / 2**30:,.0f}"
        )

    # The names of all numbers that a point leaves to its cluster need a point that can be.
    room = memory if isinstance(memory, Capacity) else None
    return (sweep.named(point) if room else asdict(point) | {"batch": ""}) | {
        "simulated": result is not None,
        "fits": room is not None and room.fits,
        "why_not": why,
        "bytes_per_server": room and room.bytes_per_server,
        "limit_bytes_per_server": room and room.limit_bytes_per_server,
        "row_format": room and room.rows,
        "miss_rate": room and room.miss_rate,
        **figures,
    }


def _mark_fronts(rows: Sequence[dict[str, Any]]) -> None:
    """A front for each workload: a small model being cheap says nothing about a large one."""
    for workload in {row["workload"] for row in rows}:
        of_workload = [row for row in rows if row["workload"] == workload]
        front = iter(sweep.pareto([row for row in of_workload if row["simulated"]]))
        for row in of_workload:
            row["on_front"] = row["simulated"] and next(front)


def _notes(rows: Sequence[dict[str, Any]], options: Options) -> str:
    """What a reader of the table must know beside it, a line each."""
    # Points whose rate did not settle within the most steps.
    lines = []
    ran = [row for row in rows if row["simulated"]]
    wide = [row for row in ran if not row["relative_half_width_95"] <= options.precision]
    if wide:
        lines.append(
            f"{len(wide)} of {len(ran)} points are wider than the precision"
            f" {options.precision:.2%} after the most steps that a point gets"
        )
    if not all(row["usd_per_hour"] for row in ran):
        lines.append("dollars are not known and not in the front; give every host its usd_per_hour")

    # Points whose rows do not fit.
    full = [row["row_format"] for row in rows if not row["simulated"] and row["bytes_per_server"]]
    if full:
        formats = ", ".join(sorted(set(full)))
        lines.append(
            f"{len(full)} points do not fit in memory as {formats} and were not"
            " simulated; add servers, or --evict to keep the most recently used rows"
        )
    return "".join(f"{line}\n" for line in lines)


def _simulated(show: str) -> Column:
    """A column that is empty where a point was not simulated."""
    return lambda row: show.format_map(row) if row["simulated"] else ""


def _half_width(row: dict[str, Any]) -> str:
    if not row["simulated"]:
        return ""
    width = row["relative_half_width_95"]
    return f"{width:.2%}" if math.isfinite(width) else "?"


COLUMNS: dict[str, Column] = {
    "workload": "{workload}",
    "mode": "{mode}",
    "GPUs": "{ranks}",
    "workers": "{workers}",
    "servers": "{servers}",
    "batch": "{batch}",
    "a rank": "{batch_per_rank}",
    "tau": lambda row: "" if row["tau"] is None else f"{row['tau']}",
    "samples/s": _simulated("{samples_per_s:,.0f}"),
    "+-": _half_width,
    "updates missed": _simulated("{updates_missed_mean:.2f}"),
    "$/M": lambda row: price(usd) if (usd := row["usd_per_million_samples"]) else "",
    "binds": _simulated("{binds}"),
    "front": lambda row: "*" if row["on_front"] else "",
    "why not": "{why_not}",
}
