"""A table that keeps the most recently used rows: its misses, and how it fills (by Che).

Requests are independent draws of Zipf's law. A row that nobody asked for within the characteristic
time T has left a full table: sum(1 - exp(-p T)) = capacity (Che, Tung and Wang 2002; asymptotically
exact, Fricker, Robert and Roberts 2012). Before that time the table only fills. One field's rows;
fields are alike.
"""

from __future__ import annotations

from functools import lru_cache
from math import expm1, inf

import numpy as np

from persia_sim.model.popularity import zipf_bins


def lru_miss_rate(capacity_rows: float, rows: float, exponent: float) -> float:
    """Share of single requests that miss in the steady state; 0 when everything fits."""
    if capacity_rows >= rows:
        return 0.0
    return lru_after(inf, capacity_rows, rows, exponent)[1]


def lru_after(
    draws: float, capacity_rows: float, rows: float, exponent: float
) -> tuple[float, float]:
    """Resident rows and miss rate of an LRU table that was empty so many requests ago.

    It holds what was asked for within the shorter of that time and the characteristic time: until
    it is full it only fills, afterwards it is as it will always be.
    """
    probability, number = zipf_bins(rows, exponent)
    time = draws
    if capacity_rows < rows:
        time = min(draws, characteristic_time(capacity_rows, rows, exponent))
    missed = np.exp(-probability * time)
    resident = float(((1.0 - missed) * number).sum())
    return min(resident, capacity_rows), float((probability * missed * number).sum())


def batch_miss_rate(
    draws: float, batch_draws: float, capacity_rows: float, rows: float, exponent: float
) -> float:
    """Share of a batch's distinct ids that an LRU table misses, empty so many requests before it.

    A batch asks once for each of its ids. Rare ids are a larger share of those than of all draws,
    and they are the ones that miss, so this is more than `lru_miss_rate`. In a batch of n draws an
    id comes at some place, after others of the batch but not after itself: of the characteristic
    time, n / 2 draws in the mean lie in the batch and cannot have brought it.
    """
    probability, number = zipf_bins(rows, exponent)
    asked = -np.expm1(batch_draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))
    time = draws
    if capacity_rows < rows:
        full = characteristic_time(capacity_rows, rows, exponent)
        time = min(draws, max(full - batch_draws / 2, 0.0))
    missed = np.exp(-probability * time)
    return float((asked * missed * number).sum() / (asked * number).sum())


def draws_until(held_rows: float, rows: float, exponent: float) -> float:
    """Requests after which an empty table is expected to hold so many rows; inf for all of them.

    >>> from persia_sim.model.popularity import expected_distinct
    >>> draws = draws_until(900.0, 1000.0, 1.05)
    >>> round(expected_distinct(draws, 1000.0, 1.05), 1)
    900.0
    """
    return inf if held_rows >= rows else characteristic_time(held_rows, rows, exponent)


@lru_cache(maxsize=1024)
def characteristic_time(capacity_rows: float, rows: float, exponent: float) -> float:
    """Requests after which a row that nobody asked for has left a full table (Che's)."""
    probability, number = zipf_bins(rows, exponent)
    low, high = 0.0, 80.0
    for _ in range(60):
        middle = (low + high) / 2
        held = float((-np.expm1(-probability * expm1(middle)) * number).sum())
        low, high = (middle, high) if held < capacity_rows else (low, middle)
    return expm1(high)
