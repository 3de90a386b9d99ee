"""Files as a stream of record batches: parquet, CSV and its kin, in bounded memory."""

from __future__ import annotations

import codecs
import csv
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.words.schema import nearest
from runtime.data.errors import DataError, broken_file, check_not_empty, no_rows
from runtime.data.rows import RecordBatch, Rows

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


HEADER_BYTES = 1 << 20
"""The header line must end in these."""
_SNIFFED_BYTES = 4096


def header_names(head: bytes, delimiter: str, path: Path) -> tuple[str, ...]:
    """The names in the first line of a text file, of which ``head`` is the beginning."""
    if (
        head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        or b"\0" in head[:_SNIFFED_BYTES]
    ):
        raise DataError(
            f"{path} is no UTF-8 text: it begins as UTF-16 or a binary file does;"
            " save it as UTF-8, or name a parquet file .parquet"
        )
    line, end, _ = head.partition(b"\n")
    line = line.removesuffix(b"\r")
    if b"\r" in line:
        raise DataError(
            f"{path} ends its lines with a carriage return alone; end them with a line feed"
            " (tr '\\r' '\\n' < FILE does it)"
        )
    if not end and len(head) >= HEADER_BYTES:
        raise DataError(
            f"{path}: the first line is longer than {HEADER_BYTES:,} bytes, and should hold"
            " the columns' names"
        )
    try:
        found = next(csv.reader([line.decode("utf-8-sig")], delimiter=delimiter, strict=True), [])
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no UTF-8 text: {error.reason} at byte {error.start} of the header line;"
            " save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(f"{path}: the header line cannot be read: {error}; correct it") from error
    if not found:
        raise DataError(
            f"{path}: the first line is empty, and should hold the columns' names; write them"
            " there, or name them in the schema (header)"
        )
    return tuple(found)


_QUOTE, _LINE_END = ord('"'), ord("\n")


class OpenQuotes:
    """Looks at a file's bytes on their way to the parser; for files without line breaks in values.

    A quote opens a value at its beginning only, and a double quote inside is a quote. A parser
    takes a line whose last value is left open to go on in the next one, down to the next quote
    anywhere: rows vanish, and nobody is told.
    """

    def __init__(
        self, path: Path, delimiter: str, columns: int, *, header: bool, skip: bool
    ) -> None:
        """``skip``: turn such a line into one of too many columns, which the parser counts; else
        it is a DataError with the number of its row."""
        own = re.escape(delimiter.encode())
        value = rb'(?:"[^"]*+(?:""[^"]*+)*+"|(?!"))[^%b]*+' % own
        self._closed = re.compile(b"%b(?:%b%b)*+" % (value, own, value))
        self._path, self._delimiter, self._skip = path, ord(delimiter), skip
        self._broken = delimiter.encode() * columns
        self._rows = -1 if header else 0
        self._rest = b""

    def __call__(self, block: bytes, most_bytes: int) -> bytes:
        """The next bytes as the parser may have them; those of a line not yet whole are kept, up
        to ``most_bytes``. An empty block is the end of the file."""
        block = self._rest + bytes(block)
        at_end = len(block) == len(self._rest)
        whole = len(block) if at_end or len(block) > 2 * most_bytes else block.rfind(b"\n") + 1
        block, self._rest = block[:whole], block[whole:]
        if _QUOTE in block:
            block = self._without(block, self._suspects(block))
        self._rows += _rows_in(block)
        return block

    def _suspects(self, block: bytes) -> list[tuple[int, int]]:
        """Start and end of the lines in which quotes do not simply open and close values."""
        text = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(text == _QUOTE)
        ends = np.append(np.flatnonzero(text == _LINE_END), len(text))
        line = np.searchsorted(ends, quotes)
        first = np.searchsorted(line, line)  # the first quote of each one's line
        opens = (np.arange(len(quotes)) - first) % 2 == 0
        before = np.where(quotes > 0, text[quotes - 1], _LINE_END)
        fits = np.isin(before, (_QUOTE, self._delimiter, _LINE_END))
        last = np.append(line[1:] != line[:-1], True)
        odd = (opens & ~fits) | (opens & last)
        starts = np.append(0, ends + 1)
        return [(int(starts[n]), int(ends[n])) for n in np.unique(line[odd])]

    def _without(self, block: bytes, suspects: list[tuple[int, int]]) -> bytes:
        pieces, done = [], 0
        for start, end in suspects:
            if self._closed.fullmatch(block, start, end):
                continue
            if not self._skip:
                raise self._error(block, start, end)
            pieces += [block[done:start], self._broken]
            done = end
        return b"".join([*pieces, block[done:]])

    def _error(self, block: bytes, start: int, end: int) -> DataError:
        row = self._rows + _rows_in(block[:start]) + 1
        text = block[start:end].decode(errors="replace").rstrip("\r")
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return DataError(
            f"{self._path}, row {row}: {shown!r}; a quote is left open at the end of its line\n"
            "  close it, write a quote inside a value twice, or ask to skip bad rows"
            " (--data.skip-bad-rows; they are counted); if values of this file do hold line"
            " breaks, add line_breaks = true to the schema"
        )


def _rows_in(block: bytes) -> int:
    """Lines that are not empty, which no parser counts."""
    lines = block.count(b"\n") + (not block.endswith(b"\n") and bool(block))
    if block.startswith((b"\n", b"\r\n")) or b"\n\n" in block or b"\n\r\n" in block:
        lines -= len(_EMPTY.findall(block))
    return lines


_EMPTY = re.compile(rb"^\r?\n", re.MULTILINE)
