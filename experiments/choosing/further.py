"""What is trained beside the answer: the simulated order, rates of each mode, fields one by one."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from experiments.choosing.batch import EXACT, Cell
from experiments.choosing.decision import LOOKS
from experiments.choosing.speeds import Simulated
from experiments.choosing.table import gap_in_words, waiting
from experiments.choosing.training import Log, Training
from experiments.gaps import columns_of, finished, gap_over_seeds, gap_table
from experiments.line_search import first_task, searched, searches_of
from experiments.option_values import typed_values
from experiments.points import data_sha256, keys_apart, over_seeds, points_of, write_schema
from experiments.search import Rates, grid_around
from experiments.search import points_of as rates_around
from experiments.study_file import SearchTable, read_study
from experiments.sweeping import run_points
from experiments.tables import table, write_csv
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.report import sweep
from runtime.config import SyncConfig

SIMULATED_S = 0.4e-3
"""Seconds to simulate a step of a rank (source: 2 cores, 2026-11-29)."""
REPLAYED_S = 1.5e-3
"""Seconds to replay a step of a rank, small batches (source: 2 cores, 2026-11-29)."""
SEARCH = SearchTable()


# The order of the simulation itself.


def replayed(one: Simulated, trained: Training) -> str:
    """Train a mode in the order of its simulation, where the budget holds it: reads then miss what
    they miss there, one more and one less, instead of the mean. A sentence of what it loses so, or
    why nobody knows."""
    name = one.candidate.name
    not_known = f"The simulated order of {name} is not replayed:"
    plan, point = trained.plan, one.candidate.point
    ranks, barrier = int(one.row["ranks"]), point.mode.has_barrier
    if barrier and plan.batch < ranks:
        return f"{not_known} {plan.batch} samples are no step of {ranks} ranks."

    # As many updates as the other runs have: steps, or in async pushes, of which each is one.
    steps = max(1, plan.samples // plan.batch // (1 if barrier else ranks))
    wall_s = ranks * steps * (SIMULATED_S + REPLAYED_S * LOOKS[0] / trained.budget.jobs)
    wall_s = trained.budget.times_planned * wall_s + trained.budget.wall_s(LOOKS[0], trained.log, 0)
    scenario = sweep.scenario_of(point, steps)
    points = _replays(one, trained, scenario, wall_s)
    if not points:
        return f"{not_known} {waiting(wall_s)} more (--minutes)."
    run_points(points, trained.options.out, trained.budget.jobs, plan.samples)
    runs = finished(points, trained.options.out)
    gap = gap_over_seeds(runs, trained.runs(EXACT), first_task(runs[0]), trained.options.out)
    late = runs[0].summary["staleness"]
    missed = late["mean_steps"] if barrier else late["mean_pushes"]
    return (
        f"Replayed in its simulated order, where a lookup misses {missed:.1f} updates in the mean,"
        f" {name} changes the AUC by {gap_in_words(gap)}."
    )


def _replays(one: Simulated, trained: Training, scenario: Scenario, wall_s: float) -> list[Any]:
    """The runs in the simulated order, which is simulated unless a call before has done it; none
    where neither is there and the budget does not hold them."""
    plan, options = trained.plan, trained.options
    path = options.out / f"order-{hashlib.sha256(repr(scenario).encode()).hexdigest()[:8]}.npz"
    barrier = scenario.mode.has_barrier
    if not path.is_file():
        if wall_s > trained.budget.left_s:
            return []
        order = simulate(scenario, trace=True).trace
        sharing = scenario.cluster.ranks if barrier else 1
        order.with_batch_per_rank(plan.batch // sharing).save(path)

    # Sync's own options, in this mode and this order.
    base = trained.lines(plan.batch)[EXACT].config
    merges = {"merge_pushes": scenario.merges} if scenario.mode.may_merge else {}
    sync = SyncConfig(
        mode=scenario.mode,
        ranks=scenario.cluster.ranks,
        tau=scenario.tau,
        row_gradients=base.sync.row_gradients,
        wire=base.sync.wire,
        **merges,
    )
    config = replace(
        trained.lines(plan.batch)[one.cell].config,
        sync=sync,
        engine=replace(base.engine, executor="replay", trace=path),
        steps=scenario.steps * (1 if barrier else scenario.cluster.ranks),
        evaluation=replace(base.evaluation, evaluate_every_steps=None),
    )
    return over_seeds("replay", config, LOOKS[0], data_sha256(config))


# Rates of each mode's own.


def runs_of_tune(cells: int) -> int:
    """Runs that a search of the rates of sync and of so many late cells has at least."""
    middle = Rates(row=1.0, dense=1.0)
    pairs = len(grid_around(middle).points) + cells * len(rates_around(middle))
    return pairs * SEARCH.seeds


def tune(trained: Training) -> None:
    """Search the rates of sync and of every late cell on validation samples; the runs that follow
    have them. The grid lies around the rates that are given."""
    lines = trained.lines(trained.plan.batch)
    families = searches_of(list(lines.values()), SEARCH, trained.options.out)
    chosen = searched(families, SEARCH, trained.budget.jobs)
    by_name = {one.search.line.name: one.choice.rates for one in chosen}
    trained.rates = {cell: by_name[line.name] for cell, line in lines.items()}
    for cell, rates in trained.rates.items():
        print(f"rates of {cell.name}: rows {rates.row:g}, dense weights {rates.dense:g}")


# Fields one by one.


def runs_of_fields(log: Log) -> int:
    """Runs with each field alone late and alone fresh, beside sync and all of them late."""
    return LOOKS[0] * (2 + 2 * len(log.unseen))


def fields_one_by_one(cell: Cell, trained: Training) -> list[dict[str, Any]]:
    """The gaps to sync with each field alone as late as a cell, and alone fresh while all others
    are; each field has a table of its own. Rows of the table that is printed and left."""
    keys, file = keys_apart(trained.log.config.data)
    out, plan = trained.options.out, trained.plan
    schema = out / "apart.toml"
    write_schema(schema, {**keys, "name": "apart", "file": str(file)})

    # Sync, all late, and each field in turn.
    names = list(trained.log.unseen)
    late = {"sync.mode": "hybrid", "sync.tau": cell.rows_late}
    lines: list[dict[str, Any]] = [
        {"name": EXACT.name, "sync.mode": "sync"},
        {"name": "all late", **late},
    ]
    for name in names:
        others = [each for each in names if each != name]
        lines.append({"name": f"{name} alone late", **late, "sync.fresh": others})
        lines.append({"name": f"{name} alone fresh", **late, "sync.fresh": [name]})
    typed = typed_values(trained.options.set) | {
        "data.name": [str(schema)],
        "data.dir": [None],
        "data.skip_rows": [max(0, trained.log.samples - plan.samples)],
        "batch": [plan.batch],
    }
    study = read_study({"versus": EXACT.name, "line": lines}, trained.options.config, typed)
    points = points_of(study.lines, LOOKS[0])
    every = [point for of_line in points for point in of_line]
    run_points(every, out, trained.budget.jobs, plan.samples)
    runs = [finished(of_line, out) for of_line in points]
    rows = gap_table(study.lines, runs, first_task(runs[0][0]), out)
    print(f"\neach field with a table of its own, {cell.rows_late} updates late:\n")
    print(table(rows, columns_of(rows)))
    print(f"table: {write_csv(out / 'which_mode_fields.csv', rows)}")
    return rows
