"""Index and slab through growth, eviction and re-use, against a dictionary, on many ids."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.embedding.config import Capacity, RowOptimizer
from tests.runtime.embedding.conftest import snapshots

SGD = RowOptimizer(kind="sgd", lr=1.0)
ZERO = {"initial": "constant", "initial_scale": 0.0}


@pytest.mark.parametrize("shards", [1, 7])
def test_growth_loses_and_confuses_no_row(one_table, shards):
    table = one_table(dim=2, shards=shards, optimizer=SGD, **ZERO)
    rng = np.random.default_rng(0)
    model: dict[int, float] = {}
    for step in range(40):
        ids = rng.choice(60_000, 4000, replace=False).astype(np.uint64)
        ids[::3] |= np.uint64(2**63)  # another field's ids
        handle = table.look_up(ids, step)
        distinct = handle.plans["rows"].ids
        table.push(handle, -(distinct % np.uint64(97)).astype(np.float32)[:, None])
        for one in ids.tolist():
            model[one] = model.get(one, 0.0) + one % 97
    ids, values, _ = table.store.export()["rows"]
    assert dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True)) == model
    assert (values[:, 0] == values[:, 1]).all()


def test_slots_are_used_again_and_never_grow_beyond_the_capacity(one_table):
    table = one_table(dim=2, optimizer=SGD, capacity=Capacity(rows=500), **ZERO)
    rng = np.random.default_rng(1)
    sizes = []
    for step in range(300):
        table.look_up(rng.choice(5000, 100, replace=False), step)
        sizes.append(table.store.resident_bytes)
    assert len(table.store) == 500
    assert sizes[20] == sizes[-1]
    order = [int(i) for i in snapshots(table.store)[0]["rows"]["ids"]]
    assert len(set(order)) == 500


def test_crowded_groups_that_wrap_around_lose_no_row_when_others_leave(one_table):
    """All homes are the index's last groups, so rows overflow into its first ones and move back."""
    rng = np.random.default_rng(3)
    tags = rng.integers(0xF8000000, 2**32, 900, dtype=np.uint64)
    ids = unmix64(tags << np.uint64(32) | rng.integers(0, 2**32, 900, dtype=np.uint64))
    table = one_table(dim=2, optimizer=SGD, capacity=Capacity(rows=300), **ZERO)
    newest_last: dict[int, None] = {}
    for step in range(200):
        chosen = rng.choice(ids, 40, replace=False)
        distinct = table.look_up(chosen, step).plans["rows"].ids
        for one in distinct.tolist():
            newest_last.pop(one, None)
            newest_last[one] = None
        newest_last = dict.fromkeys(list(newest_last)[-300:])
        kept = snapshots(table.store)[0]["rows"]["ids"]
        assert kept.tolist() == list(newest_last)
    before = table.store.counters["created"]
    table.look_up(np.array(list(newest_last), np.uint64), 200)
    assert table.store.counters["created"] == before


def test_ids_whose_hashes_share_a_tag_are_told_apart(one_table):
    """Ids are made backwards from hashes that agree in the upper half."""
    hashes = (np.uint64(0xABCDEF01) << np.uint64(32)) | np.arange(2000, dtype=np.uint64)
    ids = unmix64(hashes)
    table = one_table(dim=2, optimizer=SGD, capacity=Capacity(rows=1500), **ZERO)
    for start in range(0, 2000, 100):
        part = ids[start : start + 100]
        table.push(table.look_up(part), -(1.0 + start))
    found = table.values(ids)[:, 0]
    expected = np.repeat(1.0 + np.arange(0, 2000, 100), 100)
    expected[:500] = 0.0
    np.testing.assert_array_equal(found, expected)


def unmix64(hashes: np.ndarray) -> np.ndarray:
    """The inverse of `runtime.data.ids.mix64`."""
    mask = 2**64 - 1

    def unshift(value: int, bits: int) -> int:
        found = value
        for _ in range(64 // bits):
            found = value ^ (found >> bits)
        return found

    first = pow(0xBF58476D1CE4E5B9, -1, 2**64)
    second = pow(0x94D049BB133111EB, -1, 2**64)
    values = [
        unshift(unshift(unshift(h, 31) * second & mask, 27) * first & mask, 30)
        for h in hashes.tolist()
    ]
    return np.array(values, np.uint64)
