"""The table of a schema: its main file or files, with the columns of its small tables joined on.

A pattern's files come one after another in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from persia_sim.words.schema import nearest
from runtime.data.errors import DataError
from runtime.data.rows import Rows
from runtime.data.schema import Join, Schema
from runtime.data.source import Part
from runtime.data.table import TableFile

WILD = "*?["
"""What makes a file's name a pattern."""


@dataclass(slots=True, kw_only=True)
class FileSequence:
    """Files one after another, each perhaps a part of its own; at least one."""

    files: tuple[tuple[TableFile, Part | None], ...]

    @property
    def path(self) -> Path:
        """The first file, which stands for all where one is named."""
        return self.files[0][0].path

    @property
    def rows_skipped(self) -> int:
        """Lines that the last stream has left out so far."""
        return sum(file.rows_skipped for file, _ in self.files)

    def column_names(self) -> tuple[str, ...]:
        """Of the first file; each of the others must have the columns that are read."""
        return self.files[0][0].column_names()

    def count_rows(self) -> int:
        """Rows of all files; reads text files once."""
        return sum(file.count_rows() for file, _ in self.files)

    def stream(self, names: Sequence[str]) -> Iterator[Rows]:
        """The named columns of all rows, file after file."""
        for file, _ in self.files:
            file.check_columns(names)  # of all, before the first row
        before = 0
        for file, part in self.files:
            last = 0
            for rows in file.stream(names):
                last = int(rows.numbers[-1])
                yield replace(rows, rows_before=before, part=part)
            before += last


def is_pattern(name: str) -> bool:
    """Whether a name stands for several files.

    >>> is_pattern("part-*.csv.gz"), is_pattern("train.csv")
    (True, False)
    """
    return any(sign in name for sign in WILD)


def matching(folder: Path, name: str) -> list[Path]:
    """The file, or the pattern's files in the order of their names; DataError where none is."""
    if not is_pattern(name):
        return [folder / name]
    try:
        found = sorted(path for path in folder.glob(name) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{name!r} is no pattern of files in {folder}: {error}") from error
    if not found:
        raise DataError(f"no file in {folder} matches {name!r}\n  correct the pattern")
    return found


@dataclass(slots=True, kw_only=True)
class JoinedTable:
    """A big file streamed, small ones held in memory and looked up by key for every chunk."""

    main: TableFile | FileSequence
    sides: tuple[tuple[Join, TableFile], ...]

    @property
    def rows_skipped(self) -> int:
        """Broken lines left out, of the main file and of the small ones."""
        return self.main.rows_skipped + sum(side.rows_skipped for _, side in self.sides)

    def count_rows(self) -> int:
        """Rows of the main file."""
        return self.main.count_rows()

    def stream(self, names: Sequence[str]) -> Iterator[Rows]:
        """The named columns, wherever they lie, of all rows of the main file."""
        import pyarrow as pa

        main_names = self.main.column_names()
        from_main = [n for n in names if n in main_names]
        offers = [(j, s, [n for n in s.column_names() if n != j.right]) for j, s in self.sides]
        present = set(main_names).union(*(offered for _, _, offered in offers))
        for name in names:
            holders = [s.path.name for _, s, offered in offers if name in offered]
            holders += [self.main.path.name] if name in main_names else []
            if len(holders) > 1:
                raise DataError(
                    f"column {name!r} stands in {' and in '.join(sorted(holders))}: which one is"
                    " meant? Give them different names"
                )
        for name in names:
            if name not in present:
                raise DataError(
                    f"neither {self.main.path} nor its joined tables have a column {name!r}; "
                    f"{nearest(name, present)}"
                )
        loaded = [
            _Side(join, side, wanted)
            for join, side, offered in offers
            if (wanted := [n for n in offered if n in names])
        ]
        keys = [side.join.left for side in loaded]
        for rows in self.main.stream(tuple(dict.fromkeys(from_main + keys))):
            columns = {name: rows.table.column(name) for name in from_main}
            for side in loaded:
                columns |= side.columns_for(rows.table.column(side.join.left))
            yield replace(rows, table=pa.RecordBatch.from_pydict(columns))


class _Side:
    """One small table in memory."""

    def __init__(self, join: Join, table: TableFile, wanted: list[str]) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.join, self._wanted = join, wanted
        batches = [rows.table for rows in table.stream([join.right, *self._wanted])]
        self._table: Any = pa.Table.from_batches(batches).combine_chunks()
        self._keys = self._table.column(join.right).combine_chunks().cast(pa.string())
        doubled = len(self._keys) - pc.count_distinct(self._keys).as_py()
        if doubled:
            raise DataError(
                f"{table.path}: {doubled} rows repeat a value of key column {join.right}; "
                "a joined table has one row a key"
            )

    def columns_for(self, keys: Any) -> dict[str, Any]:
        """This table's wanted columns for the keys of a chunk; null where there is no such key."""
        import pyarrow as pa
        import pyarrow.compute as pc

        where = pc.index_in(keys.cast(pa.string()), value_set=self._keys)
        found = self._table.take(where)
        return {name: found.column(name).combine_chunks() for name in self._wanted}


def main_files(schema: Schema, folder: Path) -> list[tuple[Path, Part | None]]:
    """The main file, or all that its pattern and the split's own files stand for; and their parts,
    where files decide. DataError where a pattern has no file, or a file is of two parts."""
    split = schema.split
    if split.test_file is None:
        return [(path, None) for path in matching(folder, schema.file)]
    names: list[tuple[str | None, Part]] = [
        (schema.file, "train"),
        (split.validation_file, "validation"),
        (split.test_file, "test"),
    ]
    found: dict[Path, Part] = {}
    for name, part in names:
        for path in [] if name is None else matching(folder, name):
            if path in found:
                raise DataError(
                    f"{path} is of the {found[path]} and of the {part} part; correct the patterns"
                )
            found[path] = part
    return list(found.items())


Table = TableFile | FileSequence | JoinedTable
"""What a schema's files come to; all of them stream."""


def open_table(schema: Schema, folder: Path, *, skip_bad_rows: bool) -> Table:
    """The files of a schema, ready to stream."""
    delimiter = schema.delimiter or ","
    files = tuple(
        (
            TableFile(
                path=path,
                delimiter=delimiter,
                header=schema.header,
                skip_bad_rows=skip_bad_rows,
                line_breaks=schema.line_breaks,
            ),
            part,
        )
        for path, part in main_files(schema, folder)
    )
    apart = schema.split.test_file is not None
    main = FileSequence(files=files) if apart or len(files) > 1 else files[0][0]
    if not schema.joins:
        return main
    sides = (
        TableFile(
            path=folder / j.file,
            delimiter=delimiter,
            skip_bad_rows=skip_bad_rows,
            line_breaks=schema.line_breaks,
        )
        for j in schema.joins
    )
    return JoinedTable(main=main, sides=tuple(zip(schema.joins, sides, strict=True)))
