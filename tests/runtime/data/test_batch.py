from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from runtime.data.batch import Batch, Field, Layout
from runtime.data.source import rebatch, share, shuffled, shuffled_in_buffer

# Every sample carries its own number in the dense feature and in each of its ids, so a lost,
# doubled or torn sample shows.


def numbered(first: int, lengths_BF: np.ndarray) -> Batch:
    n_rows, n_fields = lengths_BF.shape
    numbers = np.arange(first, first + n_rows)
    ids = np.repeat(np.repeat(numbers, n_fields), lengths_BF.ravel()).astype(np.uint64)
    offsets = np.concatenate([[0], np.cumsum(lengths_BF)])
    single = bool((lengths_BF == 1).all())
    dense = numbers[:, None].astype(np.float32)
    return Batch(ids, None if single else offsets, dense, (dense % 2).astype(np.float32))


@st.composite
def streams(draw: st.DrawFn) -> list[Batch]:
    """Chunks of a stream, some with bags of one id each and some not."""
    n_fields = draw(st.integers(1, 3))
    chunks, first = [], 0
    for _ in range(draw(st.integers(0, 5))):
        n_rows = draw(st.integers(1, 9))
        longest = draw(st.sampled_from([1, 3]))
        lengths = draw(hnp.arrays(np.int64, (n_rows, n_fields), elements=st.integers(1, longest)))
        chunks.append(numbered(first, lengths))
        first += n_rows
    return chunks


def numbers(batches: list[Batch]) -> list[int]:
    return [int(x) for b in batches for x in b.dense[:, 0]]


def assert_whole(batch: Batch) -> None:
    """The ids and the label of every sample are its own."""
    bags = len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1
    lengths = np.ones(bags, int) if batch.offsets is None else np.diff(batch.offsets)
    owner = np.repeat(np.repeat(batch.dense[:, 0], bags // batch.size), lengths)
    assert (batch.ids == owner.astype(np.uint64)).all()
    assert (batch.labels == batch.dense % 2).all()


@given(chunks=streams(), size=st.integers(1, 12))
def test_rebatch_keeps_every_sample_once_and_in_order(chunks, size):
    batches = list(rebatch(iter(chunks), size))
    assert numbers(batches) == numbers(chunks)
    assert all(b.size == size for b in batches[:-1])
    for batch in batches:
        assert 1 <= batch.size <= size
        assert_whole(batch)


@given(chunks=streams().filter(bool), ranks=st.integers(1, 12))
def test_ranks_share_every_sample_once_and_evenly(chunks, ranks):
    batch = Batch.concat(chunks)
    parts = share(batch, ranks)
    assert len(parts) == ranks
    assert numbers(parts) == numbers([batch])
    sizes = [p.size for p in parts]
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        if part.size:
            assert_whole(part)


@given(chunks=streams().filter(bool), seed=st.integers(0, 9), window=st.integers(1, 20))
def test_a_shuffle_is_a_permutation_inside_windows(chunks, seed, window):
    mixed = list(shuffled(iter(chunks), seed, 0, window))
    assert sorted(numbers(mixed)) == numbers(chunks)
    for place, batch in enumerate(mixed):
        assert_whole(batch)
        assert min(numbers([batch])) == place * window
    again = list(shuffled(iter(chunks), seed, 0, window))
    assert numbers(again) == numbers(mixed)


def test_each_window_of_a_shuffle_draws_from_the_seed_the_pass_and_its_own_number():
    chunks = [numbered(0, np.ones((7, 1), np.int64)), numbered(7, np.ones((5, 1), np.int64))]
    mixed = list(shuffled(iter(chunks), 3, 2, window_rows=4))
    for number, batch in enumerate(mixed):
        order = np.random.default_rng([3, 2, number]).permutation(4)
        assert numbers([batch]) == (4 * number + order).tolist()
    assert len(mixed) == 3


@given(chunks=streams().filter(bool), data=st.data())
def test_take_gives_the_samples_that_were_asked_for(chunks, data):
    batch = Batch.concat(chunks)
    order = data.draw(st.lists(st.integers(0, batch.size - 1), min_size=1, max_size=12))
    taken = batch.take(np.array(order))
    assert numbers([taken]) == order
    assert_whole(taken)


@given(chunks=streams().filter(bool), data=st.data())
def test_cutting_and_joining_give_the_batch_back(chunks, data):
    batch = Batch.concat(chunks)
    cut = data.draw(st.integers(0, batch.size))
    again = Batch.concat([batch.rows(0, cut), batch.rows(cut, batch.size)])
    assert (again.ids == batch.ids).all()
    assert numbers([again]) == numbers([batch])
    assert_whole(again)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(ValueError, match="batch size must be >= 1, got 0"):
        next(rebatch(iter([]), 0))


def test_a_layout_with_two_columns_of_one_name_is_refused():
    with pytest.raises(ValueError, match="different names"):
        Layout(fields=(Field(name="user"),), dense=("user",))


def order_of(samples: int, chunk: int, buffer: int, seed: int = 0) -> list[int]:
    """The numbers of the stream's samples in the order in which the buffer gives them."""
    whole = numbered(0, np.ones((samples, 1), np.int64))
    return numbers(list(shuffled_in_buffer(rebatch(iter([whole]), chunk), seed, 0, buffer)))


def by_hand(samples: int, buffer: int, draws: Iterator[int], rest: Sequence[int]) -> list[int]:
    """The same, a sample at a time: the definition of tf.data's shuffle."""
    held, out = list(range(min(buffer, samples))), []
    for sample in range(len(held), samples):
        place = next(draws)
        out.append(held[place])
        held[place] = sample
    return out + [held[place] for place in rest]


@given(st.integers(1, 300), st.integers(1, 60), st.integers(2, 70), st.integers(0, 5))
def test_a_shuffle_buffer_gives_what_its_definition_gives(samples, chunk, buffer, seed):
    size = min(buffer, samples)
    generator = np.random.default_rng([seed, 0, buffer])
    draws = generator.integers(0, size, samples - size).tolist()
    expected = by_hand(samples, buffer, iter(draws), generator.permutation(size).tolist())
    assert order_of(samples, chunk, buffer, seed) == expected
    assert sorted(expected) == list(range(samples))


def test_a_shuffle_buffer_holds_no_sample_back_from_before_it_was_read_over_several_blocks(
    monkeypatch,
):
    monkeypatch.setattr("runtime.data.source._LEAST_BLOCK_ROWS", 64)
    order = np.array(order_of(5_000, 17, 32))
    early = order - np.arange(len(order))  # places before its own that a sample goes out
    assert sorted(order) == list(range(5_000))
    assert early.max() == 31
    # A place is drawn once in 32 draws: how long a sample stays is geometric, with this mean.
    waits = np.arange(len(order))[:-32] - order[:-32]
    assert abs(waits.mean() + 31 - 32) < 4 * 32 / np.sqrt(len(waits))
