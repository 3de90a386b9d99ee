"""The main job: how much test AUC hybrid and async lose against sync, on real clicks if any."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.checks import JOBS, ROWS, SEEDS, between
from experiments.gaps import Run, Setting, curve_records, finished, gap_table, record, table_cells
from experiments.paired import expected_samples, setting_points
from experiments.points import Point
from experiments.statistics import delong
from experiments.sweep import default_jobs, print_plan, run_points
from experiments.tables import aligned, write_csv
from runtime.config import DataConfig, EngineConfig, EvaluationConfig, SyncConfig, TrainConfig

SETTINGS: tuple[Setting, ...] = (
    ("sync", 0),
    ("hybrid", 1),
    ("hybrid", 4),
    ("hybrid", 16),
    ("hybrid", 64),
    ("async", 0),
    ("async", 4),
)
REAL_DATA = "kuairand-pure-14d"
DOWNLOADED_DATA = "kuairand-pure"
RANKS = 8
BATCH = 128
SYNTHETIC_STEPS = 1300  # as many as one pass over the real data has
SNAPSHOTS = 5  # along the run, for the curves
THREAD_STEPS = 160
LEAST_TEST_ROWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Modes sync, hybrid and async with 8 ranks and paired seeds: a table and a figure."""

    data_dir: Path | None = None
    """Folder with the real data; else PERSIA_DATA_DIR, else what `data get` downloaded."""
    seeds: int = 5
    """Paired seeds, >= 2."""
    samples: int | None = None
    """Train on the first samples only and test on as many (2,000 at least), for a quick look; else
    one pass, and the whole test part."""
    out: Path = Path("runs/demo")
    """Folder of the results; a second run only shows them again."""
    jobs: int = default_jobs()
    """Points at a time."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        between(2, SEEDS[1], seeds=self.seeds)  # an interval needs two
        between(*JOBS, jobs=self.jobs)
        between(1, ROWS[1], samples=self.samples)


def run(options: Options) -> None:
    """Train all points, then print the table and where the figure lies."""
    from paper_figs.demo import demo_figure  # late: pyplot takes over a second
    from paper_figs.style import save

    data = find_data(options.data_dir)
    points, thread_points = plan(data, options)
    print_plan(points + thread_points, options.out, options.jobs)
    if options.dry_run:
        return
    samples = expected_samples(points[0].config)
    run_points(points + thread_points, options.out, options.jobs, samples)
    runs = finished(points, options.out)
    threads = finished(thread_points, options.out)
    tasks = list(runs[0].summary["tasks"])
    tables = {task: gap_table(runs, threads, task) for task in tasks}
    csv = options.out / "demo.csv"
    write_csv(csv, [{"data": data.name, **record(r)} for rows in tables.values() for r in rows])
    curves = options.out / "demo_curves.csv"
    write_csv(curves, curve_records(runs, options.out))
    figure = save(demo_figure(csv, curves), options.out / "demo.png")
    print(f"\n{data.name}, {tasks[0]}, W = {RANKS}, {BATCH} samples a dense update")
    print(aligned(*table_cells(tables[tasks[0]])))
    print(_footnotes(runs, tasks[0], options))
    print(f"table:  {csv}   (all tasks: {', '.join(tasks)})\nfigure: {figure}")


def find_data(data_dir: Path | None) -> DataConfig:
    """The real clicks where they are found, else the synthetic stream, with a line that says so."""
    from runtime.data.errors import DataError
    from runtime.data.open import open_source
    from runtime.data.places import DATA_DIR_VARIABLE

    for name in (REAL_DATA, DOWNLOADED_DATA):
        try:
            open_source(name, data_dir=data_dir)
            return DataConfig(name=name, dir=data_dir)
        except DataError as error:
            asked_for = data_dir is not None or DATA_DIR_VARIABLE in os.environ
            if asked_for and name == DOWNLOADED_DATA:
                raise ValueError(str(error)) from None
    print(
        "no real data found: using the synthetic stream; for real clicks run"
        f" `python -m runtime data get {DOWNLOADED_DATA}` or set PERSIA_DATA_DIR"
    )
    return DataConfig(name="synthetic")


def plan(data: DataConfig, options: Options) -> tuple[list[Point], list[Point]]:
    """Points for AUC (constant lag, several at once), and short ones that see what threads do."""
    steps = test_rows = None
    if data.name == "synthetic":
        steps = SYNTHETIC_STEPS
    if options.samples is not None:
        steps = max(1, options.samples // BATCH)
        test_rows = max(LEAST_TEST_ROWS, options.samples)
    judged = EvaluationConfig(test_rows=test_rows)
    sync = SyncConfig(ranks=RANKS)
    base = TrainConfig(sync=sync, batch=BATCH, data=data, steps=steps, evaluation=judged)
    every = max(1, (steps or SYNTHETIC_STEPS) // SNAPSHOTS)
    curves = replace(base, evaluation=replace(judged, evaluate_every_steps=every))
    points = setting_points(curves, SETTINGS, options.seeds)
    short = min(steps or THREAD_STEPS, THREAD_STEPS)
    quick = replace(
        base,
        engine=EngineConfig(executor="concurrent"),
        steps=short,
        evaluation=EvaluationConfig(test_rows=LEAST_TEST_ROWS),
    )
    threads = [
        replace(p, label=f"threads-{p.label}", exclusive=True)
        for p in setting_points(quick, SETTINGS, 1)
    ]
    return points, threads


def _footnotes(runs: list[Run], task: str, options: Options) -> str:
    """What the intervals do and do not cover, and DeLong for one pair of models."""
    by_setting = {(r.setting, r.summary["seed"]): r for r in runs}
    first, second = by_setting[("sync", 0), 0], by_setting[("hybrid", 64), 0]
    labels, scores = [], []
    number = list(first.summary["tasks"]).index(task)
    for one in (first, second):
        found = one.predictions(options.out)
        labels.append(found.labels[:, number])
        scores.append(found.predictions[:, number])
    test = delong(labels[0], scores[0], scores[1])
    return (
        f"AUC, log-loss, staleness: constant-lag executor; (threads): the first {THREAD_STEPS}"
        f" steps with {RANKS} ranks as threads.\n"
        f"± is a 95 % t interval over {options.seeds} paired seeds on one split; another test set"
        f" of {len(labels[0]):,} rows\nwould move an AUC by {test.standard_error[0]:.4f} (standard"
        f" error, DeLong); sync against hybrid tau 64, seed 0:\n"
        f"difference {1e3 * (test.auc[1] - test.auc[0]):+.2f}e-3 with standard error"
        f" {1e3 * test.difference_standard_error:.2f}e-3 ({_p(test.p_value)})."
    )


def _p(value: float) -> str:
    return "p < 0.01" if value < 0.01 else f"p = {value:.2f}"
