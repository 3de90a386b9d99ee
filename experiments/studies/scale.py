"""Throughput against the number of workers, and against the rows: published beside simulated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from experiments.options import Planned, SimulatedSteps, Some
from experiments.published.descriptions import published_rates
from experiments.published.persia import MODES, scenario_of
from experiments.published.rivals import GPU_CV, RIVALS, samples_per_s
from experiments.tables import Column, leave, table
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.presets.costs import BATCHES, FITS
from persia_sim.report.measure import throughput

PUBLISHED = {
    "workers": ("throughput_public.csv", "throughput_kwai.csv"),
    "rows": ("throughput_model_size.csv",),
}
"""What grows -> the published figures."""
TABLES = {"workers": "_workers", "rows": "_model_size"}
"""What grows -> the end of its table's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Every system and mode that was published on Taobao, Avazu, Kwai and 100 trillion parameters;
    Criteo is predicted."""

    over: Some[Literal["workers", "rows"]] = ("workers", "rows")
    """What grows: GPUs on four data sets, or the tables on 64 GPUs."""
    steps: SimulatedSteps = 80
    """Simulated steps of a point; twice as many of the large tables."""


def run(options: Options) -> None:
    """Simulate every point, write tables and figures, print the signed errors and the speed."""
    if options.dry_run:
        points = sum(len(published_rates(n)) for over in options.over for n in PUBLISHED[over])
        print(
            f"{points} published points, over {' and '.join(options.over)}, and what is predicted,"
            f" of {options.steps} simulated steps each; {options.duration('steps')}"
        )
        return
    for over in options.over:
        is_rows = over == "rows"
        found = [*model_size(2 * options.steps)] if is_rows else over_workers(options.steps)
        print(table(found, COLUMNS))
        print(summary(found))
        if is_rows:
            _say_of_rows(found)
        leave(options, {TABLES[over]: [_stored(row) for row in found]}, drawn_first=1)


def over_workers(steps: int) -> list[Row]:
    """The points of all data sets."""
    return [*public(steps=steps), *kwai(steps=steps)]


def _say_of_rows(rows: Sequence[Row]) -> None:
    """Print how flat the level is, by the points of the large tables."""
    # The flatness was put in by one level: so each size against the mean of the others.
    rates = [row["published"] for row in rows if row["series"].endswith("hybrid")]
    levels = [(sum(rates) - rate) / (len(rates) - 1) for rate in rates]
    held_out = [abs(level / rate - 1) for level, rate in zip(levels, rates, strict=True)]
    print(f"one level fitted to four sizes, the fifth held out: {within(held_out)}")
    print(f"fitted constants: {len(FITS)} of every cluster ({', '.join(FITS)})")
    print(f"and the batch of this one ({BATCHES['gcp-100t']:,} a rank)")


Row = dict[str, Any]
"""One published point, or one that is only predicted; rates in samples/s."""


class Simulated(NamedTuple):
    """What a simulation gives, and how fast the simulator was."""

    samples_per_s: float
    events_per_s: float
    """Events a second of this process's CPU time."""


def row_of(
    series: str,
    label: str,
    gpus: int,
    published: float | None,
    model: float,
    kind: str,
    note: str = "",
    events_per_s: float | None = None,
) -> Row:
    """A point; its ``error`` is model over published, minus one.

    ``kind``: a constant was fitted to this point (``fit``), or none was (``prediction``).
    """
    return {
        "series": series,
        "label": label,
        "gpus": gpus,
        "published": published,
        "model": model,
        "kind": kind,
        "note": note,
        "error": model / published - 1 if published else None,
        "events_per_s": events_per_s,
    }


def _stored(row: Row) -> Row:
    """What the table has of a point: how fast this machine was is none of it."""
    return {name: value for name, value in row.items() if name != "events_per_s"}


@cache
def simulated(cluster: str, workload: str, mode: Mode, ranks: int, steps: int) -> Simulated:
    """A preset with the constants of its fit."""
    machine = CLUSTERS[cluster]().resized(ranks)
    work = workloads()[workload]
    return simulated_on(machine, work, costs_of(cluster), mode, steps)


def simulated_on(
    cluster: Cluster, work: Workload, costs: Costs, mode: Mode, steps: int
) -> Simulated:
    """The original: wide window, pushes on arrival."""
    scenario = scenario_of(cluster, work, costs, mode, steps, GPU_CV)
    began_s = time.process_time()
    found = simulate(scenario)
    cpu_s = time.process_time() - began_s
    return Simulated(throughput(found).mean, found.events / max(cpu_s, 1e-9))


def public(steps: int = 80) -> Iterator[Row]:
    """Taobao and Avazu as published, then Criteo, whose bars the project has not seen."""
    cluster = "v100-2021-09"
    for row in published_rates(PUBLISHED["workers"][0]):
        name = row["dataset"]
        system = row["system"]
        mode = row["mode"]
        gpus = int(row["gpus"])
        published = float(row["samples_per_s"])
        kind = "fit"
        note = ""
        speed = None
        if system != "Persia":
            machine = CLUSTERS[cluster]().with_ranks(gpus)
            rival = RIVALS[system, mode]
            model = samples_per_s(rival, machine, workloads()[name], steps)
        elif gpus == 1 and "dashed" in row["note"]:
            model, speed = simulated(cluster, name, MODES[mode], 1, steps)
            note = "dashed bar: no all-reduce"
        elif gpus == 1:
            model, speed = simulated(cluster, name, MODES[mode], 2, steps)
            model /= 2
            kind = "prediction"
            note = "plotted as half of 2 GPUs, so is the model's"
        else:
            model, speed = simulated(cluster, name, MODES[mode], gpus, steps)
        series = f"{name} {system} {mode}"
        yield row_of(series, f"{gpus} GPUs", gpus, published, model, kind, note, speed)

    # Criteo is predicted alone; one GPU in both ways that a bar may have been made.
    name = "criteo-ad"
    for gpus in (1, 2, 4, 8):
        model, speed = simulated(cluster, name, MODES["hybrid"], gpus, steps)
        series = f"{name} Persia hybrid"
        note = "without all-reduce (a dashed bar)" if gpus == 1 else ""
        yield row_of(series, f"{gpus} GPUs", gpus, None, model, "prediction", note, speed)
        if gpus == 2:
            note = "if plotted as half of 2 GPUs, as on the other sets"
            yield row_of(series, "1 GPUs", 1, None, model / 2, "prediction", note, speed)

    # And the rivals whose constants hold for it.
    for (system, mode), rival in RIVALS.items():
        if name not in rival.holds_for:
            continue
        for gpus in (1, 2, 4, 8):
            machine = CLUSTERS[cluster]().with_ranks(gpus)
            model = samples_per_s(rival, machine, workloads()[name], steps)
            yield row_of(f"{name} {system} {mode}", f"{gpus} GPUs", gpus, None, model, "prediction")


def kwai(steps: int = 60) -> Iterator[Row]:
    """The Kwai series: three modes, 1 to 64 GPUs."""
    for row in published_rates(PUBLISHED["workers"][1]):
        gpus = int(row["gpus"])
        model, speed = simulated("v100-paper", "kwai-video", MODES[row["mode"]], gpus, steps)
        published = float(row["samples_per_s"])
        series = f"kwai-video {row['mode']}"
        yield row_of(series, f"{gpus} GPUs", gpus, published, model, "fit", "", speed)


def model_size(steps: int = 100) -> Iterator[Row]:
    """Five sizes on 64 A100, and three modes at 100T."""
    for row in published_rates(*PUBLISHED["rows"]):
        mode = MODES[row["mode"]]
        model, speed = simulated("gcp-100t", row["workload"], mode, 64, steps)
        label = f"{float(row['params']) / 1e12:g}T"
        published = float(row["samples_per_s"])
        series = f"100T cluster {row['mode']}"
        yield row_of(series, label, 64, published, model, "fit", "", speed)


COLUMNS: dict[str, Column] = {
    "series": "{series}",
    "point": "{label}",
    "published": lambda row: f"{row['published']:,.0f}" if row["published"] else "-",
    "model": "{model:,.0f}",
    "error": lambda row: f"{row['error']:+.1%}" if row["error"] is not None else "-",
    "kev/s": lambda row: f"{row['events_per_s'] / 1e3:.0f}" if row["events_per_s"] else "-",
    "kind": lambda row: f"{row['kind']}{'; ' + row['note'] if row['note'] else ''}",
}
"""kev/s: thousand simulated events a second of CPU time."""


def summary(rows: Sequence[Row]) -> str:
    """Mean and largest absolute error of fits and of predictions."""
    lines = []
    for kind in ("fit", "prediction"):
        errors = [abs(r["error"]) for r in rows if r["kind"] == kind and r["error"] is not None]
        if errors:
            lines.append(f"{kind}: {len(errors)} points, {within(errors)}")
    return "\n".join(lines)


def within(errors: Sequence[float]) -> str:
    """Mean and largest of these magnitudes, in words."""
    return f"mean |error| {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
