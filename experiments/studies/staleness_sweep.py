"""How much test AUC a mode and a bound cost, over paired seeds and any factors of the start."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from experiments.checks import (
    COUNT,
    JOBS,
    RANKS,
    ROWS,
    SEEDS,
    TAU,
    all_positive,
    between,
    each_between,
    not_empty,
)
from experiments.gaps import (
    FOOTNOTE,
    Setting,
    curve_records,
    finished,
    gap_table,
    record,
    table_cells,
)
from experiments.paired import expected_samples, setting_points
from experiments.points import Point
from experiments.sweep import default_jobs, print_plan, run_points
from experiments.tables import aligned, write_csv
from persia_sim.words.vocabulary import Mode
from runtime.config import (
    DataConfig,
    DenseOptimizer,
    EvaluationConfig,
    ModelConfig,
    SyncConfig,
    TrainConfig,
)
from runtime.config.sync import MOST_DENSE_LAG
from runtime.embedding.config import RowOptimizerKind, TableConfig

DEFAULT_TAUS = (0, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sweep modes and bounds with the deterministic executor; every factor list is crossed."""

    modes: tuple[Mode, ...] = (Mode.SYNC, Mode.HYBRID, Mode.ASYNC)
    """Modes to compare; sync is the reference of the gaps."""
    taus: tuple[int, ...] = ()
    """Bounds for the modes that have one; else 0, 4 and 16."""
    seeds: int = 5
    """Paired seeds 0, 1, ..., >= 1; an interval needs two."""
    ranks: int = 8
    """NN workers W."""
    batch: tuple[int, ...] = (128,)
    """Factor: samples per dense update."""
    steps: tuple[int, ...] = ()
    """Factor: dense updates; else one pass over the data."""
    row_optimizer: tuple[RowOptimizerKind, ...] = ()
    """Factor: optimiser of the rows; else that of --rows."""
    row_lr: tuple[float, ...] = ()
    """Factor: learning rate of the rows; else that of --rows."""
    initial_accumulator: tuple[float, ...] = ()
    """Factor: Adagrad's start; 0 moves fresh rows fast, 0.01 (the original's) slowly."""
    initial_scale: tuple[float, ...] = ()
    """Factor: fresh rows are uniform in +- this."""
    optimizer: tuple[DenseOptimizer, ...] = ()
    """Factor: optimiser of the dense network; else that of --model."""
    lr: tuple[float, ...] = ()
    """Factor: learning rate of the dense network; else that of --model."""
    merge_pushes: tuple[bool, ...] = ()
    """Factor, of the hybrid modes: merged (the default) or on arrival."""
    match: tuple[Literal["update", "global"], ...] = ()
    """Factor, of async: batches of a dense update (the default), or of a rank's share of it."""
    sync_steps: tuple[int, ...] = ()
    """Factor, of the hybrid modes: so many first steps with tau 0; else none."""
    dense_lag: tuple[int, ...] = ()
    """Factor, of the hybrid modes: the dense update so many steps late; else not."""
    delay_compensation: tuple[float, ...] = ()
    """Factor, of modes that read late rows: strength lambda; else 0, off."""
    lr_by_staleness: tuple[bool, ...] = ()
    """Factor, of modes that read late rows: their rows' rate divided by max(1, steps missed)."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    evaluate_every_steps: int | None = None
    """For curves: evaluate a snapshot every so many updates."""
    part: Literal["test", "validation"] = "test"
    """Judge on this part; rates are chosen on `validation` (of --data.validation-fraction), so that
    the test part is read once."""
    test_rows: int | None = None
    """Evaluate on the first rows of that part only."""
    out: Path = Path("runs/staleness-sweep")
    """Folder of the results; a second run with the same folder does only what is missing."""
    jobs: int = default_jobs()
    """Points at a time."""
    dry_run: bool = False
    """Print the plan, point by point, and stop."""

    def __post_init__(self) -> None:
        between(*SEEDS, seeds=self.seeds)
        between(*RANKS, ranks=self.ranks)
        each_between(*TAU, sync_steps=self.sync_steps)
        each_between(0, MOST_DENSE_LAG, dense_lag=self.dense_lag)
        each_between(0, 1e9, delay_compensation=self.delay_compensation)
        between(*JOBS, jobs=self.jobs)
        between(*COUNT, evaluate_every_steps=self.evaluate_every_steps)
        between(*ROWS, test_rows=self.test_rows)
        not_empty(modes=self.modes, batch=self.batch)
        each_between(*COUNT, batch=self.batch, steps=self.steps)
        each_between(*TAU, taus=self.taus)
        all_positive(row_lr=self.row_lr, lr=self.lr)
        each_between(0, 1e6, initial_accumulator=self.initial_accumulator)
        each_between(0, 1e6, initial_scale=self.initial_scale)
        kinds = self.row_optimizer or (self.rows.optimizer.kind,)
        used = {
            "initial_accumulator": (
                any(kind.startswith("adagrad") for kind in kinds),
                "row optimiser adagrad or adagrad_row",
            ),
            "taus": (any(m.reads_late_rows for m in self.modes), "a mode that reads late rows"),
            **dict.fromkeys(
                ("merge_pushes", "sync_steps", "dense_lag"),
                (any(m.may_merge for m in self.modes), "hybrid or raw_hybrid"),
            ),
            **dict.fromkeys(
                ("delay_compensation", "lr_by_staleness"),
                (any(m.reads_late_rows for m in self.modes), "a mode that reads late rows"),
            ),
            "match": (any(not m.has_barrier for m in self.modes), "async or async_averaging"),
        }
        for name, (is_used, where) in used.items():
            if getattr(self, name) and not is_used:
                raise ValueError(f"{name} is only used by {where}; add one or remove it")


def run(options: Options) -> None:
    """Plan, run, print a table for each combination of factors."""
    groups = plan(options)
    points = [point for _, group in groups for point in group]
    print_plan(points, options.out, options.jobs)
    for label, group in groups:
        print(f"  {label or 'all'}: {len(group)} points")
        if options.dry_run:
            for point in group:
                state = "done" if point.is_done(options.out) else "to run"
                print(f"    {point.label:<24} {state:<7} {point.folder(options.out)}")
    if options.dry_run:
        return
    run_points(points, options.out, options.jobs, expected_samples(points[0].config))
    records: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for label, group in groups:
        runs = finished(group, options.out)
        for task in runs[0].summary["tasks"]:
            rows = gap_table(runs, task, options.out)
            print(f"\n{task}, {label or options.data.name}, W = {options.ranks}")
            print(aligned(*table_cells(rows)))
            records += [{"factors": label, **record(row)} for row in rows]
        curves += [{"factors": label, **line} for line in curve_records(runs, options.out)]
    table, lines = options.out / "staleness_sweep.csv", options.out / "staleness_sweep_curves.csv"
    write_csv(table, records)
    write_csv(lines, curves)
    print(f"\n{FOOTNOTE}\ntable: {table}   curves: {lines}")


def plan(options: Options) -> list[tuple[str, list[Point]]]:
    """The points, grouped by the values of the factors that vary."""
    factors: dict[str, Sequence[Any]] = {
        "batch": options.batch,
        "row_optimizer": options.row_optimizer or (options.rows.optimizer.kind,),
        "row_lr": options.row_lr or (options.rows.optimizer.lr,),
        "initial_accumulator": options.initial_accumulator
        or (options.rows.optimizer.initial_accumulator,),
        "initial_scale": options.initial_scale or (options.rows.initial_scale,),
        "optimizer": options.optimizer or (options.model.optimizer,),
        "lr": options.lr or (options.model.lr,),
        "steps": options.steps or (None,),
        "merge_pushes": options.merge_pushes or (True,),
        "match": options.match or ("update",),
        "sync_steps": options.sync_steps or (0,),
        "dense_lag": options.dense_lag or (0,),
        "delay_compensation": options.delay_compensation or (0.0,),
        "lr_by_staleness": options.lr_by_staleness or (False,),
    }
    groups = []
    for values in itertools.product(*factors.values()):
        chosen = dict(zip(factors, values, strict=True))
        label = " ".join(f"{k}={v}" for k, v in chosen.items() if len(factors[k]) > 1)
        optimizer = replace(
            options.rows.optimizer,
            kind=chosen["row_optimizer"],
            lr=chosen["row_lr"],
            initial_accumulator=chosen["initial_accumulator"],
        )
        base = TrainConfig(
            sync=SyncConfig(ranks=options.ranks),
            batch=chosen["batch"],
            steps=chosen["steps"],
            data=options.data,
            model=replace(options.model, lr=chosen["lr"], optimizer=chosen["optimizer"]),
            rows=replace(options.rows, optimizer=optimizer, initial_scale=chosen["initial_scale"]),
            evaluation=EvaluationConfig(
                evaluate_every_steps=options.evaluate_every_steps,
                part=options.part,
                test_rows=options.test_rows,
            ),
        )
        settings: list[Setting] = []
        for mode in options.modes:
            taus = (options.taus or DEFAULT_TAUS) if mode.reads_late_rows else (0,)
            settings += [(str(mode), tau) for tau in taus]
        points = setting_points(base, settings, options.seeds)
        groups.append((label, [_with_choices(p, chosen) for p in points]))
    return groups


def _with_choices(point: Point, chosen: dict[str, Any]) -> Point:
    """Add the factors that only some modes have; sync stays the reference that it is."""
    sync = point.config.sync
    if sync.mode.may_merge:
        own = ("merge_pushes", "sync_steps", "dense_lag")
        sync = replace(sync, **{name: chosen[name] for name in own})
    if sync.mode.reads_late_rows:
        own = ("delay_compensation", "lr_by_staleness")
        sync = replace(sync, **{name: chosen[name] for name in own})
    if not sync.mode.has_barrier:
        sync = replace(sync, match=chosen["match"])
    return replace(point, config=replace(point.config, sync=sync))
