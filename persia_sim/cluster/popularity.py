"""How often ids come: Zipf's law in bins, distinct ids of a batch, servers' shares."""

from __future__ import annotations

from functools import lru_cache
from math import expm1, inf, log, pi

import numpy as np

_COUNTS = 128  # points of a distribution of counts; with 1,024 extras are 0.1 % smaller
_HASHED_ROWS = 2048  # most frequent values of a field whose server is found one by one


@lru_cache(maxsize=4096)
def zipf_bins(values: float, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of Zipf-distributed values and how many values share each, both float64 [n].

    The first 1,024 values are exact, later ones are grouped in bins that grow by about 3 %.
    """
    head = np.arange(1.0, min(values, 1024.0) + 1.0)
    if values <= 1024:
        weight = head**-exponent
        return weight / weight.sum(), np.ones_like(head)
    count = max(2, int(log(values / 1024.0) / 0.03))
    edges = np.geomspace(1024.5, values + 0.5, count + 1)
    middle = np.sqrt(edges[:-1] * edges[1:])
    width = np.diff(edges)
    weight = np.concatenate([head, middle]) ** -exponent
    number = np.concatenate([np.ones_like(head), width])
    return weight / (weight * number).sum(), number


def hottest(rows: float, values: float, exponent: float) -> np.ndarray:
    """How many values of each bin are among the ``rows`` most frequent ones, float64 [n].

    >>> hottest(2.0, 4.0, 1.05).tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    _, number = zipf_bins(values, exponent)
    if rows >= values:
        return number
    return np.clip(rows - np.concatenate([[0.0], np.cumsum(number)[:-1]]), 0.0, number)


@lru_cache(maxsize=65536)
def expected_distinct(draws: float, values: float, exponent: float) -> float:
    """Expected number of distinct values among ``draws`` Zipf draws: sum of 1 - (1 - p)^draws.

    >>> round(expected_distinct(1.0, 1000.0, 1.0), 9)
    1.0
    >>> round(expected_distinct(10.0, 4.0, 0.0), 6) == round(4 * (1 - 0.75**10), 6)
    True
    """
    if values < 2:
        return 1.0
    probability, number = zipf_bins(values, exponent)
    met = -np.expm1(draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))
    return float((met * number).sum())


@lru_cache(maxsize=1024)
def server_shares(
    servers: int, fields: int, draws: float, values: float, exponent: float, distinct: bool
) -> np.ndarray:
    """Expected share of each server in ids drawn ``draws`` times a field: float64 [servers], sum 1.

    Ids go to servers by a hash. The frequent ones are placed one by one, so a server that drew
    many of them carries more; the rest spread evenly. ``distinct``: an id counts once, not once a
    draw.
    """
    each, rest = _traffic(fields, draws, values, exponent, distinct)
    load = _load(servers, each, rest)
    shares: np.ndarray = load / load.sum()
    shares.setflags(write=False)
    return shares


@lru_cache(maxsize=1024)
def busiest_extra(
    servers: int, fields: int, draws: float, values: float, exponent: float, distinct: bool
) -> float:
    """Ids by which the busiest server of a batch exceeds the largest expected number, in the mean.

    A fan-out is done when its last server is, and whose that is changes from batch to batch. Counts
    of servers are independent Poisson numbers; where an id counts once, it is there or not: then a
    count is a constant and a Poisson number, with the mean and the variance that it has (a
    translated Poisson distribution). Where a server gets ten ids the result is a tenth too large.
    """
    if servers == 1:
        return 0.0

    # Mean and certain part of each server's count.
    each, rest = _traffic(fields, draws, values, exponent, distinct)
    expected = _load(servers, each, rest)
    certain = np.rint(_load(servers, each**2, 0.0)) if distinct else np.zeros(servers)
    random = np.maximum(expected - certain, 1e-9)
    deviation = np.sqrt(random)
    busiest = int(expected.argmax())

    # Counts around the busiest server's mean, in strides where there are many.
    low = max(0, int(expected[busiest] - 4 * deviation[busiest]))
    high = float((expected + 8 * deviation).max()) + 8.0
    stride = max(1, int((high - low) / _COUNTS))
    count = np.arange(low + (stride - 1) / 2, high, stride)  # each stands for ``stride`` of them

    # The mean of the maximum: how likely it is that all servers lie below each count.
    excess = count - certain[:, None]
    chance = stride * _poisson(excess, random[:, None])
    above = np.cumsum(chance[:, ::-1], 1)[:, ::-1] - (stride + 1) / (2 * stride) * chance
    largest = low + stride * float((1.0 - np.prod(1.0 - np.minimum(above, 1.0), 0)).sum())
    return max(0.0, largest - float(expected[busiest]))


def _poisson(count: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Chance of a Poisson number, 0 below 0; by Stirling's series within 0.1 %."""
    n = np.maximum(count, 0.0) + 1.0
    log_factorial = (n - 0.5) * np.log(n) - n + 0.5 * log(2 * pi) + 1 / (12 * n) - 1 / (360 * n**3)
    return np.asarray(np.exp((n - 1.0) * np.log(mean) - mean - log_factorial) * (count >= 0))


def _traffic(
    fields: int, draws: float, values: float, exponent: float, distinct: bool
) -> tuple[np.ndarray, float]:
    """Expected ids of a batch: of each frequent value of all fields, and of the others together."""
    probability, number = zipf_bins(values, exponent)
    hot = min(_HASHED_ROWS, 1024, len(probability))

    def traffic(p: np.ndarray) -> np.ndarray:
        return -np.expm1(draws * np.log1p(-np.minimum(p, 1 - 1e-12))) if distinct else draws * p

    rest = float((traffic(probability[hot:]) * number[hot:]).sum()) * fields
    return np.tile(traffic(probability[:hot]), fields), rest


def _load(servers: int, each: np.ndarray, rest: float) -> np.ndarray:
    """Expected ids of each server, float64 [servers]."""
    placed = np.bincount(_placement(servers, len(each)), each, servers)
    return np.asarray(np.full(servers, rest / servers) + placed)


@lru_cache(maxsize=64)
def _placement(servers: int, keys: int) -> np.ndarray:
    """The server of each key, by its hash."""
    placed: np.ndarray = (mix64(np.arange(keys, dtype=np.uint64)) % np.uint64(servers)).astype(int)
    return placed


def mix64(keys: np.ndarray) -> np.ndarray:
    """A fixed bijective mixing of 64-bit keys (two xor-shift-multiply rounds), for placement."""
    with np.errstate(over="ignore"):
        mixed = keys + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def lru_miss_rate(capacity_rows: float, rows: float, exponent: float) -> float:
    """Share of single requests that miss in the steady state; 0 when everything fits."""
    return lru_after(inf, capacity_rows, rows, exponent)[1]


def lru_after(
    draws: float, capacity_rows: float, rows: float, exponent: float
) -> tuple[float, float]:
    """Resident rows and miss rate of an LRU table that was empty so many requests ago.

    It holds what was asked for within the shorter of that time and the characteristic time: until
    it is full it only fills, afterwards it is as it will always be.
    """
    probability, number = zipf_bins(rows, exponent)
    time = min(draws, characteristic_time(capacity_rows, rows, exponent))
    resident = float((-np.expm1(-probability * time) * number).sum())
    miss_rate = float((probability * np.exp(-probability * time) * number).sum())
    return min(resident, capacity_rows), miss_rate


def batch_miss_rate(
    draws: float, batch_draws: float, capacity_rows: float, rows: float, exponent: float
) -> float:
    """Share of a batch's distinct ids that an LRU table misses, empty so many requests before it.

    A batch asks once for each of its ids. Rare ids are a larger share of those than of all draws,
    and they are the ones that miss, so this is more than `lru_miss_rate`. An id hits where fewer
    others than the table has rows were asked for since: behind its first place in the last batch
    that had it, in batches between, and in this one before its first place. So `_BATCHES` back;
    farther back the characteristic time decides, of which n / 2 draws lie in the batch.
    """
    probability, number = zipf_bins(rows, exponent)
    log_absent = np.log1p(-np.minimum(probability, 1 - 1e-12))  # of an id, from a draw
    requested = -np.expm1(batch_draws * log_absent)

    # How long an id stays in the table.
    full = characteristic_time(capacity_rows, rows, exponent)
    time = min(draws, max(full - batch_draws / 2, 0.0))

    # Places inside a batch at which an id may come first.
    edges = np.geomspace(min(1.0, batch_draws / 2), batch_draws, _PLACES)
    absent = np.exp(np.outer(np.concatenate([[0.0], edges]), log_absent))
    first = absent[:-1] - absent[1:]  # [places, values]: the chance to come first at a place
    before = (absent[:-1] + absent[1:]) / 2  # to be absent before it
    hits = np.zeros_like(requested)
    between = np.ones_like(requested)

    # Hits on rows that one of the last batches had.
    for back in range(_BATCHES):
        since = (1.0 - before + absent[-1]) * between  # absent behind a place of that batch
        there = number.sum() - (since * number) @ before.T < capacity_rows  # [place then, now]
        made = -np.expm1(np.clip(draws - back * batch_draws, 0.0, batch_draws) * log_absent)
        hits += ((there.T @ first) * first).sum(0) * between * made / requested
        between = between * absent[-1]

    # Hits on rows from farther back, by the characteristic time.
    hits += requested * np.maximum(0.0, between - np.exp(-probability * time))
    return 1.0 - float(hits @ number) / float(requested @ number)


_PLACES = 64  # of a batch, at which an id may come first
_BATCHES = 2  # with one, tables of 1.5 batches miss up to 0.013 too much, with two 0.009


@lru_cache(maxsize=1024)
def characteristic_time(capacity_rows: float, rows: float, exponent: float) -> float:
    """Requests after which a row that nobody asked for has left a full table (Che's), which are
    those after which an empty one is expected to be full; inf where all rows have room.

    >>> round(expected_distinct(characteristic_time(900.0, 1000.0, 1.05), 1000.0, 1.05), 1)
    900.0
    """
    if capacity_rows >= rows:
        return inf
    probability, number = zipf_bins(rows, exponent)
    low = 0.0
    high = 80.0
    for _ in range(60):
        middle = (low + high) / 2
        held = float((-np.expm1(-probability * expm1(middle)) * number).sum())
        low, high = (middle, high) if held < capacity_rows else (low, middle)
    return expm1(high)
