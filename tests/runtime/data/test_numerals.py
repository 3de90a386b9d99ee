"""What a number is in a file, and that whole numbers of 64 bits keep every bit."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.convert import column_values
from runtime.data.ids import MISSING, hash_integers
from runtime.data.rows import absent_share, number_of, whole_number_of
from runtime.data.schema import Column

INT64 = st.integers(-(2**63), 2**63 - 1)
ABOVE = 2**53 + 1  # the first whole number that float64 does not have


def ids(column: Column, array: pa.Array) -> list[Any]:
    """The hashes of a column, None for a bad value."""
    found = column_values(column, array, None, ("", "?"))
    return [None if bad else int(v) for v, bad in zip(found.data, found.bad, strict=True)]


def hashes(*values: int) -> list[int]:
    return [int(h) for h in hash_integers(np.array(values, np.int64))]


@given(st.lists(INT64, min_size=1, max_size=8), st.integers(1, 2**63 - 1))
def test_a_remainder_is_that_of_whole_numbers_whatever_the_type(values, modulo):
    column = Column(name="x", modulo=modulo)
    expected = hashes(*(value % modulo for value in values))
    assert ids(column, pa.array(values, pa.int64())) == expected
    assert ids(column, pa.array([str(v) for v in values])) == expected
    assert ids(column, pa.array([f"{v}.0" for v in values]).dictionary_encode()) == expected
    assert ids(column, pa.array([Decimal(v) for v in values])) == expected


@given(st.lists(st.integers(2**63, 2**64 - 1), min_size=1, max_size=8), st.integers(1, 2**40))
def test_a_remainder_of_unsigned_numbers_and_longer_texts_is_exact(values, modulo):
    column = Column(name="x", modulo=modulo)
    expected = hashes(*(value % modulo for value in values))
    assert ids(column, pa.array(values, pa.uint64())) == expected
    assert ids(column, pa.array([str(v) for v in values])) == expected
    long = [v * 10**15 for v in values]
    assert ids(column, pa.array([str(v) for v in long])) == hashes(*(v % modulo for v in long))


def test_ids_above_2_to_the_53_stay_apart():
    values = [ABOVE - 1, ABOVE, ABOVE + 1]
    for array in (
        pa.array(values),
        pa.array(values, pa.uint64()),
        pa.array(list(map(str, values))),
    ):
        assert ids(Column(name="x", modulo=2**60), array) == hashes(*values)
        assert ids(Column(name="x", modulo=7), array) == hashes(*(v % 7 for v in values))


@pytest.mark.parametrize("text", ["1.5", "1e3", "x", "1_0", "0x1", "٣", "nan", "-", "1" * 41])
def test_a_text_that_is_no_whole_number_is_bad(text):
    assert ids(Column(name="x", modulo=9), pa.array([text, "9"])) == [None, *hashes(0)]


def test_numbers_of_other_types_are_whole_or_bad():
    column = Column(name="x", modulo=10)
    nan, inf = math.nan, math.inf
    floats = pa.array([13.0, 1.5, nan, inf, 2.0**63, None, -1.0])
    assert ids(column, floats) == [
        *hashes(3), None, int(MISSING), None, None, int(MISSING), *hashes(9),
    ]  # fmt: skip
    assert ids(column, pa.array([True, False])) == hashes(1, 0)
    assert ids(column, pa.array([13, None], pa.int16())) == [*hashes(3), int(MISSING)]
    assert ids(column, pa.array([None, None])) == [int(MISSING)] * 2
    assert ids(column, pa.array(["?", "", " 7 ", None])) == [
        int(MISSING), int(MISSING), *hashes(7), int(MISSING),
    ]  # fmt: skip
    assert ids(column, pa.array([[1]])) == [None]


def test_zero_is_one_value_with_and_without_a_sign():
    assert ids(Column(name="x"), pa.array([-0.0, 0.0, 1.0])) == hashes(0, 0, 1)


@given(st.floats(allow_nan=False))
def test_a_number_written_by_python_is_read_back(value):
    assert number_of(repr(value)) == value
    assert number_of(f" {value!r}\t") == value


@given(INT64)
def test_a_whole_number_written_by_python_is_read_back(value):
    assert whole_number_of(str(value)) == value
    assert whole_number_of(f"+{abs(value)}.00") == abs(value)


@given(st.text(max_size=6))
def test_what_counts_as_a_number_is_ascii_without_underscores(text):
    number = number_of(text)
    if number is not None:
        assert text.isascii()
        assert "_" not in text
        assert number == float(text) or math.isnan(number)


BUCKETS = [0.0, 0.3, -0.3, 1.0, 30.0, -30.0, 1e9, 1e300, -1e300]


@pytest.mark.parametrize("steps", [0.5, 3.0, 1e6])
def test_a_bucket_is_the_signed_step_of_the_logarithm(steps):
    expected = [int(math.copysign(math.floor(steps * math.log1p(abs(x))), x)) for x in BUCKETS]
    column = Column(name="x", kind="bucket", buckets_per_e=steps)
    assert ids(column, pa.array(BUCKETS)) == hashes(*expected)
    assert ids(column, pa.array([math.inf, None, math.nan])) == [None, int(MISSING), int(MISSING)]


def test_a_feature_is_the_signed_logarithm_or_the_number_itself():
    array = pa.array([1.5, -2.0, None, 0.0])
    kept = column_values(Column(name="x", kind="numeric", fill=9.0), array, None, ())
    assert kept.data.tolist() == pytest.approx([math.log(2.5), -math.log(3), math.log(10), 0.0])
    plain = column_values(Column(name="x", kind="numeric", log=False), array, None, ())
    assert plain.data.tolist() == [1.5, -2.0, 0.0, 0.0]
    assert plain.bad.tolist() == [False, False, True, False]


def test_a_history_keeps_its_last_ids_and_a_bag_keeps_all():
    lists = pa.array([[1, 2, 3, 4], [5], [], None, [6, 7, 8]])
    column = Column(name="x", kind="sequence", max_length=3)
    found = column_values(column, lists, None, ())
    none = int(MISSING)
    assert found.data.tolist() == [*hashes(2, 3, 4, 5), none, none, *hashes(6, 7, 8)]
    assert found.lengths is not None
    assert found.lengths.tolist() == [3, 1, 1, 1, 3]
    texts = pa.array(["1 2 3 4", "5", "", None, "6 7 8"])
    same = column_values(
        Column(name="x", kind="sequence", max_length=3, separator=" "), texts, None, ()
    )
    assert same.data.tolist() == found.data.tolist()
    bag = column_values(Column(name="x", kind="multi"), lists, None, ())
    assert bag.data.tolist()[:5] == hashes(1, 2, 3, 4, 5)


def test_blanks_around_the_ids_of_a_bag_do_not_count():
    column = Column(name="x", kind="multi", separator=",")
    found = column_values(column, pa.array(["1, 2 ,b ", "b"]), None, ())
    plain = column_values(column, pa.array(["1,2,b", "b"]), None, ())
    assert found.data.tolist() == plain.data.tolist()


def test_a_nul_byte_is_bad_in_a_joined_column_too():
    column = Column(name="x", with_column="y")
    texts = pa.array(["a", "b"])
    found = column_values(column, texts, pa.array(["c", "d\0"]), ())
    assert found.bad.tolist() == [False, True]
    assert "NUL" in found.rule


@pytest.mark.parametrize("column", [Column(name="x"), Column(name="x", with_column="y")])
def test_blanks_around_an_id_do_not_count(column):
    """Also where they stand around a text that means "no value"."""
    other = pa.array(["k"] * 6) if column.with_column else None
    padded = pa.array([" u25", "u25 ", "\tu25", " 7 ", "a b", " ? "])
    plain = pa.array(["u25", "u25", "u25", "7", "a b", "?"])
    found = column_values(column, padded, other, ("", "?")).data.tolist()
    assert found == column_values(column, plain, other, ("", "?")).data.tolist()
    assert len(set(found)) == 4
    blank = column_values(Column(name="x"), pa.array([" ", "u"]), None, (" ",)).data.tolist()
    assert blank[0] == column_values(Column(name="x"), pa.array(["?"]), None, ("?",)).data[0]


@pytest.mark.parametrize(
    ("array", "share"),
    [
        (pa.array(["a", "", " ? ", None]), 0.75),
        (pa.array([None, None], pa.string()), 1.0),
        (pa.nulls(3), 1.0),
        (pa.array([1, None, 3, 4]), 0.25),
        (pa.array([1.0, float("nan")]), 0.5),
        (pa.array([[1], [], None, [2, 3]]), 0.5),
        (pa.array(["a", None, "b", "a"]).dictionary_encode(), 0.25),
        (pa.array([True, False]), 0.0),
    ],
)
def test_the_share_of_absent_values_is_counted(array, share):
    assert absent_share(array, ("", "?")) == share
