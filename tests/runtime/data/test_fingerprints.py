"""Rows known by what they hold, and a bounded sketch of any number of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runtime.data.fingerprints as module
from runtime.data.batch import Batch, interleave
from runtime.data.fingerprints import (
    NO_ROWS,
    STRETCH,
    RowSet,
    Sketch,
    alike,
    fingerprints,
    stretches,
)
from runtime.data.ids import mix64, tag

Row = tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]
"""Values of each of three fields, and two dense features."""
VALUES = st.integers(0, 3)
ROWS = st.lists(
    st.tuples(
        st.tuples(
            st.tuples(VALUES),
            st.lists(VALUES, max_size=3).map(tuple),
            st.lists(VALUES, max_size=2).map(tuple),
        ),
        st.tuples(*[st.sampled_from([0.0, -0.0, 1.0, 0.5])] * 2),
    ),
    min_size=1,
    max_size=30,
)


def batch(rows: Sequence[Row], fields: Sequence[int] = (0, 1, 2), labels: int = 1) -> Batch:
    """The second and third field share a group, and so the tag of their ids."""
    per_field = [[row[0][k] for row in rows] for k in fields]
    flat = [np.array([v for bag in bags for v in bag], np.uint64) for bags in per_field]
    tagged = [tag(min(k, 1), mix64(ids)) for k, ids in zip(fields, flat, strict=True)]
    lengths: list[Any] = [np.array([len(bag) for bag in bags]) for bags in per_field]
    ids, offsets = interleave(tagged, lengths)
    dense = np.array([row[1] for row in rows], np.float32)
    return Batch(ids, offsets, dense, np.zeros((len(rows), labels), np.float32))


@given(ROWS, st.data())
def test_rows_have_one_fingerprint_where_and_only_where_they_hold_the_same(rows, data):
    """Whatever batches they come in and their labels; -0.0 and 0.0 are equal."""
    whole = fingerprints(batch(rows))
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            assert (whole[i] == whole[j]) == (one == other)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [batch(rows, labels=2).rows(a, b) for a, b in pairwise([0, *cuts, len(rows)])]
    assert np.concatenate([fingerprints(part) for part in parts]).tolist() == whole.tolist()
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    assert (fingerprints(batch(rows).take(order)) == whole[order]).all()


@given(ROWS, st.lists(st.integers(0, 30), max_size=5), st.sampled_from([1, 7, 1000]))
def test_a_sketch_of_samples_is_that_of_their_fingerprints(rows, cuts, at_once):
    """However many of them it takes together, and in whatever batches they come."""
    whole = batch(rows)
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    by_value, of_samples = Sketch(), Sketch()
    by_value.add(fingerprints(whole))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS_AT_ONCE", at_once)
        for first, last in pairwise(bounds):
            of_samples.add_samples(whole.rows(first, last))
    expected, found = by_value.rows(), of_samples.rows()
    assert found.size == len(rows)
    for one, other in ((found, expected), (found.stretches, expected.stretches)):
        assert one.values.tolist() == other.values.tolist()
        assert one.counts.tolist() == other.counts.tolist()


def test_a_batch_without_offsets_is_one_whose_bags_hold_one_id_each():
    rows: list[Row] = [(((k,), (k % 3,), (7,)), (0.5, float(k))) for k in range(9)]
    one = batch(rows)
    assert one.offsets is None
    other = Batch(one.ids, np.arange(len(one.ids) + 1), one.dense, one.labels)
    assert (fingerprints(one) == fingerprints(other)).all()


@given(
    st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=6),
    st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=6),
    st.sampled_from([1, 7, 1000]),
)
def test_a_sketch_is_the_smallest_fingerprints_and_how_often_each_came(first, second, most):
    """In whatever chunks, and of two sketches put together; against plain Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_ROWS", most)
        sketches = []
        for chunks in (first, second):
            sketch = Sketch()
            for chunk in chunks:
                sketch.add(mix64(np.array(chunk, np.uint64)))
                sketch.rows()
            assert_is(sketch.rows(), Counter(v for chunk in chunks for v in chunk), most)
            sketches.append(sketch.rows())
        counts = [Counter(v for chunk in chunks for v in chunk) for chunks in (first, second)]
        assert_is(sketches[0].plus(sketches[1]), counts[0] + counts[1], most)
        joined = counts[0] + counts[1]
        if _lies_in(counts[0], counts[1], most):
            joined = counts[0] | counts[1]
        assert_is(sketches[0].behind(sketches[1]), joined, most)


def _lies_in(one: Counter[int], other: Counter[int], most: int) -> bool:
    """Whether 95 % of these are of those, of the smallest fingerprints of both."""
    kept = [sorted(counts, key=_fingerprint)[:most] for counts in (one, other)]
    full = [_fingerprint(k[-1]) for c, k in zip((one, other), kept, strict=True) if len(c) > most]
    limit = min(full, default=2**64)
    ours = [value for value in kept[0] if _fingerprint(value) <= limit]
    shared = sum(min(one[value], other[value]) for value in ours)
    return bool(ours) and shared >= 0.95 * sum(one[value] for value in ours)


def _fingerprint(value: int) -> int:
    return int(mix64(np.array([value], np.uint64))[0])


@given(
    st.lists(st.integers(0, 3), min_size=0, max_size=80),
    st.lists(st.integers(1, 30), max_size=5),
    st.integers(0, 40),
)
def test_stretches_are_the_same_wherever_they_begin_and_however_they_are_read(rows, cuts, skipped):
    values = mix64(np.array(rows, np.uint64))
    found = stretches(values)
    distinct = {tuple(rows[i : i + STRETCH]) for i in range(len(rows) - STRETCH + 1)}
    assert len(found) == max(len(rows) - STRETCH + 1, 0) and len(set(found)) == len(distinct)
    assert stretches(values[skipped:]).tolist() == found[skipped:].tolist()
    sketch = Sketch()
    for piece in np.split(values, np.cumsum(cuts)):
        sketch.add(piece)
        sketch.rows()
    known = sketch.rows().stretches
    assert sorted(set(found.tolist())) == ([] if known is None else known.values.tolist())


def assert_is(rows: RowSet, counts: Counter[int], most: int) -> None:
    every = {int(mix64(np.array([v], np.uint64))[0]): count for v, count in counts.items()}
    kept = sorted(every)[:most]
    assert rows.values.tolist() == kept
    assert rows.counts.tolist() == [every[value] for value in kept]
    assert rows.knows_all == (len(every) <= most)
    assert rows.limit == (2**64 - 1 if rows.knows_all else kept[-1])


def sketch_of(values: np.ndarray) -> RowSet:
    sketch = Sketch()
    sketch.add(mix64(values.astype(np.uint64)))
    return sketch.rows()


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 300))
def test_rows_that_are_alike_are_counted_and_few_are_by_chance_where_none_repeats(a, b, size):
    """Of as many pairs twice over as those among which none is equal: 8 and two deviations."""
    judged, trained = np.arange(a, a + size), np.arange(b, b + size)
    found = alike(sketch_of(judged), sketch_of(trained))
    assert found.rows == len(set(judged) & set(trained))
    assert found.by_chance < 14 or size < 40
    many = alike(sketch_of(judged), sketch_of(np.arange(b, b + 100 * size)))
    assert many.by_chance < 1, "so many rows that do not repeat say that none meets by chance"
    assert alike(NO_ROWS, sketch_of(trained)).rows == alike(sketch_of(judged), NO_ROWS).rows == 0


@pytest.mark.parametrize(("trained", "judged"), [(64, 800), (640, 160), (5000, 1000), (1000, 5000)])
@pytest.mark.parametrize("share", [0.1, 10])
@pytest.mark.parametrize("skewed", [False, True])
def test_what_meets_by_chance_stays_within_chance(trained, judged, share, skewed):
    """Of so many values that they repeat, uniform or by a Zipf law, in twenty draws of a seed."""
    generator = np.random.default_rng([trained, judged, skewed])
    values = max(2, int(share * max(trained, judged)))

    def draw(count: int) -> np.ndarray:
        if skewed:
            return (values ** generator.random(count)).astype(int)
        return generator.integers(0, values, count)

    for _ in range(20):
        train, test = draw(trained), draw(judged)
        found = alike(sketch_of(test), sketch_of(train))
        assert found.rows <= found.by_chance
        assert found.rows == np.isin(test, train).sum()


@pytest.mark.parametrize(("trained", "judged"), [(10, 1000), (1000, 10)])
def test_many_rows_that_do_not_repeat_say_of_few_that_they_are_known(trained, judged):
    """Whichever side has many: among half a million pairs none is equal, so ten of ten thousand
    are none by chance. Ten rows against ten say nothing."""
    found = alike(sketch_of(np.arange(judged)), sketch_of(np.arange(trained)))
    assert found.rows == 10 > 10 * found.by_chance
    few = alike(sketch_of(np.arange(10)), sketch_of(np.arange(10)))
    assert few.rows == 10 < few.by_chance
