"""The main file of a schema, with the columns of its small tables joined on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.data.errors import DataError, nearest
from runtime.data.schema import Join, Schema
from runtime.data.table import Rows, TableFile


@dataclass(slots=True, kw_only=True)
class JoinedTable:
    """A big file streamed, small ones held in memory and looked up by key for every chunk."""

    main: TableFile
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
        loaded = [_Side(join, side, names, main_names) for join, side in self.sides]
        present = set(main_names).union(*(side.names for side in loaded))
        for name in names:
            if name not in present:
                raise DataError(
                    f"neither {self.main.path} nor its joined tables have a column {name!r}; "
                    f"{nearest(name, present)}"
                )
        keys = [side.join.left for side in loaded]
        for rows in self.main.stream(tuple(dict.fromkeys(from_main + keys))):
            columns = {name: rows.table.column(name) for name in from_main}
            for side in loaded:
                columns |= side.columns_for(rows.table.column(side.join.left))
            yield Rows(pa.RecordBatch.from_pydict(columns), rows.numbers)


class _Side:
    """One small table in memory."""

    def __init__(
        self, join: Join, table: TableFile, names: Sequence[str], main_names: Sequence[str]
    ) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        self.join = join
        self.names = [n for n in table.column_names() if n != join.right and n not in main_names]
        self._wanted = [n for n in self.names if n in names]
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


def open_table(schema: Schema, folder: Path, *, skip_bad_rows: bool) -> TableFile | JoinedTable:
    """The files of a schema, ready to stream."""
    main = TableFile(
        path=folder / schema.file,
        delimiter=schema.delimiter,
        header=schema.header,
        skip_bad_rows=skip_bad_rows,
    )
    if not schema.joins:
        return main
    sides = (
        TableFile(path=folder / j.file, delimiter=schema.delimiter, skip_bad_rows=skip_bad_rows)
        for j in schema.joins
    )
    return JoinedTable(main=main, sides=tuple(zip(schema.joins, sides, strict=True)))
