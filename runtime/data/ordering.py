"""Before or from a threshold on: numbers compare as numbers, dates and times as instants.

Exactly: whole numbers of 64 bits are not rounded, times are compared to the microsecond. A time
with a zone compares with times that have one, a time without with times without.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np

from runtime.data.arrow_arrays import ArrowArray, distinct, is_text, plain, to_numpy
from runtime.data.numerals import number_of, whole_number_of

Threshold = int | float | datetime
"""A number, or an instant (a date is its midnight)."""

_ISO = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII
)
FORMS = "YYYY-MM-DD, also with HH:MM:SS"
"""How dates and times are written."""


def threshold_of(value: int | float | str | date) -> Threshold:
    """What a value of the user's means; ValueError when it is neither a number nor a date.

    >>> threshold_of("20130209"), threshold_of("2013-02-09")
    (20130209, datetime.datetime(2013, 2, 9, 0, 0))
    """
    found: Threshold | None
    if isinstance(value, str):
        found = _number(value)
        found = _instant(value) if found is None else found
    elif isinstance(value, datetime) or not isinstance(value, date):
        found = value
    else:
        found = datetime(value.year, value.month, value.day)
    if isinstance(found, int | float) and not -(2.0**63) <= found < 2.0**64:  # NaN is not, either
        found = None
    if found is None:
        raise ValueError(
            f"test_from must be a number that 64 bits hold, or a date ({FORMS}), got {value!r};"
            " to test the rows that hold one text, write test_equals"
        )
    return found


def at_least(
    array: ArrowArray, threshold: Threshold, missing: Collection[str]
) -> tuple[np.ndarray, np.ndarray]:
    """bool [B], whether each value is the threshold or above it; bool [B], whether it is no value
    that compares with it."""
    array = plain(array)
    if is_text(array.type):
        values, which = distinct(array)
        read = _number if not isinstance(threshold, datetime) else _instant
        parsed = [None if text in missing else read(text) for text in values]
        usable = [_comparable(value, threshold) for value in parsed]
        reached = [
            ok and value >= threshold  # type: ignore[operator]
            for ok, value in zip(usable, parsed, strict=True)
        ]
        return np.array([*reached, False])[which], ~np.array([*usable, False])[which]
    compare = _numbers_reach if not isinstance(threshold, datetime) else _instants_reach
    found = compare(array, threshold)
    if found is None:
        return np.zeros(len(array), bool), np.ones(len(array), bool)
    return found


def _number(text: str) -> int | float | None:
    whole = whole_number_of(text)
    number = number_of(text) if whole is None else whole
    return number if number is not None and math.isfinite(number) else None


def _instant(text: str) -> datetime | None:
    if not _ISO.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # 2013-02-30
        return None


def _comparable(value: Any, threshold: Threshold) -> bool:
    if value is None or not isinstance(threshold, datetime):
        return value is not None
    return (value.tzinfo is None) == (threshold.tzinfo is None)


def _numbers_reach(array: ArrowArray, threshold: Any) -> tuple[np.ndarray, np.ndarray] | None:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if kinds.is_boolean(array.type):
        array = array.cast(pa.int8())
    if kinds.is_integer(array.type):
        values = to_numpy(pc.fill_null(array, 0))
        return values >= math.ceil(threshold), to_numpy(array.is_null())
    if kinds.is_floating(array.type):
        numbers = to_numpy(pc.fill_null(array.cast(pa.float64()), np.nan))
        least = float(threshold)
        if least < threshold:  # the smallest float64 that is not below
            least = math.nextafter(least, math.inf)
        return numbers >= least, ~np.isfinite(numbers)
    if kinds.is_decimal(array.type):
        decimals, which = distinct(array)
        reached = [value >= threshold for value in decimals]
        return np.array([*reached, False])[which], which == len(decimals)
    return None


def _instants_reach(array: ArrowArray, threshold: Any) -> tuple[np.ndarray, np.ndarray] | None:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    zoned = kinds.is_timestamp(array.type) and array.type.tz is not None
    if not (kinds.is_date(array.type) or kinds.is_timestamp(array.type)):
        return None
    if zoned != (threshold.tzinfo is not None):
        return None
    finer = kinds.is_timestamp(array.type) and array.type.unit == "ns"
    try:
        zone = array.type.tz if zoned else None
        instants = array.cast(pa.timestamp("us", zone), safe=not finer)
    except pa.ArrowInvalid:  # a year that microseconds of 64 bits do not reach
        return None
    epoch = datetime(1970, 1, 1, tzinfo=UTC if zoned else None)
    least_us = (threshold - epoch) // timedelta(microseconds=1)
    values = to_numpy(pc.fill_null(instants.cast(pa.int64()), 0))
    return values >= least_us, to_numpy(array.is_null())
