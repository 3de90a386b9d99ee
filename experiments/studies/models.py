"""Does the answer depend on the model? AUC of each on each data set, and what late rows cost it.

The same rates for all models, unless you give others by a run of `tune` for each: so a row of the
table compares modes of one model, and two rows no models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from experiments.gaps import Run, contrast_over_seeds, gap_columns, gap_over_seeds, of_sync
from experiments.options import Count, PairedSeeds, Parallel, Ranks, Some, Tau, TestRows
from experiments.points import Point, readable, setting_points
from experiments.statistics import Interval, t_interval
from experiments.sweep import trained
from experiments.tables import Column, leave, table
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import TableConfig

MODELS = ("mlp", "dlrm", "deepfm", "dcn")
DATA = ("clicks.toml",)


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
    data: DataConfig = field(default_factory=DataConfig)
    """How each set is read; `sets` name them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Widths and rates of all models; `models` name them."""
    rows: TableConfig = field(default_factory=TableConfig)
    test_rows: TestRows | None = None
    """Judge on the first rows of the test part only."""

    def _check(self) -> None:
        for name, given, default, instead in (
            ("data.name", self.data.name, DataConfig().name, "sets"),
            ("model.name", self.model.name, ModelConfig().name, "models"),
        ):
            if given != default:
                raise Refused(name, f"is {given!r}, and --{instead} names them; remove it")


Cell = tuple[str, str]
"""Data set and model."""


def run(options: Options) -> None:
    """Train every cell in sync and in hybrid; print its AUC and what late rows cost it."""
    # Data sets that are here.
    sources, missing = readable(replace(options.data, name=name) for name in options.sets)
    for sentence in missing:
        print(sentence)
    if not sources:
        raise ValueError("no data set of --sets can be read here")

    # Every model on every data set, in both modes.
    pairs = product(sources, options.models)
    cells = {(data, model): points_of(data, model, options) for data, model in pairs}
    runs = trained(cells, options)
    if runs is None:
        return

    # What late rows cost in each cell, and beside the first model.
    first = options.models[0]
    lines = [
        line_of(cell, of_cell, runs[cell[0], first], options) for cell, of_cell in runs.items()
    ]
    print(f"\nrows {options.tau} updates late in hybrid, against sync, at the same rates\n")
    print(table(lines, COLUMNS))
    print(f"\n{FOOTNOTE.format(first)}")
    leave(options, {"": lines})


def points_of(data: str, model: str, options: Options) -> list[Point]:
    """The runs of a cell: sync and hybrid, seed by seed."""
    base = TrainConfig(
        sync=SyncConfig(ranks=options.ranks),
        batch=options.batch,
        steps=options.steps,
        data=replace(options.data, name=data),
        model=replace(options.model, name=model),
        rows=options.rows,
        evaluation=EvaluationConfig(test_rows=options.test_rows),
    )
    settings = [("sync", 0), ("hybrid", options.tau)]
    name = f"{data}-{model}".replace("/", "-").replace(":", "-")
    return setting_points(base, settings, options.seeds, prefix=f"{name}-")


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


def _by_mode(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """The runs of sync, and those of hybrid."""
    sync = [run for run in runs if run.point.config.sync.mode is Mode.SYNC]
    return sync, [run for run in runs if run.point.config.sync.mode is Mode.HYBRID]


COLUMNS: dict[str, Column] = {
    "data": "{data}",
    "model": "{model}",
    "AUC in sync": "{sync_auc:.4f}",
    "AUC with late rows": "{late_auc:.4f}",
    "cost [1e-3]": of_sync,
    "beside the first [1e-3]": lambda line: (
        of_sync(line, "beside_first") if line["beside_first_half_width_95"] else "-"
    ),
}
FOOTNOTE = """\
cost: test AUC minus that of sync, paired by seed. beside the first: the cost minus that of {} on
the same data. ± is a 95 % interval over seeds and test rows together."""
