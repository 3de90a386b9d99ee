"""The simulator's filling of a bounded table beside the store that really fills and evicts."""

from __future__ import annotations

import numpy as np
import pytest

from persia_sim.model.popularity import lru_after, zipf_bins
from runtime.embedding.features import Capacity
from tests.runtime.embedding.conftest import OneTable

ROWS, ROOM, SKEW = 1000, 200, 0.9


@pytest.mark.parametrize("requests", [100, 600, 3000])
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
