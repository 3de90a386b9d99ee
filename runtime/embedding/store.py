"""What both engines and their callers hold in hand: a batch's distinct rows, and its vectors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from runtime.data.batch import Batch

ABSENT = -1
"""The slot of an id that has no row."""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The distinct ids that one batch needs of one table; N occurrences, U distinct ids."""

    ids: np.ndarray
    """uint64 [U], grouped by shard."""
    bounds: np.ndarray
    """int64 [shards + 1]: ``ids[bounds[k]:bounds[k + 1]]`` belong to shard k."""
    inverse: np.ndarray
    """int64 [N]: which distinct id each occurrence is."""
    occurrences: np.ndarray | slice
    """Where in ``batch.ids`` the occurrences stand (everything, when there is one table)."""

    def part(self, shard: int) -> slice:
        """The distinct ids of one shard."""
        return slice(int(self.bounds[shard]), int(self.bounds[shard + 1]))


Plans = dict[str, TablePlan]
"""Per table."""


@dataclass(slots=True)
class Handle:
    """One batch at the embedding worker, between its lookup and its push."""

    rank: int
    step: int
    batch: Batch
    plans: Plans
    values: dict[str, np.ndarray]
    """Per table [U, d]: the rows as read, in the order of the plan's ids."""
    slots: dict[str, np.ndarray]
    """Per table int64 [U]: where the rows lie, so that a push need not search again."""
    writes: dict[str, np.ndarray]
    """Per table int64 [U]: write counts at the moment of reading."""
    version: dict[int, int] = field(default_factory=dict)
    """Per shard: pushes applied there when the rows were read."""


RowGradients = dict[str, np.ndarray]
"""Per table [U, d], in the order of the handle's plan."""


@dataclass(frozen=True, slots=True)
class FieldVectors:
    """What the dense model is given, and in the backward pass the gradients of it.

    Shape letters: B samples, L ids of a sequence, d the table's dim, E the sum of dims of all
    pooled fields.
    """

    pooled: np.ndarray
    """[B, E]: the pooled fields side by side, in the layout's order."""
    sequences: dict[str, np.ndarray]
    """Per sequence field [B, L, d], zero where a sample has fewer than L ids."""
    masks: dict[str, np.ndarray]
    """Per sequence field bool [B, L]: where an id stands."""


@dataclass(slots=True)
class VectorGradients:
    """What the backward pass of one batch gives the embedding worker."""

    vectors: FieldVectors
    factor: float = 1.0
    """Rows' gradients are multiplied by it after their sums (a loss scale is taken out here)."""
    arrived: Callable[[], object] = lambda: None
    """Returns when the vectors may be read: those of a GPU may be on their way. Raises the error of
    the step where they are not finite."""
    held: ExitStack = field(default_factory=ExitStack)
    """Closed after the scatter: buffers that the vectors lie in may then be used again."""
