"""Day after day: each day judges the model before it trains it (progressive validation).

Every day begins with the rows and dense weights of the day before (`train --warm-start`), so what a
mode loses is what a model in service would lose. Optimisers begin anew each day. With expiry, a row
that no batch of a whole day has looked up starts afresh.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.gaps import Run, finished, gap_of, gap_table
from experiments.option_values import options_in, typed_values
from experiments.options import REFERENCE, STUDIED, Parallel, Seeds, Some, Tau
from experiments.points import Line, Point, data_sha256, over_seeds
from experiments.sweeping import Whole, minutes_left, run_points
from experiments.tables import Column, leave, table
from persia_sim.base.command_line import with_changes
from persia_sim.base.files import atomic_write, toml_value
from persia_sim.base.rules import Refused
from persia_sim.base.vocabulary import Mode
from runtime.checkpoint.whole import find_checkpoint
from runtime.config import CheckpointConfig, TrainConfig
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.rows import number_of, span_of
from runtime.data.schema import Schema, document, read_schema
from runtime.data.split import Split
from runtime.data.table import file_of, main_files, open_table

RANKS = 8
LEAST_DAYS = 2
"""One to train on, one to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Judge each day by the model of the days before it, then train on it, in each mode."""

    days: tuple[Path, ...] = ()
    """Files of a day each, in their order, with the columns of the schema. Example: day-1.csv
    day-2.csv. Else the files that the schema's pattern stands for, day-9 before day-10; of one
    file the values of its split's column."""
    modes: Some[Mode] = (REFERENCE, STUDIED)
    """Modes to compare; sync is the reference of the gaps."""
    tau: Tau = 4
    """Bound of the modes that have one."""
    seeds: Seeds = 2
    """Paired seeds 0, 1, ..., >= 1; an interval needs two."""
    config: Path | None = None
    """Options of training from a file, as run.toml of `train --config`. Its mode, tau, seed and
    executor are not read."""
    set: tuple[str, ...] = ()
    """Options of training by their names in such a file, over it: data.name=days.toml
    sync.ranks=4."""
    expire: bool = True
    """A row that a whole day has not looked up starts afresh; with
    rows.capacity.expire_after_steps one that was not looked up for so many steps."""

    def _check(self) -> None:
        typed_values(self.set)  # which refuses what is no option

    @property
    def base(self) -> TrainConfig:
        """What the runs of all modes have; 8 ranks where nothing says another number."""
        typed = typed_values(self.set)
        for path, values in typed.items():
            if len(values) > 1:
                rule = f"gives {path} {len(values)} values, and every day has the same; give one"
                raise Refused("set", rule)
        said, _ = options_in(self.config, typed)
        one_each = {path: value for path, (value,) in typed.items()}
        return with_changes(TrainConfig(), {"sync.ranks": RANKS} | said | one_each)


@dataclass(frozen=True, slots=True)
class Day:
    """A day that trains, and the next one, which judges."""

    schema: Path
    train: str
    test: str
    train_rows: int
    test_rows: int


def run(options: Options) -> None:
    """Train day by day, every mode and seed side by side; print a line a day and mode."""
    if options.dry_run:
        with tempfile.TemporaryDirectory() as folder:  # days of one file are cut there
            _print_plan(replace(options, out=Path(folder)))
        return

    # A day for each file; every run begins with the model of the day before.
    schema, files = days_of(options)
    if len(files) < LEAST_DAYS:
        raise DataError(f"{options.base.data.name} has {len(files)} day; give {LEAST_DAYS} or more")
    settings = _settings(options)
    print(_counts(files, options))

    # A day after the other: its runs begin with the checkpoints of the day before.
    lines = []
    before: dict[tuple[Mode, int], Path] = {}
    whole = Whole((len(files) - 1) * len(settings) * options.seeds)
    for number, (train, test) in enumerate(pairwise(files), 1):
        day = written_day(schema, train, test, options.out / "days" / f"{number:03}.toml")
        points = {mode: points_of(mode, tau, day, before, options) for mode, tau in settings}
        of_day = [point for of_mode in points.values() for point in of_mode]
        run_points(of_day, options.out, options.jobs, whole=whole)
        runs = {mode: finished(of_mode, options.out) for mode, of_mode in points.items()}
        lines += lines_of(number, day, runs, options)
        before = {
            (mode, point.config.seed): point.folder(options.out)
            for mode, of_mode in points.items()
            for point in of_mode
        }

    print(f"\n{options.base.data.name}: each day judged by the model of the days before it\n")
    print(table(lines, COLUMNS))
    print(f"\n{FOOTNOTE}")
    leave(options, {"": lines}, drawn_first=1)


def _settings(options: Options) -> list[tuple[Mode, int]]:
    """Each mode with its bound."""
    return [(mode, options.tau if mode.reads_late_rows else 0) for mode in options.modes]


def _counts(files: Sequence[Path], options: Options) -> str:
    runs = (len(files) - 1) * len(options.modes) * options.seeds
    return (
        f"{len(files)} days, {len(options.modes)} modes, {options.seeds} seeds: {runs} runs, each"
        " begins with the one before"
    )


def _print_plan(options: Options) -> None:
    """The days, the runs, and how long the first day takes; the folder of results is one that does
    not last."""
    schema, files = days_of(options)
    print(_counts(files, options))
    print("\n".join(f"  {file.name}" for file in files))
    if len(files) >= LEAST_DAYS:
        first = written_day(schema, *files[:LEAST_DAYS], options.out / "first.toml")
        modes = [points_of(mode, tau, first, {}, options) for mode, tau in _settings(options)]
        points = [point for of_mode in modes for point in of_mode]
        print(f"  the first day: {minutes_left(points, options.out, options.jobs)}")


def days_of(options: Options) -> tuple[Schema, list[Path]]:
    """The schema, and the files of the days in their order."""
    name = options.base.data.name
    if not name.endswith(".toml"):
        raise DataError(
            f"data.name is {name}: days need the schema (.toml) that describes them; --set"
            " data.name=days.toml"
        )
    schema, folder = read_schema(Path(name))
    joins = tuple(replace(j, file=str((folder / j.file).resolve())) for j in schema.joins)
    schema = replace(schema, joins=joins, md5=())
    files = list(options.days) or list(main_files(replace(schema, split=_WHOLE), folder))
    if len(files) == 1 and schema.split.column is not None:
        return replace(schema, joins=()), cut_into_days(schema, files[0], options)
    for file in files:
        file_of(schema, file, header=schema.header).check_columns(schema.judging_columns)
    _refuse_other_order(schema, files)
    return schema, [file.resolve() for file in files]


def _refuse_other_order(schema: Schema, files: Sequence[Path]) -> None:
    """Raise DataError where a day begins before the one before it ends, by the column of times that
    the split declares, where it declares one: it would be judged by what comes behind it."""
    column = schema.split.column
    threshold = schema.split.threshold
    if column is None or threshold is None:
        return
    last: Any = None
    for before, file in pairwise([None, *files]):
        day = file_of(schema, file, header=schema.header)
        if column not in day.column_names():  # it is in a joined table
            return
        columns = (rows.table.column(column) for rows in day.stream([column]))
        spans = [span_of(one, threshold, schema.missing) for one in columns]
        found = [span for span in spans if span is not None]
        first = min((begin for begin, _ in found), default=None)
        if None not in (first, last) and first < last:
            raise DataError(
                f"{file} begins at {first} in column {column}, before {before} ends at {last}: days"
                " come in the order of their times; name the files in it with --days"
            )
        last = max((end for _, end in found), default=last)


_WHOLE = Split(test_fraction=0.5)
"""A split that needs no other file."""


def cut_into_days(schema: Schema, file: Path, options: Options) -> list[Path]:
    """A parquet file for each value of the split's column, in the order of these values."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    # All rows by day, as texts: a value has one id, however it is stored.
    column = str(schema.split.column)
    rows: dict[str, list[Any]] = {}
    whole = replace(schema, file=str(file.resolve()), split=_WHOLE)
    names = tuple(dict.fromkeys((*schema.feature_columns, *schema.judging_columns, column)))
    opened = open_table(whole, Path("/"), skip_bad_rows=options.base.data.skip_bad_rows)
    for chunk in opened.stream(names):
        of_day = chunk.table.column(column).cast(pa.string())
        for day in pc.unique(of_day).to_pylist():
            if day is not None and day not in schema.missing:
                rows.setdefault(day, []).append(chunk.table.filter(pc.equal(of_day, day)))

    # Numbers in their order, dates and other texts in theirs.
    values = [number_of(day) for day in rows]
    are_numbers = all(value is not None for value in values)
    in_order = sorted(rows, key=(lambda day: number_of(day) or 0.0) if are_numbers else str)
    folder = options.out / "days"
    folder.mkdir(parents=True, exist_ok=True)
    result = []
    for day in in_order:
        path = folder / f"{day.replace('/', '-').replace(' ', '_')}.parquet"
        if path.resolve() in result:
            raise DataError(
                f"two values of {column} make one file, {path.name}: write one of them otherwise"
            )
        pq.write_table(pa.Table.from_batches(rows[day]), path)
        result.append(path.resolve())
    return result


def written_day(schema: Schema, train: Path, test: Path, path: Path) -> Day:
    """The schema of a day, in a file that `train --data.name` takes."""
    of_text = ("delimiter", "header", "quotes", "format")
    made = replace(schema, file=str(train), split=Split(test_file=str(test)))
    if train.suffix == ".parquet":
        made = replace(made, **dict.fromkeys(of_text), line_breaks=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = {"name": f"{schema.name} {train.stem}", **document(made)}
    with atomic_write(path) as file:
        lines = (f"{key} = {toml_value(value)}\n" for key, value in keys.items() if value != [])
        file.write("".join(lines).encode())
    census = FileSource(schema=made, folder=path.parent, skip_bad_rows=True).census()
    rows = census.placed
    return Day(path, train.stem, test.stem, rows["train"], rows["test"])


def points_of(
    mode: Mode, tau: int, day: Day, before: dict[tuple[Mode, int], Path], options: Options
) -> list[Point]:
    """The runs of a mode on one day, a seed each."""
    # Rows that a whole day does not look up are older than its steps at its end.
    base = options.base
    steps = math.ceil(day.train_rows / base.batch)
    rows = base.rows
    if options.expire and rows.capacity.expire_after_steps is None:
        rows = replace(rows, capacity=replace(rows.capacity, expire_after_steps=max(1, steps - 1)))

    # The run of the day; it leaves the checkpoint that the next one begins with.
    sync = replace(base.sync, mode=mode)
    config = replace(
        base,
        sync=replace(sync, tau=tau) if mode.reads_late_rows else sync,
        checkpoint=CheckpointConfig(checkpoint_every="end", keep_checkpoints=1),
        data=replace(base.data, name=str(day.schema)),
        rows=rows,
    )
    label = f"{day.train}-{mode}" + (f"-tau{tau}" if mode.reads_late_rows else "")
    points = over_seeds(label, config, options.seeds, data_sha256(config))
    if not before:
        return points
    starts = (find_checkpoint(before[mode, point.config.seed]).folder for point in points)
    return [
        replace(point, config=replace(point.config, warm_start=start))
        for point, start in zip(points, starts, strict=True)
    ]


def lines_of(
    number: int, day: Day, runs: dict[Mode, list[Run]], options: Options
) -> list[dict[str, Any]]:
    """A line a mode: how the next day is predicted, and what of it late rows cost."""
    of_modes = [
        Line(
            name=str(mode),
            config=of_mode[0].point.config,
            versus=(str(REFERENCE),) if mode is not REFERENCE and REFERENCE in runs else (),
        )
        for mode, of_mode in runs.items()
    ]
    found = [*runs.values()]
    task = next(iter(found[0][0].summary["tasks"]))
    of_day = {
        "number": number,
        "trained_on": day.train,
        "judged_by": day.test,
        "judged_rows": day.test_rows,
    }

    # How large the tables have grown, beside the scores.
    rows = gap_table(of_modes, found, task, options.out)
    return [
        of_day
        | row
        | {"rows_in_tables": round(sum(run.summary["rows"] for run in of_mode) / len(of_mode))}
        for row, of_mode in zip(rows, found, strict=True)
    ]


COLUMNS: dict[str, Column] = {
    "judged by": "{judged_by}",
    "mode": "{mode}",
    "tau": lambda line: str(line["tau"]) if Mode(line["mode"]).reads_late_rows else "-",
    "AUC": "{auc:.4f}",
    "log-loss": "{log_loss:.4f}",
    "gap to sync [1e-3]": lambda line: gap_of(line) if line["versus"] else "-",
    "rows": "{rows_in_tables:,}",
}
FOOTNOTE = """\
Each day tests the model before it trains it. ± is a 95 % interval over seeds and the rows of the
day together. rows: how many rows the tables hold after the day before."""
