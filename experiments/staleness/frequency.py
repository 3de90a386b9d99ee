"""How often each id of a data set occurs, how often those of a sample do, and alpha by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from persia_sim.theory import convergence as alpha
from runtime.data.batch import Batch
from runtime.data.ids import VALUE_BITS
from runtime.data.source import Part, Source

BATCHES = (128, 4096)
"""For which alpha of a batch is told: the demo's, and the paper's."""
_LEVELS = (*np.round(np.arange(0.05, 1.0, 0.05), 2).tolist(), 0.99, 0.999, 1.0)
_LEVELS_OF_A_FIELD = (0.5, 0.9, 0.99, 1.0)


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


def rarest(known: Frequencies, batch: Batch) -> np.ndarray:
    """int64 [B]: how often each sample's rarest id occurs in ``known``; 0 where it has no id."""
    least = np.full(batch.size, np.iinfo(np.int64).max)
    np.minimum.at(least, sample_of_each_id(batch), known.of(batch.ids))
    return np.where(least == np.iinfo(np.int64).max, 0, least)


def alpha_lines(name: str, samples: int) -> list[dict[str, Any]]:
    """A line per field and level, over rows and over lookups, of the first training samples.

    A field with one value is a bias and no id; it is left out.
    """
    from runtime.data.open import open_source  # late: a second to import

    source = open_source(name, rows=samples, keep=True)
    known = frequencies(first_samples(source, "train", samples))
    fields = source.layout.fields
    values = np.bincount(known.fields, minlength=len(fields))
    varied = values[known.fields] > 1
    lines = []
    for number in (None, *range(len(fields))):
        own = known.shares[varied if number is None else varied & (known.fields == number)]
        if not len(own):
            continue
        of_rows = alpha.quantiles(own, _LEVELS)
        of_lookups = alpha.quantiles(own, _LEVELS, own)
        lines += [
            {
                "data": name,
                "field": "all" if number is None else fields[number].name,
                "samples": known.samples,
                "rows": len(own),
                "level": level,
                "share_of_rows": float(of_rows[n]),
                "share_of_lookups": float(of_lookups[n]),
                **{f"of_lookups_in_batch_{b}": alpha.of_batch(float(of_lookups[n]), b)
                   for b in BATCHES},
                "mean_met": alpha.met(own),
            }
            for n, level in enumerate(_LEVELS)
            if number is None or level in _LEVELS_OF_A_FIELD
        ]  # fmt: skip
    return lines
