"""One column of a record batch becomes ids or numbers; bad values are marked, never mended.

Shape letters: B rows, N ids.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.data.ids import hash_integers, hash_text, hash_texts, join_hashes
from runtime.data.schema import Column

ArrowArray = Any
"""A pyarrow.Array."""
MISSING = np.uint64(hash_text(""))
"""The value hash of "no value": that of the empty text."""
LARGEST_FEATURE = float(np.finfo(np.float32).max)
"""Dense features are float32."""


@dataclass(frozen=True, slots=True)
class Values:
    """What one column holds for a chunk of rows."""

    data: np.ndarray
    """uint64 [N] value hashes (without the field's number), or float64 [B] numbers."""
    lengths: np.ndarray | None
    """int64 [B], ids of each row; None when each has exactly one."""
    bad: np.ndarray
    """bool [B], rows whose value breaks the rule."""
    rule: str
    """The rule in words, for the error."""


def column_values(
    column: Column, array: ArrowArray, other: ArrowArray | None, missing: Collection[str]
) -> Values:
    """Convert one column; ``other`` is the array of its ``with_column``."""
    match column.kind:
        case "numeric":
            return _numeric(column, array, missing)
        case "bucket":
            return _bucket(column, array, missing)
        case "multi" | "sequence":
            return _bags(column, array, missing)
        case "categorical":
            return _categorical(column, array, other, missing)


def zero_or_one(array: ArrowArray, missing: Collection[str]) -> Values:
    """A label column."""
    numbers, absent, bad = numbers_of(array, missing)
    bad |= absent | ~((numbers == 0) | (numbers == 1))
    return Values(numbers, None, bad, "a label must be 0 or 1")


def numbers_of(
    array: ArrowArray, missing: Collection[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A column's numbers (float64 [B]), and where there is none and where it is no number (bool).

    An absent value, a NaN and a text of ``missing`` all count as none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = _plain(array)
    if not _is_text(array.type):
        plain = kinds.is_primitive(array.type) or kinds.is_decimal(array.type)
        # A time is a number of what? Whoever means one must say so: store it as an integer.
        if kinds.is_temporal(array.type) or not (plain or kinds.is_null(array.type)):
            return np.zeros(len(array)), np.zeros(len(array), bool), np.ones(len(array), bool)
        numbers = _numpy(pc.fill_null(array.cast(pa.float64(), safe=False), np.nan))
        return numbers, np.isnan(numbers), np.zeros(len(array), bool)
    distinct, which = _distinct(array)
    parsed = np.full(len(distinct) + 1, np.nan)
    bad = np.zeros(len(distinct) + 1, bool)
    for place, text in enumerate(distinct):
        if text in missing:
            continue
        try:
            parsed[place] = float(text)
        except ValueError:
            bad[place] = True
    numbers = parsed[which]
    return numbers, np.isnan(numbers) & ~bad[which], bad[which]


def _numeric(column: Column, array: ArrowArray, missing: Collection[str]) -> Values:
    numbers, absent, bad = numbers_of(array, missing)
    rule = "a numeric column needs a finite number that float32 can hold"
    if column.fill is None:
        bad |= absent
        rule += " (or `fill`, the value of an absent one)"
    else:
        numbers = np.where(absent, column.fill, numbers)
    bad |= np.isinf(numbers)
    if column.log:
        numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
    bad |= np.abs(numbers) > LARGEST_FEATURE
    return Values(np.where(bad, 0.0, numbers), None, bad, rule)


def _bucket(column: Column, array: ArrowArray, missing: Collection[str]) -> Values:
    numbers, absent, bad = numbers_of(array, missing)
    bad |= np.isinf(numbers)
    finite = np.where(absent | bad, 0.0, numbers)
    steps = np.sign(finite) * np.floor(column.buckets_per_e * np.log1p(np.abs(finite)))
    hashes = np.where(absent, MISSING, hash_integers(steps))
    return Values(hashes, None, bad, "a bucket column needs a number")


def _categorical(
    column: Column, array: ArrowArray, other: ArrowArray | None, missing: Collection[str]
) -> Values:
    if column.max_id is None and column.modulo is None:
        hashes, bad, rule = _hashes(array, missing), np.zeros(len(array), bool), ""
    else:
        numbers, absent, bad = numbers_of(array, missing)
        bad |= ~absent & (numbers != np.floor(numbers))
        rule = "the value must be a whole number"
        if column.max_id is not None:
            bad |= ~absent & ((numbers < 0) | (numbers > column.max_id))
            rule += f" from 0 to {column.max_id}"
        whole = np.where(absent | bad, 0.0, numbers).astype(np.int64)
        if column.modulo is not None:
            whole %= column.modulo
        hashes = np.where(absent, MISSING, hash_integers(whole))
    if other is not None:
        hashes = join_hashes(hashes, _hashes(other, missing))
    return Values(hashes, None, bad, rule)


def _bags(column: Column, array: ArrowArray, missing: Collection[str]) -> Values:
    import pyarrow.compute as pc

    array = _plain(array)
    none_bad = np.zeros(len(array), bool)
    if _is_text(array.type):
        array = pc.split_pattern(array, column.separator)
    elif not _is_list(array.type):
        return _bad_everywhere(array, "a multi or sequence column needs a list, or text")
    inner = array.flatten()
    hashes = _hashes(pc.utf8_trim_whitespace(inner) if _is_text(inner.type) else inner, missing)
    lengths = _numpy(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    # A row without ids holds the one id "missing": no bag is empty, every pooling is defined.
    starts = np.cumsum(lengths) - lengths
    hashes = np.insert(hashes, starts[lengths == 0], MISSING)
    lengths = np.maximum(lengths, 1)
    if column.kind == "sequence" and lengths.max(initial=0) > column.max_length:
        kept = np.minimum(lengths, column.max_length)
        place = np.arange(len(hashes)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        hashes, lengths = hashes[place < column.max_length], kept
    return Values(hashes, lengths, none_bad, "")


def _bad_everywhere(array: ArrowArray, rule: str) -> Values:
    n_rows = len(array)
    return Values(np.full(n_rows, MISSING), None, np.ones(n_rows, bool), rule)


def _hashes(array: ArrowArray, missing: Collection[str]) -> np.ndarray:
    """uint64 [B] hashes of single values of any type that has a text form."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = _plain(array)
    if kinds.is_integer(array.type) and array.type != pa.uint64():
        hashes = hash_integers(_numpy(pc.fill_null(array, 0)))
        return np.where(_numpy(array.is_null()), MISSING, hashes) if array.null_count else hashes
    if kinds.is_floating(array.type):
        texts = [repr(x) for x in _numpy(pc.fill_null(array, np.nan)).astype(float).tolist()]
        array = pa.array([None if text == "nan" else text for text in texts], pa.string())
    elif not _is_text(array.type):
        array = array.cast(pa.string())
    distinct, which = _distinct(array)
    table = np.append(hash_texts(distinct), MISSING)
    for place, text in enumerate(distinct):
        if text in missing:
            table[place] = MISSING
    return np.take(table, which)


def _distinct(array: ArrowArray) -> tuple[list[str], np.ndarray]:
    """The distinct texts and, for every row, which one it has (one past the last: none)."""
    import pyarrow.compute as pc

    coded = array.dictionary_encode()
    distinct = coded.dictionary.to_pylist()
    return distinct, _numpy(pc.fill_null(coded.indices, len(distinct)))


def _plain(array: ArrowArray) -> ArrowArray:
    """The array without dictionary coding."""
    import pyarrow.types as kinds

    return array.dictionary_decode() if kinds.is_dictionary(array.type) else array


def _is_text(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_string(kind) or kinds.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _numpy(array: ArrowArray) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
