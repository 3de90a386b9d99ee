"""Tables that keep the most recently used rows: Che's approximation beside simulated tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.model.popularity import (
    batch_miss_rate,
    characteristic_time,
    draws_until,
    expected_distinct,
    lru_after,
    lru_miss_rate,
    zipf_bins,
)
from tests.persia_sim import sim_configurations  # noqa: F401  # its hypothesis profile


def test_lru_miss_rate_matches_a_simulated_cache() -> None:
    rng = np.random.default_rng(1)
    probability, _ = zipf_bins(1000.0, 0.9)
    cache: dict[int, None] = {}
    misses = []
    for number, key in enumerate(rng.choice(1000, 60_000, p=probability).tolist()):
        if number >= 10_000:
            misses.append(key not in cache)
        cache.pop(key, None)
        cache[key] = None
        if len(cache) > 200:
            del cache[next(iter(cache))]
    assert lru_miss_rate(200.0, 1000.0, 0.9) == pytest.approx(np.mean(misses), abs=0.01)
    assert lru_miss_rate(1000.0, 1000.0, 0.9) == 0


def test_a_store_that_fills_has_the_rows_and_misses_of_a_simulated_one() -> None:
    probability, _ = zipf_bins(1000.0, 0.9)
    resident: dict[int, list[int]] = {n: [] for n in (50, 200, 1000, 4000)}
    missed: dict[int, list[bool]] = {n: [] for n in resident}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        held: dict[int, None] = {}
        for n, one in enumerate(rng.choice(1000, 4001, p=probability).tolist()):
            if n in resident:
                resident[n].append(len(held))
            for at in missed:
                if at <= n < at + 40:
                    missed[at].append(one not in held)
            held.pop(one, None)
            held[one] = None
            if len(held) > 200:
                held.pop(next(iter(held)))
    for n in resident:
        rows, miss = lru_after(n, 200.0, 1000.0, 0.9)
        assert rows == pytest.approx(np.mean(resident[n]), rel=0.02), n
        error = np.sqrt(miss * (1 - miss) / len(missed[n]))
        assert miss == pytest.approx(np.mean(missed[n]), abs=4 * error + 0.02), n


def test_filling_begins_with_nothing_and_ends_in_the_steady_state() -> None:
    assert lru_after(0.0, 100.0, 1e6, 1.05) == (0.0, pytest.approx(1.0))
    rows, miss = lru_after(1e12, 100.0, 1e6, 1.05)
    assert rows == pytest.approx(100.0)
    assert miss == pytest.approx(lru_miss_rate(100.0, 1e6, 1.05))
    before = 1.1
    for draws in np.geomspace(1, 1e9, 30):
        rows, miss = lru_after(float(draws), 1e4, 1e6, 1.05)
        assert miss <= before and 0 < rows <= 1e4 + 1e-6
        before = miss


def missed_of_a_simulated_table(
    rows: int, room: int, exponent: float, draws: int, seed: int
) -> float:
    """Share of the distinct ids of batches that an LRU table does not hold, once it is full."""
    rng = np.random.default_rng(seed)
    probability, _ = zipf_bins(float(rows), exponent)
    held: dict[int, None] = {}
    asked = missed = 0
    most = int(4 * characteristic_time(room, rows, exponent) / draws) + 60
    for batch in rng.choice(rows, (most, draws), p=probability):
        ids = list(dict.fromkeys(batch.tolist()))
        full = len(held) == room
        for one in ids:
            asked, missed = asked + full, missed + (full and one not in held)
            held.pop(one, None)
            held[one] = None
            if len(held) > room:
                del held[next(iter(held))]
    return missed / asked


@given(
    exponent=st.floats(0.0, 1.3),
    share=st.floats(0.2, 0.8),
    draws=st.sampled_from([1, 5, 20]),
    seed=st.integers(0, 99),
)
@settings(max_examples=10)
def test_batches_miss_what_a_simulated_table_misses(
    exponent: float, share: float, draws: int, seed: int
) -> None:
    """Che's only approximation is that the characteristic time is no random number: a window of
    that many requests holds capacity rows in the mean, with the variance sum m (1 - m), m the
    chance that a row is missing. A table with that many rows more or less bounds the error; to it
    come six standard errors of eight simulated tables."""
    rows = 300
    room = round(share * rows)
    found = [
        missed_of_a_simulated_table(rows, room, exponent, draws, 8 * seed + k) for k in range(8)
    ]
    probability, _ = zipf_bins(float(rows), exponent)
    missing = np.exp(-probability * characteristic_time(room, rows, exponent))
    spread = float(np.sqrt((missing * (1 - missing)).sum()))
    most = batch_miss_rate(np.inf, draws, room - spread, rows, exponent)
    least = batch_miss_rate(np.inf, draws, room + spread, rows, exponent)
    error = 6 * float(np.std(found, ddof=1)) / np.sqrt(8)
    assert least - error <= np.mean(found) <= most + error


@pytest.mark.parametrize(
    ("room", "exponent", "draws"), [(60, 0.0, 200), (100, 1.05, 500), (400, 0.9, 2000)]
)
def test_batches_of_more_ids_than_the_table_has_rows_hit_what_came_late(
    room: int, exponent: float, draws: int
) -> None:
    """Without the batch before, the law would say that 95 to 100 % miss."""
    rows = 300 if exponent == 0 else 1000
    assert expected_distinct(draws, float(rows), exponent) > 1.4 * room
    found = [missed_of_a_simulated_table(rows, room, exponent, draws, k) for k in range(6)]
    law = batch_miss_rate(np.inf, draws, room, rows, exponent)
    assert law == pytest.approx(np.mean(found), abs=0.01) and law < 0.96


def test_single_requests_are_batches_of_one() -> None:
    for room in (50.0, 200.0, 900.0):
        one = batch_miss_rate(np.inf, 1.0, room, 1000.0, 0.9)
        assert one == pytest.approx(lru_miss_rate(room, 1000.0, 0.9), rel=2e-2)


def test_distinct_ids_miss_more_often_than_draws_do() -> None:
    """Popular ids are many draws and one distinct id, and they do not miss."""
    each = lru_miss_rate(1000.0, 5000.0, 1.1)
    distinct = batch_miss_rate(np.inf, 800.0, 1000.0, 5000.0, 1.1)
    created = distinct * expected_distinct(800.0, 5000.0, 1.1)
    assert distinct > 2 * each
    assert created == pytest.approx(800 * each, rel=0.02)  # the same rows are made


@given(
    exponent=st.floats(0.0, 1.3), draws=st.floats(1.0, 1e5), room=st.floats(1.0, 1e4),
    before=st.floats(0.0, 1e9),
)  # fmt: skip
def test_a_larger_or_older_table_never_misses_more(
    exponent: float, draws: float, room: float, before: float
) -> None:
    at = batch_miss_rate(before, draws, room, 1e4, exponent)
    assert 0 <= batch_miss_rate(2 * before + 1, draws, room, 1e4, exponent) <= at <= 1 + 1e-12
    assert batch_miss_rate(before, draws, min(1e4, 1.5 * room), 1e4, exponent) <= at + 1e-12


def test_an_empty_table_misses_everything_and_one_with_room_for_all_nothing() -> None:
    assert batch_miss_rate(0.0, 100.0, 10.0, 1e4, 1.05) == pytest.approx(1.0)
    assert batch_miss_rate(np.inf, 100.0, 1e4, 1e4, 1.05) == 0.0
    assert draws_until(1e4, 1e4, 1.05) == np.inf
