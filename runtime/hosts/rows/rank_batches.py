"""The batches of a rank at a server: opened at the lookup, forgotten when the push is closed.

What decides rows here (ids, where the rows lie, how often they had been written) are copies of the
server's own; only values and gradients are in memory that the rank can write.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from persia_sim.base.vocabulary import ALL
from runtime.data.batch import Batch
from runtime.embedding.batch_rows import (
    AT,
    FIRST,
    ROWS,
    BatchPlan,
    ByTable,
    Handle,
    RankPush,
    shard_of,
)
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import open_handle
from runtime.hosts.rows.batch_layout import (
    EVERY,
    HalvedSpans,
    OfTables,
    Spans,
    Which,
    fresh_among,
    spans_of,
    tables_in,
)
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    Placed,
    unpack_placed,
    unpack_segment,
)
from runtime.hosts.wire.segments import Segment

PUSHES = (MessageKind.PUSH, MessageKind.FRESH_PUSH, MessageKind.WRITE_BACK)
_NOTHING = Batch(
    np.zeros(0, np.uint64), None, np.zeros((0, 0), np.float32), np.zeros((0, 1), np.float32)
)
"""A server needs the distinct ids only, not the samples."""


@dataclass(slots=True)
class OpenBatch:
    """A batch between its lookup and the end of its push."""

    handle: Handle
    gradients: ByTable
    placed: Placed
    segment: Segment
    """In which it lies, whatever its number stands for since."""
    closed_to: Channel | None = None
    """Receives CLOSED when its push is applied or lost; None: it is not pushed."""
    pushed: set[MessageKind] = field(default_factory=set)
    """What has come of its push: that of fresh tables comes by itself."""
    coming: Spans | None = None
    """Its gradients, where they travel."""
    shown: ByTable | None = None
    """Where the rank sees its rows, of a batch that was opened again: elsewhere than they are."""

    def push(self) -> RankPush:
        """The rank's push with its gradients, which are here."""
        if self.coming is not None:
            self.coming.arrived()
        return self.handle, self.gradients


class RankBatches:
    """The segments and the open batches of one rank at one server."""

    def __init__(
        self,
        rank: int,
        shard: int,
        shards: int,
        tables: Sequence[TableConfig],
        *,
        half: bool = False,
        fresh: Collection[str] = (),
    ) -> None:
        """``half``: how its rows and gradients travel; ``fresh``: tables whose do so apart."""
        self.rank = rank
        self.client = ""
        """The name of the process that has the rank."""
        self._half = half
        self._fresh = fresh
        self._is_fresh = fresh_among([table.name for table in tables], fresh)
        self.users: dict[str, tuple[Channel, int]] = {}
        """By role, the connection and the process."""
        self.of_earlier_run: set[str] = set()
        """Roles over whose connections comes what a run that was stopped has sent."""
        self._shard = shard
        self._shards = shards
        self._tables = tables
        self._dims = np.array([table.dim for table in tables])
        self._dtype = tables[0].dtype
        self._numbers = {table.name: number for number, table in enumerate(tables)}
        self._segments: dict[int, Segment] = {}
        self._open: dict[int, OpenBatch] = {}
        self._lock = threading.Lock()

    def anew(self) -> RankBatches:
        """Empty ones of the same rank, for a process that takes it over."""
        return RankBatches(
            self.rank,
            self._shard,
            self._shards,
            self._tables,
            half=self._half,
            fresh=self._fresh,
        )

    def attach(self, message: Message, segment: Segment | None) -> None:
        """Take a segment; one of the same number is let go."""
        if segment is None:
            raise BadMessageError("a segment comes with its descriptor")
        number, size = unpack_segment(message.body)
        if segment.size < size:
            raise BadMessageError(f"a segment has {segment.size} bytes, said to have {size}")
        segment.close()  # it is mapped; the descriptor is not needed
        with self._lock:
            self._segments[number] = segment

    def place(self, message: Message) -> list[memoryview] | None:
        """Where arrays belong that follow a message; None: they are not needed any more."""
        if message.kind in PUSHES:
            batch = self.known(message.step)
            if batch is None or message.kind in batch.pushed:  # closed, or it came before
                return None
            tables = tables_in(message.kind, self._is_fresh)
            batch.coming = self._arrays("gradients", batch.placed, batch.segment, tables)
            return batch.coming.room()
        with self._lock:
            if message.step in self._open:  # asked again: its ids are here
                return None
            placed = self._placed(message)
            return self._arrays("ids", placed, self._segments[placed.segment]).room()

    def values(self, batch: Handle, asked: MessageKind) -> Spans:
        """The rows that a rank on another host is sent, which has asked in this way."""
        tables = tables_in(asked, self._is_fresh)
        spans = batch.plans.spans[tables]
        dims = self._dims[tables]
        rows = Spans(lambda: (batch.values.flat, spans[:, AT], spans[:, ROWS] * dims))
        if not self._half:
            return rows
        return HalvedSpans(rows, np.repeat(dims, spans[:, ROWS]), self._dtype)

    def batch(self, message: Message) -> Handle:
        """The batch of a lookup, which is opened by its first one."""
        with self._lock:
            known = self._open.get(message.step)
            if known is None:
                placed = self._placed(message)
                known = self._open[message.step] = self._opened(self.rank, message.step, placed)
            return known.handle

    def reopen(self, message: Message) -> Handle:
        """A batch that the server before this one has read, and nobody has pushed.

        The rank computes with the rows that it has; those found here stay here, but for fresh
        ones, as soon as they are up to date.
        """
        handle = self.batch(message)
        self._open[message.step].shown = handle.values
        handle.values = handle.values.of(np.empty_like(handle.values.flat))
        return handle

    def show_fresh(self, batch: OpenBatch) -> None:
        """Fresh rows of a batch are up to date: where the rank sees others, it is given them."""
        if batch.shown is not None:
            for name in self._fresh:
                batch.shown[name][...] = batch.handle.values[name]

    def known(self, step: int) -> OpenBatch | None:
        """The open batch of a step."""
        with self._lock:
            return self._open.get(step)

    def close(self, step: int) -> Channel | None:
        """The push of a step is closed; the connection that awaits it."""
        with self._lock:
            batch = self._open.pop(step, None)
        return batch.closed_to if batch else None

    def forget_all(self) -> None:
        """The rank has gone, or begins anew."""
        with self._lock:
            self._open.clear()

    def unpushed(self, message: Message) -> Handle:
        """A batch that nobody will push: rows for an evaluation."""
        with self._lock:
            return self._opened(ALL, ALL, self._placed(message)).handle

    def _placed(self, message: Message) -> Placed:
        """Where a new batch lies: not where one lies that is not pushed."""
        sizes = {number: segment.size for number, segment in self._segments.items()}
        number_bytes = np.dtype(self._dtype).itemsize
        placed = unpack_placed(message.body, sizes, self._dims, number_bytes)
        used_by = [s for s, b in self._open.items() if b.placed.segment == placed.segment]
        if used_by:
            raise BadMessageError(
                f"segment {placed.segment} holds the batch of step {used_by[0]}, which is"
                f" not pushed, and step {message.step} is to lie there"
            )
        return placed

    def _arrays(
        self, which: Which, placed: Placed, segment: Segment, tables: OfTables = EVERY
    ) -> Spans:
        dims = self._dims
        return spans_of(which, segment, placed, dims, self._dtype, half=self._half, tables=tables)

    def _opened(self, rank: int, step: int, placed: Placed) -> OpenBatch:
        segment = self._segments[placed.segment]
        ids = np.concatenate(list(self._arrays("ids", placed, segment)))
        plan = self._plan(ids, placed)
        self._check_owner(plan)
        values, gradients = (
            segment.array(start, (placed.elements(self._dims),), self._dtype)
            for start in (placed.values_at, placed.gradients_at)
        )
        handle = open_handle(rank, step, _NOTHING, plan, values)
        return OpenBatch(handle, handle.values.of(gradients), placed, segment)

    def _plan(self, ids: np.ndarray, placed: Placed) -> BatchPlan:
        """A plan of what lies here, with the ids of all tables next to each other."""
        spans = placed.spans.copy()
        rows = spans[:, ROWS]
        spans[:, FIRST] = rows.cumsum() - rows
        bounds = np.outer(rows, np.arange(self._shards + 1) > self._shard)
        nowhere = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros((2, len(spans) + 1), int)
        return BatchPlan(self._numbers, self._dims, ids, spans, bounds, *nowhere, self._shard)

    def _check_owner(self, plan: BatchPlan) -> None:
        if self._shards == 1:
            return
        owners = shard_of(plan.ids, self._shards)
        wrong = np.flatnonzero(owners != self._shard)
        if len(wrong):
            first = int(wrong[0])
            number = int(np.searchsorted(plan.spans[:, FIRST], first, "right")) - 1
            raise BadMessageError(
                f"id {plan.ids[first]} of table {self._tables[number].name} belongs to server"
                f" {owners[first]}, not to {self._shard}"
            )
