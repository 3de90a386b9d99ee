"""Many configurations: a grid or a Latin hypercube, each run until its interval is narrow enough.

Points and rows are plain data, so that they can be computed anywhere and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.insight.report import staleness
from persia_sim.model.demand import demand
from persia_sim.model.scenario import Discipline, Noise, Scenario
from persia_sim.oracle.closed_form import answer
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.presets.costs import FITS
from persia_sim.words.vocabulary import DEFAULT_TAU, Mode

FIRST_STEPS = 64
FIRST_STEPS_ASYNC = 96  # averaging rounds make its steps uneven


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One configuration of a sweep."""

    cluster: str = "gcp-100t"
    """A preset's name."""
    workload: str = "criteo-syn5"
    """A preset's name."""
    mode: Mode = Mode.HYBRID
    """How rows and dense weights are kept up to date."""
    ranks: int = 64
    """GPUs."""
    workers: int = 100
    """Embedding worker hosts."""
    servers: int = 30
    """Server hosts."""
    loaders: int | None = None
    """Loader processes; None: as many a rank as the preset has."""
    batch_per_rank: int = FITS["gcp-100t"]["batch_per_rank"].integer
    """Samples of a rank in a step."""
    tau: int | None = DEFAULT_TAU
    """Window where the mode reads late rows; not used elsewhere."""
    merge_pushes: bool | None = None
    """Apply the pushes of a step at once where the mode may; None means yes there."""
    discipline: Discipline = Discipline.FLUID
    """How NICs are shared."""
    gpu_cv: float = 0.05
    """Noise of a rank's compute time."""
    seed: int = 0
    """Root of all random draws."""

    @property
    def batch(self) -> int:
        """Samples of one dense update over all ranks; in async, of one batch of every rank."""
        return self.ranks * self.batch_per_rank

    @property
    def label(self) -> str:
        """The same for equal points and different for others."""
        return "/".join(str(value) for value in asdict(self).values())


def scenario_of(point: Point, steps: int) -> Scenario:
    """The scenario of a point: the same as the command's with the same options."""
    preset = CLUSTERS[point.cluster]()
    return Scenario(
        cluster=preset.resized(point.ranks, point.workers, point.servers, point.loaders),
        workload=replace(workloads()[point.workload], batch_per_rank=point.batch_per_rank),
        costs=costs_of(point.cluster),
        mode=point.mode,
        tau=point.tau if point.mode.reads_late_rows else None,
        merge_pushes=point.merge_pushes if point.mode.may_merge else None,
        discipline=point.discipline,
        noise=Noise(gpu_cv=point.gpu_cv),
        seed=point.seed,
        steps=steps,
    )


def evaluate(
    point: Point, half_width: float = 0.005, most_steps: int = 1536, miss_rate: float = 0.0
) -> dict[str, Any]:
    """Simulate with twice the steps until the 95 % interval is narrow enough; one row of a table.

    ``half_width`` is relative. A point that is not there at ``most_steps`` says what it has.
    ``miss_rate`` is the share of lookups whose row was evicted.
    """
    steps = FIRST_STEPS if point.mode.has_barrier else FIRST_STEPS_ASYNC
    while True:
        scenario = scenario_of(point, steps)
        run = simulate(scenario, trace=True, need=demand(scenario, miss_rate))
        rate = throughput(run)
        if rate.relative <= half_width or 2 * steps > most_steps:
            break
        steps *= 2
    late = staleness(run)
    dollars = run.scenario.cluster.usd_per_hour
    return asdict(point) | {
        "mode": str(point.mode),
        "discipline": str(point.discipline),
        "batch": point.batch,
        "samples_per_s": rate.mean,
        "relative_half_width_95": rate.relative,
        "steps": steps,
        "dense_late": not point.mode.has_barrier,
        "staleness_steps_mean": late.steps_mean,
        "staleness_pushes_mean": late.pushes_mean,
        "usd_per_hour": dollars,
        "usd_per_million_samples": dollars / 3600 / rate.mean * 1e6,
        "bound_samples_per_s": answer(run.scenario, run.need).samples_per_s,
        "binds": answer(run.scenario, run.need).binds,
    }


def analytic(point: Point, most_steps: int = 1536) -> dict[str, Any]:
    """The closed form's row: an upper bound, exact without contention and noise.

    Only async_averaging reads ``most_steps``: a run that is short meets fewer rounds.
    """
    scenario = scenario_of(point, most_steps)
    found = answer(scenario, demand(scenario))
    dollars = scenario.cluster.usd_per_hour
    return asdict(point) | {
        "batch": point.batch,
        "samples_per_s": found.samples_per_s,
        "binds": found.binds,
        "usd_per_million_samples": dollars / 3600 / found.samples_per_s * 1e6,
    }


def grid(**axes: Sequence[Any]) -> list[Point]:
    """Every combination of the values of the named fields."""
    return [Point(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]


def latin_hypercube(count: int, seed: int, **axes: Sequence[Any]) -> list[Point]:
    """``count`` points that cover every axis evenly: its values in turn, in random order."""
    rng = np.random.default_rng(seed)
    columns = {
        name: [values[k * len(values) // count] for k in rng.permutation(count)]
        for name, values in axes.items()
    }
    return [Point(**{name: column[i] for name, column in columns.items()}) for i in range(count)]


def pareto(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Which rows no other beats in throughput, staleness and dollars at once.

    Late dense weights are a harm of their own: a mode that has them beats none that has not.
    """
    scores = [
        (
            -r["samples_per_s"],
            r["staleness_steps_mean"],
            r["usd_per_million_samples"],
            r["dense_late"],
        )
        for r in rows
    ]
    return [
        not any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True))
            for other in scores
        )
        for own in scores
    ]
