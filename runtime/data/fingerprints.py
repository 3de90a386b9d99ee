"""Rows known by what they hold: a fingerprint of each, and a bounded sketch of any number of them.

Rows of a few values meet others by chance. What tells those that were read from those that look the
same is their order: a stretch of rows, one behind the other, stands nowhere else by chance. So a
sketch holds fingerprints of rows, and of stretches.

A fingerprint is of what a model reads of a row, its ids and dense features, as they come out of the
reader: so it is the same in whatever file, format, place or order the row stands, and its label may
be another one. Shape letters: B samples, F fields, N ids, D dense features.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.data.batch import Batch
from runtime.data.ids import mix64

_READ_AGAIN = 0.95
"""This share of a run's rows stands in what trained before where these are the same rows."""
MOST_ROWS = 1 << 18
"""Distinct rows that a sketch holds, and as many stretches, of 12 bytes each: up to so many it
knows every row."""
ROWS_AT_ONCE = 1 << 12
"""Samples whose fingerprints are taken together, at least: of 128 the calls of numpy cost many
times what the numbers do."""
STRETCH = 16
"""Rows of a stretch: with 20 different rows two stretches are equal once in 20**16."""
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_OF_LENGTHS, _OF_DENSE = np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7)
"""Odd numbers: what stands at another place, or is of another kind, gives another term."""
_ALL = np.uint64(2**64 - 1)


def fingerprints(batch: Batch) -> np.ndarray:
    """uint64 [B]: equal where rows are equal in all ids and dense features, else different (two
    rows in 2**64 have one by chance); whatever their labels and weights.

    >>> nothing = np.empty((2, 0), np.float32)
    >>> one, other = fingerprints(Batch(np.array([1, 2, 2, 1], np.uint64), None, nothing, nothing))
    >>> one == other
    np.False_
    """
    samples = batch.size
    if not samples:
        return np.empty(0, np.uint64)
    sums = _of_ids(batch.ids, batch.offsets, samples)
    if batch.offsets is not None:
        sums += _of_lengths(batch.offsets, samples)
    if batch.dense.shape[1]:
        bits = (batch.dense.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0.0 is 0.0
        places = _steps(batch.dense.shape[1]) + _OF_DENSE
        sums += mix64(bits.astype(np.uint64) + places).sum(1, dtype=np.uint64)
    return mix64(sums)


def _steps(count: int) -> np.ndarray:
    """uint64 [count]: what is added to a value for its place in the row."""
    return np.arange(1, count + 1, dtype=np.uint64) * _STEP


def _of_ids(ids: np.ndarray, offsets: np.ndarray | None, samples: int) -> np.ndarray:
    """uint64 [B]: the sum of the ids of each row, each mixed with its place there."""
    if offsets is None:
        ids_BF = ids.reshape(samples, -1)
        sums: np.ndarray = mix64(ids_BF + _steps(ids_BF.shape[1])).sum(1, dtype=np.uint64)
        return sums
    fields = (len(offsets) - 1) // samples
    bounds = offsets[::fields]
    place = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    mixed = mix64(ids + (place + 1).astype(np.uint64) * _STEP)
    until = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    result: np.ndarray = until[bounds[1:]] - until[bounds[:-1]]  # modulo 2**64, as sums are
    return result


def _of_lengths(offsets: np.ndarray, samples: int) -> np.ndarray:
    """uint64 [B]: where the ids of one field end and those of the next begin; 0 where each field
    has one id, as such a batch may come with or without its offsets."""
    more_BF = (np.diff(offsets).reshape(samples, -1) - 1).astype(np.uint64)
    sums: np.ndarray = (more_BF * (_steps(more_BF.shape[1]) ^ _OF_LENGTHS)).sum(1, dtype=np.uint64)
    return sums


def stretches(values: np.ndarray) -> np.ndarray:
    """uint64 [n - STRETCH + 1]: a fingerprint of each stretch of n rows, from theirs."""
    if len(values) < STRETCH:
        return np.empty(0, np.uint64)

    # Sums of values times powers of an odd number, modulo 2**64, where it has an inverse: so that
    # a stretch gives the same wherever it begins.
    sums = np.concatenate([[np.uint64(0)], np.cumsum(values * _powers(_BASE, len(values)))])
    windows = sums[STRETCH:] - sums[:-STRETCH]
    return mix64(windows * _powers(_INVERSE, len(windows)))


def _powers(base: int, count: int) -> np.ndarray:
    """uint64 [count]: 1, base, its square, ..., modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    result: np.ndarray = np.cumprod(factors)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """The distinct rows of a sketch at one instant."""

    values: np.ndarray
    """uint64 [n], sorted: the smallest fingerprints of all."""
    counts: np.ndarray
    """uint32 [n]: rows that have each."""
    limit: int
    """Up to this fingerprint every row is in here; of a sketch that is not full, of all rows."""
    size: int
    """Rows in all."""
    stretches: RowSet | None = None
    """Those of the rows in the order in which they were read; None where nobody knows it."""

    @property
    def knows_all(self) -> bool:
        """Whether no row was left out."""
        return self.limit == int(_ALL)

    def up_to(self, limit: int) -> RowSet:
        """The rows whose fingerprint is at most the limit."""
        if limit >= self.limit:
            return self
        here = self.values <= np.uint64(limit)
        return replace(self, values=self.values[here], counts=self.counts[here], limit=limit)

    def plus(self, other: RowSet) -> RowSet:
        """Both, of which none is a row of the other."""
        return self._with(other, np.add)

    def behind(self, before: RowSet) -> RowSet:
        """The rows of a run behind those that trained what it was started from.

        Where these are other rows, both count, so that what repeats by chance from one to the next
        counts as repeated. Where they are the same, read again, they count once: then one stands in
        the order of the other, or next to all of them are there.
        """
        read_again = shares_stretches(self, before) or self._lies_in(before)
        return self._with(before, np.maximum if read_again else np.add)

    def _lies_in(self, other: RowSet) -> bool:
        """Whether the other has next to all of these rows, each as often."""
        limit = min(self.limit, other.limit)
        ours = self.up_to(limit)
        theirs = other.up_to(limit)
        if not len(ours.values) or not len(theirs.values):
            return False
        place = np.minimum(np.searchsorted(theirs.values, ours.values), len(theirs.values) - 1)
        there = np.where(theirs.values[place] == ours.values, theirs.counts[place], 0)
        return int(np.minimum(there, ours.counts).sum()) >= _READ_AGAIN * int(ours.counts.sum())

    def _with(self, other: RowSet, joins: np.ufunc) -> RowSet:
        if not other.size:
            return self
        whole = self._rows_with(other, joins)
        if self.stretches is None and other.stretches is None:
            return whole
        ours = self.stretches or NO_ROWS
        return replace(whole, stretches=ours._rows_with(other.stretches or NO_ROWS, joins))

    def _rows_with(self, other: RowSet, joins: np.ufunc) -> RowSet:
        limit = min(self.limit, other.limit)
        parts = [self.up_to(limit), other.up_to(limit)]
        both = np.concatenate([p.values for p in parts])
        order = np.argsort(both, kind="stable")
        values, first = np.unique(both[order], return_index=True)
        each = np.concatenate([p.counts for p in parts], dtype=np.int64)[order]
        counts = joins.reduceat(each, first)
        whole = RowSet(
            values=values,
            counts=np.minimum(counts, 2**32 - 1).astype(np.uint32),
            limit=limit,
            size=self.size + other.size,
        )
        return whole.up_to(int(values[MOST_ROWS - 1])) if len(values) > MOST_ROWS else whole


NO_ROWS = RowSet(
    values=np.empty(0, np.uint64), counts=np.empty(0, np.uint32), limit=int(_ALL), size=0
)


@dataclass(slots=True)
class Sketch:
    """Any number of rows in bounded memory: the distinct ones with the smallest fingerprints, which
    are a random choice of the rows, the same one wherever they are met (Bar-Yossef et al. 2002).

    Safe for threads.
    """

    _rows: RowSet = NO_ROWS
    _waiting: list[np.ndarray] = field(default_factory=list)
    _waits: int = 0
    _last: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    """The last rows, with which the next stretches begin."""
    _samples: list[Batch] = field(default_factory=list)
    """The last of all, whose fingerprints are still to be taken."""
    _sampled: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, values: np.ndarray) -> None:
        """Rows by their fingerprints, uint64 [B]."""
        with self._lock:
            self._take_fingerprints()
            self._wait(values)

    def add_samples(self, batch: Batch) -> None:
        """Rows by what they hold."""
        with self._lock:
            self._samples.append(batch)
            self._sampled += batch.size
            if self._sampled >= ROWS_AT_ONCE:
                self._take_fingerprints()

    def rows(self) -> RowSet:
        """The sketched rows of all batches so far."""
        with self._lock:
            self._take_fingerprints()
            self._settle()
            return self._rows

    def _take_fingerprints(self) -> None:
        """Under the lock, as all below."""
        if self._samples:
            self._wait(fingerprints(Batch.concat(self._samples)))
            self._samples = []
            self._sampled = 0

    def _wait(self, values: np.ndarray) -> None:
        self._waiting.append(values)
        self._waits += len(values)
        if self._waits >= MOST_ROWS:
            self._settle()

    def _settle(self) -> None:
        """Take in what waits, and let go of what is too much."""
        if not self._waiting:
            return
        waiting = np.concatenate(self._waiting)
        self._waiting = []
        self._waits = 0
        in_order = np.concatenate([self._last, waiting])
        self._last = in_order[max(len(in_order) - STRETCH + 1, 0) :]
        before = self._rows.stretches or NO_ROWS
        fresh = _counted(waiting, self._rows.limit)
        of_stretches = _counted(stretches(in_order), before.limit)
        self._rows = self._rows.plus(replace(fresh, stretches=of_stretches))


def _counted(values: np.ndarray, limit: int) -> RowSet:
    """Fingerprints up to a limit, each with how often it is there."""
    distinct, counts = np.unique(values[values <= np.uint64(limit)], return_counts=True)
    return RowSet(values=distinct, counts=counts, limit=limit, size=len(values))


def shares_stretches(one: RowSet, other: RowSet, known: int = 0) -> int:
    """About how many rows of one stand in the other in the same order, if these are more than meet
    by chance, ``known`` of which are known otherwise; else 0."""
    if one.stretches is None or other.stretches is None:
        return 0
    same = alike(one.stretches, other.stretches, known)
    if same.rows - known <= same.by_chance:
        return 0
    return min(same.rows + STRETCH - 1, one.size)  # as of one piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """How many of some rows equal one of others."""

    rows: int
    """So many do; an estimate where a sketch is full."""
    by_chance: float
    """At most so many would if none of them were among the others: rows of a few values repeat."""


def alike(judged: RowSet, trained: RowSet, known: int = 0) -> Alike:
    """Rows that are judged and equal one that trained; ``known`` of them are known to have trained
    otherwise, and are no chance.

    What repeats by chance shows in the samples that trained: the share of them that is not alone
    there is that of new rows which meet one of them (Good 1953). Where these are fewer than what is
    judged, what repeats in there shows more. Chance is twice what is to be expected, and four
    standard deviations; and at least what it may be where so many pairs of rows show so few that
    are equal, as of few rows of many values none is.
    """
    # Two sketches are compared below the smaller of their limits, where both are complete.
    limit = min(judged.limit, trained.limit)
    ours = judged.up_to(limit)
    theirs = trained.up_to(limit)
    seen = int(ours.counts.sum())
    if not seen or not len(theirs.values):
        return Alike(rows=0, by_chance=0.0)

    # How often a new row would meet a trained one by chance, from the repeats among themselves.
    both = ours.counts[np.isin(ours.values, theirs.values, assume_unique=True)]
    each = judged.size / seen  # rows that one of these stands for
    repeats = _repeated(theirs)
    new = max(seen - known / each, 0.0)
    looked_at = [theirs]
    if len(theirs.values) < len(ours.values):
        repeats = max(repeats, _repeated(ours))
        looked_at.append(ours)

    # The bound on chance, above which equal rows mean that they were trained on.
    expected = new * repeats
    by_chance = 2 * expected + 4 * math.sqrt(expected)
    by_chance = max(by_chance, _unseen_chance(looked_at, new * int(theirs.counts.sum())))
    in_both = int(both.sum())
    if known and each > 1:  # known exactly, and here by a random choice of rows
        by_chance += 4 * math.sqrt(in_both * (1 - in_both / seen))
    return Alike(rows=round(each * in_both), by_chance=each * by_chance)


def _unseen_chance(sets: Sequence[RowSet], pairs: float) -> float:
    """At most so many of these pairs of rows are equal by chance, as far as the pairs within the
    sets tell.

    Both numbers are Poisson's. Where C of these are equal, C + 4 sqrt(C) + 4 may be usual (98 % at
    C = 0); to what follows from that for the others, two standard deviations are added.
    """
    totals = [int(rows.counts.sum()) for rows in sets]
    equal = sum(totals) - sum(len(rows.values) for rows in sets)
    within = sum(total * (total - 1) / 2 for total in totals)
    expected = (equal + 4 * math.sqrt(equal) + 4) * pairs / max(within, 1.0)
    return expected + 2 * math.sqrt(expected)


def _repeated(rows: RowSet) -> float:
    """The share of rows that are not alone with what they hold."""
    total = int(rows.counts.sum())
    return int(rows.counts[rows.counts > 1].sum()) / total if total else 0.0
