"""Rows kept at embedding workers or ranks: how often a batch finds them there, and still valid.

A cache keeps the most frequent rows once it has read them. Pushes go to the servers alone, so a
copy grows old. Exact: a push of any rank makes it invalid, and the servers say so to every cache
that has it. Bounded staleness: nobody is told, and a copy serves the step that fetched it and the
next S.

The hit rates are exact for independent batches on a schedule without noise: lookups of a step start
together, when the pushes of all steps up to so many before it are applied and no later ones; two
batches at one cache that want the same row fetch it once. In exact caches a row is then valid a
steps after it was last read, for 0 < a <= late, if none of the ranks' pushes that were applied
meanwhile has it: probability (1 - q)^(ranks a), with q the chance that a batch has the row. After
``late`` steps the push of the batch that read it has made it invalid. So in sync (late = 0) nothing
lives longer than its own step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np

from persia_sim.model.popularity import hottest, zipf_bins
from persia_sim.model.workload import Workload
from persia_sim.words.rules import require

MOST_STALE_STEPS = 10_000
_MOST_PERIOD = 64  # steps after which the visits of a cache repeat; else by the nearest fraction
_NEVER_SURE = 1e-9  # rows of every batch: a system of equations needs a chance that they are not


class Place(StrEnum):
    """Where rows are kept."""

    WORKER = "worker"
    """At each embedding worker process, for the batches that it serves: rows that are there are not
    asked of the servers."""
    RANK = "rank"
    """At each rank, in its GPU's memory: rows that are there do not travel at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCache:
    """A cache of rows that are read often."""

    place: Place
    """Where it is."""
    rows: float
    """Rows that each worker process or rank keeps: the most frequent ones of all fields, >= 0."""
    stale_steps: int = 0
    """Steps that a copy serves after the one that fetched it, in [0, 10000]; 0 is exact: a copy is
    valid until a push has its row. Above 0 only where rows may be late."""

    def __post_init__(self) -> None:
        require(self.rows >= 0, "row_cache.rows", self.rows, "must be >= 0")
        ok = 0 <= self.stale_steps <= MOST_STALE_STEPS
        rule = f"must lie in [0, {MOST_STALE_STEPS}]"
        require(ok, "row_cache.stale_steps", self.stale_steps, rule)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a cache does for a batch, in the mean."""

    distinct: float
    """Of a batch's distinct ids, those whose row is there."""
    occurrences: float
    """Of all occurrences of ids, those whose row is there."""
    fetched: float
    """Ids that the cache keeps and had to fetch. In an exact cache each copy is made invalid once,
    so as many are named to it."""
    age_steps: float
    """Steps since a hit's row was fetched, mean over hits; 0 in an exact cache, which misses no
    push that is applied."""


NOTHING_KEPT = Kept(0.0, 0.0, 0.0, 0.0)


def kept(cache: RowCache, workload: Workload, ranks: int, caches: int, late_steps: int) -> Kept:
    """Apply the formulas to all rows of a workload.

    ``caches`` share the batches of ``ranks`` ranks in turn; ``late_steps``: pushes that a lookup
    misses.
    """
    values, draws = (
        workload.rows / workload.fields,
        workload.batch_per_rank * workload.ids_per_field,
    )
    probability, number = zipf_bins(values, workload.zipf)
    held = hottest(cache.rows / workload.fields, values, workload.zipf)
    asked = -np.expm1(draws * np.log1p(-np.minimum(probability, 1 - 1e-12)))
    visits = visits_of(ranks, caches)
    if not held.any() or not visits.any():
        return NOTHING_KEPT
    age = np.zeros_like(asked)
    if cache.stale_steps:
        missed, age = leased(asked, visits, cache.stale_steps)
    else:
        missed = invalidated(asked, visits, ranks, late_steps)
    hit = np.maximum(asked - missed, 0.0)
    hits = float((hit * held).sum())
    return Kept(
        distinct=hits / float((asked * number).sum()),
        occurrences=float((probability * (hit / asked) * held).sum()),
        fetched=workload.fields * float((missed * held).sum()),
        age_steps=float((hit * age * held).sum()) / hits if hits else 0.0,
    )


def visits_of(ranks: int, caches: int) -> np.ndarray:
    """Batches that one cache serves in each step of a period, int64 [steps].

    Batches go to caches in turn, by their global number.
    """
    each = Fraction(ranks, caches).limit_denominator(_MOST_PERIOD)
    steps = np.arange(each.denominator + 1, dtype=np.int64)
    return np.diff(steps * each.numerator // each.denominator)


def invalidated(asked: np.ndarray, visits: np.ndarray, ranks: int, late_steps: int) -> np.ndarray:
    """Chance [rows] that a batch at an exact cache has the row and must fetch it.

    ``asked``: chance [rows] that a batch has it.
    """
    absent = np.log1p(-np.minimum(asked, 1 - 1e-15))
    read = -np.expm1(visits[:, None] * absent)  # by a cache in a step: [steps, rows]
    valid, unread = np.zeros_like(read), np.ones_like(read)
    for age in range(1, late_steps + 1):
        then = np.roll(read, age, axis=0)
        valid += unread * then * np.exp(ranks * age * absent)
        unread *= 1 - then
    missed: np.ndarray = (read * (1 - valid)).sum(0) / visits.sum()
    return missed


def leased(
    asked: np.ndarray, visits: np.ndarray, stale_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chance [rows] that a batch has the row and must fetch it, and mean age [rows] of hits.

    A fetch serves the next ``stale_steps`` steps, so at most one lies in so many steps: a step
    fetches with probability read (1 - sum of those of the steps before it), periodic in the steps.
    """
    steps = np.arange(len(visits))
    absent = np.log1p(-np.minimum(asked, 1 - 1e-15))
    read = np.minimum(-np.expm1(visits[:, None] * absent), 1 - _NEVER_SURE).T  # [rows, steps]
    ages = np.arange(1, stale_steps + 1)
    before = np.stack([np.bincount((t - ages) % len(steps), minlength=len(steps)) for t in steps])
    system = np.eye(len(steps)) + read[:, :, None] * before
    fetches = np.linalg.solve(system, read[:, :, None])[:, :, 0]
    missed = fetches.sum(1) / visits.sum()
    # Hits of age k: batches k steps behind a fetch that have the row.
    later = np.array([(ages * visits[(t + ages) % len(steps)]).sum() for t in steps])
    hits = np.maximum(asked - missed, 1e-300) * visits.sum()
    return missed, (fetches * later).sum(1) * asked / hits
