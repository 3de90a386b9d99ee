"""How fast the simulator is: events and CPU time against the size of the cluster."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Annotated

from experiments.options import Count, Planned, SimulatedSteps
from experiments.tables import Column, leave, table
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.scenario import Discipline
from persia_sim.engine.simulate import simulate
from persia_sim.report.sweep import Point, analytic, scenario_of

SIZES = ((8, 13, 4), (64, 100, 30), (256, 250, 75), (1024, 1000, 75))
BOTH_MODES_RANKS = 64  # beyond, hybrid alone


COLUMNS: dict[str, Column] = {
    "GPUs": "{ranks}",
    "workers": "{workers}",
    "servers": "{servers}",
    "mode": "{mode}",
    "network": "{network}",
    "steps": "{steps}",
    "events/step": "{events_per_step:,.0f}",
    "kev/s": lambda line: f"{line['events_per_s'] / 1e3:.0f}",
    "CPU s": "{cpu_s:.1f}",
    "load": "{load_1min:.1f}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """CPU time of this process, so that other work on the machine counts as little as it can."""

    steps: SimulatedSteps = 100
    """Steps of a run."""
    most_ranks: Annotated[int, Within(SIZES[0][0], 100_000)] = 1024
    """Leave out larger clusters."""
    closed_forms: Count = 10_000
    """Points of the closed form that are timed together."""


def run(options: Options) -> None:
    """Time runs of growing clusters, a long run and the closed form."""
    if options.dry_run:
        sizes = [ranks for ranks, *_ in SIZES if ranks <= options.most_ranks]
        print(
            f"runs of {options.steps} simulated steps on clusters of {', '.join(map(str, sizes))}"
            f" GPUs and {options.closed_forms:,} points of the closed form; at most"
            f" {options.duration('steps')}"
        )
        return

    # Growing clusters, on both models of the network; both modes where that is cheap.
    records = []
    for ranks, workers, servers in SIZES:
        if ranks > options.most_ranks:
            continue
        point = Point(ranks=ranks, workers=workers, servers=servers)
        modes = [Mode.SYNC, Mode.HYBRID] if ranks <= BOTH_MODES_RANKS else [Mode.HYBRID]
        for discipline in (Discipline.FLUID, Discipline.FIFO):
            for mode in modes:
                chosen = replace(point, discipline=discipline, mode=mode)
                records.append(_timed(chosen, options.steps))

    # A long run, whose time a step must not grow.
    if options.most_ranks >= 64:
        records.append(_timed(Point(), 10 * options.steps))
    print(table(records, COLUMNS))

    # The closed form, for comparison; no two points in a row are alike.
    started = time.process_time()
    for number in range(options.closed_forms):
        analytic(Point(batch_per_rank=100 + number % 4000, tau=number % 7))
    print(
        f"{options.closed_forms:,} closed-form points: {time.process_time() - started:.1f} s of CPU"
    )
    leave(options, {"": records})


def _timed(point: Point, steps: int) -> dict[str, float | str | int]:
    # CPU seconds: what else the machine does counts little.
    scenario = scenario_of(point, steps)
    started = time.process_time()
    result = simulate(scenario)
    cpu_s = time.process_time() - started
    return {
        "ranks": scenario.cluster.ranks,
        "workers": scenario.cluster.embedding_workers.processes,
        "servers": scenario.cluster.servers.processes,
        "mode": str(point.mode),
        "network": str(point.discipline),
        "steps": steps,
        "events_per_step": result.events / steps,
        "events_per_s": result.events / cpu_s,
        "cpu_s": cpu_s,
        "load_1min": os.getloadavg()[0],
    }
