"""The names in the first line of a delimited text file, and the files that are no such text."""

from __future__ import annotations

import codecs
import csv
from pathlib import Path

from runtime.data.errors import DataError

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
