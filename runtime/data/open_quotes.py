"""Lines of a delimited text file whose quote is left open: each would swallow those behind it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from runtime.data.errors import DataError

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
