"""Row staleness from a run's recorded order: pushes of a row that a read of it missed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from persia_sim.words.trace import ALL, Event, Kind
from runtime.data.batch import Batch


@dataclass(frozen=True, slots=True)
class RowReads:
    """Per id of a run, over all batches that read it."""

    ids: np.ndarray
    """uint64 [U], sorted."""
    occurrences: np.ndarray
    """int64 [U]: samples' reads of the row, bags that hold it twice counted twice."""
    reads: np.ndarray
    """int64 [U]: batches that read the row."""
    missed: np.ndarray
    """int64 [U]: pushes of the row that these reads missed, added up."""
    histogram: np.ndarray
    """int64 [bins]: reads of any row by how many pushes of it were missed; more: the last bin."""


def row_reads(order: Iterable[Event], batches: Sequence[Batch], bins: int) -> RowReads:
    """Of a run of one rank in barrier mode on one shard; batch s is that of step s.

    Raises ValueError for an order of other ranks.
    """
    ids, place = np.unique(np.concatenate([b.ids for b in batches]), return_inverse=True)
    ends = np.cumsum([len(b.ids) for b in batches])
    rows = [np.unique(part) for part in np.split(place, ends[:-1])]
    pending = np.zeros(len(ids), np.int64)  # pushes of each row that are on their way
    reads, missed = np.zeros_like(pending), np.zeros_like(pending)
    histogram = np.zeros(bins, np.int64)
    for event in order:
        if event.rank not in (0, ALL):
            raise ValueError(f"the order is of several ranks: it has rank {event.rank}")
        if event.kind == Kind.LOOKUP:
            touched = rows[event.step]
            here = pending[touched]
            reads[touched] += 1
            missed[touched] += here
            histogram += np.bincount(np.minimum(here, bins - 1), minlength=bins)
            pending[touched] += 1
        elif event.kind in (Kind.PUSH, Kind.LOST_PUSH):
            pending[rows[event.step]] -= 1
    occurrences = np.bincount(place, minlength=len(ids))
    return RowReads(ids, occurrences, reads, missed, histogram)
