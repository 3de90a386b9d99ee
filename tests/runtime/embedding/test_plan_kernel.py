"""Merging duplicate ids: against numpy, over sizes, hash pieces that agree, and many calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.batch import Batch, Field
from runtime.data.ids import VALUE_BITS, tag
from runtime.embedding.batch_rows import shard_of
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.plan import Planner
from tests.runtime.embedding.test_index_model import unmix64


def plan(ids: np.ndarray, shards: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    no_offsets, one_table = np.empty(0, np.int64), [1]
    found = native.plan_tables(ids, no_offsets, np.zeros(1, np.int32), one_table, 0, shards)
    distinct, _, bounds, inverse, *_ = found
    return distinct, bounds[0], inverse


@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from([0, 1, 2, 17, 700, 5000, 80_000]),
    values=st.sampled_from([1, 10, 4000, 2**62]),
    shards=st.sampled_from([1, 2, 7]),
)
@settings(max_examples=60, deadline=None)
def test_every_occurrence_points_to_its_id_in_its_shard(seed, count, values, shards):
    ids = np.random.default_rng(seed).integers(0, values, count).astype(np.uint64)
    distinct, bounds, inverse = plan(ids, shards)
    np.testing.assert_array_equal(distinct[inverse], ids)
    np.testing.assert_array_equal(np.sort(distinct), np.unique(ids))
    np.testing.assert_array_equal(
        shard_of(distinct, shards), np.repeat(np.arange(shards), np.diff(bounds))
    )
    first = {int(one): place for place, one in reversed(list(enumerate(ids)))}
    for part in np.split(distinct, bounds[1:-1]):
        places = [first[int(one)] for one in part]
        assert places == sorted(places)  # in the order of first appearance


def test_ids_whose_hashes_agree_in_place_and_piece_are_told_apart():
    """The upper 16 bits and the lower 20 are the same in all: one chain, one piece."""
    middle = np.arange(600, dtype=np.uint64) << np.uint64(20)
    ids = unmix64((np.uint64(0xABCD) << np.uint64(48)) | middle | np.uint64(77))
    distinct, _, inverse = plan(np.concatenate([ids, ids[::-1]]), 1)
    np.testing.assert_array_equal(distinct, ids)
    np.testing.assert_array_equal(inverse, np.r_[0:600, 599:-1:-1])


def test_what_an_earlier_call_left_behind_is_never_found_again():
    """The scratch table is cleared by a number of 16 bits, so go once around it."""
    ids = np.random.default_rng(0).integers(0, 2**40, 400).astype(np.uint64)
    plan(ids, 1)
    for _ in range(2**16 - 2):
        plan(ids[:1], 1)
    for _ in range(2):
        distinct, _, inverse = plan(ids, 1)
        np.testing.assert_array_equal(distinct, ids)
        np.testing.assert_array_equal(inverse, np.arange(400))


@given(seed=st.integers(0, 10**6), bags=st.booleans(), shards=st.sampled_from([1, 3]))
@settings(max_examples=40, deadline=None)
def test_one_call_plans_every_table_of_a_batch(seed, bags, shards):
    """Fields of three tables in turn, of which two share one; bags may be empty."""
    rng = np.random.default_rng(seed)
    fields = [Field(name=f"f{k}", table=t) for k, t in enumerate(("plain", "both", "wide", "both"))]
    tables = [TableConfig(name="both"), TableConfig(name="wide", dim=16), TableConfig(name="plain")]
    lengths = rng.integers(0, 4, 9 * 4) if bags else np.ones(9 * 4, np.int64)
    field_of_id = np.repeat(np.tile(np.arange(4), 9), lengths)
    values = rng.integers(0, 12, len(field_of_id)).astype(np.uint64)
    ids = np.array([tag(f, v)[()] for f, v in zip(field_of_id, values, strict=True)], np.uint64)
    empty = np.zeros((9, 1), np.float32)
    offsets = np.r_[0, np.cumsum(lengths)] if bags else None
    plans = Planner(fields, tables, shards).plan(Batch(ids, offsets, empty, empty))
    assert list(plans) == ["both", "wide", "plain"]
    for name, own in (("both", (1, 3)), ("wide", (2,)), ("plain", (0,))):
        found, where = plans[name], np.flatnonzero(np.isin(field_of_id, own))
        np.testing.assert_array_equal(found.occurrences, where)
        wanted = ids[where]
        np.testing.assert_array_equal(found.ids[found.inverse], wanted)
        assert len(found.ids) == len(np.unique(wanted)) == found.bounds[-1]
        owners = np.repeat(np.arange(shards), np.diff(found.bounds))
        np.testing.assert_array_equal(shard_of(found.ids, shards), owners)


FIELDS = [Field(name=f"f{k}") for k in range(5)]
SAMPLES = 40_000
"""So many that three threads share the fields."""


def many(bags: bool, tagged: bool) -> Batch:
    """Enough ids of five fields for several threads; not tagged, fields have ids in common."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 4, SAMPLES * 5) if bags else np.ones(SAMPLES * 5, np.int64)
    fields = np.repeat(np.tile(np.arange(5), SAMPLES), lengths)
    ids = rng.zipf(1.3, len(fields)).astype(np.uint64) % np.uint64(7000)
    if tagged:
        ids |= fields.astype(np.uint64) << np.uint64(VALUE_BITS)
    empty = np.zeros((SAMPLES, 1), np.float32)
    return Batch(ids, np.r_[0, np.cumsum(lengths)] if bags else None, empty, empty)


@pytest.mark.law6
@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("tables", [
    {}, {"shards": 3}, {"apart": True},
], ids=str)  # fmt: skip
def test_threads_that_share_the_merge_number_ids_as_one_does(bags, tagged, tables):
    shards, has_two = tables.get("shards", 1), tables.get("apart", False)
    configs = [TableConfig()] + [TableConfig(name="other")] * has_two
    fields = [Field(name=f.name, table="other") if has_two and k == 2 else f
              for k, f in enumerate(FIELDS)]  # fmt: skip
    batch = many(bags, tagged)
    found = []
    for threads in (1, 2, 5):
        native.set_threads(threads)
        try:
            found.append(Planner(fields, configs, shards).plan(batch))
        finally:
            native.set_threads(1)
    alone, *shared = found
    assert alone.apart == ()
    for plan_of_threads in shared:
        for name in ("ids", "spans", "bounds", "inverse", "occurrences", "starts"):
            wanted, given_by = getattr(alone, name), getattr(plan_of_threads, name)
            np.testing.assert_array_equal(given_by, wanted, err_msg=name)
        # A table of one field has no row of two, whatever its ids are.
        assert plan_of_threads.apart == ((tagged, True) if has_two else (tagged,))


@pytest.mark.parametrize("wrong", ["one id of another field", "a field with another's number"])
def test_fields_with_an_id_in_common_are_not_apart(wrong):
    batch = many(False, True)
    ids = batch.ids.reshape(SAMPLES, 5).copy()
    if wrong.startswith("one"):
        ids[-1, 3] = ids[0, 1]
    else:
        ids[:, 3] = ids[:, 1]
    native.set_threads(2)
    try:
        made = Batch(ids.ravel(), None, batch.dense, batch.labels)
        assert Planner(FIELDS, [TableConfig()], 1).plan(made).apart == (False,)
    finally:
        native.set_threads(1)
