"""The table of a schema as a stream of rows: its files one after another, small tables joined on.

Parquet, CSV and its kin, in bounded memory. A pattern's files come in the order of their names, in
which numbers count by their value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.schema import nearest
from persia_sim.base.vocabulary import ENDLESS
from runtime.data.delimited import delimited_batches
from runtime.data.errors import (
    DataError,
    OpenQuotes,
    broken_file,
    check_not_empty,
    header_names,
    matching,
    no_rows,
)
from runtime.data.formats import (
    VALUE,
    Format,
    atomic_columns,
    libsvm_batches,
    libsvm_seen,
)
from runtime.data.parquet import parquet_batches, parquet_file
from runtime.data.rows import Rows, key_texts
from runtime.data.schema import Join, Schema, is_parquet
from runtime.data.source import Part

ROWS_PER_BATCH = 65_536
"""Rows of one parquet record batch: some 10 MB of ids for 40 columns."""
CSV_BLOCK_BYTES = 4 << 20
"""Bytes of one CSV block; no line may be longer."""
_COLUMN = re.compile(r"CSV column #(\d+)")
_WRONG_COLUMNS = re.compile(r"Row #(\d+): (Expected .*)")


@dataclass(slots=True, kw_only=True)
class TableFile:
    """One file of a data set. Parquet when its name ends so, else delimited text."""

    path: Path
    delimiter: str = ","
    header: tuple[str, ...] | None = None
    """Column names of a text file without a header line."""
    skip_bad_rows: bool = False
    """Leave out lines with a wrong number of columns and count them; else they are an error."""
    line_breaks: bool = False
    """Quoted values of a text file may hold line breaks; else a quote left open is a bad row."""
    quotes: bool = True
    """Quotes of a text file enclose values; else they are characters like any other."""
    format: Format | None = None
    """Format of a text file that another library writes; None: it is delimited."""
    part: Part | None = None
    """The part that the whole file is of, where files decide."""
    may_lack: frozenset[str] = frozenset()
    """Columns without which the file is read as if none of its rows had a value of them."""
    open_quotes: list[int] = field(default_factory=list)
    """Rows whose lines the last stream has left out for a quote that is left open."""
    _broken: list[int] = field(default_factory=list)
    _last: int = 0

    def column_names(self) -> tuple[str, ...]:
        """Names of all columns of the file."""
        if is_parquet(self.path.name):
            return tuple(parquet_file(self.path).schema_arrow.names)
        if self.format == "recbole":
            return tuple(atomic_columns(self.path))
        if self.format is not None:
            return libsvm_seen(self.path).names
        if self.header is not None:
            return self.header
        return header_names(self.path, self.delimiter, quotes=self.quotes)

    @property
    def skipped(self) -> list[int]:
        """Rows whose lines the last stream has left out so far."""
        return [number for number in self._broken if number < self._last]

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise when the file lacks one of the columns, but for those of `may_lack`."""
        present = self.column_names()
        for name in names:
            if present.count(name) > 1:
                raise DataError(
                    f"{self.path} has {present.count(name)} columns {name!r}: which one is meant?"
                    " Give them different names"
                )
            may_lack = name in self.may_lack or self._may_come_later(name)
            if name not in present and not may_lack:
                raise DataError(
                    f"{self.path} has no column {name!r}; {nearest(name, present)}\n"
                    "  correct the schema, or the header line of the file"
                )

    def _may_come_later(self, name: str) -> bool:
        """Whether a later line may have a column that the first one does not show."""
        return self.format == "libsvm" and re.fullmatch(rf"\d+{VALUE}", name) is not None

    def stream(self, names: Sequence[str]) -> Iterator[Rows]:
        """The named columns of all rows, in the file's order; text files give strings."""
        present = self.column_names()
        lacking = self.may_lack.difference(present)
        if lacking.isdisjoint(names):
            return self._stream(names)
        read = [name for name in names if name not in lacking] or present[:1]
        return (_with_nulls(rows, names) for rows in self._stream(read))

    def _stream(self, names: Sequence[str]) -> Iterator[Rows]:
        self._broken = []
        self.open_quotes = []
        self._last = 0
        if is_parquet(self.path.name):
            return self._stream_parquet(names)
        if self.format == "libsvm":
            return self._stream_libsvm(names)
        return self._stream_text(names)

    def count_rows(self) -> int:
        """Rows of the file; reads a text file once."""
        if is_parquet(self.path.name):
            return int(parquet_file(self.path).metadata.num_rows)
        last = 0
        for rows in self.stream(self.column_names()[:1]):
            last = int(rows.numbers[-1])
        return last

    def _stream_parquet(self, names: Sequence[str]) -> Iterator[Rows]:
        first = 1
        for batch in parquet_batches(self.path, names, ROWS_PER_BATCH):
            numbers = np.arange(first, first + batch.num_rows)
            first += batch.num_rows
            yield Rows(table=batch, numbers=numbers, path=self.path)
        if first == 1:
            raise no_rows(self.path)

    def _stream_libsvm(self, names: Sequence[str]) -> Iterator[Rows]:
        skipped = self._broken if self.skip_bad_rows else None
        is_empty = True
        for batch, numbers in libsvm_batches(self.path, names, skipped):
            if len(numbers):
                is_empty = False
                self._last = int(numbers[-1]) + 1
                yield Rows(table=batch, numbers=numbers, path=self.path)
        self._last = ENDLESS
        if is_empty:
            raise no_rows(self.path)

    def _stream_text(self, names: Sequence[str]) -> Iterator[Rows]:
        import pyarrow as pa

        # Broken lines are skipped and counted where the run may skip them.
        all_names = self.column_names()
        check_not_empty(self.path)
        lines_before = 0 if self.header is not None else 1
        first = 1

        counts: list[int] = []

        def on_broken(line: Any) -> str:
            self._broken.append(line.number - lines_before)
            counts.append(line.actual_columns)
            return "skip"

        batches = delimited_batches(
            self.path,
            all_names,
            names,
            delimiter=self.delimiter,
            block_bytes=CSV_BLOCK_BYTES,
            skip_lines=lines_before,
            quotes=self.quotes,
            line_breaks=self.line_breaks,
            unpacked=self._closing_quotes(len(all_names)),
            on_broken=on_broken if self.skip_bad_rows else None,
        )
        try:
            # Row numbers as an editor counts them, for whoever is told of a bad one.
            for batch in batches:
                if batch.num_rows:
                    numbers = self._numbers(first, batch.num_rows)
                    first = int(numbers[-1]) + 1
                    self._last = first
                    yield Rows(table=batch, numbers=numbers, path=self.path)
        except (pa.ArrowException, OSError) as error:
            raise self._text_error(error, first, lines_before) from error
        finally:
            batches.close()
        self._last = ENDLESS
        if first == 1 and counts:
            raise self._other_columns(len(all_names), counts)
        if first == 1:
            raise no_rows(self.path)

    def _other_columns(self, expected: int, lengths: list[int]) -> DataError:
        """The error for a file that has lines, and no good one."""
        names = "do the names in its first line" if self.header is None else "does header"
        return DataError(
            f"{self.path}: all {len(lengths):,} lines have another number of columns than"
            f" {expected} (the first: {lengths[0]})\n  is delimiter, {self.delimiter!r}, right, and"
            f" {names} name every column?"
        )

    def _closing_quotes(self, columns: int) -> Callable[[Any], bytes] | None:
        """What makes each line one by itself, where values hold no line breaks."""
        if self.line_breaks or not self.quotes:
            return None
        skipped, header = self.open_quotes if self.skip_bad_rows else None, self.header is None
        lines = OpenQuotes(self.path, self.delimiter, columns, header=header, skipped=skipped)
        return lambda block: lines(block, CSV_BLOCK_BYTES)

    def _numbers(self, first: int, count: int) -> np.ndarray:
        """Numbers of the next ``count`` good lines, from line ``first`` on."""
        broken = np.array([n for n in self._broken if n >= first], np.int64)
        candidates = np.arange(first, first + count + len(broken))
        return candidates[~np.isin(candidates, broken)][:count]

    def _text_error(self, error: Exception, first: int, lines_before: int) -> DataError:
        # pyarrow has one type for all: its words say which mistake it was.
        words = str(error).splitlines()[0]
        if "Empty CSV" in words:
            return no_rows(self.path)
        if "invalid UTF8" in words:
            column = _COLUMN.search(words)
            name = f", column {self.column_names()[int(column[1])]}" if column else ""
            return DataError(
                f"{self.path}, after row {first - 1}{name}: a text is not in UTF-8 (Latin-1, or"
                " another encoding?); save the file as UTF-8\n"
                "  (iconv -f latin1 -t utf-8 FILE > NEW does it for Latin-1)"
            )
        if "straddling" in words:
            return DataError(
                f"{self.path}, after row {first - 1}: a line is longer than {CSV_BLOCK_BYTES:,}"
                " bytes; is a quote left open?"
            )

        # A row of another length is the most likely one, and has a row number.
        place = _WRONG_COLUMNS.search(words)
        if place is None:
            return broken_file(self.path, error, f"after row {first - 1}")
        return DataError(
            f"{self.path}, row {int(place[1]) - lines_before}: {place[2]}\n"
            "  every row must have the columns of the header; correct the row, fetch the file "
            "again if it ends there; train and evaluate can skip bad rows (--data.skip-bad-rows)"
        )


def _with_nulls(rows: Rows, names: Sequence[str]) -> Rows:
    """The named columns; those that the rows do not have hold no value."""
    import pyarrow as pa

    table = rows.table
    nulls = pa.nulls(len(rows.numbers), pa.string())
    present = set(table.schema.names)
    columns = {name: table.column(name) if name in present else nulls for name in names}
    return replace(rows, table=pa.RecordBatch.from_pydict(columns))


@dataclass(slots=True, kw_only=True)
class Table:
    """Big files streamed, small ones held in memory and looked up by key for every chunk."""

    files: tuple[TableFile, ...]
    """At least one; each must have the columns of the first that are read."""
    sides: tuple[tuple[Join, TableFile], ...] = ()

    @property
    def skipped(self) -> list[tuple[Path, int]]:
        """File and row of each broken line that the last stream has left out so far."""
        files = (*self.files, *(side for _, side in self.sides))
        return [(file.path, row) for file in files for row in file.skipped]

    @property
    def open_quotes(self) -> int:
        """Lines that the last stream has left out for a quote that is left open."""
        return sum(len(file.open_quotes) for file in self.files)

    def count_rows(self) -> int:
        """Rows of the main files; reads text files once."""
        return sum(file.count_rows() for file in self.files)

    def stream(self, names: Sequence[str]) -> Iterator[Rows]:
        """The named columns, wherever they lie, of all rows of the main files."""
        import pyarrow as pa

        if not self.sides:
            yield from self._stream_main(names)
            return
        from_main, wanted = self._holders(names)
        loaded = [(side[0].left, _by_key(*side, columns)) for side, columns in wanted]
        keys = [key for key, _ in loaded]
        for rows in self._stream_main(tuple(dict.fromkeys(from_main + keys))):
            columns = {name: rows.table.column(name) for name in from_main}
            for key, columns_for in loaded:
                columns |= columns_for(rows.table.column(key))
            yield replace(rows, table=pa.RecordBatch.from_pydict(columns))

    def _stream_main(self, names: Sequence[str]) -> Iterator[Rows]:
        for file in self.files:
            file.check_columns(names)  # of all, before the first row
        before = 0
        for file in self.files:
            last = 0
            for rows in file.stream(names):
                last = int(rows.numbers[-1])
                yield replace(rows, rows_before=before, part=file.part)
            before += last

    def _holders(
        self, names: Sequence[str]
    ) -> tuple[list[str], list[tuple[tuple[Join, TableFile], list[str]]]]:
        """The columns that the main files hold; each small table that holds some, and these."""
        # Which file could give which column.
        main = self.files[0].path
        offers = [(side, set(side[1].column_names()) - {side[0].right}) for side in self.sides]
        offered = set[str]().union(*(columns for _, columns in offers))
        in_main = set(self.files[0].column_names()) | (self.files[0].may_lack - offered)
        held = [(main, in_main), *((side[1].path, columns) for side, columns in offers)]

        # Exactly one must.
        for name in names:
            holders = sorted(path.name for path, columns in held if name in columns)
            if len(holders) > 1:
                raise DataError(
                    f"column {name!r} stands in {' and in '.join(holders)}: which one is"
                    " meant? Give them different names"
                )
            if not holders:
                known = sorted(set().union(*(columns for _, columns in held)))
                raise DataError(
                    f"neither {main} nor its joined tables have a column {name!r};"
                    f" {nearest(name, known)}"
                )
        wanted = [(side, [name for name in names if name in columns]) for side, columns in offers]
        from_main = [name for name in names if name in in_main]
        return from_main, [(side, columns) for side, columns in wanted if columns]


def _by_key(join: Join, table: TableFile, wanted: list[str]) -> Callable[[Any], dict[str, Any]]:
    """Hold a small table in memory, and give its wanted columns for the keys of a chunk; null where
    there is no such key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # The whole small table, which must have one row a key.
    table.check_columns([join.right, *wanted])
    batches = [rows.table for rows in table.stream([join.right, *wanted])]
    held: Any = pa.Table.from_batches(batches).combine_chunks()
    right_keys = key_texts(held.column(join.right).combine_chunks())
    doubled = len(right_keys) - pc.count_distinct(right_keys, mode="all").as_py()
    if doubled:
        raise DataError(
            f"{table.path}: {doubled} rows repeat a value of key column {join.right}; "
            "a joined table has one row a key"
        )

    def columns_for(keys: Any) -> dict[str, Any]:
        matching = held.take(pc.index_in(key_texts(keys), value_set=right_keys))
        return {name: matching.column(name).combine_chunks() for name in wanted}

    return columns_for


def main_files(schema: Schema, folder: Path) -> dict[Path, Part | None]:
    """The main file, or all that its pattern and the split's own files stand for; and their parts,
    where files decide. DataError where a pattern has no file, or a file is of two parts."""
    # Without a file for the test part all files are one stream.
    split = schema.split
    if split.test_file is None:
        return dict.fromkeys(matching(folder, schema.file))

    # Else each pattern's files have its part, and no file may have two.
    result: dict[Path, Part | None] = {}
    parts: tuple[tuple[str | None, Part], ...] = (
        (schema.file, "train"),
        (split.validation_file, "validation"),
        (split.test_file, "test"),
    )
    for name, part in parts:
        for path in [] if name is None else matching(folder, name):
            if path in result:
                raise DataError(
                    f"{path} is of the {result[path]} and of the {part} part; correct the patterns"
                )
            result[path] = part
    return result


def open_table(schema: Schema, folder: Path, *, skip_bad_rows: bool) -> Table:
    """The files of a schema, ready to stream."""
    main, opened = main_files(schema, folder).items(), partial(file_of, schema, skip=skip_bad_rows)
    return Table(
        files=tuple(opened(path, header=schema.header, part=part) for path, part in main),
        sides=tuple((join, opened(matching(folder, join.file)[0])) for join in schema.joins),
    )


def header_of(schema: Schema, path: Path) -> tuple[str, ...] | None:
    """Names of the columns of a table that is scored, where no line of it has them: it may be
    written as those that train, or lack just what nobody scores by, as a table without answers."""
    if schema.header is None or is_parquet(path.name) or schema.format is not None:
        return schema.header

    # Nobody scores by labels, weights or the split: a table that lacks them may still be scored.
    quotes = schema.quotes is not False
    columns = len(header_names(path, schema.delimiter or ",", quotes=quotes))
    weight = set() if schema.weight is None else {schema.weight}
    split = set() if schema.split.column is None else {schema.split.column}
    labels, scored_by = set(schema.labels), set(schema.feature_columns)
    lacking: list[set[str]] = [
        set(),
        labels,
        labels | weight,
        labels | split,
        labels | weight | split,
    ]

    # Where one of these headers alone fits the number of columns, it is that one.
    headers = {tuple(n for n in schema.header if n not in more - scored_by) for more in lacking}
    fitting = [names for names in headers if len(names) == columns]
    return fitting[0] if len(fitting) == 1 else schema.header


def file_of(schema: Schema, path: Path, *, skip: bool = False, **more: Any) -> TableFile:
    """One file, as the schema says that text is written."""
    is_atomic = schema.format == "recbole"
    return TableFile(
        path=path,
        format=None if is_parquet(path.name) else schema.format,
        delimiter="\t" if is_atomic else schema.delimiter or ",",
        line_breaks=schema.line_breaks,
        quotes=schema.quotes is not False and not is_atomic,
        may_lack=frozenset(schema.optional or ()),
        skip_bad_rows=skip,
        **more,
    )
