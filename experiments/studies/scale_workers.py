"""Throughput against the number of workers: published bars beside the simulator's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from experiments.options import Planned, SimulatedSteps
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
from persia_sim.report.measure import throughput

PUBLISHED = "throughput_public.csv", "throughput_kwai.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Taobao, Avazu, Criteo and Kwai, every system and mode that was published."""

    steps: SimulatedSteps = 80
    """Simulated steps of a point."""


def run(options: Options) -> None:
    """Simulate every point, write the table and the figure, print the signed errors."""
    if options.dry_run:
        published = sum(len(published_rates(name)) for name in PUBLISHED)
        print(
            f"{published} published points and those of Criteo, which are predicted, of"
            f" {options.steps} simulated steps each; {options.duration('steps')}"
        )
        return
    rows = [*public(steps=options.steps), *kwai(steps=options.steps)]
    print(table(rows, COLUMNS))
    print(summary(rows))
    leave(options, {"": rows}, drawn_first=1)


Row = dict[str, Any]
"""One published point, or one that is only predicted, as the CSV has it; rates in samples/s."""


def row_of(
    series: str,
    label: str,
    gpus: int,
    published: float | None,
    model: float,
    kind: str,
    note: str = "",
) -> Row:
    """A row of the CSV; its ``error`` is model over published, minus one.

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
    }


@cache
def simulated(cluster: str, workload: str, mode: Mode, ranks: int, steps: int) -> float:
    """Throughput of a preset with the constants of its fit."""
    machine = CLUSTERS[cluster]().resized(ranks)
    work = workloads()[workload]
    return rate_of(machine, work, costs_of(cluster), mode, steps)


def rate_of(cluster: Cluster, work: Workload, costs: Costs, mode: Mode, steps: int) -> float:
    """Simulated samples per second of the original: wide window, pushes on arrival."""
    return throughput(simulate(scenario_of(cluster, work, costs, mode, steps, GPU_CV))).mean


def public(steps: int = 80) -> Iterator[Row]:
    """Taobao and Avazu as published, then Criteo, whose bars the project has not seen."""
    cluster = "v100-2021-09"
    for row in published_rates(PUBLISHED[0]):
        name = row["dataset"]
        system = row["system"]
        mode = row["mode"]
        gpus = int(row["gpus"])
        published = float(row["samples_per_s"])
        kind = "fit"
        note = ""
        if system != "Persia":
            machine = CLUSTERS[cluster]().with_ranks(gpus)
            rival = RIVALS[system, mode]
            model = samples_per_s(rival, machine, workloads()[name], steps)
        elif gpus == 1 and "dashed" in row["note"]:
            model = simulated(cluster, name, MODES[mode], 1, steps)
            note = "dashed bar: no all-reduce"
        elif gpus == 1:
            model = simulated(cluster, name, MODES[mode], 2, steps) / 2
            kind = "prediction"
            note = "plotted as half of 2 GPUs, so is the model's"
        else:
            model = simulated(cluster, name, MODES[mode], gpus, steps)
        yield row_of(f"{name} {system} {mode}", f"{gpus} GPUs", gpus, published, model, kind, note)

    # Criteo is predicted alone; one GPU in both ways that a bar may have been made.
    name = "criteo-ad"
    for gpus in (1, 2, 4, 8):
        model = simulated(cluster, name, Mode.HYBRID, gpus, steps)
        note = "without all-reduce (a dashed bar)" if gpus == 1 else ""
        yield row_of(f"{name} Persia hybrid", f"{gpus} GPUs", gpus, None, model, "prediction", note)
        if gpus == 2:
            note = "if plotted as half of 2 GPUs, as on the other sets"
            yield row_of(f"{name} Persia hybrid", "1 GPUs", 1, None, model / 2, "prediction", note)

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
    for row in published_rates(PUBLISHED[1]):
        gpus = int(row["gpus"])
        model = simulated("v100-paper", "kwai-video", MODES[row["mode"]], gpus, steps)
        published = float(row["samples_per_s"])
        yield row_of(f"kwai-video {row['mode']}", f"{gpus} GPUs", gpus, published, model, "fit")


COLUMNS: dict[str, Column] = {
    "series": "{series}",
    "point": "{label}",
    "published": lambda row: f"{row['published']:,.0f}" if row["published"] else "-",
    "model": "{model:,.0f}",
    "error": lambda row: f"{row['error']:+.1%}" if row["error"] is not None else "-",
    "kind": lambda row: f"{row['kind']}{'; ' + row['note'] if row['note'] else ''}",
}


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
