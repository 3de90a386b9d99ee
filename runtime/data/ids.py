"""Ids: 64 bits, the field's number in the top 8, a hash of the value in the rest.

No vocabulary pass: the id of a value is a function of the value alone, so a stream can be read once
and two readers agree (paper, section 4.2.3; the original keeps a group prefix in the top bits too).
Ids of a synthetic stream are drawn by a Zipf law, where a few values are seen all the time and most
of them hardly ever.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

FIELD_BITS = 8
VALUE_BITS = 64 - FIELD_BITS
VALUE_MASK = np.uint64(2**VALUE_BITS - 1)
MAX_FIELDS = 2**FIELD_BITS - 1
"""Fields of one data set; number 255 is left free so that no id is 2**64 - 1 (an empty slot)."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: the increment of splitmix64


def mix64(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads every bit (the finaliser of splitmix64, Steele 2014)."""
    z = values.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def tag(field: int, hashes: np.ndarray) -> np.ndarray:
    """Put the number of the field on top of value hashes.

    >>> hex(int(tag(1, np.array([2**64 - 1], np.uint64))[0]))
    '0x1ffffffffffffff'
    """
    if not 0 <= field < MAX_FIELDS:
        raise ValueError(f"field number must be 0 to {MAX_FIELDS - 1}, got {field}")
    return (hashes.astype(np.uint64) & VALUE_MASK) | np.uint64(field << VALUE_BITS)


def hash_integers(values: np.ndarray) -> np.ndarray:
    """uint64 hashes of integers (any that fit int64)."""
    return mix64(values.astype(np.int64).view(np.uint64) + _GOLDEN)


_FLOAT = re.compile(r"-?\d(\.\d+)?e\+\d\d+", re.ASCII)
"""A number of 1e16 or more as Python writes it."""
_CLOCK = re.compile(
    r"(?:(?P<day>\d{4}-\d\d-\d\d)[T ]|(?P<days>\d+ days) |(?P<before>-\d+ days) [+])?"
    r"(?P<time>(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:[.](?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?",
    re.ASCII,
)
"""An instant, a span as pandas writes it ("-1 days +23:00:00"), or a time of day."""


def canonical(text: str) -> str:
    """The one text of a value that pandas, Arrow and Spark write in several ways; others stay.

    A whole number has no point and no exponent. An instant has no zeros behind its fraction, that
    with a zone is of UTC, and midnight without one is the day; so are times and spans of time.

    >>> [canonical(text) for text in ("7.0", "1e+16", "-0.0", "007", "1e16")]
    ['7', '10000000000000000', '0', '007', '1e16']
    >>> [canonical("2024-05-01" + text) for text in (" 00:00:00.000", "T10:00:00.50", " 10:00")]
    ['2024-05-01', '2024-05-01 10:00:00.5', '2024-05-01 10:00']
    >>> canonical("2024-05-01 00:30:00+02:00"), canonical("1 days 00:00:00")
    ('2024-04-30 22:30:00Z', '1 days')
    """
    if text.endswith(".0"):
        whole = text.removesuffix(".0")
        return "0" if whole == "-0" else whole if _as_integer(whole) is not None else text
    if "e+" in text and _FLOAT.fullmatch(text):
        number = float(text)
        return str(int(number)) if repr(number) == text else text
    clock = _CLOCK.fullmatch(text) if ":" in text else None
    return text if clock is None else _canonical_clock(clock)


def _canonical_clock(clock: re.Match[str]) -> str:
    day, days, before, time, fraction, zone = clock.groups()
    if day is None:
        # A time of day has no instant, so its zone says nothing that could be compared.
        span = days or before or ""
        return clock[0] if zone is not None else clock_text(span, time, fraction or "")
    try:
        instant = datetime.fromisoformat(f"{day} {time}{zone or ''}")
        instant = instant if zone is None else instant.astimezone(UTC)
    except (ValueError, OverflowError):  # 2024-02-30, or in UTC a year before 1
        return clock[0]
    day, time = instant.replace(tzinfo=None).isoformat(" ").split()
    return clock_text(day, time, fraction or "", "" if zone is None else "Z")


def clock_text(day: str, time: str, fraction: str, zone: str = "") -> str:
    """How a moment of a day, a span of days or a time alone (``day`` is "") is written.

    >>> clock_text("2024-05-01", "10:00:00", "500"), clock_text("-1 days", "23:00:00", "")
    ('2024-05-01 10:00:00.5', '-1 days +23:00:00')
    """
    fraction = fraction.rstrip("0")
    if day and time == "00:00:00" and not fraction and not zone:
        return day
    sign = "+" if day.startswith("-") and day.endswith(" days") else ""
    start = f"{day} {sign}" if day else ""
    return f"{start}{time}{'.' if fraction else ''}{fraction}{zone}"


def hash_texts(values: Sequence[str]) -> np.ndarray:
    """uint64 hashes of what strings write (`canonical`); an integer hashes as that integer.

    So a column of numbers or times has the same ids whether a file stores it as text or as these.

    >>> hash_texts(["-7"]) == hash_integers(np.array([-7]))
    array([ True])
    """
    values = [canonical(value) for value in values]
    integers = [_as_integer(value) for value in values]
    hashes = hash_integers(np.array([integer or 0 for integer in integers], np.int64))
    for place, (value, integer) in enumerate(zip(values, integers, strict=True)):
        if integer is None:
            digest = hashlib.blake2b(value.encode(), digest_size=8).digest()
            hashes[place] = int.from_bytes(digest, "little")
    return hashes


def _as_integer(value: str) -> int | None:
    """The int64 (a sign, 19 digits) that the text is the usual form of ("7", not "007")."""
    if len(value) > 20 or not value.removeprefix("-").isdecimal():
        return None
    integer = int(value)
    return integer if str(integer) == value and -(2**63) <= integer < 2**63 else None


def join_hashes(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The hash of a pair of values, from theirs; the order matters."""
    return mix64(mix64(first + _GOLDEN) + second)


def zipf_ranks(
    generator: np.random.Generator, size: int, values: int, exponent: float
) -> np.ndarray:
    """int64 [size] ranks, 0 (the most popular) to values - 1, with P(k) about (k + 1)**-exponent.

    By inversion of the continuous power law on [1, values + 1), cut to whole numbers: no table, so
    the cost does not depend on ``values``, which may be 10**13. exponent 0 is uniform.
    """
    u = generator.random(size)
    top = float(values + 1)
    if exponent == 1.0:
        x = np.exp(u * np.log(top))
    else:
        power = 1.0 - exponent
        x = ((top**power - 1.0) * u + 1.0) ** (1.0 / power)
    ranks: np.ndarray = np.clip(x.astype(np.int64) - 1, 0, values - 1)
    return ranks


def scatter56(ranks: np.ndarray) -> np.ndarray:
    """uint64 [N]: a bijection of the 56-bit numbers that leaves no trace of the order.

    Different ranks never collide, so the number of distinct ids is exact; two rounds of odd
    multiplication and xor-shift, as in splitmix64.
    """
    z = ranks.astype(np.uint64)
    for odd in (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)):
        z = (z * odd) & VALUE_MASK
        z ^= z >> np.uint64(VALUE_BITS // 2)
    return z


MISSING = hash_texts([""])[0]
"""The value hash of "no value": that of the empty text."""
