"""Files as a stream of record batches: parquet, CSV and its kin, in bounded memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.errors import DataError, nearest
from runtime.data.header import HEADER_BYTES, header_names
from runtime.data.open_quotes import OpenQuotes
from runtime.data.regular import broken_file, check_not_empty, no_rows
from runtime.data.source import Part

ROWS_PER_BATCH = 65_536
"""Rows of one parquet record batch: some 10 MB of ids for 40 columns."""
CSV_BLOCK_BYTES = 4 << 20
"""Bytes of one CSV block; no line may be longer."""
_COLUMN = re.compile(r"CSV column #(\d+)")
_WRONG_COLUMNS = re.compile(r"Row #(\d+): (Expected .*)")

# pyarrow has no type hints and takes 0.1 s to import: it is imported where a file is opened, and
# its objects are Any here.
RecordBatch = Any
"""A pyarrow.RecordBatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a file and their numbers in it."""

    table: RecordBatch
    numbers: np.ndarray
    """int64 [B], counted from 1 in their file, the header line not counted."""
    path: Path
    """The file."""
    rows_before: int = 0
    """Of the files before it, where several make one table."""
    part: Part | None = None
    """The part that the whole file is of, where files decide."""

    @property
    def places(self) -> np.ndarray:
        """int64 [B], counted from 1 over all files."""
        return self.rows_before + self.numbers

    def take(self, which: np.ndarray) -> Rows:
        """Some of them."""
        import pyarrow as pa

        try:
            return replace(self, table=self.table.take(which), numbers=self.numbers[which])
        except pa.ArrowException as error:
            kinds = ", ".join(f"{field.name} {field.type}" for field in self.table.schema)
            raise DataError(
                f"{self.path}: rows cannot be taken from columns of these types ({kinds}): {error}"
                "\n  write them as plain text, numbers, or lists of these"
            ) from error

    def where(self, which: int) -> str:
        """File and row, as an error names them."""
        return f"{self.path}, row {self.numbers[which]}"


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
    _broken: list[int] = field(default_factory=list)
    _last: int = 0

    @property
    def is_parquet(self) -> bool:
        """Whether the name says parquet."""
        return is_parquet(self.path.name)

    def column_names(self) -> tuple[str, ...]:
        """Names of all columns of the file."""
        if self.is_parquet:
            return tuple(self._open_parquet().schema_arrow.names)
        return self._text_names()

    @property
    def rows_skipped(self) -> int:
        """Lines that the last stream has left out so far."""
        return sum(number < self._last for number in self._broken)

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise when the file lacks one of the columns."""
        present = self.column_names()
        for name in names:
            if present.count(name) > 1:
                raise DataError(
                    f"{self.path} has {present.count(name)} columns {name!r}: which one is meant?"
                    " Give them different names"
                )
            if name not in present:
                raise DataError(
                    f"{self.path} has no column {name!r}; {nearest(name, present)}\n"
                    "  correct the schema, or the header line of the file"
                )

    def stream(self, names: Sequence[str]) -> Iterator[Rows]:
        """The named columns of all rows, in the file's order; text files give strings."""
        self._broken = []
        self._last = 0
        self.check_columns(names)
        return self._stream_parquet(names) if self.is_parquet else self._stream_text(names)

    def count_rows(self) -> int:
        """Rows of the file; reads a text file once."""
        if self.is_parquet:
            return int(self._open_parquet().metadata.num_rows)
        last = 0
        for rows in self._stream_text(self.column_names()[:1]):
            last = int(rows.numbers[-1])
        return last

    def _open_parquet(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        check_not_empty(self.path)
        try:
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            raise broken_file(self.path, error) from error

    def _stream_parquet(self, names: Sequence[str]) -> Iterator[Rows]:
        import pyarrow as pa

        first = 1
        batches = self._open_parquet().iter_batches(ROWS_PER_BATCH, columns=list(names))
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise broken_file(self.path, error, f"after row {first - 1}") from error
            if batch is None:
                break
            if batch.num_rows:
                numbers = np.arange(first, first + batch.num_rows)
                yield Rows(table=_without_views(batch), numbers=numbers, path=self.path)
                first += batch.num_rows
        if first == 1:
            raise no_rows(self.path)

    def _text_names(self) -> tuple[str, ...]:
        import pyarrow as pa

        if self.header is not None:
            return self.header
        check_not_empty(self.path)
        try:
            with pa.input_stream(str(self.path)) as stream:
                head = stream.read(HEADER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise broken_file(self.path, error) from error
        return header_names(head, self.delimiter, self.path)

    def _stream_text(self, names: Sequence[str]) -> Iterator[Rows]:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        all_names = self.column_names()
        check_not_empty(self.path)
        lines_before = 0 if self.header is not None else 1
        first = 1

        def on_broken(line: Any) -> str:
            self._broken.append(line.number - lines_before)
            return "skip"

        try:
            with _told_once():
                reader = arrow_csv.open_csv(
                    self._bytes(),
                    read_options=arrow_csv.ReadOptions(
                        use_threads=False,
                        block_size=CSV_BLOCK_BYTES,
                        column_names=list(all_names),
                        skip_rows=lines_before,
                    ),
                    parse_options=arrow_csv.ParseOptions(
                        delimiter=self.delimiter,
                        invalid_row_handler=on_broken if self.skip_bad_rows else None,
                        newlines_in_values=self.line_breaks,
                    ),
                    convert_options=arrow_csv.ConvertOptions(
                        column_types={name: pa.string() for name in names},
                        include_columns=list(names),
                        strings_can_be_null=False,
                    ),
                )
            while (batch := _next(reader)) is not None:
                if batch.num_rows:
                    numbers = self._numbers(first, batch.num_rows)
                    first = int(numbers[-1]) + 1
                    self._last = first
                    yield Rows(table=batch, numbers=numbers, path=self.path)
        except (pa.ArrowException, OSError) as error:
            raise self._text_error(error, first, lines_before) from error
        self._last = 2**62  # all of them
        if first == 1:
            raise no_rows(self.path)

    def _bytes(self) -> Any:
        """The file, unpacked; without line breaks in values, each line by itself."""
        import pyarrow as pa

        stream = pa.input_stream(str(self.path))
        if self.line_breaks:
            return stream
        lines = OpenQuotes(
            self.path,
            self.delimiter,
            len(self.column_names()),
            header=self.header is None,
            skip=self.skip_bad_rows,
        )
        return pa.lib.TransformInputStream(stream, lambda block: lines(block, CSV_BLOCK_BYTES))

    def _numbers(self, first: int, count: int) -> np.ndarray:
        """Numbers of the next ``count`` good lines, from line ``first`` on."""
        broken = np.array([n for n in self._broken if n >= first], np.int64)
        candidates = np.arange(first, first + count + len(broken))
        return candidates[~np.isin(candidates, broken)][:count]

    def _text_error(self, error: Exception, first: int, lines_before: int) -> DataError:
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
        place = _WRONG_COLUMNS.search(words)
        if place is None:
            return broken_file(self.path, error, f"after row {first - 1}")
        return DataError(
            f"{self.path}, row {int(place[1]) - lines_before}: {place[2]}\n"
            "  every row must have the columns of the header; correct the row, fetch the file "
            "again if it ends there, or ask to skip bad rows (--data.skip-bad-rows)"
        )


@contextmanager
def _told_once() -> Iterator[None]:
    """Of a broken line that is no UTF-8, pyarrow fails to tell our handler and prints a traceback
    of that, before it raises the error that we turn into words."""
    usual = sys.unraisablehook

    def without_pyarrows(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, UnicodeDecodeError):
            usual(unraisable)

    sys.unraisablehook = without_pyarrows
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _next(reader: Any) -> RecordBatch | None:
    with _told_once():
        return next(reader, None)


def _without_views(batch: RecordBatch) -> RecordBatch:
    """Views of texts as texts: few of pyarrow's functions know them."""
    import pyarrow as pa

    for place, column in enumerate(batch.schema):
        if str(column.type) == "string_view":
            batch = batch.set_column(place, column.name, batch.column(place).cast(pa.string()))
    return batch


def is_parquet(name: str) -> bool:
    """Whether a file's name says parquet; else it is delimited text."""
    return name.endswith((".parquet", ".pq"))
