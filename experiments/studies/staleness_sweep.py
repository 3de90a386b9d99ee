"""How much test AUC a mode and a bound cost, over paired seeds and any factors of the start."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from experiments.gaps import (
    COLUMNS,
    FOOTNOTE,
    Setting,
    curve_records,
    finished,
    gap_table,
    of_sync,
)
from experiments.options import Count, Parallel, Positive, Ranks, Seeds, Some, Tau, TestRows, within
from experiments.paired import expected_samples, setting_points
from experiments.points import Point
from experiments.statistics import t_interval
from experiments.sweep import print_plan, run_points
from experiments.tables import Column, table, write_csv
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
NotNegative = Annotated[float, within(0, 1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Sweep modes and bounds with the deterministic executor; every factor list is crossed."""

    modes: Some[Mode] = (Mode.SYNC, Mode.HYBRID, Mode.ASYNC)
    """Modes to compare; sync is the reference of the gaps."""
    taus: tuple[Tau, ...] = ()
    """Bounds for the modes that have one; else 0, 4 and 16."""
    seeds: Seeds = 5
    """Paired seeds 0, 1, ..., >= 1; an interval needs two."""
    ranks: Ranks = 8
    """NN workers W."""
    batch: Some[Count] = (128,)
    """Factor: samples per dense update."""
    steps: tuple[Count, ...] = ()
    """Factor: dense updates; else one pass over the data."""
    row_optimizer: tuple[RowOptimizerKind, ...] = ()
    """Factor: optimiser of the rows; else that of --rows."""
    row_lr: tuple[Positive, ...] = ()
    """Factor: learning rate of the rows; else that of --rows."""
    initial_accumulator: tuple[NotNegative, ...] = ()
    """Factor: Adagrad's start; 0 moves fresh rows fast, 0.01 (the original's) slowly."""
    initial_scale: tuple[NotNegative, ...] = ()
    """Factor: fresh rows are uniform in +- this."""
    optimizer: tuple[DenseOptimizer, ...] = ()
    """Factor: optimiser of the dense network; else that of --model."""
    lr: tuple[Positive, ...] = ()
    """Factor: learning rate of the dense network; else that of --model."""
    merge_pushes: tuple[bool, ...] = ()
    """Factor, of the hybrid modes: merged (the default) or on arrival."""
    match: tuple[Literal["update", "global"], ...] = ()
    """Factor, of async: batches of a dense update (the default), or of a rank's share of it."""
    sync_steps: tuple[Tau, ...] = ()
    """Factor, of the hybrid modes: so many first steps with tau 0; else none."""
    dense_lag: tuple[Annotated[int, within(0, MOST_DENSE_LAG)], ...] = ()
    """Factor, of the hybrid modes: the dense update so many steps late; else not."""
    delay_compensation: tuple[Annotated[float, within(0, 1e9)], ...] = ()
    """Factor, of modes that read late rows: strength lambda; else 0, off."""
    lr_by_staleness: tuple[bool, ...] = ()
    """Factor, of modes that read late rows: their rows' rate divided by max(1, steps missed)."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    evaluate_every_steps: Count | None = None
    """For curves: evaluate a snapshot every so many updates."""
    part: Literal["test", "validation"] = "test"
    """Judge on this part; rates are chosen on `validation` (of --data.validation-fraction), so that
    the test part is read once."""
    windows: Annotated[int, within(2, 100)] | None = None
    """Rolling origins: judge on this many windows in turn, each after training on all rows before
    it; together they are the second half of the training part. Else on ``part``."""
    test_rows: TestRows | None = None
    """Evaluate on the first rows of that part only."""

    def check(self) -> None:
        """That something reads each factor."""
        if self.windows is not None:
            self._has_rows_in_order()
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

    def _has_rows_in_order(self) -> None:
        if self.data.name.startswith("synthetic"):
            raise ValueError(
                "windows are of rows in an order, and each seed draws the rows of a synthetic"
                " stream anew; name another data set or remove windows"
            )
        if self.part == "validation" or self.data.validation_fraction is not None:
            raise ValueError(
                "windows say what is judged on; remove --part and --data.validation-fraction"
            )


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
            print(table(rows, COLUMNS))
            records += [{"factors": label, **line} for line in rows]
        curves += [{"factors": label, **line} for line in curve_records(runs, options.out)]
    path = write_csv(options.out / "staleness_sweep.csv", records)
    lines = write_csv(options.out / "staleness_sweep_curves.csv", curves)
    if options.windows is not None:
        write_csv(options.out / "staleness_sweep_windows.csv", found := over_windows(records))
        print(f"\nmean over {options.windows} windows, ± 95 % over windows (t)")
        print(table([line for line in found if line["mode"] != "sync"], WINDOW_COLUMNS))
    print(f"\n{FOOTNOTE}\ntable: {path}   curves: {lines}")


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
        "window": (None,) if options.windows is None else range(1, options.windows + 1),
    }
    groups = []
    rows = None if options.windows is None else _train_rows(options.data)
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
            data=_before(options, chosen["window"], rows),
            model=replace(options.model, lr=chosen["lr"], optimizer=chosen["optimizer"]),
            rows=replace(options.rows, optimizer=optimizer, initial_scale=chosen["initial_scale"]),
            evaluation=EvaluationConfig(
                evaluate_every_steps=options.evaluate_every_steps,
                part=options.part if options.windows is None else "validation",
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


def _train_rows(data: DataConfig) -> int:
    from runtime.data.open import open_source  # late: a second to import

    found = open_source(data.name, data.dir, data.rows, data.skip_bad_rows, keep=data.keep)
    return found.provenance().train_rows or 0


def _before(options: Options, window: int | None, rows: int | None) -> DataConfig:
    """The data up to the end of a window (from 1 on), which its last rows are."""
    if window is None or rows is None or options.windows is None:
        return options.data
    size = rows // (2 * options.windows)
    end = rows - (options.windows - window) * size
    return replace(options.data, rows=end, validation_fraction=size / end)


def over_windows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a setting and task: the gap to sync in each window, and their mean with its interval,
    over windows as the drawn things; both sources of doubt are in it, seeds and rows."""
    names = ("mode", "tau", "rows_late", "dense_late", "lr", "ranks", "task", "seeds")
    gaps: dict[tuple[Any, ...], list[float]] = {}
    for line in records:
        factors, _, _ = line["factors"].partition("window=")
        key = factors.strip(), *(line[name] for name in names)
        gaps.setdefault(key, []).append(line["gap_to_sync"])
    lines = []
    for key, own in gaps.items():
        mean = t_interval(own)
        lines.append(
            dict(zip(("factors", *names), key, strict=True))
            | {f"gap_{number}": gap for number, gap in enumerate(own, start=1)}
            | {"gap_to_sync": mean.mean, "gap_to_sync_half_width_95": mean.half_width}
        )
    return lines


def _gaps_of_windows(line: Mapping[str, Any]) -> str:
    return " ".join(f"{1e3 * gap:+.1f}" for name, gap in line.items() if name[4:].isdigit())


WINDOW_COLUMNS: dict[str, Column] = {
    "task": "{task}",
    "factors": "{factors}",
    "mode": "{mode}",
    "rows late": "{rows_late}",
    "dense late": "{dense_late}",
    "gaps [1e-3]": _gaps_of_windows,
    "mean [1e-3]": of_sync,
}
