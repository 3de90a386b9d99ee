"""Trains the lines of a study and holds each against another, over paired seeds.

The study is a file (`experiments.study_file`); `experiments/sweeps` has those of the house.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from experiments.gaps import FOOTNOTE, Run, columns_of, gap_table
from experiments.line_search import (
    RATE_COLUMNS,
    RULE,
    LineSearch,
    at_rates,
    print_plan,
    rate_rows,
    searched,
    searches_of,
    write_config,
)
from experiments.option_values import typed_values
from experiments.options import Parallel, Seeds
from experiments.points import Line, files_digest, points_of, what_decides
from experiments.search import NO_RATE
from experiments.study_file import Study, read_study
from experiments.sweeping import print_points, trained
from experiments.tables import leave, table
from persia_sim.base.command_line import POSITIONAL
from persia_sim.base.rules import Refused
from runtime.files import BrokenFileError

Table = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Train the lines of a study: AUC of each, and its gap to the line that it is held against."""

    file: Annotated[Path, POSITIONAL]
    """The study: a file (.toml), or one that comes with the package, as demo.toml."""
    config: Path | None = None
    """Options of training from a file, as run.toml of `train --config`, over those of the study's
    base. Its mode, tau, seed and executor are not read: the study has its own."""
    set: tuple[str, ...] = ()
    """Options of training by their names in such a file, over both. Several values are crossed:
    data.name=clicks.toml sync.tau=4,16 model.hidden=64 32."""
    seeds: Seeds | None = None
    """Paired seeds 0, 1, ..., >= 1; else as the study says. An interval needs two."""
    search: bool = False
    """Choose the rates of each line first, on validation samples, as ``[search]`` of a study."""
    also_hash: tuple[Path, ...] = ()
    """Files that a model of your own reads by itself, as vocabulary.txt: where they change, a
    point runs anew, as where its options, data, schema, split or the model's code do."""
    json: bool = False
    """Print the table as one JSON document on stdout, and all sentences on stderr."""

    def _check(self) -> None:
        typed_values(self.set)  # which refuses what is no option

    @property
    def study(self) -> str:
        """The name of the study's file."""
        return self.file.stem


def run(options: Options) -> None:
    """Train what is missing, then print a table a group and leave the figure of the first."""
    if not options.json:
        table_of(options.file, options, typed_values(options.set))
        return
    with redirect_stdout(sys.stderr):
        rows = table_of(options.file, options, typed_values(options.set))
    print(json.dumps(_without_nan(rows), indent=1))


def _without_nan(rows: Table) -> Table:
    """JSON has no NaN."""
    return [
        {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()}
        for row in rows
    ]


def table_of(
    given: Path | str | Mapping[str, Any], options: Options, typed: Mapping[str, list[Any]]
) -> Table:
    """The table of a study whose lines it trains; empty after a dry run. Raises ValueError for what
    the study cannot be, and for points that failed."""
    study = read_study(given, options.config, typed)
    search = study.file.search
    is_searched = options.search or search.wanted
    for note in study.notes:
        print(note)
    lines = study.lines
    also = _digest(options, lines)

    # The rates first, where they are wanted.
    tables: dict[str, Table] = {}
    if is_searched:
        families = searches_of(lines, search, options.out, also)
        if options.dry_run:
            print_plan(families, search, options.jobs)
        else:
            lines, tables["_rates"] = _at_own_rates(lines, families, study, options)
        if search.only:
            if tables:
                leave(options, {"": tables["_rates"]})
            return tables.get("_rates", [])

    # All lines, on all training samples.
    points = points_of(lines, options.seeds or study.file.seeds, also)
    found = trained(dict(enumerate(points)), options)
    if found is None:
        print_points([point for of_line in points for point in of_line], options.out)
        return []
    runs = [found[number] for number in range(len(lines))]
    rows = _told(study, lines, runs, options)
    print(f"\n{FOOTNOTE}")
    has_gaps = any(row["versus"] for row in rows)
    leave(options, {"": rows} | tables, drawn_first=int(has_gaps), as_a="sweep")
    return rows


def _digest(options: Options, lines: Sequence[Line]) -> str:
    """The checksum of files that models of the user's read, said with what else decides."""
    models = list(dict.fromkeys(line.config.model.name for line in lines))
    if options.also_hash and not any(":" in name for name in models):
        rule = "names files that a model of your own reads, and a built-in one reads none"
        raise Refused("also_hash", f"{rule}; remove it, or --set model.name=MODULE:CLASS")
    try:
        also = files_digest(options.also_hash)
    except BrokenFileError as error:
        raise Refused("also_hash", f"names files; {error}; correct its name") from None
    if note := what_decides(models, options.also_hash):
        print(f"  {note}")
    return also


def _at_own_rates(
    lines: Sequence[Line], families: Sequence[list[LineSearch]], study: Study, options: Options
) -> tuple[tuple[Line, ...], Table]:
    """The lines at the rates that are searched for each, which it prints and leaves as files; and
    every pair that was tried."""
    chosen = searched(families, study.file.search, options.jobs)
    rows = rate_rows(chosen)
    print("\nrates by line, judged on validation samples\n")
    print(table([row for row in rows if row["rates"]], RATE_COLUMNS))
    print(f"\n{RULE}")

    choices = {(one.search.line.group, one.search.line.name): one.choice for one in chosen}
    result = []
    for line in lines:
        choice = choices[line.group, line.name]
        result.append(replace(line, config=at_rates(line.config, choice.rates)))
        if choice.outcome != NO_RATE:
            print(f"persia-runtime train --config {write_config(result[-1], options.out)}")
    return tuple(result), rows


def _told(
    study: Study, lines: Sequence[Line], runs: Sequence[list[Run]], options: Options
) -> Table:
    """Print a table for each group and task; returns all rows, those of the first task first."""
    every: dict[str, Table] = {}
    of_group: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        of_group.setdefault(line.group_name, []).append(number)
    for task, scores in runs[0][0].summary["tasks"].items():
        if "mse" in scores:
            print(f"\n{task} is a regression, without AUC: its MSE is in the runs' summaries")
            continue
        every[task] = gap_table(lines, runs, task, options.out, study.file.beside)
    for task, rows in every.items():
        for group, numbers in of_group.items():
            config = lines[numbers[0]].config
            print(f"\n{task}, {group or config.data.name}, W = {config.sync.ranks}")
            part = config.evaluation.eval_split
            of_this = [row for row in rows if row["group"] == group]
            print(table(of_this, columns_of(rows, part)))
    for warning in dict.fromkeys(
        _short_runs([runs[number] for number in numbers]) for numbers in of_group.values()
    ):
        print(warning, end="")
    return [row for rows in every.values() for row in rows]


def _short_runs(runs: Sequence[list[Run]]) -> str:
    """What a reader must know where rows miss much of a run; "" elsewhere."""
    # The guides ask for ten times as many updates as rows are late, at least.
    updates = runs[0][0].summary["updates"]
    late = sorted({r[0].late.rows for r in runs if (r[0].late.rows or 0) * 10 > updates})
    if not late:
        return ""
    shares = [f"{100 * missed / updates:.0f}" for missed in late]
    return (
        f"rows {', '.join(map(str, late))} updates late miss {', '.join(shares)} % of the"
        f" run's {updates:,} updates.\nWhere it is more than a tenth, a gap tells of the"
        " start of training only.\n"
    )
