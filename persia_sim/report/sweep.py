"""Configurations beside each other, each run until its interval is narrow enough.

Points and rows are plain data, so that they can be computed anywhere and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from persia_sim.cluster.scenario import Scenario
from persia_sim.presets import point as points
from persia_sim.presets.point import Point
from persia_sim.report.measure import bound_of, throughput, until_narrow
from persia_sim.report.row_staleness import staleness

FIRST_STEPS = 64
FIRST_STEPS_ASYNC = 96  # averaging rounds make its steps uneven


def scenario_of(point: Point, steps: int) -> Scenario:
    """The scenario of a point, as the command's; a factor that its mode does not read is dropped,
    so that one grid may hold all modes."""
    tau = point.tau if point.mode.reads_late_rows else None
    merged = point.merge_pushes if point.mode.may_merge else None
    return points.scenario_of(replace(point, steps=steps, tau=tau, merge_pushes=merged))


def named(point: Point) -> dict[str, Any]:
    """The columns that say what a point is: every factor, and the sizes that presets give."""
    scenario = scenario_of(point, 1)
    cluster = scenario.cluster
    work = scenario.workload
    return asdict(point) | {
        "ranks": cluster.ranks,
        "workers": cluster.embedding_workers.hosts,
        "servers": cluster.servers.hosts,
        "loaders": cluster.loaders,
        "batch_per_rank": work.batch_per_rank,
        "batch": scenario.batch,
    }


def evaluate(
    point: Point, half_width: float = 0.005, most_steps: int = 1536, miss_rate: float = 0.0
) -> dict[str, Any]:
    """Simulate with twice the steps until the 95 % interval is narrow enough; one row of a table.

    ``half_width`` is relative. A point that is not there at ``most_steps`` says what it has.
    ``miss_rate`` is the share of lookups whose row was evicted.
    """
    # Simulate until the interval is narrow.
    steps = FIRST_STEPS if point.mode.has_barrier else FIRST_STEPS_ASYNC
    run = until_narrow(scenario_of(point, steps), half_width, most_steps, miss_rate)

    # One line: what was found, how surely, and what would bound it.
    rate = throughput(run)
    bound = bound_of(run)
    late = staleness(run)
    dollars = run.scenario.cluster.usd_per_hour or None  # some price is not known
    return named(point) | {
        "samples_per_s": rate.mean,
        "relative_half_width_95": rate.relative,
        "steps": run.scenario.steps,
        "dense_late": not point.mode.has_barrier,
        "staleness_steps_mean": late.steps_mean,
        "staleness_pushes_mean": late.pushes_mean,
        "usd_per_hour": dollars,
        "usd_per_million_samples": dollars and dollars / 3600 / rate.mean * 1e6,
        "bound_samples_per_s": bound.samples_per_s,
        "binds": bound.binds,
    }


def updates_missed(row: Mapping[str, Any]) -> float:
    """The updates that a mean lookup misses: a common step is one update, without a barrier every
    push is one."""
    missed: float = row["staleness_pushes_mean" if row["dense_late"] else "staleness_steps_mean"]
    return missed


TIE = 0.01
"""Share by which figures may differ and count as equal: two half widths, by default."""


def pareto(rows: Sequence[dict[str, Any]]) -> list[bool]:
    """Which rows no other beats in throughput, updates missed and dollars at once; without dollars
    where those of some row are not known. Of rows that tie in all of it each is on the front.

    Late dense weights are a harm of their own: a mode that has them beats none that has not.
    """
    usd = [r["usd_per_million_samples"] for r in rows]
    columns = [
        _levels([-r["samples_per_s"] for r in rows]),
        _levels([updates_missed(r) for r in rows]),
        _levels(usd) if all(usd) else [0.0] * len(rows),
        [r["dense_late"] for r in rows],
    ]
    scores = list(zip(*columns, strict=True))
    return [
        not any(
            other != score and all(a <= b for a, b in zip(other, score, strict=True))
            for other in scores
        )
        for score in scores
    ]


def _levels(values: Sequence[float]) -> list[float]:
    """Each value as the best one, the least, that it ties with: so of three, none ties with two
    that differ."""
    levels: dict[float, float] = {}
    for value in sorted(values):
        best = next(reversed(levels.values()), value)
        levels[value] = best if value - best <= TIE * abs(best) else value
    return [levels[value] for value in values]
