"""How often each id of a data set occurs, and how often those of a sample do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.data.batch import Batch
from runtime.data.ids import VALUE_BITS
from runtime.data.source import Part, Source


@dataclass(frozen=True, slots=True)
class Frequencies:
    """In how many samples of a stream each id stood."""

    ids: np.ndarray
    """uint64 [U], sorted."""
    counts: np.ndarray
    """int64 [U]: samples that hold the id, once or more."""
    samples: int

    @property
    def shares(self) -> np.ndarray:
        """[U]: of all samples."""
        return self.counts / self.samples

    @property
    def fields(self) -> np.ndarray:
        """[U]: the number of each id's field."""
        return (self.ids >> np.uint64(VALUE_BITS)).astype(np.int64)

    def of(self, ids: np.ndarray) -> np.ndarray:
        """The counts of any ids; 0 of one that was never met."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.counts[places], 0)


def first_samples(source: Source, part: Part, samples: int | None) -> Batch:
    """The first samples of a part as one batch; None: all."""
    parts, left = [], 2**62 if samples is None else samples
    for chunk in source.chunks(part):
        parts.append(chunk.rows(0, min(left, chunk.size)))
        left -= chunk.size
        if left <= 0:
            break
    return Batch.concat(parts)


def sample_of_each_id(batch: Batch) -> np.ndarray:
    """int64 [N]: which sample each id of the batch belongs to."""
    if batch.offsets is None:
        return np.repeat(np.arange(batch.size), len(batch.ids) // max(1, batch.size))
    fields = (len(batch.offsets) - 1) // max(1, batch.size)
    return np.repeat(np.arange(batch.size), np.diff(batch.offsets[::fields]))


def frequencies(batch: Batch) -> Frequencies:
    """Of the samples of one batch."""
    ids, place = np.unique(batch.ids, return_inverse=True)
    if batch.offsets is not None:  # a bag may hold an id twice, and is one sample
        pairs = np.unique(sample_of_each_id(batch) * len(ids) + place)
        place = pairs % len(ids)
    return Frequencies(ids, np.bincount(place, minlength=len(ids)), batch.size)


def rarest_and_median(known: Frequencies, batch: Batch) -> np.ndarray:
    """int64 [B, 2]: per sample, how often its rarest and its (lower) median id occur in ``known``.

    A sample without any id has counts of 0.
    """
    counts, sample = known.of(batch.ids), sample_of_each_id(batch)
    sizes = np.bincount(sample, minlength=batch.size)
    ordered = np.append(counts[np.lexsort((counts, sample))], 0)
    first = np.cumsum(sizes) - sizes
    middle = first + np.maximum(sizes - 1, 0) // 2
    return np.where(sizes[:, None] > 0, ordered[np.column_stack([first, middle])], 0)
