"""Text formats of other libraries, read as tables: RecBole's atomic files, libsvm and ffm.

recbole   columns between tabs; the first line names them with their types: user_id:token
libsvm    label index:value index:value ...            columns: label, features, INDEX:value
ffm       label field:feature:value ...                columns: label, FIELD, FIELD:value

In libsvm and ffm an entry of value 0 is absent, a label -1 is 0, and a line whose first entry holds
a colon has no label. "features" are the indexes of a line that have no column of their own; what
values they have does not count. FIELD are the features of one field, INDEX:value and FIELD:value
are a value itself.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from runtime.data.errors import DataError, broken_file, check_not_empty, header_names

Format = Literal["recbole", "libsvm", "ffm"]
TYPES = ("token", "token_seq", "float", "float_seq")
"""Types of the columns of an atomic file."""
LABEL = "label"
FEATURES = "features"
VALUE = ":value"
ROWS_PER_BATCH = 16_384
_NUMBER = r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?"
_LIBSVM = re.compile(rf"({_NUMBER}[ \t]+)?[^\s:]+:{_NUMBER}([ \t]+[^\s:]+:{_NUMBER})*\s*", re.ASCII)
_FFM = re.compile(
    rf"({_NUMBER}[ \t]+)?[^\s:]+:[^\s:]+:{_NUMBER}([ \t]+[^\s:]+:[^\s:]+:{_NUMBER})*\s*", re.ASCII
)


def recognised(path: Path) -> Format | None:
    """The format of a text file by its first line; None of one that is delimited."""
    try:
        line = next(_lines(path), "")
    except DataError:
        return None
    names = line.rstrip("\r\n").split("\t")
    if all(name.rpartition(":")[2] in TYPES for name in names):
        return "recbole"
    if _FFM.fullmatch(line):
        return "ffm"
    return "libsvm" if _LIBSVM.fullmatch(line) else None


def atomic_columns(path: Path) -> dict[str, str]:
    """Name -> type of the columns of an atomic file; DataError for a name without its type."""
    result = {}
    for written in header_names(path, "\t", quotes=False):
        name, _, kind = written.rpartition(":")
        if kind not in TYPES or not name:
            raise DataError(
                f"{path}: column {written!r} has no type; an atomic file names each as NAME:TYPE,"
                f" and TYPE is one of {', '.join(TYPES)}"
            )
        if name in result:
            raise DataError(f"{path} has two columns {name!r}; give them different names")
        result[name] = kind
    return result


class SparseLine(NamedTuple):
    """A line of a libsvm or ffm file."""

    label: str | None
    entries: list[tuple[str, str, float]]
    """Field (of libsvm empty), feature and value; those of value 0 are left out."""


def sparse_line(line: str, form: Format) -> SparseLine:
    """What a line says; ValueError in words for one that is none of the format."""
    words = line.partition("#")[0].split()
    label = words.pop(0) if words and ":" not in words[0] else None
    if label is not None:
        number = float(label)
        label = "0" if number == -1 else label

    # Each entry is a feature and its value, of ffm behind its field.
    entries = []
    for word in words:
        parts = word.split(":")
        if len(parts) != (3 if form == "ffm" else 2) or not all(parts):
            shape = "field:feature:value" if form == "ffm" else "index:value"
            raise ValueError(f"{word!r} is no {shape}")
        value = float(parts[-1])
        if value:
            entries.append((parts[0] if form == "ffm" else "", parts[-2], value))
    return SparseLine(label, entries)


def sparse_lines(path: Path, form: Format) -> Iterator[tuple[int, SparseLine | str]]:
    """Number and content of every line that is not empty, or why it cannot be read."""
    for number, line in enumerate((line for line in _lines(path) if line.strip()), 1):
        try:
            yield number, sparse_line(line, form)
        except ValueError as error:
            yield number, str(error)


def sparse_names(path: Path, form: Format) -> tuple[str, ...]:
    """Columns that the first line shows; any other INDEX:value, FIELD or FIELD:value may be asked
    for as well."""
    line = next(_lines(path), "")
    try:
        first = sparse_line(line, form)
    except ValueError as error:
        raise DataError(f"{path}, row 1: {error}; is it {form}?") from None
    labels = [LABEL] if first.label is not None else []
    if form == "libsvm":
        return (*labels, FEATURES, *(f"{index}{VALUE}" for _, index, _ in first.entries))
    fields = dict.fromkeys(field for field, _, _ in first.entries)
    return (*labels, *fields, *(f"{field}{VALUE}" for field in fields))


def sparse_batches(
    path: Path, form: Format, names: Sequence[str], skipped: list[int] | None
) -> Iterator[tuple[Any, np.ndarray]]:
    """The named columns as texts, batch by batch, and the numbers of their lines. ``skipped``
    takes the numbers of lines that cannot be read; None: the first one is a DataError."""
    import pyarrow as pa

    # Values with a column of their own are no features; lines come in pieces of a bounded size.
    apart = {name.removesuffix(VALUE) for name in names if name.endswith(VALUE)}
    lines = sparse_lines(path, form)
    while piece := list(islice(lines, ROWS_PER_BATCH)):
        numbers = list[int]()
        rows = list[SparseLine]()
        for number, row in piece:
            if isinstance(row, SparseLine):
                numbers.append(number)
                rows.append(row)
            elif skipped is None:
                raise DataError(
                    f"{path}, row {number}: {row}\n  correct the line; train and evaluate can skip"
                    " bad rows (--data.skip-bad-rows)"
                )
            else:
                skipped.append(number)
        # The lines that can be read, as columns of texts.
        texts = [_texts_of(row, form, apart) for row in rows]
        columns = {name: pa.array([t.get(name, "") for t in texts], pa.string()) for name in names}
        yield pa.RecordBatch.from_pydict(columns), np.array(numbers, np.int64)


def _texts_of(row: SparseLine, form: Format, apart: set[str]) -> dict[str, str]:
    """Column -> text of one line; features of a column stand between blanks."""
    features: dict[str, list[str]] = {}
    result = {LABEL: row.label or ""}
    for field, feature, value in row.entries:
        place = field if form == "ffm" else feature
        result[f"{place}{VALUE}"] = repr(value)
        if form == "ffm":
            features.setdefault(field, []).append(feature)
        elif place not in apart:
            features.setdefault(FEATURES, []).append(feature)
    return result | {name: " ".join(ids) for name, ids in features.items()}


def _lines(path: Path) -> Iterator[str]:
    import pyarrow as pa

    check_not_empty(path)
    try:
        with io.TextIOWrapper(pa.input_stream(str(path)), encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error.reason}; save it as UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        raise broken_file(path, error) from error
