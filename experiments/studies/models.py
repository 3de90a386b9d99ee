"""Does the answer depend on the model? AUC of each on each data set, and what late rows cost it.

All models have the rates that are given; with ``search`` each has its own on each data set, by the
rule of `tune`. Only with rates of its own may the cost of one model be held against another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from experiments.gaps import Run, contrast_over_seeds, gap_columns, gap_over_seeds, of_sync
from experiments.lateness.rates import BETTER, GIVEN, NO_RATE, Choice, Rates, grid_around, points_of
from experiments.options import Count, PairedSeeds, Parallel, Ranks, Some, Tau, TestRows
from experiments.points import Point, data_sha256, readable, setting_points
from experiments.statistics import Interval, t_interval
from experiments.studies.tune import (
    TRIALS,
    Chosen,
    Search,
    at_rates,
    judged_on_validation_rows,
    search_rates,
    tried_lines,
)
from experiments.sweep import Whole, trained
from experiments.tables import Column, leave, table
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import TableConfig

MODELS = ("mlp", "dlrm", "deepfm", "dcn")
DATA = ("clicks.toml",)
SEARCH_SEEDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """AUC of each model on each data set, and what rows that are late cost it."""

    models: Some[str] = MODELS
    """Built-in ones, or package.module:Class of your own, as din:DIN in examples/."""
    sets: Some[str] = DATA
    """Data sets by name, or schemas (.toml); one that is not on this machine is left out."""
    tau: Annotated[Tau, Within(1, 10_000)] = 16
    """How many updates late hybrid reads its rows."""
    seeds: PairedSeeds = 3
    """Paired seeds of each cell, >= 2."""
    ranks: Ranks = 8
    """Ranks W."""
    batch: Count = 128
    """Samples per dense update."""
    steps: Count | None = None
    """Dense updates; else one pass over the data."""
    search: bool = False
    """Choose the rates of each model on each data set first, on validation samples, by the rule of
    `tune`; the rates that are given are the middle. Else all models have those."""
    search_seeds: PairedSeeds = SEARCH_SEEDS
    """Paired seeds of each pair of rates that the search tries, >= 2."""
    trials: Annotated[int, Within(5, 1_000)] = TRIALS
    """Pairs of rates that a mode may try in the search; sync's grid alone has 12."""
    data: DataConfig = field(default_factory=DataConfig)
    """How each set is read; `sets` name them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Widths and rates of all models; `models` name them."""
    rows: TableConfig = field(default_factory=TableConfig)
    test_rows: TestRows | None = None
    """Judge on the first samples of the test part only."""

    def _check(self) -> None:
        for name, given, default, instead in (
            ("data.name", self.data.name, DataConfig().name, "sets"),
            ("model.name", self.model.name, ModelConfig().name, "models"),
        ):
            if given != default:
                raise Refused(name, f"is {given!r}, and --{instead} names them; remove it")
        for name, given, default in (
            ("search_seeds", self.search_seeds, SEARCH_SEEDS),
            ("trials", self.trials, TRIALS),
        ):
            if given != default and not self.search:
                raise Refused(name, "is read with --search only; add that, or remove it")


Cell = tuple[str, str]
"""Data set and model."""
Choices = tuple[Choice, Choice]
"""The rates of a cell in sync and in hybrid, and how they came about."""


def run(options: Options) -> None:
    """Train every cell in sync and in hybrid; print its AUC and what late rows cost it."""
    # Data sets that are here.
    sources, missing = readable(replace(options.data, name=name) for name in options.sets)
    for sentence in missing:
        print(sentence)
    if not sources:
        raise ValueError("no data set of --sets can be read here")

    # The rates of every model on every data set, in sync and in hybrid.
    cells: list[Cell] = list(product(sources, options.models))
    given = Choice(rates=middle_of(options), outcome=GIVEN)
    rates: dict[Cell, Choices] = {cell: (given, given) for cell in cells}
    tables: dict[str, list[dict[str, Any]]] = {}
    if options.search and options.dry_run:
        print(plan_of_search(cells, options))
    elif options.search:
        chosen = searched(cells, options)
        rates = {cell: (sync.choice, late.choice) for cell, (sync, late) in chosen.items()}
        tables["_tried"] = [
            {"data": cell[0], "model": cell[1]} | line
            for cell, modes in chosen.items()
            for line in tried_lines(modes)
        ]

    # Both modes of every cell, on all training samples and judged by the test part.
    points = {cell: points_of_cell(cell, rates[cell], options) for cell in cells}
    runs = trained(points, options)
    if runs is None:
        return

    # What late rows cost in each cell, and beside the first model.
    first = options.models[0]
    lines = []
    for cell, of_cell in runs.items():
        beside = (cell[0], first)
        learns = has_rates(rates[cell]) and has_rates(rates[beside])
        line = line_of(cell, of_cell, runs[beside] if learns else of_cell, options)
        lines.append(line | columns_of_rates(rates[cell]))
    print(f"\nrows {options.tau} updates late in hybrid, against sync\n")
    print(table(lines, COLUMNS))
    print(f"\n{FOOTNOTE.format(first)}")
    leave(options, {"": lines} | tables)


def middle_of(options: Options) -> Rates:
    """The rates that all models have, or around which theirs are searched."""
    return Rates(row=options.rows.optimizer.lr, dense=options.model.lr)


def base_of(cell: Cell, options: Options) -> TrainConfig:
    """A run of the model on the data set, at the rates that are given."""
    data, model = cell
    return TrainConfig(
        sync=SyncConfig(ranks=options.ranks),
        batch=options.batch,
        steps=options.steps,
        data=replace(options.data, name=data),
        model=replace(options.model, name=model),
        rows=options.rows,
        evaluation=EvaluationConfig(test_rows=options.test_rows),
    )


def name_of(cell: Cell) -> str:
    """What the names of the cell's runs begin with."""
    return f"{cell[0]}-{cell[1]}-".replace("/", "-").replace(":", "-")


def plan_of_search(cells: Sequence[Cell], options: Options) -> str:
    """In words, how many runs the search adds to those of the table."""
    pairs = len(grid_around(middle_of(options)).points) + len(points_of(middle_of(options)))
    return (
        f"the search of rates comes first: {len(cells)} cells with {pairs} pairs of rates or more"
        f" in two modes, {options.search_seeds} seeds each:"
        f" {len(cells) * pairs * options.search_seeds} runs; those of the table then:"
    )


def searched(cells: Sequence[Cell], options: Options) -> dict[Cell, list[Chosen]]:
    """The rates of sync and of hybrid in each cell, by the rule of `tune`."""
    grid = grid_around(middle_of(options))
    certain = len(grid.points) + len(points_of(middle_of(options)))
    whole = Whole(certain * options.search_seeds * len(cells))
    result = {}
    for cell in cells:
        # A search for each mode, judged on validation samples.
        base = judged_on_validation_rows(base_of(cell, options))
        checksum = data_sha256(base)
        searches = [
            Search(
                mode=mode,
                base=replace(base, sync=replace(base.sync, mode=mode, tau=tau)),
                seeds=options.search_seeds,
                checksum=checksum,
                root=options.out,
                prefix=f"search-{name_of(cell)}",
            )
            for mode, tau in ((Mode.SYNC, base.sync.tau), (Mode.HYBRID, options.tau))
        ]
        result[cell] = search_rates(searches, grid, options.trials, options.jobs, whole)
    return result


def points_of_cell(cell: Cell, choices: Choices, options: Options) -> list[Point]:
    """The runs of a cell: sync and hybrid at their rates, seed by seed."""
    base = base_of(cell, options)
    of_modes = []
    for setting, choice in zip((("sync", 0), ("hybrid", options.tau)), choices, strict=True):
        config = at_rates(base, choice.rates)
        of_modes.append(setting_points(config, [setting], options.seeds, prefix=name_of(cell)))
    return [point for same_seed in zip(*of_modes, strict=True) for point in same_seed]


def columns_of_rates(choices: Choices) -> dict[str, Any]:
    """The rates of a cell in both modes, and how they came about."""
    sync, late = choices
    return {
        "row_lr": sync.rates.row,
        "dense_lr": sync.rates.dense,
        "rates": sync.outcome,
        "late_row_lr": late.rates.row,
        "late_dense_lr": late.rates.dense,
        "late_rates": late.outcome,
    }


def line_of(cell: Cell, runs: list[Run], of_first: list[Run], options: Options) -> dict[str, Any]:
    """AUC of sync and of hybrid in a cell, their paired difference, and how far that lies from the
    difference of the first model on the same data."""
    # Paired by seed, on the first task.
    sync, late = _by_mode(runs)
    task = next(iter(sync[0].summary["tasks"]))
    gap = gap_over_seeds(late, sync, task, options.out)

    # Whether the cost depends on the model: a difference of two paired differences.
    beside = Interval(0.0, 0.0, gap.n)
    if of_first is not runs:
        sides = [*_by_mode(of_first), sync, late]
        by_seed = [{run.summary["seed"]: run for run in side} for side in sides]
        beside = contrast_over_seeds(by_seed, (1, -1, -1, 1), task, options.out)
    return {
        "data": cell[0],
        "model": cell[1],
        "task": task,
        "tau": options.tau,
        "seeds": gap.n,
        "sync_auc": t_interval([run.auc(task) for run in sync]).mean,
        "late_auc": t_interval([run.auc(task) for run in late]).mean,
        **gap_columns(gap),
        **gap_columns(beside, "beside_first"),
    }


def has_rates(choices: Choices) -> bool:
    """Whether both modes of a cell have rates at which the model learns."""
    return all(choice.outcome != NO_RATE for choice in choices)


def _by_mode(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """The runs of sync, and those of hybrid."""
    sync = [run for run in runs if run.point.config.sync.mode is Mode.SYNC]
    return sync, [run for run in runs if run.point.config.sync.mode is Mode.HYBRID]


COLUMNS: dict[str, Column] = {
    "data": "{data}",
    "model": "{model}",
    "AUC in sync": "{sync_auc:.4f}",
    "AUC with late rows": "{late_auc:.4f}",
    "row rate": "{row_lr:g}",
    "dense rate": "{dense_lr:g}",
    "late rates": lambda line: (
        line["late_rates"]
        if line["late_rates"] != BETTER
        else f"{line['late_row_lr']:g}, {line['late_dense_lr']:g}"
    ),
    "cost [1e-3]": lambda line: (
        NO_RATE if NO_RATE in (line["rates"], line["late_rates"]) else of_sync(line)
    ),
    "beside the first [1e-3]": lambda line: (
        of_sync(line, "beside_first") if line["beside_first_half_width_95"] else "-"
    ),
}
FOOTNOTE = """\
cost: test AUC minus that of sync, paired by seed. beside the first: the cost minus that of {} on
the same data. ± is a 95 % interval over seeds and test samples together."""
