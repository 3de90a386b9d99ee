"""The main file of a schema, with the columns of its small tables joined on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.data.errors import DataError, nearest
from runtime.data.schema import Join, Schema
from runtime.data.sequence import FileSequence, matching
from runtime.data.source import Part
from runtime.data.table import Rows, TableFile


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
