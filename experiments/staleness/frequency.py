"""How often ids occur, and alpha by field."""

from __future__ import annotations

from typing import Any

import numpy as np

from persia_sim.base.vocabulary import ENDLESS
from persia_sim.theory import convergence as alpha
from runtime.data.batch import Batch
from runtime.data.ids import VALUE_BITS
from runtime.data.source import Part, Source

BATCHES = (128, 4096)
"""Batches for which alpha is computed: the demo's, and the paper's."""
_LEVELS = (*np.round(np.arange(0.05, 1.0, 0.05), 2).tolist(), 0.99, 0.999, 1.0)
_LEVELS_OF_A_FIELD = (0.5, 0.9, 0.99, 1.0)


def first_samples(source: Source, part: Part, samples: int | None) -> Batch:
    """The first samples of a part as one batch; None: all."""
    parts = []
    left = ENDLESS if samples is None else samples
    for chunk in source.chunks(part):
        parts.append(chunk.rows(0, min(left, chunk.size)))
        left -= chunk.size
        if left <= 0:
            break
    return Batch.concat(parts)


def sample_of_each_id(batch: Batch) -> np.ndarray:
    """The number of the sample that each id of the batch belongs to, int64 [N]."""
    if batch.offsets is None:
        return np.repeat(np.arange(batch.size), len(batch.ids) // max(1, batch.size))
    fields = (len(batch.offsets) - 1) // max(1, batch.size)
    return np.repeat(np.arange(batch.size), np.diff(batch.offsets[::fields]))


def frequencies(batch: Batch) -> Any:
    """The number of samples of one batch in which each id stands, once or more: a pandas Series of
    int64 by id, sorted."""
    import pandas as pd  # late: a second to import

    ids, place = np.unique(batch.ids, return_inverse=True)
    if batch.offsets is not None:  # a bag may hold an id twice, and is one sample
        pairs = np.unique(sample_of_each_id(batch) * len(ids) + place)
        place = pairs % len(ids)
    return pd.Series(np.bincount(place, minlength=len(ids)), ids)


def alpha_lines(name: str, samples: int, _sha256: str = "") -> list[dict[str, Any]]:
    """A line per field and level, over rows and over lookups, of the first training samples.

    A field of one value is a bias, and left out; ``_sha256`` tells an edited file from one kept.
    """
    from runtime.data.open import open_source  # late: a second to import

    # The share of samples that read each row; an id's upper bits are its field.
    source = open_source(name, rows=samples, keep=True)
    counted = first_samples(source, "train", samples)
    occurrences = frequencies(counted)
    shares = occurrences.to_numpy() / counted.size
    fields = source.layout.fields
    owner = (occurrences.index.to_numpy() >> np.uint64(VALUE_BITS)).astype(np.int64)
    varied = np.bincount(owner, minlength=len(fields))[owner] > 1

    lines = []
    for number in (None, *range(len(fields))):
        # All fields together first, then one by one.
        chosen = shares[varied if number is None else varied & (owner == number)]
        if not len(chosen):
            continue

        # Quantiles over rows, and over lookups: a row counts as often as it is read.
        of_rows = alpha.quantiles(chosen, _LEVELS)
        of_lookups = alpha.quantiles(chosen, _LEVELS, chosen)
        for n, level in enumerate(_LEVELS):
            if number is not None and level not in _LEVELS_OF_A_FIELD:
                continue
            in_batches = {
                f"of_lookups_in_batch_{b}": alpha.of_batch(float(of_lookups[n]), b) for b in BATCHES
            }
            lines.append(
                {
                    "data": name,
                    "field": "all" if number is None else fields[number].name,
                    "samples": counted.size,
                    "rows": len(chosen),
                    "level": level,
                    "share_of_rows": float(of_rows[n]),
                    "share_of_lookups": float(of_lookups[n]),
                    **in_batches,
                    "mean_met": alpha.met(chosen),
                }
            )
    return lines
