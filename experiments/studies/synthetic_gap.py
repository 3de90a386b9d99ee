"""Where the gap opens: tau from 0 to 256 on a long synthetic stream, for two row optimisers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.checks import COUNT, JOBS, ROWS, SEEDS, TAU, between, each_between, not_empty
from experiments.gaps import Run, Setting, curve_records, finished, gap_table, record, table_cells
from experiments.paired import setting_points
from experiments.points import Point
from experiments.sweep import default_jobs, print_plan, run_points
from experiments.tables import aligned, write_csv
from runtime.config import DataConfig, EvaluationConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

TAUS = (0, 1, 4, 16, 64, 256)
STARTS = {
    "fast start": RowOptimizer(kind="adagrad_row", lr=0.05, initial_accumulator=0.0),
    "slow start": RowOptimizer(kind="adagrad_row", lr=0.05, initial_accumulator=0.01),
}
"""Adagrad from 0 moves fresh rows by about lr at once; from the original's 0.01 they creep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Mode hybrid (merged pushes, so tau = 0 is sync) over bounds, seeds and two row optimisers."""

    seeds: int = 5
    """Paired seeds."""
    taus: tuple[int, ...] = TAUS
    """Bounds; 0 is the reference."""
    steps: int = 12_000
    """Dense updates of one run."""
    batch: int = 256
    """Samples per dense update."""
    test_rows: int = 50_000
    """Rows that are evaluated."""
    evaluate_every_steps: int = 1_500
    """For the gap along the run."""
    data: DataConfig = field(default_factory=lambda: DataConfig(name="synthetic"))
    out: Path = Path("runs/synthetic-gap")
    """Folder of the results; a second run does only what is missing."""
    jobs: int = default_jobs()
    """Points at a time."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        between(*SEEDS, seeds=self.seeds)
        between(*COUNT, steps=self.steps, evaluate_every_steps=self.evaluate_every_steps)
        between(*COUNT, batch=self.batch)
        between(*ROWS, test_rows=self.test_rows)
        between(*JOBS, jobs=self.jobs)
        not_empty(taus=self.taus)
        each_between(*TAU, taus=self.taus)


def run(options: Options) -> None:
    """Plan, run, print a table per row optimiser, draw both figures."""
    from paper_figs.style import save  # late: pyplot
    from paper_figs.synthetic_gap import synthetic_gap_figure

    groups = {start: _points(options, start) for start in STARTS}
    points = [p for group in groups.values() for p in group]
    print_plan(points, options.out, options.jobs)
    if options.dry_run:
        return
    run_points(points, options.out, options.jobs, options.steps * options.batch)
    records: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for start, group in groups.items():
        runs = finished(group, options.out)
        rows = gap_table(runs, [], "click")
        optimizer = STARTS[start]
        print(
            f"\n{start}: {optimizer.kind}, lr {optimizer.lr},"
            f" accumulator from {optimizer.initial_accumulator}"
        )
        print(aligned(*table_cells(rows)))
        print(_best(runs))
        records += [{"row_optimizer": start, **record(row)} for row in rows]
        curves += [{"row_optimizer": start, **line} for line in curve_records(runs, options.out)]
    table, lines = options.out / "synthetic_gap.csv", options.out / "synthetic_gap_curves.csv"
    write_csv(table, records)
    write_csv(lines, curves)
    figure = save(synthetic_gap_figure(table, lines), options.out / "synthetic_gap.png")
    print(f"\ntable: {table}   curves: {lines}\nfigure: {figure}")


def _points(options: Options, start: str) -> list[Point]:
    base = TrainConfig(
        batch=options.batch,
        steps=options.steps,
        data=options.data,
        rows=TableConfig(optimizer=STARTS[start]),
        evaluation=EvaluationConfig(
            evaluate_every_steps=options.evaluate_every_steps, test_rows=options.test_rows
        ),
    )
    settings: list[Setting] = [("sync", 0)]
    settings += [("hybrid", tau) for tau in options.taus if tau > 0]
    points = setting_points(base, settings, options.seeds)
    return [replace(p, label=f"{start.split()[0]}-{p.label}") for p in points]


def _best(runs: list[Run]) -> str:
    """How far the trained model is from what nobody could beat on these test rows."""
    best = runs[0].summary["best_reachable_auc"]
    sync = [r.auc("click") for r in runs if r.setting == ("sync", 0)]
    below = best - float(np.mean(sync))
    return f"best reachable AUC {best:.4f} (planted truth); sync is {below:.4f} below it"
