"""The simulator's filling of a bounded table beside the store that really fills and evicts."""

from __future__ import annotations

import numpy as np
import pytest

from persia_sim.base.popularity import (
    batch_miss_rate,
    characteristic_time,
    lru_after,
    lru_miss_rate,
    zipf_bins,
)
from runtime.embedding.config import Capacity
from tests.runtime.embedding.conftest import OneTable

ROWS, ROOM, SKEW = 1000, 200, 0.9


@pytest.mark.parametrize("requests", [600])
def test_a_store_holds_and_creates_what_che_says(requests):
    probability, _ = zipf_bins(float(ROWS), SKEW)
    resident, created = [], []
    for seed in range(6):
        table = OneTable(dim=2, capacity=Capacity(rows=ROOM))
        for one in np.random.default_rng(seed).choice(ROWS, requests, p=probability):
            table.look_up([int(one) + 1])
        resident.append(len(table.resident()))
        created.append(table.store.counters["created"])
    rows, _ = lru_after(requests, ROOM, ROWS, SKEW)
    # Every miss creates a row, and each request misses at the rate of its own time.
    misses = sum(lru_after(n, ROOM, ROWS, SKEW)[1] for n in range(requests))
    assert np.mean(resident) == pytest.approx(rows, rel=0.05)
    assert np.mean(created) == pytest.approx(misses, rel=0.05)
    assert max(resident) <= ROOM


@pytest.mark.parametrize("skew", [0.0, 0.9, 1.3])
def test_batches_create_the_rows_that_che_says(skew):
    """A full store, 40 draws a batch, each distinct id once; see test_memory for the tolerance."""
    probability, _ = zipf_bins(float(ROWS), skew)
    batch, share = 40, []
    full = int(characteristic_time(0.99 * ROOM, ROWS, skew) / batch) + 20
    for seed in range(6):
        table, random = OneTable(dim=2, capacity=Capacity(rows=ROOM)), np.random.default_rng(seed)
        asked = before = 0
        for number in range(full + 100):
            if number == full:
                before = table.store.counters["created"]
                assert len(table.resident()) == ROOM
            ids = random.choice(ROWS, batch, p=probability)
            table.look_up(ids + 1)
            asked += len(set(ids.tolist())) * (number >= full)
        share.append((table.store.counters["created"] - before) / asked)
    missing = np.exp(-probability * characteristic_time(ROOM, ROWS, skew))
    spread = np.sqrt((missing * (1 - missing)).sum())
    most = batch_miss_rate(np.inf, batch, ROOM - spread, ROWS, skew)
    least = batch_miss_rate(np.inf, batch, ROOM + spread, ROWS, skew)
    error = 6 * np.std(share, ddof=1) / np.sqrt(6)
    assert least - error <= np.mean(share) <= most + error
    if skew:  # draws miss more seldom: what a batch misses is no share of its draws
        assert lru_miss_rate(ROOM, ROWS, skew) < least - error
