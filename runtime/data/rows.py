"""Rows of a file as they are read, and their columns as numbers, whole numbers and instants.

pyarrow has no type hints and takes 0.1 s to import: it is imported inside the functions, and its
objects are Any. Numbers are float64 for features and labels, exact whole numbers for ids. A text is
a number when it is written in ASCII digits, with a point and an exponent where needed; blanks
around it do not count. ``1_000`` and digits of other scripts, which Python would take, are not.
Times compare to the microsecond, those with a zone with such alone. One value is one text, whatever
type holds it (`written`): of that are ids made, keys of joins and values of a split.
Shape letter: B rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np

from runtime.data.errors import DataError
from runtime.data.ids import canonical
from runtime.data.source import Part

RecordBatch = Any
"""A pyarrow.RecordBatch."""
ArrowArray = Any
"""A pyarrow.Array."""
Threshold = int | float | datetime
"""A number, or an instant (a date is its midnight)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of a file and their numbers in it."""

    table: RecordBatch
    numbers: np.ndarray
    """int64 [B], counted from 1 in their file, the header line not counted."""
    path: Path
    """The file."""
    rows_before: int = 0
    """Rows of the files before it, where several make one table."""
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


def plain(array: ArrowArray, missing: Collection[str] = ()) -> ArrowArray:
    """The array without dictionary coding; one of nulls alone, which has no type, as texts. Of
    numbers, those that a text of ``missing`` writes are null."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if kinds.is_null(array.type):
        return array.cast(pa.string())
    array = array.dictionary_decode() if kinds.is_dictionary(array.type) else array
    none = {_finite(text) for text in missing} - {None}
    numeric = (kinds.is_integer, kinds.is_floating, kinds.is_decimal)
    if not none or not any(is_kind(array.type) for is_kind in numeric):
        return array
    values, which = distinct(array)
    gone = np.array([*(value in none for value in values), False])[which]
    return pc.if_else(pa.array(gone), pa.scalar(None, array.type), array)


def written(array: ArrowArray, missing: Collection[str] = ()) -> tuple[list[str], np.ndarray]:
    """Texts of the values and, for every row, which one it has (one past the last: none).

    Equal values have equal texts, whatever types hold them: those of `canonical`. A NaN is none, as
    is what ``missing`` lists. pyarrow raises for a type without texts, such as a list.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = plain(array, missing)
    if kinds.is_decimal(array.type):  # pyarrow encodes the wide ones alone
        array = array.cast(pa.decimal256(76, array.type.scale))
    coded = array.dictionary_encode()
    values = coded.dictionary
    kind = array.type

    # A text for each distinct value, by the kind of its type.
    texts: list[str | None] = []
    if kinds.is_floating(kind):
        texts += map(_number_text, to_numpy(values).astype(float).tolist())
    elif kinds.is_decimal(kind):
        texts += map(_decimal_text, values.to_pylist())
    elif kinds.is_boolean(kind):  # as pandas writes them to a CSV
        texts += map(str, values.to_pylist())
    elif kinds.is_duration(kind):
        texts += (canonical(str(span)) for span in values.to_pandas())
    else:  # texts, around which blanks do not count, whole numbers, days, instants
        if kinds.is_timestamp(kind) and kind.tz is not None:  # old offsets have seconds
            values = values.cast(pa.timestamp(kind.unit, "UTC"))
        texts += (canonical(text.strip()) for text in values.cast(pa.string()).to_pylist())

    # Rows of no value have a number of their own.
    none = no_values(missing)
    gone = np.array([*(text is None or text in none for text in texts), True])
    which = to_numpy(pc.fill_null(coded.indices, len(texts)))
    return [text or "" for text in texts], np.where(gone[which], len(texts), which)


def _number_text(value: float) -> str | None:
    """Python's shortest, of a whole number its digits; None for a NaN.

    >>> _number_text(1e16), _number_text(-0.0), _number_text(0.1), _number_text(math.inf)
    ('10000000000000000', '0', '0.1', 'inf')
    """
    if math.isnan(value):
        return None
    return str(int(value)) if value.is_integer() else repr(value)


def _decimal_text(value: Decimal) -> str:
    """The text of the float that is written so, where there is one.

    >>> [_decimal_text(Decimal(text)) for text in ("7.00", "0.10", "0.00001", "-0.00")]
    ['7', '0.1', '1e-05', '0']
    """
    if value == value.to_integral_value():
        return str(int(value))
    shortest = repr(float(value))
    return shortest if Decimal(shortest) == value else format(value, "f").rstrip("0")


def key_texts(array: ArrowArray) -> ArrowArray:
    """What keys of two tables are compared by: 7, 7.0 and " 7" are one key, as they are one id."""
    import pyarrow as pa

    texts, which = written(array)
    return pa.array([*texts, None], pa.string()).take(pa.array(which))


def no_values(missing: Collection[str]) -> frozenset[str]:
    """The texts that say that there is no value, as `canonical` has them."""
    return frozenset(canonical(text.strip()) for text in missing)


def is_none(text: str, none: frozenset[str]) -> bool:
    """Whether a text is one of `no_values`; blanks around it do not count."""
    return canonical(text.strip()) in none


def absent_share(array: ArrowArray, missing: Collection[str]) -> float:
    """The share of rows without a value; of lists, of those that are empty."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = plain(array, missing)
    if is_text(array.type) or kinds.is_temporal(array.type):
        texts, which = written(array, missing)
        return float((which == len(texts)).mean())
    absent = pc.is_null(array, nan_is_null=kinds.is_floating(array.type))
    if is_list(array.type):
        absent = pc.or_(absent, pc.equal(pc.fill_null(pc.list_value_length(array), 0), 0))
    return float(to_numpy(absent).mean())


def why_bad(rule: str, array: ArrowArray, place: int, missing: Collection[str]) -> str:
    """The rule that a value breaks, and whether it does so because ``missing`` lists the value."""
    one = array[place:][:1]
    listed = absent_share(one, missing) > absent_share(one, ())
    return f"{rule}, and the schema's missing lists this one as no value" if listed else rule


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
    return cast(np.ndarray, array.to_numpy(zero_copy_only=False))


_WHOLE = re.compile(r"[+-]?[0-9]{1,40}(\.0*)?")
_ODD = re.compile(r"[^0-9eE+.\- \t]")
_ISO = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?", re.ASCII
)
FORMS = "YYYY-MM-DD, also with HH:MM:SS"
"""How dates and times are written."""


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


def threshold_of(value: int | float | str | date) -> Threshold:
    """What a value of the user's means; ValueError when it is neither a number nor a date.

    >>> threshold_of("20130209"), threshold_of("2013-02-09")
    (20130209, datetime.datetime(2013, 2, 9, 0, 0))
    """
    # A text is a number if it can be one, else a date.
    result: Threshold | None
    if isinstance(value, str):
        result = _finite(value)
        result = _instant(value) if result is None else result
    elif isinstance(value, datetime) or not isinstance(value, date):
        result = value
    else:
        result = datetime(value.year, value.month, value.day)

    # What 64 bits do not hold cannot be compared exactly.
    if isinstance(result, int | float) and not -(2.0**63) <= result < 2.0**64:  # NaN is not, either
        result = None
    if result is None:
        raise ValueError(
            f"test_from must be a number that 64 bits hold, or a date ({FORMS}), got {value!r};"
            " to test the rows that hold one text, write test_equals"
        )
    return result


def _finite(text: str) -> int | float | None:
    whole = whole_number_of(text)
    number = number_of(text) if whole is None else whole
    return number if number is not None and math.isfinite(number) else None


def _instant(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if _ISO.fullmatch(text) else None
    except ValueError:  # 2013-02-30
        return None


def _comparable(text: str, threshold: Threshold) -> Any:
    """What the text writes, None when it does not compare with the threshold."""
    if not isinstance(threshold, datetime):
        return _finite(text)
    instant = _instant(text)
    same = instant is not None and (instant.tzinfo is None) == (threshold.tzinfo is None)
    return instant if same else None


def numbers_of(
    array: ArrowArray, missing: Collection[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A column's numbers (float64 [B]), and where there is none and where it is no number (bool).

    An absent value, a NaN and a text of ``missing`` all count as none.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    array = plain(array, missing)
    if is_text(array.type):
        texts, which = distinct(array)
        none = no_values(missing)
        parsed = [math.nan if is_none(t, none) else number_of(t) for t in texts] + [math.nan]
        bad = np.array([number is None for number in parsed])[which]
        numbers = np.array(parsed, float)[which]  # None is a NaN, too
        return numbers, np.isnan(numbers) & ~bad, bad
    nowhere = np.zeros(len(array), bool)
    is_number = kinds.is_primitive(array.type) or kinds.is_decimal(array.type)
    # A time is a number of what? Whoever means one must say so: store it as an integer.
    if kinds.is_temporal(array.type) or not is_number:
        return np.zeros(len(array)), nowhere, ~nowhere
    numbers = to_numpy(pc.fill_null(array.cast(pa.float64(), safe=False), np.nan))
    return numbers, np.isnan(numbers), nowhere


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

    # Integers as they are.
    array = plain(array, missing)
    if kinds.is_decimal(array.type):
        array = array.cast(pa.string())
    nowhere = np.zeros(len(array), bool)
    if kinds.is_boolean(array.type) or kinds.is_integer(array.type):
        wide = array.cast(pa.uint64() if array.type == pa.uint64() else pa.int64())
        return to_numpy(pc.fill_null(wide, 0)), to_numpy(array.is_null()), nowhere

    # Floats where they are whole, and small enough that float64 has every one.
    if kinds.is_floating(array.type):
        numbers = to_numpy(pc.fill_null(array.cast(pa.float64()), np.nan))
        absent = np.isnan(numbers)
        bad = ~absent & ((numbers != np.floor(numbers)) | (np.abs(numbers) >= 2.0**63))
        return np.where(absent | bad, 0.0, numbers).astype(np.int64), absent, bad
    if not is_text(array.type):
        return nowhere.astype(np.int64), nowhere, ~nowhere

    # Texts: each distinct one is parsed once.
    texts, which = distinct(array)
    none = no_values(missing)
    gone = [is_none(text, none) for text in texts]
    parsed = [0 if no else whole_number_of(t) for t, no in zip(texts, gone, strict=True)]
    absent = np.array([*gone, True])[which]
    bad = np.array([*(number is None for number in parsed), False])[which]
    whole = [number or 0 for number in [*parsed, 0]]
    fits = all(-(2**63) <= number < 2**63 for number in whole)
    return np.array(whole, np.int64 if fits else object)[which], absent, bad


def equals(array: ArrowArray, text: str, missing: Collection[str]) -> tuple[np.ndarray, np.ndarray]:
    """bool [B], whether each value is the one that ``text`` writes; bool [B], whether it is none,
    or a list or the like, which is never written so."""
    import pyarrow as pa

    try:
        texts, which = written(array, missing)
    except pa.ArrowException:
        return _nothing_compares(array)
    same = np.array([*(value == canonical(text.strip()) for value in texts), False])
    return same[which], which == len(texts)


def at_least(
    array: ArrowArray, threshold: Threshold, missing: Collection[str]
) -> tuple[np.ndarray, np.ndarray]:
    """bool [B], whether each value is the threshold or above it; bool [B], whether it is no value
    that compares with it. Whole numbers of 64 bits are not rounded."""
    import pyarrow as pa
    import pyarrow.types as kinds

    array = plain(array, missing)
    if kinds.is_decimal(array.type):
        array = array.cast(pa.string())
    if is_text(array.type):
        texts, which = distinct(array)
        none = no_values(missing)
        parsed = [None if is_none(t, none) else _comparable(t, threshold) for t in texts]
        parsed.append(None)
        reached = [value is not None and value >= threshold for value in parsed]
        return np.array(reached)[which], np.array([value is None for value in parsed])[which]
    if isinstance(threshold, datetime):
        return _instants_reach(array, threshold)
    return _numbers_reach(array, threshold)


def span_of(
    array: ArrowArray, threshold: Threshold, missing: Collection[str]
) -> tuple[Any, Any] | None:
    """The least and the largest of the values that compare with the threshold; None where none
    does."""
    texts, which = written(array, missing)
    every = (_comparable(texts[k], threshold) for k in np.unique(which[which < len(texts)]))
    values = [value for value in every if value is not None]
    return (min(values), max(values)) if values else None


def order_of(array: ArrowArray, missing: Collection[str]) -> tuple[np.ndarray, set[type]]:
    """longdouble [B], by which the numbers or dates of a column are ordered, and which of the two
    they are; NaN where there is neither. Whole numbers of 64 bits are not rounded."""
    texts, which = written(array, missing)
    values: list[Any] = []
    found = set[type]()
    for text in texts:
        value = _finite(text)
        instant = _instant(text) if value is None else None
        if instant is not None:
            zoned = instant if instant.tzinfo else instant.replace(tzinfo=UTC)
            value = (zoned - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
        values.append(np.longdouble("nan") if value is None else np.longdouble(value))
        found |= {datetime} if instant is not None else set() if value is None else {float}
    return np.array([*values, np.nan], np.longdouble)[which], found


def _numbers_reach(array: ArrowArray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if kinds.is_boolean(array.type):
        array = array.cast(pa.int8())
    if kinds.is_integer(array.type):
        values = to_numpy(pc.fill_null(array, 0))
        return values >= math.ceil(threshold), to_numpy(array.is_null())
    if not kinds.is_floating(array.type):
        return _nothing_compares(array)
    numbers = to_numpy(pc.fill_null(array.cast(pa.float64()), np.nan))
    least = float(threshold)
    if least < threshold:  # the smallest float64 that is not below
        least = math.nextafter(least, math.inf)
    return numbers >= least, ~np.isfinite(numbers)


def _instants_reach(array: ArrowArray, threshold: datetime) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    is_time = kinds.is_timestamp(array.type)
    zone = array.type.tz if is_time else None
    if not (is_time or kinds.is_date(array.type)) or (zone is None) != (threshold.tzinfo is None):
        return _nothing_compares(array)
    least = pa.scalar(threshold, pa.timestamp("us", zone))
    try:
        instants = array.cast(least.type, safe=not (is_time and array.type.unit == "ns"))
    except pa.ArrowInvalid:  # a year that microseconds of 64 bits do not reach
        return _nothing_compares(array)
    reached = pc.fill_null(pc.greater_equal(instants, least), False)
    return to_numpy(reached), to_numpy(array.is_null())


def _nothing_compares(array: ArrowArray) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(array), bool), np.ones(len(array), bool)
