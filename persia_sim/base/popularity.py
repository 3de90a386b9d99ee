"""How often ids come: Zipf's law in bins, distinct ids of a batch, servers' shares; and the law
that a log's own ids follow."""

from __future__ import annotations

from functools import lru_cache
from math import expm1, inf, log, pi
from typing import TypeVar

import numpy as np

_COUNTS = 128  # points of a distribution of counts; with 1,024 extras are 0.1 % smaller
_HASHED_ROWS = 2048  # most frequent values of a table whose server is found one by one

Shares = TypeVar("Shares", float, np.ndarray)
Drawn = tuple[int, float, float, float]
"""Tables that are alike: how many, draws of a batch and values of each, exponent."""


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
def server_shares(servers: int, drawn: tuple[Drawn, ...], distinct: bool) -> np.ndarray:
    """Expected share of each server in the ids that are drawn: float64 [servers], sum 1.

    Ids go to servers by a hash. The frequent ones are placed one by one, so a server that drew
    many of them carries more; the rest spread evenly. ``distinct``: an id counts once, not once a
    draw.
    """
    each, rest = _traffic(drawn, distinct)
    load = _load(servers, each, rest)
    shares: np.ndarray = load / load.sum()
    shares.setflags(write=False)
    return shares


@lru_cache(maxsize=1024)
def busiest_extra(servers: int, drawn: tuple[Drawn, ...], distinct: bool) -> float:
    """Ids by which the busiest server of a batch exceeds the largest expected number, in the mean.

    A fan-out is done when its last server is, and whose that is changes from batch to batch. Counts
    of servers are independent Poisson numbers; where an id counts once, it is there or not: then a
    count is a constant and a Poisson number, with the mean and the variance that it has (a
    translated Poisson distribution). Where a server gets ten ids the result is a tenth too large.
    """
    if servers == 1:
        return 0.0

    # Mean and certain part of each server's count.
    each, rest = _traffic(drawn, distinct)
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


def _traffic(drawn: tuple[Drawn, ...], distinct: bool) -> tuple[np.ndarray, float]:
    """Expected ids of a batch: of each frequent value of all tables, and of the others together."""
    frequent = []
    rest = 0.0
    for tables, draws, values, exponent in drawn:
        probability, number = zipf_bins(values, exponent)
        hot = min(_HASHED_ROWS, 1024, len(probability))
        met = draws * probability
        if distinct:
            met = -np.expm1(draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))
        rest += float((met[hot:] * number[hot:]).sum()) * tables
        frequent.append(np.tile(met[:hot], tables))
    return np.concatenate(frequent), rest


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


_STEEPEST = 20.0
_HALVINGS = 32
_EXPONENTS = np.linspace(0.0, 2.0, 11)
_BURSTS = 2.0 ** np.arange(0, 11)
_MOST_ROWS = 1e15
_LUCK = 1.0
"""Misfit that the luck of a log explains."""


def exponent(distinct: float, draws: float, rows: float) -> float:
    """Zipf's exponent with which so many draws are expected to have so many distinct ids.

    >>> round(exponent(expected_distinct(100.0, 1000, 1.05), 100.0, 1000), 3)
    1.05
    """
    low = 0.0
    high = _STEEPEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        few = expected_distinct(draws, rows, middle) < distinct
        low, high = (low, middle) if few else (middle, high)
    return (low + high) / 2


def grown(draws: np.ndarray, met: np.ndarray, scale: float) -> float:
    """Distinct ids of ``scale`` times as many draws as the first, from those of shorter logs.

    The law is that of Zipf draws of which each comes ``burst`` times in a row, which fits users
    who come, stay and leave as well as items that are always there; exponent, rows and burst are
    those nearest to the growth of the log.

    >>> draws = 1e5 * 0.5 ** np.arange(8)
    >>> met = np.array([expected_distinct(float(n), 5000.0, 1.1) for n in draws])
    >>> round(grown(draws, met, 100.0) / expected_distinct(1e7, 5000.0, 1.1), 2)
    1.0
    """
    best = (inf, 0.0, 0.0, 1.0)
    longest = draws[0] / met[0]  # of longer bursts there would be fewer than ids
    for burst in _BURSTS[longest >= _BURSTS]:
        last = best
        best = min(best, (*_nearest(draws / burst, met), float(burst)))
        if best[0] < _LUCK or best is last:  # longer bursts fit no better
            break
    if best[0] > _LUCK:
        between = np.clip(best[3] * 2.0 ** np.linspace(-1, 1, 9), 1.0, longest)
        best = min(best, *((*_nearest(draws / each, met), float(each)) for each in between))
    _, rows, zipf, burst = best
    return max(float(met[0]), expected_distinct(float(draws[0] / burst * scale), rows, zipf))


def _nearest(draws: np.ndarray, met: np.ndarray) -> tuple[float, float, float]:
    """The misfit of the nearest law, its rows and its exponent."""
    best = (inf, 0.0, 0.0)
    exponents = _EXPONENTS
    for _ in range(3):  # coarse, then around the best
        best = min(best, min((*_misfit(draws, met, float(s)), float(s)) for s in exponents))
        step = exponents[1] - exponents[0]
        exponents = np.clip(best[2] + step * np.linspace(-1, 1, 9), 0.0, _STEEPEST)
    return best


def _misfit(draws: np.ndarray, met: np.ndarray, zipf: float) -> tuple[float, float]:
    """How far a law that meets as many ids in the whole log is from those of its parts, and its
    rows."""
    low = np.log(met[0])
    high = np.log(_MOST_ROWS)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        few = expected_distinct(float(draws[0]), float(np.exp(middle)), zipf) < met[0]
        low, high = (middle, high) if few else (low, middle)
    rows = float(np.exp(low))  # not above the last id of a table that was met whole
    law = np.array([expected_distinct(float(n), rows, zipf) for n in draws])
    return float((np.log(law / met) ** 2 * met).sum()), rows


def of_batch(share: Shares, draws: float) -> Shares:
    """1 - (1 - p)^B: the chance that a row read by a share ``p`` of samples is read by a batch.

    ``draws`` B: independent samples (or ids drawn) of a batch.

    >>> of_batch(0.5, 2)
    0.75
    >>> round(of_batch(1e-3, 4096), 3)
    0.983
    """
    met: Shares = -np.expm1(draws * np.log1p(-np.minimum(share, 1 - 1e-12)))
    return met if isinstance(share, np.ndarray) else float(met)
