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

from experiments.gaps import FOOTNOTE, Run, columns_of, gap_of, gap_table
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
from experiments.statistics import t_interval
from experiments.study_file import Study, read_study
from experiments.sweeping import print_points, trained
from experiments.tables import Column, leave, table
from persia_sim.base.command_line import POSITIONAL
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within
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
    windows: Annotated[int, Within(2, 100)] | None = None
    """Rolling origins: judge on this many windows in turn, each after training on all rows before
    it; together they are the second half of the training part."""
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
    windows = options.windows or study.file.windows
    if windows is not None:
        if is_searched:
            raise Refused("windows", "judge on validation samples, as a search does; remove one")
        lines = in_windows(lines, windows)

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
    if windows is not None:
        tables["_windows"] = over_windows(rows)
        print(f"\nmean over {windows} windows, ± 95 % over windows (t)")
        print(table([row for row in tables["_windows"] if row["versus"]], WINDOW_COLUMNS))
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


# Rolling origins.


def in_windows(lines: Sequence[Line], windows: int) -> tuple[Line, ...]:
    """Each line in each window: trained on the rows before it, and judged on it, the last of the
    data then."""
    from runtime.executors.open import source_of  # late: a second to import

    rows_of: dict[str, int] = {}
    result = []
    for window in range(1, windows + 1):
        for line in lines:
            config = line.config
            _refuse_other_part(config)
            if repr(config.data) not in rows_of:
                provenance = source_of(config).provenance()
                if provenance.schema.get("split", {}).get("by_group"):
                    raise Refused("windows", "are of rows in an order, and the split is by group")
                rows_of[repr(config.data)] = provenance.train_rows or 0
            size = rows_of[repr(config.data)] // (2 * windows)
            end = rows_of[repr(config.data)] - (windows - window) * size
            data = replace(config.data, rows=end, validation_fraction=size / end)
            evaluation = replace(config.evaluation, eval_split="validation")
            config = replace(config, data=data, evaluation=evaluation)
            result.append(replace(line, config=config, group=(*line.group, ("window", window))))
    return tuple(result)


def _refuse_other_part(config: Any) -> None:
    """Windows are of rows in one order, and choose the part that is judged on."""
    if config.data.name.startswith("synthetic"):
        raise Refused(
            "windows",
            "are of rows in an order, and each seed draws the rows of a synthetic stream anew; name"
            " another data set or remove windows",
        )
    if config.evaluation.eval_split == "validation" or config.data.validation_fraction is not None:
        raise Refused(
            "windows",
            "say what is judged on; remove evaluation.eval_split and data.validation_fraction",
        )


def over_windows(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row a line and task: the gap in each window, and their mean with its interval, over windows
    as the drawn things; both sources of doubt are in it, seeds and rows."""
    # The gaps of a line, in the order of the windows.
    names = ("line", "mode", "tau", "rows_late", "dense_late", "lr", "ranks", "task", "seeds")
    gaps: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        group, _, _ = row["group"].partition("window=")
        key = (group.strip(), *(row[name] for name in names), row["versus"])
        gaps.setdefault(key, []).append(row["gap"])

    lines = []
    for key, by_window in gaps.items():
        mean = t_interval(by_window)
        lines.append(
            dict(zip(("group", *names, "versus"), key, strict=True))
            | {f"gap_{number}": gap for number, gap in enumerate(by_window, start=1)}
            | {"gap": mean.mean, "gap_half_width_95": mean.half_width}
        )
    return lines


WINDOW_COLUMNS: dict[str, Column] = {
    "line": lambda row: f"{row['group']} {row['line']}".strip(),
    "task": "{task}",
    "rows late": "{rows_late}",
    "dense late": "{dense_late}",
    "gaps [1e-3]": lambda row: " ".join(
        f"{1e3 * gap:+.1f}" for name, gap in row.items() if name[4:].isdigit()
    ),
    "mean [1e-3]": gap_of,
}
