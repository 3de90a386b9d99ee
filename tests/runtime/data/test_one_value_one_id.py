"""One value has one id, whatever type of Arrow or pandas, or text of theirs, holds it; and the ids
of what was always one value stay, because stored results were made by them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.convert import column_values
from runtime.data.ids import canonical
from runtime.data.rows import absent_share, equals, key_texts
from runtime.data.schema import Column

UNITS = ["s", "ms", "us", "ns"]
PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
ZONES = ["UTC", "Europe/Berlin", "America/St_Johns", "Asia/Kathmandu"]


def ids(array: pa.Array, missing: tuple[str, ...] = ("", "?")) -> list[str]:
    found = column_values(Column(name="x"), array, None, missing)
    assert not found.bad.any()
    return [f"{int(value):016x}" for value in found.data]


def of_frame(values: Any) -> pa.Array:
    """The column as `predict_frame` gets it."""
    return pa.RecordBatch.from_pandas(pd.DataFrame({"x": values})).column(0)


def in_csv(values: Any) -> pa.Array:
    """The column as pandas writes it to a CSV, which is read as texts."""
    text = io.StringIO()
    pd.DataFrame({"x": values}).to_csv(text, index=False)
    return pa.array(text.getvalue().splitlines()[1:])


def assert_one_id(arrays: Iterator[pa.Array]) -> None:
    """Also as keys of a join, as a value of a split, and in a dictionary."""
    every = list(arrays)
    found = [(ids(array)[0], text := key_texts(array)[0].as_py(), str(array)) for array in every]
    assert len({one[:2] for one in found}) == 1, found
    for array in every:
        assert equals(array, text, ())[0][0]
        assert ids(array.slice(0, 1).dictionary_encode()) == ids(array)[:1]


def whole_numbers(value: int) -> Iterator[pa.Array]:
    yield pa.array([Decimal(value)])
    yield pa.array([Decimal(value)], pa.decimal256(50, 7))
    yield pa.array([str(value)])
    yield pa.array([f" {value}\t"], pa.large_string())
    for bits in (8, 16, 32, 64):
        if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            yield pa.array([value], f"int{bits}")
            yield of_frame(pd.array([value, None], f"Int{bits}"))
        if 0 <= value < 2**bits:
            yield pa.array([value], f"uint{bits}")
    for kind in (np.float16, np.float32, np.float64):
        with np.errstate(over="ignore"):
            exact = np.isfinite(kind(value)) and int(kind(value)) == value
        if exact:
            yield pa.array(np.array([value], kind))
            yield of_frame(np.array([value, np.nan], kind))
    if int(float(value)) == value:
        yield in_csv([float(value), np.nan])
        yield pa.array([repr(float(value))])


@given(
    st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 2**63, 10**16, 10**18])
    | st.integers(0, 63).map(lambda k: 2**k)
    | st.integers(-(2**62), 2**62).map(lambda k: int(float(k)))
)
def test_a_whole_number(value):
    assert_one_id(whole_numbers(value))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number(value):
    def arrays() -> Iterator[pa.Array]:
        yield pa.array([value])
        yield in_csv([value, np.nan])
        if value == float(np.float32(value)):
            yield pa.array([value], pa.float32())
        exact = Decimal(repr(value))
        places = -int(exact.as_tuple().exponent)
        if 0 <= places <= 30 and abs(value) < 1e40:
            yield pa.array([exact], pa.decimal256(76, places))
            yield pa.array([exact], pa.decimal256(76, places + 5))

    with np.errstate(over="ignore"):
        assert_one_id(arrays())


def as_count(instant: datetime, unit: str) -> int | None:
    """Units since 1970, where that is a whole number of them that 64 bits hold."""
    micros = (instant - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    count, rest = divmod(micros * PER_S[unit], 10**6)
    return count if not rest and abs(count) < 2**63 else None


INSTANTS = st.builds(
    lambda instant, cut: cut(instant),
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
    st.sampled_from(
        [
            lambda at: at,
            lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000),
            lambda at: at.replace(microsecond=0),
            lambda at: at.replace(hour=0, minute=0, second=0, microsecond=0),
        ]
    ),
)


def instants(instant: datetime) -> Iterator[pa.Array]:
    for unit in UNITS:
        if (count := as_count(instant, unit)) is not None:
            yield pa.array([count], pa.timestamp(unit))
            yield of_frame(pd.Series([count]).astype(f"datetime64[{unit}]"))
            yield in_csv(pd.Series([count]).astype(f"datetime64[{unit}]"))
    yield pa.array([instant])
    yield pa.array([instant.isoformat()])
    yield pa.array([str(instant)])
    if instant == datetime(instant.year, instant.month, instant.day):
        yield pa.array([instant.date()])
        yield pa.array([instant.date()], pa.date64())
        yield of_frame([instant.date()])
        yield pa.array([str(instant.date())])


@given(INSTANTS)
def test_an_instant_without_a_zone_and_a_day(instant):
    assert_one_id(instants(instant))


@given(INSTANTS, st.sampled_from(ZONES))
def test_an_instant_with_a_zone(instant, zone):
    def arrays() -> Iterator[pa.Array]:
        for unit in UNITS:
            if (count := as_count(instant, unit)) is not None:
                yield pa.array([count], pa.timestamp(unit, "UTC"))
                yield pa.array([count], pa.timestamp(unit, zone))
        there = instant.replace(tzinfo=UTC).astimezone(ZoneInfo(zone))
        yield pa.array([f"{instant.isoformat()}Z"])
        if not there.utcoffset() % timedelta(minutes=1):  # local mean time is no zone of ISO 8601
            yield pa.array([there.isoformat()])
            yield pa.array([str(there)])
            yield pa.array([f"{there:%z}".join([there.replace(tzinfo=None).isoformat(), ""])])

    assert_one_id(arrays())
    assert ids(pa.array([instant])) != ids(pa.array([instant.replace(tzinfo=UTC)]))


@given(st.integers(-(10**15), 10**15), st.sampled_from([1, 10**3, 10**6, 86_400 * 10**6]))
def test_a_span_of_time(count, step):
    micros = count // step * step

    def arrays() -> Iterator[pa.Array]:
        for unit in UNITS:
            many, rest = divmod(micros * PER_S[unit], 10**6)
            if not rest and abs(many) < 2**63:
                yield pa.array([many], pa.duration(unit))
                yield of_frame(pd.Series([many]).astype(f"timedelta64[{unit}]"))
                yield in_csv(pd.Series([many]).astype(f"timedelta64[{unit}]"))
        yield pa.array([str(pd.Timedelta(micros, "us"))])

    assert_one_id(arrays())


@given(st.lists(INSTANTS, unique=True, min_size=2, max_size=6))
def test_different_instants_have_different_ids(values):
    assert len(set(ids(pa.array(values)))) == len(values)
    assert len({canonical(str(value)) for value in values}) == len(values)


@given(st.text(max_size=30) | INSTANTS.map(str) | st.floats().map(repr))
def test_what_is_canonical_stays(text):
    assert canonical(canonical(text)) == canonical(text)


@pytest.mark.parametrize(
    "text",
    ["1e16", "1E+16", "1e+1", "10e+15", "1.50e+16", "2024-02-30 00:00:00", "2024-05-01 24:00:00",
     "2024-05-01 10:00", "10:00", "24:00:00", "10:00:00Z", "0001-01-01 00:00:00+14:00", "7.00",
     "2024-05-01T10:00:00 CET", "1 days", "+1 days 10:00:00", "0x7.0", "\u0663.0", "-0"],
)  # fmt: skip
def test_a_text_that_no_library_writes_for_a_value_stays_a_text(text):
    assert canonical(text) == text


def test_what_a_number_in_missing_writes_is_none_in_a_text_too():
    arrays = [pa.array([-1.0, 5.0]), pa.array(["-1.0", "5.0"]), pa.array([-1, 5])]
    arrays.append(pa.array([Decimal("-1.00"), Decimal("5.00")]))
    none = ids(pa.array(["", "5"]))
    for array in arrays:
        assert ids(array, ("", "-1")) == none
        assert absent_share(array, ("", "-1")) == 0.5
    epoch = pa.array([datetime(1970, 1, 1), datetime(2024, 5, 1)])
    for missing in ("1970-01-01", "1970-01-01 00:00:00"):
        assert ids(epoch, (missing,))[0] == none[0]
        assert absent_share(epoch, (missing,)) == 0.5


# By the code before the forms of one value were made one (July 2026), each by its own type.
GOLDEN = {
    "whole numbers": (
        pa.array([0, 1, -1, 7, 20220408, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]),
        "e220a8397b1dcdaf 910a2dec89025cc1 e4d971771b652c20 63cbe1e459320dd7 d5dbc8b152131f74"
        " 25493cc63225736c 055ce0bfd3337037 2a67d7552e039ea7 481ec0a212a9f3db",
    ),
    "texts": (
        pa.array(["a", "user 7", "été", "7", "-7", "7.0", "007", "+7", "7.00", "1e5", "1e16", "nan",
                  "True", "true", "1.5", "0.10", "2024-05-01", "2024-05-01 10:00:00",
                  "2024-05-01 10:00", "10:30:00", "12:61:00", "9223372036854775808", "", "?"]),
        "2f42665b399ef840 f97055ee5d9e4113 d8205061b72151bc 63cbe1e459320dd7 6c1e186443822970"
        " 63cbe1e459320dd7 bd81ecfc21802a49 d0b5a87cc5e0a340 8e1a8738c5aaaaa2 505fb90c33f6058e"
        " 843cfd8b0fd29f6e 8844ccb810bff0e3 830ee17e2320ec2d 3ff66403c87569f5 352d57632c8f147a"
        " 54dd88341564e62c 11c19b0da3440511 00f8d567bcf12fda f58f911fbe617d96 6cf5c4031d31a60b"
        " 27097582ad8bfbb5 c26ce80d029a408a b4b2797457a0a6e4 b4b2797457a0a6e4",
    ),
    "numbers": (
        pa.array([0.0, 7.0, -3.0, 0.1, 1.5, -2.25, 1e-5, 123456789.25, 1e15, 2.0**53, np.inf]),
        "e220a8397b1dcdaf 63cbe1e459320dd7 f75f04cbb5a1a1dd d11416f577ab47c5 352d57632c8f147a"
        " aba0755ade4a4b9a 5415133be9abb449 6dbaf35e4ad1a4bc f8b5028633c32f5b cec3603a0c3ea1cf"
        " b271b71f4d636010",
    ),
    "float32": (
        pa.array([0.1, 2.5, 7.0], pa.float32()),
        "19dff77833bb6a52 b4444876b650fe57 63cbe1e459320dd7",
    ),
    "booleans": (pa.array([True, False]), "830ee17e2320ec2d 6b97c5a59c61328a"),
    "beyond 63 bits": (
        pa.array([7, 2**63 + 5], pa.uint64()),
        "63cbe1e459320dd7 6ada9db379fd7f7c",
    ),
    "days": (pa.array([date(2024, 5, 1)]), "11c19b0da3440511"),
    "seconds": (pa.array([datetime(2024, 5, 1, 10)], pa.timestamp("s")), "00f8d567bcf12fda"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOLDEN)
def test_ids_of_stored_results_stay(kind):
    array, expected = GOLDEN[kind]
    assert ids(array) == expected.split()


def test_a_joined_table_may_write_its_keys_in_another_type():
    """By hand, as `Table` looks keys up: each of these finds the same row."""
    day = datetime(2024, 5, 1)
    keys = [
        pa.array([day], pa.timestamp("ns")), pa.array(["2024-05-01 00:00:00.000"]),
        pa.array([day.date()]), pa.array(["2024-05-01"]),
    ]  # fmt: skip
    assert {key_texts(key)[0].as_py() for key in keys} == {"2024-05-01"}
    flags = [pa.array([True, None]), pa.array(["True", None])]
    assert [key_texts(flag).to_pylist() for flag in flags] == [["True", None]] * 2


@pytest.mark.parametrize(
    "kind", [pa.null(), pa.float64(), pa.list_(pa.int64()), pa.int32()], ids=str
)
def test_lists_that_are_all_absent_have_the_id_of_no_value_whatever_their_type(kind):
    """pandas makes numbers of a column that is empty throughout."""
    column = Column(name="tags", kind="multi")
    expected = column_values(column, pa.array(["", ""]), None, ("", "?"))
    found = column_values(column, pa.nulls(2, kind), None, ("", "?"))
    assert not found.bad.any() and list(found.lengths) == list(expected.lengths) == [1, 1]
    assert list(found.data) == list(expected.data)
