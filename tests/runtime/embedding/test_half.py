"""Rows that travel as float16 with a scale each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime.embedding.half import decoded, encoded, rounded

NUMBERS = {
    "float32": st.floats(-(2.0**120), 2.0**120, width=32),
    "float64": st.floats(-1e300, 1e300),
}


@st.composite
def tables(draw):
    """Numbers of rows side by side, and how many each row has."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=6))
    kind = draw(st.sampled_from(sorted(NUMBERS)))
    rows = draw(arrays.arrays(kind, sum(sizes), elements=NUMBERS[kind]))
    return rows, np.array(sizes, np.int64)


def by_hand(row: list[float]) -> list[float]:
    """Each number to 11 bits, or to the grid of the row's largest, by Python's own numbers."""
    top = max(map(abs, row))
    exponent = math.frexp(top)[1] if top else 0
    if top and round(math.ldexp(top, 11 - exponent)) == 2**11:  # it is rounded up to 2**exponent
        exponent += 1
    grid = max(exponent, -100) - 15 - 24
    found = []
    for number in row:
        unit = max(math.frexp(number)[1] - 11, grid)
        found.append(math.ldexp(round(math.ldexp(number, -unit)), unit))  # halves go to even
    return found


@given(tables())
def test_each_row_is_rounded_to_eleven_bits_beside_its_largest_number(table):
    rows, sizes = table
    ends = sizes.cumsum()
    wanted = [by_hand(rows[e - n : e].tolist()) for e, n in zip(ends, sizes, strict=True)]
    assert rounded(rows, sizes).tolist() == [number for row in wanted for number in row]


@given(tables())
def test_what_travels_is_what_was_rounded_and_is_not_rounded_again(table):
    rows, sizes = table
    data, once = encoded(rows, sizes), rounded(rows, sizes)
    assert len(data) == 2 * (len(rows) + len(sizes))
    assert decoded(data, sizes, rows.dtype.name).tobytes() == once.tobytes()
    assert rounded(once, sizes).tobytes() == once.tobytes()


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_harms_no_other_row(wrong):
    found = rounded(np.array([wrong, 1.0, 2.0, 3.0], np.float32), np.array([2, 2]))
    assert not math.isfinite(found[0]) and found[2:].tolist() == [2.0, 3.0]
