"""One column of a record batch becomes ids or numbers; bad values are marked, never mended.

Shape letters: B rows, N ids.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from runtime.data.ids import MISSING, hash_integers, hash_texts, join_hashes
from runtime.data.rows import (
    ArrowArray,
    is_list,
    is_text,
    numbers_of,
    plain,
    to_numpy,
    whole_numbers_of,
    written,
)
from runtime.data.schema import LARGEST_FEATURE, Column, Schema

_NO_NUL = "a text must hold no NUL byte; is the file binary, or UTF-16?"


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


def label_values(schema: Schema, name: str, array: ArrowArray) -> Values:
    """A column of labels, or of weights; NaN where an optional label is absent."""
    # What a value must be: a weight, a number, or one of two classes.
    numbers, absent, bad = numbers_of(array, schema.missing)
    finite = np.abs(numbers) <= LARGEST_FEATURE
    if name == schema.weight:
        good = finite & (numbers >= 0)
        rule = "a weight must be a finite number >= 0"
    elif name in (schema.regression or ()):
        good = finite
        rule = "a label of a regression must be a finite number"
    else:
        good = (numbers == 0) | (numbers == 1)
        # Who skips all 2 of the labels 1 and 2 keeps one class, and reads it as the other.
        rule = "a label must be 0 or 1, and other classes are made these, not skipped"
    # Whether a row may lack it.
    if name in (schema.optional or ()):
        good |= absent
        rule += ", or one of the schema's missing"
    elif name != schema.weight:
        good &= ~absent
        rule += " (where rows may lack it: `optional`, and its word in `missing`)"
    else:
        good &= ~absent
    return Values(numbers, None, bad | ~good, rule)


def _numeric(column: Column, array: ArrowArray, missing: Collection[str]) -> Values:
    numbers, absent, bad = numbers_of(array, missing)
    rule = "a numeric column needs a finite number that float32 can hold"
    bad |= np.abs(numbers) > LARGEST_FEATURE  # as it stands there, not only its logarithm
    if column.fill is None:
        bad |= absent
        rule += " (or `fill`, the value of an absent one)"
    else:
        numbers = np.where(absent, column.fill, numbers)
    if column.log:
        numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
    return Values(np.where(bad, 0.0, numbers), None, bad, rule)


def _bucket(column: Column, array: ArrowArray, missing: Collection[str]) -> Values:
    numbers, absent, bad = numbers_of(array, missing)
    bad |= np.isinf(numbers)
    finite = np.where(absent | bad, 0.0, numbers)
    assert column.buckets_per_e is not None  # filled in by the column's own check
    steps = np.sign(finite) * np.floor(column.buckets_per_e * np.log1p(np.abs(finite)))
    hashes = np.where(absent, MISSING, hash_integers(steps))
    return Values(hashes, None, bad, "a bucket column needs a finite number")


def _categorical(
    column: Column, array: ArrowArray, other: ArrowArray | None, missing: Collection[str]
) -> Values:
    if column.modulo is None:
        hashes = _hashes(array, missing)
        bad = _holds_nul(array)
        rule = _NO_NUL
    else:
        whole, absent, bad = whole_numbers_of(array, missing)
        rule = "the value must be a whole number"
        # Whatever was wider than 64 bits is not as a remainder.
        whole = np.where(absent | bad, 0, whole) % column.modulo
        hashes = np.where(absent, MISSING, hash_integers(whole.astype(np.int64)))
    if other is not None:
        hashes = join_hashes(hashes, _hashes(other, missing))
        bad = bad | _holds_nul(other)
    return Values(hashes, None, bad, rule)


def _bags(column: Column, array: ArrowArray, missing: Collection[str]) -> Values:
    import pyarrow as pa
    import pyarrow.compute as pc

    array = plain(array)
    if array.null_count == len(array):  # nothing says of what type the absent lists are
        array = pa.nulls(len(array), pa.string())
    bad = _holds_nul(array)
    if is_text(array.type):
        array = pc.split_pattern(array, column.separator)
    elif not is_list(array.type):
        rule = "a multi or sequence column needs a list, or text"
        return Values(np.full(len(array), MISSING), None, np.ones(len(array), bool), rule)
    inner = array.flatten()
    hashes = _hashes(inner, missing)
    lengths = to_numpy(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    # A row without ids holds the one id "missing": no bag is empty, every pooling is defined.
    starts = np.cumsum(lengths) - lengths
    hashes = np.insert(hashes, starts[lengths == 0], MISSING)
    lengths = np.maximum(lengths, 1)
    most = column.max_length
    if most is not None and lengths.max(initial=0) > most:
        left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(hashes))  # 1 for the last id
        hashes = hashes[left <= most]
        lengths = np.minimum(lengths, most)
    return Values(hashes, lengths, bad, _NO_NUL)


def _holds_nul(array: ArrowArray) -> np.ndarray:
    """bool [B], where a text holds a NUL byte: a sign of a binary file, never of an id."""
    import pyarrow.compute as pc

    array = plain(array)
    if not is_text(array.type):
        return np.zeros(len(array), bool)
    return to_numpy(pc.fill_null(pc.match_substring(array, "\0"), False))


def _hashes(array: ArrowArray, missing: Collection[str]) -> np.ndarray:
    """uint64 [B] hashes of single values of any type that has a text form: of what is `written`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = plain(array, missing)
    if kinds.is_integer(array.type) and array.type != pa.uint64():
        hashes = hash_integers(to_numpy(pc.fill_null(array, 0)))
        return np.where(to_numpy(array.is_null()), MISSING, hashes) if array.null_count else hashes
    texts, which = written(array, missing)
    return np.take(np.append(hash_texts(texts), MISSING), which)
