"""Rows of a file as they are read: pyarrow's columns, and these as numbers.

pyarrow has no type hints and takes 0.1 s to import: it is imported inside the functions, and its
objects are Any. Numbers are float64 for features and labels, exact whole numbers for ids. A text is
a number when it is written in ASCII digits, with a point and an exponent where needed; blanks
around it do not count. ``1_000`` and digits of other scripts, which Python would take, are not.
Shape letter: B rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.errors import DataError
from runtime.data.source import Part

RecordBatch = Any
"""A pyarrow.RecordBatch."""
ArrowArray = Any
"""A pyarrow.Array."""


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


def plain(array: ArrowArray) -> ArrowArray:
    """The array without dictionary coding."""
    import pyarrow.types as kinds

    return array.dictionary_decode() if kinds.is_dictionary(array.type) else array


def distinct(array: ArrowArray) -> tuple[list[Any], np.ndarray]:
    """The distinct values and, for every row, which one it has (one past the last: none)."""
    import pyarrow.compute as pc

    coded = array.dictionary_encode()
    values = coded.dictionary.to_pylist()
    return values, to_numpy(pc.fill_null(coded.indices, len(values)))


def is_text(kind: Any) -> bool:
    """Whether a pyarrow type holds texts."""
    import pyarrow.types as kinds

    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type holds lists."""
    import pyarrow.types as kinds

    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def to_numpy(array: ArrowArray) -> np.ndarray:
    """The values; an array without nulls of a plain type is not copied."""
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values


_WHOLE = re.compile(r"[+-]?[0-9]{1,40}(\.0*)?")
_ODD = re.compile(r"[^0-9eE+.\- \t]")


def number_of(text: str) -> float | None:
    """The number a text writes (NaN and infinities included), None when it writes none.

    >>> number_of(" 1.5e3 "), number_of("1_000"), number_of("1e400")
    (1500.0, None, inf)
    """
    if _ODD.search(text) and text.strip(" \t").lower().lstrip("+-") not in ("nan", "inf"):
        return None
    try:
        return float(text)
    except ValueError:
        return None


def whole_number_of(text: str) -> int | None:
    """The whole number a text writes, exactly and of any size up to 40 digits.

    >>> whole_number_of("9007199254740993"), whole_number_of("7.0"), whole_number_of("7.5")
    (9007199254740993, 7, None)
    """
    text = text.strip(" \t")
    return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else None


def numbers_of(
    array: ArrowArray, missing: Collection[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A column's numbers (float64 [B]), and where there is none and where it is no number (bool).

    An absent value, a NaN and a text of ``missing`` all count as none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = plain(array)
    if not is_text(array.type):
        is_number = kinds.is_primitive(array.type) or kinds.is_decimal(array.type)
        # A time is a number of what? Whoever means one must say so: store it as an integer.
        if kinds.is_temporal(array.type) or not (is_number or kinds.is_null(array.type)):
            return np.zeros(len(array)), np.zeros(len(array), bool), np.ones(len(array), bool)
        numbers = to_numpy(pc.fill_null(array.cast(pa.float64(), safe=False), np.nan))
        return numbers, np.isnan(numbers), np.zeros(len(array), bool)
    texts, which = distinct(array)
    parsed = np.full(len(texts) + 1, np.nan)
    bad = np.zeros(len(texts) + 1, bool)
    for place, text in enumerate(texts):
        if text in missing:
            continue
        number = number_of(text)
        if number is None:
            bad[place] = True
        else:
            parsed[place] = number
    numbers = parsed[which]
    return numbers, np.isnan(numbers) & ~bad[which], bad[which]


def whole_numbers_of(
    array: ArrowArray, missing: Collection[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A column's whole numbers, exactly; where there is none and where it is no such number.

    int64 or uint64 [B], or Python's integers where 64 bits do not hold all of them; 0 where there
    is none. Never by way of float64, which has no odd numbers above 2**53.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = plain(array)
    n_rows = len(array)
    if kinds.is_boolean(array.type):
        array = array.cast(pa.int64())
    if kinds.is_integer(array.type):
        wide = array.cast(pa.uint64() if array.type == pa.uint64() else pa.int64())
        return to_numpy(pc.fill_null(wide, 0)), to_numpy(array.is_null()), np.zeros(n_rows, bool)
    if kinds.is_floating(array.type):
        numbers = to_numpy(pc.fill_null(array.cast(pa.float64()), np.nan))
        absent = np.isnan(numbers)
        bad = ~absent & ((numbers != np.floor(numbers)) | (np.abs(numbers) >= 2.0**63))
        return np.where(absent | bad, 0.0, numbers).astype(np.int64), absent, bad
    if kinds.is_decimal(array.type):
        array = array.cast(pa.string())
    if not is_text(array.type):
        absent = np.full(n_rows, kinds.is_null(array.type))
        return np.zeros(n_rows, np.int64), absent, ~absent
    texts, which = distinct(array)
    parsed = [0 if text in missing else whole_number_of(text) for text in texts]
    absent = np.array([*(text in missing for text in texts), True])[which]
    bad = np.array([*(number is None for number in parsed), False])[which]
    whole = [number or 0 for number in [*parsed, 0]]
    fits = all(-(2**63) <= number < 2**63 for number in whole)
    return np.array(whole, np.int64 if fits else object)[which], absent, bad
