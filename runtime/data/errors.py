"""What is wrong with data, in words: the one error, and what a file is before a parser reads it.

ValueError
  DataError   something in a file, a schema or a name is not what it must be

What is opened as data must be a regular file that can be read: a pipe, a socket or a device would
be waited for without end, or read for ever. Delimited text must have a header line, and no quote
that is left open.
"""

from __future__ import annotations

import codecs
import csv
import os
import re
import stat
from pathlib import Path

from persia_sim.base.files import kind_of
from runtime.object_store import by_number, cached_files, url_of


class DataError(ValueError):
    """Data that cannot be read as asked; the text says where, what, which rule and what to do."""


def regular_file(path: Path) -> os.stat_result:
    """What the system says of a regular file; DataError for all else, and where there is none."""
    try:
        result = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"no file {path}\n  correct the path, or the data directory") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot open {str(path)!r}: {reason}; correct the path") from error
    if not stat.S_ISREG(result.st_mode):
        raise DataError(
            f"{path} is {kind_of(result.st_mode)}: data is read more than once; name a regular file"
        )
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} may not be read by this user; change its permissions")
    return result


def check_not_empty(path: Path) -> None:
    """Raise when the path is no regular file, or holds no byte."""
    if regular_file(path).st_size == 0:
        raise no_rows(path)


def no_rows(path: Path) -> DataError:
    """The error of a file without rows."""
    size_bytes = path.stat().st_size
    why = f"nothing but a header line, or empty lines, in its {size_bytes} bytes"
    return DataError(
        f"{path} holds no rows: {why if size_bytes else 'it is empty (0 bytes)'}\n"
        "  write the rows into it, or name the file that has them"
    )


def broken_file(path: Path, error: Exception, where: str = "") -> DataError:
    """The error of bytes that a reader could not make sense of."""
    reason = str(error).splitlines()[0].rstrip(".")
    place = f", {where}" if where else ""
    return DataError(
        f"{path}{place} cannot be read: {reason}\n"
        "  the file is truncated or of another format; fetch it again and compare its sha256"
    )


HEADER_BYTES = 1 << 20
"""The header line must end in these."""
_SNIFFED_BYTES = 4096


def header_names(path: Path, delimiter: str, *, quotes: bool = True) -> tuple[str, ...]:
    """The names in the first line of a text file."""
    import pyarrow as pa

    # The first bytes, which must be text.
    check_not_empty(path)
    try:
        with pa.input_stream(str(path)) as stream:
            head = stream.read(HEADER_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise broken_file(path, error) from error
    if other := _of_another_kind(head):
        raise DataError(f"{path} {other}")
    if (
        head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        or b"\0" in head[:_SNIFFED_BYTES]
    ):
        raise DataError(
            f"{path} is no UTF-8 text: it begins as UTF-16 or a binary file does;"
            " save it as UTF-8, or name a parquet file .parquet"
        )

    # The first line of them.
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

    # Its names.
    try:
        text = line.decode("utf-8-sig")
        if quotes:
            names = next(csv.reader([text], delimiter=delimiter, strict=True), [])
        else:
            names = text.split(delimiter) if text else []
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no UTF-8 text: {error.reason} at byte {error.start} of the header line;"
            " save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(f"{path}: the header line cannot be read: {error}; correct it") from error
    if not names:
        raise DataError(
            f"{path}: the first line is empty, and should hold the columns' names; write them"
            " there, or name them in the schema (header)"
        )
    return tuple(names)


_PACKED = {
    b"\x1f\x8b": (".gz", "gzip"),
    b"BZh": (".bz2", "bzip2"),
    b"\x28\xb5\x2f\xfd": (".zst", "zstd"),
}
"""First bytes of what is unpacked on the way where the name says so."""
_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\{\s*["}]|\[\s*[\[{])')


def _of_another_kind(head: bytes) -> str:
    """What a file is by its first bytes, where that is no delimited text, and what to do."""
    for start, (ending, kind) in _PACKED.items():
        if head.startswith(start):
            return f"is packed by {kind}, and not named so: let its name end in {ending}"
    if head.startswith(b"PAR1"):
        return "is a parquet file, and not named so: let its name end in .parquet"
    if head.startswith(b"PK\x03\x04"):
        return "is a zip archive (or a spreadsheet): unpack it, or save it as CSV"
    if _JSON.match(head):
        return (
            "holds JSON, which is not read: write parquet or CSV\n"
            "  (pandas.read_json(FILE, lines=True).to_parquet(NEW) does it for JSON lines)"
        )
    return ""


class OpenQuotes:
    """Looks at a file's bytes on their way to the parser; for files without line breaks in values.

    A quote opens a value at its beginning only, and a double quote inside is a quote. A parser
    takes a line whose last value is left open to go on in the next one, down to the next quote
    anywhere: rows vanish, and nobody is told.
    """

    def __init__(
        self, path: Path, delimiter: str, columns: int, *, header: bool, skipped: list[int] | None
    ) -> None:
        """``skipped``: such a line becomes one of too many columns, which the parser counts, and
        the number of its row is added here; None: it is a DataError with that number."""
        mark = re.escape(delimiter.encode())
        value = rb'(?:"[^"\n]*+(?:""[^"\n]*+)*+"|(?!"))[^%b\n]*+' % mark
        self._closed = re.compile(rb"(?:(?!\Z)%b(?:%b%b)*+(?:\n|\Z))*+" % (value, mark, value))
        self._path = path
        self._skipped = skipped
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
        if b'"' in block:
            block = self._without_open(block)
        self._rows += _rows_in(block)
        return block

    def _without_open(self, block: bytes) -> bytes:
        pieces = []
        done = 0
        while (closed := self._closed.match(block, done)) and closed.end() < len(block):
            start = closed.end()
            end = block.find(b"\n", start)
            end = len(block) if end < 0 else end
            row = self._rows + _rows_in(block[:start]) + 1
            if self._skipped is None:
                raise self._error(row, block[start:end])
            self._skipped.append(row)
            pieces += [block[done:start], self._broken]
            done = end
        return b"".join([*pieces, block[done:]])

    def _error(self, row: int, line: bytes) -> DataError:
        text = line.decode(errors="replace").rstrip("\r")
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return DataError(
            f"{self._path}, row {row}: {shown!r}; a quote is left open at the end of its line\n"
            "  close it, write a quote inside a value twice; train and evaluate can skip bad rows"
            " (--data.skip-bad-rows; they are counted); if values of this file do hold line"
            " breaks, add line_breaks = true to the schema; if quotes are characters like any"
            " other, quotes = false"
        )


_EMPTY = re.compile(rb"^\r?\n", re.MULTILINE)


def _rows_in(block: bytes) -> int:
    """Lines that are not empty, which no parser counts."""
    lines = block.count(b"\n") + (not block.endswith(b"\n") and bool(block))
    if block.startswith((b"\n", b"\r\n")) or b"\n\n" in block or b"\n\r\n" in block:
        lines -= len(_EMPTY.findall(block))
    return lines


def matching(folder: Path, name: str) -> list[Path]:
    """The file, or the pattern's files in the order of `by_number`; DataError where none is."""
    if url_of(name) is not None:
        return cached_files(name)
    if not any(sign in name for sign in "*?["):
        return [folder / name]
    try:
        found = [path for path in folder.glob(name) if path.is_file()]
    except (ValueError, NotImplementedError, RecursionError) as error:  # folders too deep
        raise DataError(f"{name!r} is no pattern of files in {folder}: {error}") from error
    if not found:
        raise DataError(f"no file in {folder} matches {name!r}\n  correct the pattern")
    return sorted(found, key=lambda path: by_number(str(path)))
