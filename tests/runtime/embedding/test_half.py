"""Rows that travel as float16 with a scale each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime.embedding.half import decoded, encoded, rounded
from runtime.embedding.native.extension import native

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


def halved_by_numpy(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and halves, in numpy's own operations."""
    largest = np.maximum.reduceat(np.abs(rows), sizes.cumsum() - sizes)
    with np.errstate(invalid="ignore"):
        significand, exponents = np.frexp(largest)
    scales = np.maximum(exponents + (significand >= 1 - 2.0**-12), -100)
    factors = np.repeat(np.ldexp(np.ones(1, rows.dtype), 15 - scales), sizes)
    with np.errstate(invalid="ignore", over="ignore"):
        return scales.astype("<i2"), (rows * factors).astype("<f2")


def whole_by_numpy(
    scales: np.ndarray, halves: np.ndarray, sizes: np.ndarray, dtype: str
) -> np.ndarray:
    factors = np.repeat(np.ldexp(np.ones(1, dtype), scales.astype(np.int64) - 15), sizes)
    with np.errstate(invalid="ignore", over="ignore"):
        whole: np.ndarray = halves.astype(dtype) * factors
    return whole


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def kernel_set(request) -> Iterator[str]:
    before = native.kernel_set()
    try:
        native.choose_kernel_set(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.choose_kernel_set(before)


def same_bytes_as_numpy(rows: np.ndarray, sizes: np.ndarray) -> None:
    scales, halves = halved_by_numpy(rows, sizes)
    data = encoded(rows, sizes)
    assert data[: 2 * len(sizes)].tobytes() == scales.tobytes()
    assert data[2 * len(sizes) :].tobytes() == halves.tobytes()
    whole = whole_by_numpy(scales, halves, sizes, rows.dtype.name).tobytes()
    assert decoded(data, sizes, rows.dtype.name).tobytes() == whole
    assert rounded(rows, sizes).tobytes() == whole
    again = rows.copy()
    assert rounded(again, sizes, out=again) is again and again.tobytes() == whole


def beside_every_float16(dtype: str) -> np.ndarray:
    """All float16 numbers, NaN and infinities too, all ties of two, and the numbers beside them."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(dtype)
    finite = np.sort(halves[np.isfinite(halves)])
    overflows = np.array([65520.0, -65520.0, 65519.99, 65536.0, -1e30], dtype)
    ties = (finite[1:] + finite[:-1]) / 2
    exact = np.concatenate([halves, ties, overflows])
    with np.errstate(invalid="ignore"):
        return np.concatenate([exact, np.nextafter(exact, np.inf), np.nextafter(exact, -np.inf)])


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_float16_and_all_between_two_are_rounded_as_numpy_casts(kernel_set, dtype, width):
    """The first number of each row sets its scale to 1 where no other is larger."""
    numbers = beside_every_float16(dtype)
    numbers = np.pad(numbers, (0, -len(numbers) % (width - 1))).reshape(-1, width - 1)
    tops = np.full((len(numbers), 1), 2.0**14, dtype)
    rows = np.concatenate([tops, numbers], axis=1)
    same_bytes_as_numpy(rows.ravel(), np.full(len(rows), width))
    # Apart from what is not finite, which leaves a row's other numbers too large.
    finite = numbers[np.isfinite(numbers) & (np.abs(numbers) < 2**14)]
    apart = np.stack([np.full(len(finite), 2.0**14, dtype), finite], axis=1)
    assert (rounded(apart.ravel(), np.full(len(apart), 2))[1::2] == finite.astype("<f2")).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_of_any_bits_are_rounded_as_numpy_casts(kernel_set, dtype):
    """Zeros, subnormal rows, the largest numbers, NaN with any bits, for rows of many sizes."""
    unsigned = {"float32": np.uint32, "float64": np.uint64}[dtype]
    draw = np.random.default_rng(0)
    sizes = draw.choice([1, 2, 7, 8, 16, 32, 33], 9000)
    rows = draw.integers(0, np.iinfo(unsigned).max, int(sizes.sum()), unsigned, endpoint=True)
    rows = rows.view(dtype)
    info = np.finfo(dtype)
    corners = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_subnormal, np.inf, -np.inf]
    rows[: len(corners)] = corners
    sizes[: len(corners)] = 1
    sizes[-1] += len(rows) - sizes.sum()
    zeros = np.repeat(draw.random(len(sizes)) < 0.1, sizes)
    rows[zeros] = 0.0
    for threads in (1, 3):
        native.set_threads(threads)
        try:
            same_bytes_as_numpy(rows, sizes)
        finally:
            native.set_threads(1)


def test_sizes_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="sizes must add up"):
        rounded(np.ones(5, np.float32), np.array([2, 2]))
    with pytest.raises(ValueError, match="0 numbers or more"):
        rounded(np.ones(2, np.float32), np.array([3, -1]))
