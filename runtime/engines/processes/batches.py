"""A batch at both ends: where its ids, rows and gradients lie in its segment, and until when.

A rank lays a batch out (`lay_out`); each server opens its part of it (`RankBatches`) at the lookup
and forgets it when the push is closed. What decides rows at a server (ids, where its rows lie, how
often they had been written) are copies of its own; only values and gradients are in memory that
the rank can write.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from persia_sim.words.events import ALL
from runtime.data.batch import Batch
from runtime.embedding.config import TableConfig
from runtime.embedding.shard import shard_of
from runtime.embedding.store import ABSENT, Handle, Plans, RowGradients, TablePlan
from runtime.engines.processes.channel import Channel
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    Part,
    Placed,
    pack_placed,
    unpack_lease,
    unpack_placed,
    unpack_segment,
)
from runtime.engines.processes.segments import Places, Segment, SegmentPool

Which = Literal["ids", "values", "gradients"]
_NOTHING = Batch(
    np.zeros(0, np.uint64), None, np.zeros((0, 0), np.float32), np.zeros((0, 1), np.float32)
)
"""A server needs the distinct ids only, not the samples."""


def row_bytes(table: TableConfig) -> int:
    """Of a row's values, or gradients."""
    return table.dim * np.dtype(table.dtype).itemsize


def arrays_of(
    which: Which, segment: Segment, parts: Sequence[Part], tables: Sequence[TableConfig]
) -> list[memoryview]:
    """One kind of array of a server's part of a batch, table by table, in place."""
    found = []
    for part, table in zip(parts, tables, strict=True):
        at = {"ids": part.ids_at, "values": part.values_at, "gradients": part.gradients_at}[which]
        found.append(segment.view(at, part.rows * (8 if which == "ids" else row_bytes(table))))
    return found


# At the rank.


@dataclass(slots=True)
class SentBatch:
    """A batch whose segment the servers may write and read."""

    number: int
    segment: Segment
    tables: list[TableConfig]
    parts: list[list[Part]]
    """By server and table."""
    gradients: RowGradients
    open_at: set[int]
    """Servers that have not closed its push."""
    read_at: set[int] = field(default_factory=set)
    """Servers whose rows are here."""
    push: Message | None = None
    """What was sent to the servers, once it was."""

    def placed(self, shard: int) -> bytes:
        """Where a server's part lies: the body of a lookup."""
        return pack_placed(self.number, self.parts[shard])

    def arrays(self, which: Which, shard: int) -> list[memoryview]:
        """Of a server's part, table by table, in place."""
        return arrays_of(which, self.segment, self.parts[shard], self.tables)


def lay_out(
    plans: Plans, tables: Mapping[str, TableConfig], shards: int, pool: SegmentPool
) -> tuple[SentBatch, dict[str, np.ndarray]]:
    """Waits for a segment that is free; ids are in it then, rows and gradients have their place.
    Also the rows, by table."""
    places, values, gradients = Places(), {}, {}
    parts: list[list[Part]] = [[] for _ in range(shards)]
    lies = {
        name: [places.take(size) for size in _sizes(len(plan.ids), tables[name])]
        for name, plan in plans.items()
    }
    number, segment = pool.take(places.size)
    for name, plan in plans.items():
        table, rows = tables[name], len(plan.ids)
        ids_at, values_at, gradients_at = lies[name]
        segment.array(ids_at, (rows,), np.uint64)[:] = plan.ids
        shape = rows, table.dim
        values[name] = segment.array(values_at, shape, table.dtype)
        gradients[name] = segment.array(gradients_at, shape, table.dtype)
        each = row_bytes(table)
        for shard, found in enumerate(parts):
            own = plan.part(shard)
            at = ids_at + 8 * own.start, values_at + each * own.start
            found.append(Part(own.stop - own.start, *at, gradients_at + each * own.start))
    used = [tables[name] for name in plans]
    return SentBatch(number, segment, used, parts, gradients, set(range(shards))), values


def _sizes(rows: int, table: TableConfig) -> tuple[int, int, int]:
    """Bytes of ids, values and gradients."""
    values = rows * row_bytes(table)
    return rows * 8, values, values


# At a server.


@dataclass(slots=True)
class OpenBatch:
    """A batch between its lookup and the end of its push."""

    handle: Handle
    gradients: RowGradients
    placed: Placed
    answers_to: Channel | None = None
    """Who is told that its push is closed."""


class RankBatches:
    """Of one rank, at one server: its segments and its open batches."""

    def __init__(self, rank: int, shard: int, shards: int, tables: Sequence[TableConfig]) -> None:
        self.rank = rank
        self._shard, self._shards, self._tables = shard, shards, tables
        self._row_bytes = [row_bytes(table) for table in tables]
        self._segments: dict[int, Segment] = {}
        self._open: dict[int, OpenBatch] = {}
        self._lock = threading.Lock()

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
        if message.kind is MessageKind.PUSH:
            batch = self.known(message.step)
            if batch is None or batch.answers_to is not None:  # closed, or it came before
                return None
            return self._arrays("gradients", batch.placed)
        body = message.body
        if message.kind is MessageKind.LEASE:
            body = unpack_lease(body)[1]
        with self._lock:
            if message.step in self._open:  # asked again: its ids are here
                return None
            return self._arrays("ids", self._placed(message._replace(body=body)))

    def values(self, batch: Handle) -> list[np.ndarray]:
        """The rows that a rank on another host is sent, table by table."""
        return [batch.values[table.name] for table in self._tables]

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

        The rank computes with the rows that it has; those found here stay here.
        """
        handle = self.batch(message)
        handle.values = {name: np.empty_like(rows) for name, rows in handle.values.items()}
        return handle

    def known(self, step: int) -> OpenBatch | None:
        """The open batch of a step."""
        with self._lock:
            return self._open.get(step)

    def close(self, step: int) -> Channel | None:
        """The push of a step is closed; who waits to hear it."""
        with self._lock:
            found = self._open.pop(step, None)
        return found.answers_to if found else None

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
        placed = unpack_placed(message.body, sizes, self._row_bytes)
        used_by = [s for s, b in self._open.items() if b.placed.segment == placed.segment]
        if used_by:
            raise BadMessageError(
                f"segment {placed.segment} holds the batch of step {used_by[0]}, which is"
                f" not pushed, and step {message.step} is to lie there"
            )
        return placed

    def _arrays(self, which: Which, placed: Placed) -> list[memoryview]:
        return arrays_of(which, self._segments[placed.segment], placed.parts, self._tables)

    def _opened(self, rank: int, step: int, placed: Placed) -> OpenBatch:
        segment = self._segments[placed.segment]
        handle = Handle(rank, step, _NOTHING, {}, {}, {}, {})
        gradients = {}
        for table, part in zip(self._tables, placed.parts, strict=True):
            n, shape = part.rows, (part.rows, table.dim)
            ids = segment.array(part.ids_at, (n,), np.uint64).copy()
            self._check_owner(ids, table.name)
            bounds = np.zeros(self._shards + 1, np.int64)
            bounds[self._shard + 1 :] = n
            handle.plans[table.name] = TablePlan(ids, bounds, ids[:0], slice(0))
            handle.values[table.name] = segment.array(part.values_at, shape, table.dtype)
            handle.slots[table.name] = np.full(n, ABSENT, np.int64)
            handle.writes[table.name] = np.zeros(n, np.int64)
            gradients[table.name] = segment.array(part.gradients_at, shape, table.dtype)
        return OpenBatch(handle, gradients, placed)

    def _check_owner(self, ids: np.ndarray, table: str) -> None:
        if self._shards > 1 and len(ids):
            owners = shard_of(ids, self._shards)
            if (owners != self._shard).any():
                wrong = int(np.flatnonzero(owners != self._shard)[0])
                raise BadMessageError(
                    f"id {ids[wrong]} of table {table} belongs to server {owners[wrong]},"
                    f" not to {self._shard}"
                )
