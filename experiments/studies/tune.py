"""The learning rates of each mode, by one rule, as files to train with.

Every mode is searched with runs of full length on the validation part, over paired seeds: sync on
a grid around the rates that it is given, each late mode around sync's. A late mode leaves sync's
rates only for a gain of more than two standard errors, and nothing is chosen among runs at chance
(`experiments.lateness.rates`, the rule of the study of lateness).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.gaps import Run, finished, gap_columns, gap_over_seeds, of_sync
from experiments.lateness.rates import (
    BY_SEARCH,
    GIVEN,
    NO_RATE,
    SYNCS,
    Choice,
    Grid,
    Rates,
    best_of,
    choice_of,
    error_of,
    grid_around,
    points_of,
    to_try_of_cell,
    to_try_of_sync,
)
from experiments.options import Count, PairedSeeds, Parallel, Ranks, Some, Tau, TestRows
from experiments.points import Point, data_sha256, over_seeds
from experiments.statistics import Interval
from experiments.studies.staleness_sweep import of
from experiments.sweep import Whole, minutes_left, run_points
from experiments.tables import Column, leave, table, toml_value
from persia_sim.base.command_line import options_of
from persia_sim.base.files import atomic_write
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from runtime.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    TrainConfig,
    read_config,
)
from runtime.embedding.config import TableConfig
from runtime.models.imported import refuse_code_named_in
from runtime.run.folder import plain

TRIALS = 20
"""Pairs of rates that a mode may try; sync's grid alone has 12."""
VALIDATION_FRACTION = 0.1
"""Last share of the training samples that judges, where neither the schema nor an option says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Choose the rates of rows and dense weights for each mode on validation samples."""

    modes: Some[Mode] = (Mode.SYNC, Mode.HYBRID, Mode.ASYNC)
    """Modes to tune; sync is always searched first, since the others are held against it."""
    taus: Some[Tau] = (4,)
    """Bounds of the modes that have one: each is searched by itself."""
    search_sync: bool = True
    """Search sync's rates first; else the rates that are given are sync's, and late modes are
    searched around them."""
    trials: Annotated[int, Within(5, 1_000)] = TRIALS
    """Pairs of rates that a mode may try, each with all seeds; sync's grid alone has 12."""
    seeds: PairedSeeds = 3
    """Paired seeds of each pair of rates, >= 2: a gain is believed beyond two standard errors."""
    ranks: Ranks = 8
    """Ranks W."""
    batch: Count = 128
    """Samples per dense update."""
    steps: Count | None = None
    """Dense updates; else one pass over the data."""
    config: Path | None = None
    """Options of training from a file, as run.toml of `train --config`; those typed here win. Its
    rates are the middle of the search, and its mode, bound and seed are not read."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rows: TableConfig = field(default_factory=TableConfig)
    test_rows: TestRows | None = None
    """Judge on the first rows of the validation part only."""

    @classmethod
    def completed(cls, typed: Mapping[str, Any]) -> dict[str, Any]:
        """The typed options, completed by those of a file."""
        if typed.get("config") is None:
            return dict(typed)
        start = read_config(typed["config"])
        if "model.name" not in typed:
            remedy = f"type --model.name {start.model.name}"
            refuse_code_named_in(typed["config"], start.model.name, trust=False, remedy=remedy)
        names = {option.path for option in options_of(cls)}
        filled = {path: of(start, path) for path in _set_by(start) if path in names}
        return filled | dict(typed)

    @property
    def start(self) -> TrainConfig:
        """The synchronous run that the search begins at, judged on validation samples."""
        # What is typed wins over the file, and the end of the run alone is judged.
        read = TrainConfig() if self.config is None else read_config(self.config)
        typed = replace(
            read,
            sync=replace(TrainConfig().sync, ranks=self.ranks),
            engine=EngineConfig(executor="constant_lag", precision=read.engine.precision),
            checkpoint=CheckpointConfig(),
            batch=self.batch,
            steps=self.steps,
            data=self.data,
            model=self.model,
            rows=self.rows,
            evaluation=replace(
                read.evaluation,
                evaluate_every_steps=None,
                stop_after=None,
                test_rows=self.test_rows,
            ),
        )
        return judged_on_validation_rows(typed)


def judged_on_validation_rows(config: TrainConfig) -> TrainConfig:
    """The run, judged by rows of its training part that do not train it."""
    # Real rows need a part to be judged on; a synthetic stream has one anyway.
    fraction = config.data.validation_fraction
    if fraction is None and not config.data.name.startswith("synthetic"):
        fraction = VALIDATION_FRACTION
    return replace(
        config,
        data=replace(config.data, validation_fraction=fraction),
        evaluation=replace(config.evaluation, eval_split="validation"),
    )


def at_rates(config: TrainConfig, rates: Rates) -> TrainConfig:
    """The run with these rates of rows and of dense weights."""
    optimizer = replace(config.rows.optimizer, lr=rates.row)
    return replace(
        config,
        model=replace(config.model, lr=rates.dense),
        rows=replace(config.rows, optimizer=optimizer),
    )


def _set_by(start: TrainConfig) -> list[str]:
    """The options of a file that are not as they are by default."""
    options = options_of(TrainConfig)
    return [option.path for option in options if of(start, option.path) != option.default]


@dataclass(slots=True)
class Search:
    """The search for the rates of one mode."""

    mode: Mode
    base: TrainConfig
    seeds: int
    checksum: str
    root: Path
    prefix: str = ""
    """Begins the names of its runs, where a study searches for more than one model."""

    @property
    def label(self) -> str:
        """The mode with its bound, as tables and files name it."""
        sync = self.base.sync
        mode = f"{self.mode}-tau{sync.tau}" if self.mode.reads_late_rows else str(self.mode)
        return self.prefix + mode

    def config(self, rates: Rates) -> TrainConfig:
        """A run of the mode at these rates."""
        return at_rates(self.base, rates)

    def points(self, rates: Rates) -> list[Point]:
        """Its runs, a seed each."""
        label = f"{self.label}-row{rates.row:g}-dense{rates.dense:g}"
        return over_seeds(label, self.config(rates), self.seeds, self.checksum)

    def runs(self, rates: Rates) -> list[Run]:
        """The runs of this search at these rates that are done."""
        return finished(self.points(rates), self.root)

    def auc(self, rates: Rates) -> float:
        """Mean validation AUC of the first task; NaN where a run diverged."""
        runs = self.runs(rates)
        return float(np.mean([run.auc(first_task(run)) for run in runs]))

    def gain(self, rates: Rates, over: Rates) -> Interval:
        """Validation AUC at these rates minus that at others, paired by seed."""
        runs = self.runs(rates)
        return gap_over_seeds(runs, self.runs(over), first_task(runs[0]), self.root)


def first_task(run: Run) -> str:
    """The task whose AUC decides."""
    return next(iter(run.summary["tasks"]))


def run(options: Options) -> None:
    """Search sync's rates, then each late mode's; print a line a mode and leave a file each."""
    searches = searches_of(options)
    first, *others = searches
    middle = Rates(row=options.rows.optimizer.lr, dense=options.model.lr)
    grid = grid_around(middle) if options.search_sync else Grid((middle.row,), (middle.dense,))

    # The plan: what is certain to run, before the first results say how a search goes on.
    certain = len(grid.points) + len(points_of(middle)) * len(others)
    pairs = f"{len(grid.points)} pairs of rates around" if options.search_sync else "only"
    print(
        f"{first.label}: {pairs} row rate {middle.row:g} and dense rate {middle.dense:g}; every"
        f" other mode: 5 around sync's; at most {options.trials} a mode, {options.seeds} seeds each"
    )
    if options.dry_run:
        points = [point for rates in grid.points for point in first.points(rates)]
        print(f"{certain * options.seeds} runs or more; those of sync:")
        print(f"  {minutes_left(points, options.out, options.jobs)}")
        return

    whole = Whole(certain * options.seeds)

    chosen_of = search_rates(searches, grid, options.trials, options.jobs, whole)

    # A line a mode, every pair of rates that was tried, and files to train with.
    wanted = [one for one in chosen_of if one.search.mode in options.modes]
    chosen = [chosen_line(one, chosen_of[0]) for one in wanted]
    print(f"\n{options.data.name}: rates by mode, judged on validation samples\n")
    print(table(chosen, CHOSEN))
    print(f"\n{RULE}")
    leave(options, {"": chosen, "_tried": tried_lines(chosen_of)})
    for one in wanted:
        if one.choice.outcome != NO_RATE:
            path = write_config(one.search, one.choice.rates, options)
            print(f"persia-runtime train --config {path}")


def searches_of(options: Options) -> list[Search]:
    """A search for each mode and bound, sync's first."""
    start = options.start
    checksum = data_sha256(start)
    modes = [Mode.SYNC, *(mode for mode in options.modes if mode is not Mode.SYNC)]
    result = []
    for mode in modes:
        sync = replace(start.sync, mode=mode)
        bounds = options.taus if mode.reads_late_rows else (sync.tau,)
        for tau in bounds:
            base = replace(start, sync=replace(sync, tau=tau))
            result.append(Search(mode, base, options.seeds, checksum, options.out))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What the search for a mode has tried, and what it chose."""

    search: Search
    tried: Mapping[Rates, float]
    """Every pair of rates, with its validation AUC."""
    choice: Choice


def search_rates(
    searches: Sequence[Search], grid: Grid, trials: int, jobs: int, whole: Whole
) -> list[Chosen]:
    """Search the rates of sync on its grid, then those of each late mode around sync's.

    ``searches``: sync's comes first. ``trials``: pairs of rates that a mode may try, at most.
    """
    first, *others = searches

    # Sync first: the others are tried around what it chooses, and held against it.
    tried: dict[Rates, float] = {}
    while asked := to_try_of_sync(tried, grid)[: trials - len(tried)]:
        train(first, asked, jobs, whole)
        tried |= {rates: first.auc(rates) for rates in asked}
    sync = best_of(tried)
    choice = choice_of(sync, tried, partial(first.gain, over=sync))
    if choice.outcome == SYNCS:
        choice = replace(choice, outcome=BY_SEARCH if len(grid.points) > 1 else GIVEN)
    result = [Chosen(search=first, tried=tried, choice=choice)]

    # Late modes, each around sync's rates.
    sync_auc = tried[sync]
    for search in others:
        tried = {}
        while asked := to_try_of_cell(sync, tried, sync_auc)[: trials - len(tried)]:
            train(search, asked, jobs, whole)
            tried |= {rates: search.auc(rates) for rates in asked}
        choice = choice_of(sync, tried, partial(search.gain, over=sync))
        result.append(Chosen(search=search, tried=tried, choice=choice))
    return result


def train(search: Search, asked: Sequence[Rates], jobs: int, whole: Whole) -> None:
    """Train a mode at all these rates, seed by seed; what is done is not done again."""
    columns = [search.points(rates) for rates in asked]
    points = [point for same_seed in zip(*columns, strict=True) for point in same_seed]
    print(f"{search.label}: {len(asked)} pairs of rates, {len(points)} runs")
    run_points(points, search.root, jobs, whole=whole)


def chosen_line(one: Chosen, first: Chosen) -> dict[str, Any]:
    """A mode's rates, their validation AUC, and that AUC minus that of sync at its own rates."""
    # Paired with sync at its own rates.
    search = one.search
    runs = search.runs(one.choice.rates)
    reference = first.search.runs(first.choice.rates)
    gap = gap_over_seeds(runs, reference, first_task(runs[0]), search.root)

    # How the rates came about.
    has_rate = one.choice.outcome != NO_RATE
    return {
        "mode": str(search.mode),
        "tau": search.base.sync.tau if search.mode.reads_late_rows else None,
        "row_lr": one.choice.rates.row if has_rate else math.nan,
        "dense_lr": one.choice.rates.dense if has_rate else math.nan,
        "rates": one.choice.outcome,
        "seeds": gap.n,
        "validation_auc": search.auc(one.choice.rates),
        **gap_columns(gap),
    }


def tried_lines(chosen_of: Sequence[Chosen]) -> list[dict[str, Any]]:
    """Every pair of rates that was tried, with its gain over sync's rates and its two errors."""
    sync = chosen_of[0].choice.rates
    lines = []
    for one in chosen_of:
        for rates, auc in one.tried.items():
            # Paired by seed with the same mode at the rates of sync.
            search = one.search
            gain = search.gain(rates, sync)
            lines.append(
                {
                    "mode": str(search.mode),
                    "tau": search.base.sync.tau if search.mode.reads_late_rows else None,
                    "row_lr": rates.row,
                    "dense_lr": rates.dense,
                    "validation_auc": auc,
                    "standard_error": error_of(gain),
                    **gap_columns(gain, "gain"),
                }
            )
    return lines


def write_config(search: Search, rates: Rates, options: Options) -> Path:
    """Write what `train --config` takes to train the mode at its rates: on all training samples,
    the validation samples among them, judged on the test part."""
    path = options.out / f"tune_{search.label}.toml"
    config = search.config(rates)
    config = replace(
        config,
        data=options.data,
        evaluation=replace(config.evaluation, eval_split="test", test_rows=None),
    )

    # Only what differs from a default is written, top level first, then a table for each group.
    groups: dict[str, list[str]] = {"": []}
    for option in _set_by(config):
        group, _, key = option.rpartition(".")
        line = f"{key} = {toml_value(plain(of(config, option)))}"
        groups.setdefault(group, []).append(line)
    texts = []
    for group, lines in groups.items():
        heading = [f"[{group}]"] if group else []
        texts.append("\n".join([*heading, *lines]))
    with atomic_write(path) as file:
        file.write(("\n\n".join(filter(None, texts)) + "\n").encode())
    return path


RULE = f"""\
found: the best of sync's grid; given: not searched. {SYNCS}: no other pair gained more than two
standard errors (seeds and validation samples). gap: validation AUC minus that of sync at its rates,
± 95 % over both."""

CHOSEN: dict[str, Column] = {
    "mode": "{mode}",
    "tau": lambda line: "-" if line["tau"] is None else str(line["tau"]),
    "row rate": "{row_lr:g}",
    "dense rate": "{dense_lr:g}",
    "rates": "{rates}",
    "validation AUC": "{validation_auc:.4f}",
    "gap to sync [1e-3]": lambda line: "-" if line["mode"] == "sync" else of_sync(line),
}
