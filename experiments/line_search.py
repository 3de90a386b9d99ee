"""The learning rates of the lines of a study, by the rule of `experiments.search`, and as files.

Lines are searched with runs of full length on validation samples, over paired seeds. One that is
held against none has a grid around the rates that it has; the others are tried around what was
chosen for the line that they go back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gaps import Run, finished, gap_columns, gap_of, gap_over_seeds
from experiments.option_values import of, training_options
from experiments.points import Line, Point, data_sha256, over_seeds
from experiments.search import (
    BY_SEARCH,
    GIVEN,
    SYNCS,
    Choice,
    Grid,
    Rates,
    choice_of,
    error_of,
    grid_around,
    points_of,
    search_late,
    search_reference,
)
from experiments.statistics import Interval
from experiments.study_file import SearchTable
from experiments.sweeping import Whole, minutes_left, run_points
from experiments.tables import Column
from persia_sim.base.files import atomic_write, toml_value
from runtime.config import TrainConfig
from runtime.run.folder import plain

VALIDATION_FRACTION = 0.1
"""Last share of the training samples that judges, where neither the schema nor an option says."""


@dataclass(slots=True)
class LineSearch:
    """The search for the rates of one line."""

    line: Line
    seeds: int
    root: Path
    checksum: str
    rates: list[Rates] = field(default_factory=list)
    """What has been tried."""

    @property
    def middle(self) -> Rates:
        """The rates that the line has."""
        return Rates(row=self.line.config.rows.optimizer.lr, dense=self.line.config.model.lr)

    def points(self, rates: Rates) -> list[Point]:
        """Its runs at these rates, a seed each, judged on validation samples."""
        label = f"search-{self.line.slug}-row{rates.row:g}-dense{rates.dense:g}"
        config = at_rates(judged_on_validation_rows(self.line.config), rates)
        return over_seeds(label, config, self.seeds, self.checksum)

    def runs(self, rates: Rates) -> list[Run]:
        """The runs of this search at these rates that are done."""
        return finished(self.points(rates), self.root)

    def auc(self, rates: Rates) -> float:
        """Mean validation AUC of the first task; NaN where a run diverged."""
        runs = self.runs(rates)
        return float(np.mean([run.auc(first_task(run)) for run in runs]))

    def tried(self) -> dict[Rates, float]:
        """Every pair of rates, with its validation AUC."""
        return {rates: self.auc(rates) for rates in self.rates}

    def gain(self, rates: Rates, over: Rates) -> Interval:
        """Validation AUC at these rates minus that at others, paired by seed."""
        runs = self.runs(rates)
        return gap_over_seeds(runs, self.runs(over), first_task(runs[0]), self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What the search for a line has tried, and what it chose."""

    search: LineSearch
    choice: Choice
    reference: LineSearch
    """Of the line that it goes back to, itself where it is held against none."""
    of_reference: Rates


def first_task(run: Run) -> str:
    """The task whose AUC decides."""
    return str(next(iter(run.summary["tasks"])))


def at_rates(config: TrainConfig, rates: Rates) -> TrainConfig:
    """The run with these rates of rows and of dense weights."""
    optimizer = replace(config.rows.optimizer, lr=rates.row)
    return replace(
        config,
        model=replace(config.model, lr=rates.dense),
        rows=replace(config.rows, optimizer=optimizer),
    )


def judged_on_validation_rows(config: TrainConfig) -> TrainConfig:
    """The run, judged by rows of its training part that do not train it."""
    # Real rows need a part to be judged on; a synthetic stream has one anyway.
    fraction = config.data.validation_fraction
    if fraction is None and not config.data.name.startswith("synthetic"):
        fraction = VALIDATION_FRACTION
    evaluation = replace(
        config.evaluation, eval_split="validation", evaluate_every_steps=None, stop_after=None
    )
    data = replace(config.data, validation_fraction=fraction)
    return replace(config, data=data, evaluation=evaluation)


def searches_of(
    lines: Sequence[Line], table: SearchTable, root: Path, also: str = ""
) -> list[list[LineSearch]]:
    """The searches: a list for each line that is held against none, with those that go back to it
    behind it. ``also``: a digest of what decides beside the data."""
    checksums: dict[str, str] = {}
    by_name = {(line.group, line.name): line for line in lines}
    families: dict[tuple[Any, ...], list[LineSearch]] = {}
    for line in lines:
        first, seen = line, {line.name}
        while first.versus and first.versus[0] not in seen:
            seen.add(first.versus[0])
            first = by_name[line.group, first.versus[0]]
        config = judged_on_validation_rows(line.config)
        if repr(config.data) not in checksums:
            checksums[repr(config.data)] = data_sha256(config)
        decides = " ".join(filter(None, [checksums[repr(config.data)], also]))
        search = LineSearch(line, table.seeds, root, decides)
        family = families.setdefault((first.group, first.name), [])
        family.insert(0 if line is first else len(family), search)
    return list(families.values())


def print_plan(families: Sequence[Sequence[LineSearch]], table: SearchTable, jobs: int) -> None:
    """Print how many runs are certain, before the first results say how a search goes on, and how
    long those of the first line take."""
    certain = sum(_certain(family, table) for family in families)
    first = families[0][0]
    points = [point for rates in _grid(first, table).points for point in first.points(rates)]
    print(f"{certain * table.seeds} runs or more search the rates; those of {first.line.name}:")
    print(f"  {minutes_left(points, first.root, jobs)}")


def _grid(search: LineSearch, table: SearchTable) -> Grid:
    middle = search.middle
    is_given = table.reference == "given" or search.line.keeps_rates
    return Grid((middle.row,), (middle.dense,)) if is_given else grid_around(middle)


def _certain(family: Sequence[LineSearch], table: SearchTable) -> int:
    first, *others = family
    late = sum(1 if one.line.keeps_rates else len(points_of(one.middle)) for one in others)
    return len(_grid(first, table).points) + late


def searched(
    families: Sequence[Sequence[LineSearch]], table: SearchTable, jobs: int
) -> list[Chosen]:
    """Search the rates of each line; one that has rates of its own keeps them."""
    whole = Whole(table.seeds * sum(_certain(family, table) for family in families))
    train = partial(_train, jobs, whole)
    chosen = []
    for first, *others in families:
        # The reference: the others are tried around what it chooses, and held against it.
        grid = _grid(first, table)
        sync = search_reference(first, train, grid, table.trials) or first.middle
        choice = choice_of(sync, first.tried(), partial(first.gain, over=sync))
        if choice.outcome == SYNCS:
            outcome = BY_SEARCH if len(grid.points) > 1 else GIVEN
            choice = Choice(rates=choice.rates, outcome=outcome)
        of_family = partial(Chosen, reference=first, of_reference=sync)
        chosen.append(of_family(search=first, choice=choice))

        # The others, each around these rates or at its own.
        free = [one for one in others if not one.line.keeps_rates]
        kept = [(one, one.middle) for one in others if one.line.keeps_rates]
        if kept:
            train(kept)
        search_late(free, sync, first.auc(sync), train, table.trials)
        for one in others:
            if one.line.keeps_rates:
                choice = Choice(rates=one.middle, outcome=GIVEN)
            else:
                choice = choice_of(sync, one.tried(), partial(one.gain, over=sync))
            chosen.append(of_family(search=one, choice=choice))
    return chosen


def _train(jobs: int, whole: Whole, asked: Sequence[tuple[LineSearch, Rates]]) -> bool:
    """Train lines at rates, seed by seed; what is done is not done again."""
    columns = [search.points(rates) for search, rates in asked]
    points = [point for same_seed in zip(*columns, strict=True) for point in same_seed]
    names = ", ".join(dict.fromkeys(search.line.name for search, _ in asked))
    print(f"{names}: {len(asked)} pairs of rates, {len(points)} runs")
    run_points(points, asked[0][0].root, jobs, whole=whole)
    for search, rates in asked:
        search.rates.append(rates)
    return True


def rate_rows(chosen: Sequence[Chosen]) -> list[dict[str, Any]]:
    """A row for every pair of rates that was tried, with how the chosen ones came about.

    ``gain``: validation AUC minus that of the same line at the reference's rates, on which the rule
    decides; ``gap``: minus that of the reference itself at its rates.
    """
    rows = []
    for one in chosen:
        search, tried = one.search, one.search.tried()
        reference = one.reference.runs(one.of_reference)
        for rates, auc in tried.items():
            # Paired by seed; a line with rates of its own was not tried at the reference's.
            runs = search.runs(rates)
            gap = gap_over_seeds(runs, reference, first_task(runs[0]), search.root)
            base = one.of_reference if one.of_reference in tried else one.choice.rates
            gain = search.gain(rates, base)
            rows.append(
                {
                    "group": search.line.group_name,
                    "line": search.line.name,
                    "row_lr": rates.row,
                    "lr": rates.dense,
                    "rates": one.choice.outcome if rates == one.choice.rates else "",
                    "seeds": gap.n,
                    "validation_auc": auc,
                    "standard_error": error_of(gain),
                    **gap_columns(gain, "gain"),
                    "versus": "" if one.reference is search else one.reference.line.name,
                    **gap_columns(gap, "gap"),
                }
            )
    return rows


def write_config(line: Line, folder: Path) -> Path:
    """Write what `train --config` takes to train a line: on all training samples, the validation
    samples among them, judged on the test part."""
    path = folder / f"{line.slug}.toml"
    evaluation = replace(line.config.evaluation, eval_split="test", test_rows=None)
    config = replace(line.config, evaluation=evaluation)

    # Only what differs from a default is written, top level first, then a table for each group.
    groups: dict[str, list[str]] = {"": []}
    for name, option in training_options().items():
        value = of(config, name)
        if value != option.default:
            group, _, key = name.rpartition(".")
            groups.setdefault(group, []).append(f"{key} = {toml_value(plain(value))}")
    texts = []
    for group, lines in groups.items():
        heading = [f"[{group}]"] if group else []
        texts.append("\n".join([*heading, *lines]))
    with atomic_write(path) as file:
        file.write(("\n\n".join(filter(None, texts)) + "\n").encode())
    return path


RULE = f"""\
found: the best of the grid of a line that is held against none; given: not searched. {SYNCS}: no
other pair gained more than two standard errors (seeds and validation samples) over the rates of the
line that it goes back to. gap: validation AUC minus that of this line, ± 95 % over both."""

RATE_COLUMNS: dict[str, Column] = {
    "line": lambda row: f"{row['group']} {row['line']}".strip(),
    "row rate": "{row_lr:g}",
    "dense rate": "{lr:g}",
    "rates": "{rates}",
    "validation AUC": "{validation_auc:.4f}",
    "gap [1e-3]": lambda row: gap_of(row) if row["versus"] else "-",
}
