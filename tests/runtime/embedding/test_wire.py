"""Wire forms: what comes out equals what went in, in exactly the bytes that were announced."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.embedding.wire import FieldIds, HalfRows


@given(seed=st.integers(0, 10_000), size=st.integers(1, 40), values=st.integers(1, 30))
def test_packed_ids_come_back_as_the_same_bags(seed: int, size: int, values: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, size)
    ids = rng.integers(0, values, lengths.sum()).astype(np.uint64)
    packed = FieldIds.pack(ids, lengths)
    data = packed.to_bytes()
    assert len(data) == 8 + packed.byte_count
    distinct = len(np.unique(ids))
    assert packed.byte_count == 8 * distinct + 2 * (distinct + 1) + 2 * len(ids)
    found, found_lengths = FieldIds.from_bytes(data).unpack(size)
    np.testing.assert_array_equal(found_lengths, lengths)
    bags = [np.split(a, np.cumsum(lengths)[:-1]) for a in (ids, found)]
    for sent, received in zip(*bags, strict=True):
        np.testing.assert_array_equal(np.sort(sent), np.sort(received))


def test_zipf_ids_shrink() -> None:
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, 4096), 10**6).astype(np.uint64)
    packed = FieldIds.pack(ids, np.ones(4096, int))
    assert packed.byte_count < 0.7 * ids.nbytes


def test_more_occurrences_than_16_bits_count_come_back() -> None:
    ids = np.arange(70_000, dtype=np.uint64) % np.uint64(3)
    packed = FieldIds.pack(ids, np.array([70_000]))
    found, lengths = FieldIds.from_bytes(packed.to_bytes()).unpack(1)
    assert lengths.tolist() == [70_000]
    np.testing.assert_array_equal(np.sort(found), np.sort(ids))
    assert packed.byte_count == 8 * 3 + 4 * 4 + 2 * 70_000


def test_cut_bytes_and_too_many_samples_are_refused() -> None:
    data = FieldIds.pack(np.array([1, 1], np.uint64), np.array([1, 1])).to_bytes()
    with pytest.raises(ValueError, match="packed ids have 23 bytes, their counts say 24"):
        FieldIds.from_bytes(data[:-1])
    with pytest.raises(ValueError, match="65537 samples does not fit 16-bit positions"):
        FieldIds.pack(np.empty(0, np.uint64), np.zeros(65537, int))


@given(seed=st.integers(0, 1000), exponent=st.integers(-30, 30), block=st.sampled_from([4, 8, 16]))
def test_scaled_rows_err_by_a_2048th_of_the_block_at_most(
    seed: int, exponent: int, block: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((20, 16)) * 2.0**exponent).astype(np.float32)
    rows[0] = 0
    packed = HalfRows.pack(rows, block=block)
    largest = np.abs(rows.reshape(20, -1, block)).max(axis=2).repeat(block, axis=1)
    assert (np.abs(packed.unpack() - rows) <= largest * 2.0**-11 * 1.001).all()
    assert packed.byte_count == 2 * 20 * 16 + 4 * 20 * (16 // block)


def test_scaling_saves_small_gradients_that_plain_fp16_loses() -> None:
    rows = (np.random.default_rng(0).standard_normal((1000, 16)) * 1e-7).astype(np.float32)
    error = {
        block: float(np.linalg.norm(HalfRows.pack(rows, block=block).unpack() - rows))
        / float(np.linalg.norm(rows))
        for block in (None, 16)
    }
    assert error[16] < 3e-4
    assert error[None] > 0.1
    assert HalfRows.pack(rows, block=16).byte_count / rows.nbytes == 0.5625


def test_block_must_divide_the_row() -> None:
    with pytest.raises(ValueError, match="block must divide the 16 elements of a row, got 5"):
        HalfRows.pack(np.zeros((1, 16), np.float32), block=5)


def test_the_bytes_of_packed_ids_are_those_of_the_layout() -> None:
    """By hand: bags [7, 9], [], [7, 7]; 7 stands in samples 0, 2, 2 and 9 in sample 0."""
    packed = FieldIds.pack(np.array([7, 9, 7, 7], np.uint64), np.array([2, 0, 2]))
    expected = struct.pack("<II", 2, 4) + struct.pack("<QQ", 7, 9)
    expected += struct.pack("<HHH", 0, 3, 4) + struct.pack("<HHHH", 0, 2, 2, 0)
    assert packed.to_bytes() == expected
    ids, lengths = FieldIds.from_bytes(expected).unpack(3)
    assert (ids.tolist(), lengths.tolist()) == ([7, 9, 7, 7], [2, 0, 2])


@pytest.mark.parametrize(("occurrences", "bytes_each"), [(65_535, 2), (65_536, 4)])
def test_bounds_take_16_bits_as_long_as_every_count_fits(occurrences: int, bytes_each: int) -> None:
    ids = np.zeros(occurrences, np.uint64)
    packed = FieldIds.pack(ids, np.array([occurrences]))
    assert packed.byte_count == 8 + bytes_each * 2 + 2 * occurrences
    found, lengths = FieldIds.from_bytes(packed.to_bytes()).unpack(1)
    assert len(found) == occurrences == lengths[0]


def test_the_last_of_65536_samples_has_a_position() -> None:
    lengths = np.zeros(65_536, int)
    lengths[[0, 65_535]] = 1
    ids, found = FieldIds.pack(np.array([3, 4], np.uint64), lengths).unpack(65_536)
    assert ids.tolist() == [3, 4]
    np.testing.assert_array_equal(found, lengths)


def test_an_empty_field_comes_back_empty() -> None:
    packed = FieldIds.pack(np.empty(0, np.uint64), np.zeros(5, int))
    ids, lengths = FieldIds.from_bytes(packed.to_bytes()).unpack(5)
    assert len(ids) == 0
    assert lengths.tolist() == [0] * 5


def test_scaled_rows_by_hand() -> None:
    """The largest of a block is mapped to 32768, the others in proportion; zeros stay zeros."""
    rows = np.array([[0.5, -2.0, 0.0, 0.0], [1e-20, 0.5e-20, 3e30, -1.5e30]], np.float32)
    packed = HalfRows.pack(rows, block=2)
    assert packed.halves.astype(float).tolist() == [
        [8192.0, -32768.0, 0.0, 0.0],
        [32768.0, 16384.0, 32768.0, -16384.0],
    ]
    np.testing.assert_array_equal(packed.norms, np.abs(rows).reshape(2, 2, 2).max(axis=2))
    np.testing.assert_array_equal(packed.unpack(), rows)
    assert packed.byte_count == 2 * 8 + 4 * 4


def test_plain_rows_are_rounded_to_fp16_and_nothing_else() -> None:
    rows = np.array([[1.0, 1.0 + 2.0**-11, 65504.0, 1e-9]], np.float32)
    packed = HalfRows.pack(rows, block=None)
    np.testing.assert_array_equal(packed.unpack(), rows.astype(np.float16).astype(np.float32))
    assert packed.byte_count == 8
