"""Delimited text as a stream of record batches of pyarrow, whose own threads read ahead."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from runtime.data.rows import RecordBatch

LONGEST_BLOCK_S = 10.0
"""How long a file's end waits for a block that is still read ahead."""


def delimited_batches(
    path: Path,
    columns: Sequence[str],
    names: Sequence[str],
    *,
    delimiter: str,
    block_bytes: int,
    skip_lines: int,
    quotes: bool,
    line_breaks: bool,
    unpacked: Callable[[Any], Any] | None,
    on_broken: Callable[[Any], str] | None,
) -> Generator[RecordBatch]:
    """The columns ``names``, of all ``columns`` of the file, every value a text.

    ``unpacked`` changes each block of the file before it is parsed; ``on_broken`` is told of a line
    that has another number of columns, and says "skip". Without it such a line, as any other that
    cannot be parsed, raises pyarrow's error.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    lent = _Lent()
    stream = pa.input_stream(str(path))
    if unpacked is not None:
        stream = pa.lib.TransformInputStream(stream, lent.to(unpacked))
    reader = None
    try:
        with _warned_once():
            # Every value stays a text: the schema says what it means, not pyarrow's guess.
            reader = arrow_csv.open_csv(
                stream,
                read_options=arrow_csv.ReadOptions(
                    use_threads=False,
                    block_size=block_bytes,
                    column_names=list(columns),
                    skip_rows=skip_lines,
                ),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=delimiter,
                    quote_char='"' if quotes else False,
                    invalid_row_handler=None if on_broken is None else lent.to(on_broken),
                    newlines_in_values=line_breaks,
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types={name: pa.string() for name in names},
                    include_columns=list(names),
                    strings_can_be_null=False,
                ),
            )
        while True:
            with _warned_once():
                if (batch := next(reader, None)) is None:
                    break
            yield batch
    finally:
        stream = reader = None
        lent.wait()


class _Lent:
    """Functions that pyarrow's own threads call while they read ahead, until all are given back.

    A reader that ends or is left lets go of them in such a thread, a little later. The process
    aborts ("terminate called without an active exception") where Python has ended by then.
    """

    def __init__(self) -> None:
        self._back: list[threading.Event] = []

    def to(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as pyarrow may hold it; nobody else may."""
        lent, back = partial(function), threading.Event()
        weakref.finalize(lent, back.set).atexit = False
        self._back.append(back)
        return lent

    def wait(self) -> None:
        """Wait for the last block that is read ahead, but not for a disk that stands still."""
        for back in self._back:
            back.wait(LONGEST_BLOCK_S)


@contextmanager
def _warned_once() -> Iterator[None]:
    """Hide what pyarrow prints of a broken line that is no UTF-8: it fails to tell our handler, and
    prints a traceback of that before it raises the error that we turn into words."""
    usual = sys.unraisablehook

    def without_pyarrows(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, UnicodeDecodeError):
            usual(unraisable)

    sys.unraisablehook = without_pyarrows
    try:
        yield
    finally:
        sys.unraisablehook = usual
