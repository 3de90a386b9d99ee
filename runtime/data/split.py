"""Which rows train and which test, as the schema says it, decided row by row as files stream by.

Numbers compare as numbers, dates and times as instants, exactly: whole numbers of 64 bits are not
rounded, times are compared to the microsecond. A time with a zone compares with times that have
one, a time without with times without.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import numpy as np

from persia_sim.words.schema import Within, check_fields
from runtime.data.rows import (
    ArrowArray,
    Rows,
    distinct,
    is_text,
    number_of,
    plain,
    to_numpy,
    whole_number_of,
)
from runtime.data.source import Part

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which rows train and which test: by a column's value, at random, by place, or by file."""

    column: str | None = None
    """The column that decides, with ``test_from`` or ``test_equals``."""
    test_from: int | float | str | date | None = None
    """First test value of ``column``: rows below it train, it and all above it test. Numbers
    compare as numbers, dates (TOML dates, or texts YYYY-MM-DD, also with HH:MM:SS) as dates;
    quoting changes nothing."""
    test_equals: str | None = None
    """The rows whose ``column`` holds this text test, all others train."""
    test_fraction: Annotated[float | None, Within(0, 1, without="both")] = None
    """Share of the rows that test, > 0 and < 1, when no column decides."""
    random_seed: Annotated[int | None, Within(0, 2**63 - 1)] = None
    """With ``test_fraction``: draw rows at random (numpy default_rng(seed).random() < fraction);
    None takes the last rows of the file. 0 to 2**63 - 1."""
    test_file: str | None = None
    """A file, or a pattern, whose rows test; all rows of the schema's ``file`` train."""
    validation_file: str | None = None
    """With ``test_file``: a file, or a pattern, whose rows validate."""
    validation_fraction: Annotated[float, Within(0, 1, without="most")] = 0.0
    """Share of the training rows, the last of them, kept for validation; 0 to below 1."""

    def __post_init__(self) -> None:
        check_fields(self)
        ways = [
            name
            for name in ("test_from", "test_equals", "test_fraction", "test_file")
            if getattr(self, name) is not None
        ]
        by_column = ways in (["test_from"], ["test_equals"])
        if len(ways) != 1 or by_column != (self.column is not None):
            given = ways if self.column is None else ["column", *ways]
            raise ValueError(
                "a split needs either column and test_from, or column and test_equals, or"
                f" test_fraction, or test_file, got {' and '.join(given) or 'none of them'}"
            )
        for name in ("test_file", "validation_file"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; give it a file's name, or leave it out")
        if self.validation_file is not None:
            if self.test_file is None:
                raise ValueError("validation_file goes with test_file; add it, or remove both")
            if self.validation_fraction:
                raise ValueError(
                    "validation_file and validation_fraction both say what validates; remove one"
                )
        if self.random_seed is not None and self.test_fraction is None:
            decides = "a column" if by_column else "a file"
            raise ValueError(f"random_seed is for test_fraction, {decides} decides; remove it")
        if self.test_from is not None:
            threshold_of(self.test_from)

    @property
    def threshold(self) -> Threshold | None:
        """``test_from`` as the number or the instant that it means."""
        return None if self.test_from is None else threshold_of(self.test_from)

    @property
    def rule(self) -> str:
        """What a value of the split's column must be, in words."""
        if self.test_from is None:
            return f"the split compares this column with {self.test_equals!r}"
        if isinstance(self.threshold, datetime):
            zone = "with" if self.threshold.tzinfo is not None else "without"
            kind = f"dates: write YYYY-MM-DD, also with HH:MM:SS, {zone} a zone"
        else:
            kind = "numbers: write digits"
        return f"the split compares this column with {self._threshold_words} as {kind}"

    @property
    def _threshold_words(self) -> str:
        threshold = self.threshold
        if isinstance(threshold, datetime):
            return threshold.isoformat(sep=" ").removesuffix(" 00:00:00")
        return str(threshold)

    def __str__(self) -> str:
        """The split in words.

        >>> print(Split(column="date", test_from=20220505, validation_fraction=0.1))
        train date < 20220505, test the others; validation: the last 0.1 of train
        >>> print(Split(column="day", test_from="2013-02-09"))
        train day < 2013-02-09 (as dates), test the others
        """
        if self.test_file is not None:
            words = f"test {self.test_file}, train the main file"
            if self.validation_file is not None:
                words += f"; validation: {self.validation_file}"
        elif self.test_equals is not None:
            words = f"test {self.column} == {self.test_equals!r}, train the others"
        elif self.test_from is not None:
            kind = " (as dates)" if isinstance(self.threshold, datetime) else ""
            words = f"train {self.column} < {self._threshold_words}{kind}, test the others"
        elif self.random_seed is not None:
            words = f"test a random {self.test_fraction} of the rows, seed {self.random_seed}"
        else:
            words = f"test the last {self.test_fraction} of the rows"
        if self.validation_fraction:
            words += f"; validation: the last {self.validation_fraction} of train"
        return words


CODES: dict[Part, int] = {"train": 0, "validation": 1, "test": 2}
UNPLACED = -1
"""Code of a row whose split column holds no usable value."""
NOT_READ = 3
"""Code of a training row behind those that were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts that a split by place needs before the stream starts."""

    rows: int = 0
    """Rows of the file; needed by a split that tests the last ones."""
    train_rows: int = 0
    """Rows that train or validate, as many as were asked for; needed when there is a validation
    part."""


@dataclass(slots=True)
class Placer:
    """Gives each row of one stream its part; call ``place`` once for each chunk, in order."""

    split: Split
    totals: Totals
    missing: Collection[str]
    _train_seen: int = 0
    _generator: np.random.Generator | None = None
    _drawn: int = 0
    _threshold: Threshold | None = field(init=False)

    def __post_init__(self) -> None:
        self._threshold = self.split.threshold

    def place(self, rows: Rows) -> np.ndarray:
        """int64 [B] codes of the rows' parts."""
        in_test, unusable = self._in_test(rows)
        codes = np.where(in_test, CODES["test"], CODES["train"])
        codes[unusable] = UNPLACED
        if rows.part == "validation":
            codes[:] = CODES["validation"]
        if self.split.validation_fraction:
            train = codes == CODES["train"]
            order = self._train_seen + np.cumsum(train)  # 1 for the first training row
            kept = self.totals.train_rows * (1 - self.split.validation_fraction)
            codes[train & (order > round(kept))] = CODES["validation"]
            codes[train & (order > self.totals.train_rows)] = NOT_READ
            self._train_seen = int(order[-1])
        return codes

    def _in_test(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """bool [B], whether each row tests; bool [B], whether its split column is unusable."""
        split = self.split
        none_unusable = np.zeros(len(rows.numbers), bool)
        if rows.part is not None:
            return np.full(len(rows.numbers), rows.part == "test"), none_unusable
        if split.column is not None:
            array = rows.table.column(split.column)
            threshold = self._threshold
            if threshold is not None:
                return at_least(array, threshold, self.missing)
            texts, which = distinct(plain(array))
            unusable = [text in self.missing for text in map(str, texts)]
            equal = [str(text) == split.test_equals for text in texts]
            return np.array([*equal, False])[which], np.array([*unusable, True])[which]
        assert split.test_fraction is not None  # the split's own check
        if split.random_seed is None:
            last = round(self.totals.rows * (1 - split.test_fraction))
            return rows.places > last, none_unusable
        return self._draws(rows.places) < split.test_fraction, none_unusable

    def _draws(self, numbers: np.ndarray) -> np.ndarray:
        """Draw k of the seed's sequence for the row with number k, rows left out included."""
        if self._generator is None:
            self._generator = np.random.default_rng(self.split.random_seed)
        draws = self._generator.random(int(numbers[-1]) - self._drawn)
        first, self._drawn = self._drawn, int(numbers[-1])
        mine: np.ndarray = draws[numbers - 1 - first]
        return mine
