"""What engines and their callers hold of a batch: its distinct rows, and its vectors; and what is
asked of a shard's rows.

The tables of a batch lie side by side in one array of each kind, so that one call serves them all.
Who holds rows implements `ShardRows`, the server calls it; neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from runtime.data.batch import Batch
from runtime.data.ids import mix64

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


FIRST, ROWS, AT = range(3)
"""Columns of a table's span: where its first id stands, how many there are, and the element of
all values at which its first row starts."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan(Mapping[str, TablePlan]):
    """The distinct ids of one batch, T tables side by side; as a mapping, table by table."""

    tables: Mapping[str, int]
    """Their numbers by name."""
    dims: np.ndarray
    """int64 [T]"""
    ids: np.ndarray
    """uint64 [U], by table and shard."""
    spans: np.ndarray
    """int64 [T, 3]: FIRST, ROWS, AT."""
    bounds: np.ndarray
    """int64 [T, shards + 1]: as those of a `TablePlan`."""
    inverse: np.ndarray
    """int32 [N], by table."""
    occurrences: np.ndarray
    """int64 [N], by table; empty where there is one table."""
    starts: np.ndarray
    """int64 [T + 1]: where a table's ``inverse`` and ``occurrences`` start."""
    only_shard: int | None = None
    """The shard of all ids, where it is one."""
    apart: tuple[bool, ...] = ()
    """Whether, table by table, none of its rows belongs to two fields; () where nobody has
    looked."""

    def __getitem__(self, name: str) -> TablePlan:
        table = self.tables[name]
        first, rows, _ = self.spans[table]
        here = slice(*self.starts[table : table + 2])
        return TablePlan(
            self.ids[first : first + rows],
            self.bounds[table],
            self.inverse[here],
            slice(None) if len(self.tables) == 1 else self.occurrences[here],
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def elements(self) -> int:
        """Number of values in all rows."""
        _, rows, at = self.spans[-1].tolist()
        return int(at + rows * self.dims[-1].item())

    def row_sizes(self) -> np.ndarray:
        """int64 [U]: the numbers of each row."""
        return np.repeat(self.dims, self.spans[:, ROWS])

    def spans_of(self, shard: int) -> np.ndarray:
        """int64 [T, 3]: those of one shard's rows."""
        if shard == self.only_shard:
            return self.spans
        before = self.bounds[:, shard]
        result = self.spans.copy()
        result[:, FIRST] += before
        result[:, ROWS] = self.bounds[:, shard + 1] - before
        result[:, AT] += before * self.dims
        return result


class ByTable(Mapping[str, np.ndarray]):
    """Arrays of all tables of a batch side by side in one; as a mapping, the view of each."""

    __slots__ = ("flat", "plan", "wide")

    def __init__(self, flat: np.ndarray, plan: BatchPlan, *, wide: bool) -> None:
        """``wide``: a row has the table's dim of numbers, [U, d]; else one, [U]."""
        self.flat = flat
        self.plan = plan
        self.wide = wide

    def __getitem__(self, name: str) -> np.ndarray:
        table = self.plan.tables[name]
        first, rows, at = self.plan.spans[table]
        if not self.wide:
            return self.flat[first : first + rows]
        dim = self.plan.dims[table]
        return self.flat[at : at + rows * dim].reshape(rows, dim)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.tables)

    def __len__(self) -> int:
        return len(self.plan.tables)

    def of(self, flat: np.ndarray) -> ByTable:
        """Other numbers of the same rows."""
        return ByTable(flat, self.plan, wide=self.wide)

    def filled(self, rows: Mapping[str, np.ndarray]) -> ByTable:
        """These rows, in one array as the rows here."""
        if isinstance(rows, ByTable):
            return rows
        result = self.of(np.zeros(self.flat.shape, next(iter(rows.values())).dtype))
        for name, array in rows.items():
            result[name][...] = array
        return result


@dataclass(slots=True)
class Handle:
    """One batch at the embedding worker, between its lookup and its push."""

    rank: int
    step: int
    batch: Batch
    plans: BatchPlan
    values: ByTable
    """Per table [U, d]: the rows as read, in the order of the plan's ids."""
    slots: ByTable | None = None
    """Per table int64 [U]: where the rows lie, so that a push need not search again; None where
    that is known elsewhere, to their servers."""
    writes: ByTable | None = None
    """Per table int64 [U]: write counts at the moment of reading."""
    version: dict[int, int] = field(default_factory=dict)
    """Per shard: pushes applied there when the rows were read."""
    gradients: ByTable | None = None
    """Per table [U, d]: where the servers will read the batch's gradients; None: wherever they
    are."""


RowGradients = Mapping[str, np.ndarray]
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

    def named(self) -> dict[str, np.ndarray]:
        """All arrays, as `of_named` takes them."""
        arrays = {"pooled": self.pooled}
        for name, array in self.sequences.items():
            arrays[f"sequence/{name}"] = array
        return arrays | {f"mask/{name}": array for name, array in self.masks.items()}

    @classmethod
    def of_named(cls, arrays: Mapping[str, np.ndarray]) -> FieldVectors:
        """The vectors in the arrays that `named` gave."""
        result = cls(arrays["pooled"], {}, {})
        of = {"sequence": result.sequences, "mask": result.masks}
        for name, array in arrays.items():
            if "/" in name:
                kind, _, sequence = name.partition("/")
                of[kind][sequence] = array
        return result


Allocate = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]
"""Makes an array of a shape and dtype, whose values do not matter yet."""


@dataclass(slots=True)
class VectorGradients:
    """What the backward pass of one batch gives the embedding worker."""

    vectors: FieldVectors
    factor: float = 1.0
    """Rows' gradients are multiplied by it after their sums."""
    arrived: Callable[[], object] = lambda: None
    """Returns when the vectors may be read: those of a GPU may be on their way. Raises the error of
    the step where they are not finite."""
    held: ExitStack = field(default_factory=ExitStack)
    """Closed after the scatter: buffers that the vectors lie in may then be used again."""


RankPush = tuple[Handle, RowGradients | None]
"""A rank's handle and its rows' gradients; None when they are lost or not finite."""

WholePush = tuple[Handle, RowGradients]
"""A push with gradients."""

STALENESS_BINS = 64
"""Row staleness is counted up to this many missed updates; more go into the last bin."""


def shard_of(ids: np.ndarray, shards: int) -> np.ndarray:
    """The shard that owns each id: int64 in [0, shards).

    A hash of it, whatever its field, so hot fields spread over all shards (paper, section 4.2.3).
    """
    return ((mix64(ids) >> np.uint64(32)) % np.uint64(shards)).astype(np.int64)


class ShardRows(Protocol):
    """The rows of all tables that one server owns; called under the server's lock."""

    def of_tables(self, names: Collection[str], inside: bool) -> ShardRows:
        """The same rows, of these tables alone, or of all but these; what is done to the others
        does nothing."""
        ...

    def read(self, handle: Handle, create: bool, batch_step: int) -> None:
        """Copy the batch's rows into the handle; ``create=False`` has no side effect."""
        ...

    def refresh(self, handle: Handle, batch_step: int) -> int:
        """Replace rows written since the handle read them, create absent ones; how many."""
        ...

    def status(self) -> dict[str, Any]:
        """How many ``rows`` there are, in how many ``resident_bytes``, and ``counters``: rows
        created, evicted, expired, not admitted, and gradients that found none."""
        ...

    def export(self, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, values and state of all rows of a table, in any order."""
        ...

    def lease(self, handle: Handle) -> dict[str, dict[str, Any]]:
        """Per table, the batch's rows with their state; absent ones are left out."""
        ...

    def update(self, pushes: Sequence[WholePush], update: int, rate: float = 1.0) -> np.ndarray:
        """One optimiser update on each row, gradients summed in the given order.

        ``update`` counts the server's updates from 1 (Adam's bias correction), ``rate`` multiplies
        the learning rate. Returns int64 [STALENESS_BINS]: rows by updates they had missed.
        """
        ...
