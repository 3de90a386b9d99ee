"""Columns of ids become the rows of a batch."""

from __future__ import annotations

import numpy as np


def interleave(
    ids: list[np.ndarray], lengths: list[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Sort the ids of F fields by (sample, field).

    ``ids``: uint64 [N] of each field, in sample order; ``lengths``: int64 [B], ids of each sample,
    or None when every sample has one. Returns the ids of a ``Batch`` and its offsets.
    """
    lengths = [None if n is None or (n == 1).all() else n for n in lengths]
    n_rows = len(ids[0]) if lengths[0] is None else len(lengths[0])
    if all(n is None for n in lengths):
        ids_BF = np.empty((n_rows, len(ids)), np.uint64)
        for place, field_ids in enumerate(ids):
            ids_BF[:, place] = field_ids
        return ids_BF.ravel(), None
    lengths_BF = np.ones((n_rows, len(ids)), np.int64)
    for place, field_lengths in enumerate(lengths):
        if field_lengths is not None:
            lengths_BF[:, place] = field_lengths
    offsets = np.concatenate([[0], np.cumsum(lengths_BF)])
    starts_BF = offsets[:-1].reshape(n_rows, len(ids))
    out = np.empty(offsets[-1], np.uint64)
    for place, (field_ids, field_lengths) in enumerate(zip(ids, lengths, strict=True)):
        where = starts_BF[:, place]
        if field_lengths is not None:
            within = np.arange(len(field_ids))
            within -= np.repeat(np.cumsum(field_lengths) - field_lengths, field_lengths)
            where = np.repeat(where, field_lengths) + within
        out[where] = field_ids
    return out, offsets
