"""Saved rows on another number of shards, after several saves: each row, its age and its end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.rows import load
from runtime.embedding.batch_rows import STALENESS_BINS, shard_of
from runtime.embedding.config import Capacity
from runtime.embedding.sharded import divided
from tests.runtime.embedding.conftest import save
from tests.runtime.embedding.test_checkpoint import ADAM, equal_stores, train


@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 5), (1, 3)])
@pytest.mark.law11
def test_a_resharded_store_trains_on_as_the_one_that_was_not(one_table, tmp_path, old, new):
    """Rows must lie in the shard where lookups look for them, or they would start afresh."""
    saved, loaded = (one_table(shards=n, dim=4, optimizer=ADAM) for n in (old, new))
    train(saved, range(8))
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    created = [t.store.counters["created"] for t in (saved, loaded)]
    for step in range(11, 20):
        ids = np.random.default_rng(step).choice(150, 40, replace=False)
        seen = []
        for table in (saved, loaded):
            handle = table.look_up(ids, step)
            inverse = handle.plans["rows"].inverse
            gradients = np.empty((40, 4), np.float32)
            gradients[inverse] = (ids[:, None] + np.arange(4)) / 100  # by id, whatever the order
            table.push(handle, gradients)
            seen.append(handle.values["rows"][inverse])
        np.testing.assert_array_equal(seen[0], seen[1])
    equal_stores(loaded, saved)
    fresh = [t.store.counters["created"] for t in (saved, loaded)]
    assert fresh[0] - created[0] == fresh[1] - created[1] > 0


def relative_ages(ids: list[int], shards: int) -> list[int]:
    """Ids that were used in this order, as that many shards merge theirs: by place in their own."""
    own = [[one for one in ids if shard_of(np.array([one]), shards)[0] == k] for k in range(shards)]
    aged = [(place / len(of), k, one) for k, of in enumerate(own) for place, one in enumerate(of)]
    return [one for _, _, one in sorted(aged)]


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 3), (2, 3), (3, 2)])
@pytest.mark.law11
def test_a_full_table_on_other_shards_goes_on_to_evict_its_oldest_rows(
    one_table, tmp_path, old, new
):
    """Against a list a shard; new shards do not hold equally many rows, so loading evicts, too."""
    saved, loaded = (one_table(shards=n, dim=2, capacity=Capacity(rows=24)) for n in (old, new))
    used = [int(i) for i in np.random.default_rng(old).permutation(60)[:30]]
    for number, one in enumerate([*used, *used[10:14]]):  # four of them are used again
        saved.look_up([one], number)
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    gone = len(saved.resident()) - len(loaded.resident())
    assert loaded.store.counters["evicted"] == gone  # nothing is lost without being counted
    used = [one for one in used if one not in used[10:14]] + used[10:14]
    full = relative_ages([one for one in used if one in saved.resident()], old)
    kept: list[list[int]] = [[] for _ in range(new)]
    for one in [*full, *range(100, 130)]:
        if one >= 100:
            loaded.look_up([one], one)
        shard = kept[shard_of(np.array([one]), new)[0]]
        shard.append(one)
        del shard[: -(24 // new)]
        if one >= 100 or one == full[-1]:
            assert loaded.resident() == {i for of in kept for i in of}


@pytest.mark.parametrize("saved_at", [25, 40])
@pytest.mark.parametrize("capacity", [None, 90])
@pytest.mark.parametrize(("old", "new"), [(2, 2), (2, 1), (1, 3), (3, 2)])
@pytest.mark.law11
def test_each_row_on_other_shards_expires_when_its_own_time_is_over(
    one_table, tmp_path, old, new, capacity, saved_at
):
    """Saved at step 40, some have expired, one is at its very last step, and the id of that step is
    in one of the shards alone."""
    config = {"dim": 2, "capacity": Capacity(rows=capacity, expire_after_steps=30)}
    saved, loaded = (one_table(shards=n, **config) for n in (old, new))
    last = {int(i): step for step, i in enumerate(np.random.default_rng(new).permutation(60)[:25])}
    for one, step in last.items():
        saved.look_up([one], step)
    late = next(i for i in range(1000, 1100) if shard_of(np.array([i]), old)[0] == old - 1)
    saved.look_up([late], saved_at)
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    living = {late} | {i for i, used in last.items() if used >= saved_at - 30}
    assert loaded.resident() == saved.resident() == living
    for step in range(saved_at + 1, 60):
        loaded.look_up([late], step)
        assert loaded.resident() == {late} | {i for i, used in last.items() if used >= step - 30}


@pytest.mark.parametrize("shards", [1, 2])
def test_rows_that_had_expired_do_not_come_back_where_rows_do_not_expire(
    one_table, tmp_path, shards
):
    capacity = Capacity(rows=90, expire_after_steps=5)
    saved, loaded = one_table(shards=2, dim=2, capacity=capacity), one_table(shards=shards, dim=2)
    saved.look_up(np.arange(30), 0)
    saved.look_up([4], 5)
    saved.look_up([30], 9)
    save(saved.store, tmp_path)
    load(loaded.store, tmp_path)
    assert loaded.resident() == {4, 30} and len(loaded.store) == 2


COUNTED = st.fixed_dictionaries(
    {
        "version": st.integers(0, 99),
        "updates": st.integers(0, 99),
        "rows_replaced": st.integers(0, 99),
        "lost": st.integers(0, 99),
        "row_staleness": st.lists(
            st.integers(0, 9), min_size=STALENESS_BINS, max_size=STALENESS_BINS
        ),
        "counters": st.fixed_dictionaries({"created": st.integers(0, 9)}),
    }
)


@given(st.lists(COUNTED, min_size=1, max_size=4), st.integers(1, 6))
@pytest.mark.law11
def test_counts_on_other_shards_have_the_sums_and_the_clock_of_those_before(before, shards):
    after = divided(before, shards)
    assert len(after) == shards
    for name in ("rows_replaced", "lost"):
        assert sum(one[name] for one in after) == sum(one[name] for one in before)
    staleness = [np.sum([one["row_staleness"] for one in side], 0) for side in (before, after)]
    assert np.array_equal(*staleness)
    created = [sum(one["counters"].get("created", 0) for one in side) for side in (before, after)]
    assert created[0] == created[1]
    if shards != len(before):
        for name in ("version", "updates"):
            assert {one[name] for one in after} == {max(one[name] for one in before)}
