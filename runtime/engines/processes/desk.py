"""What a server keeps of one rank: its segments, and its batches from lookup to closed push.

The ids of a batch, where its rows lie and how often they had been written are copies of the
server's own; only values and gradients are in memory that the rank can write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from persia_sim.words.events import ALL
from runtime.data.batch import Batch
from runtime.embedding.config import TableConfig
from runtime.embedding.shard import shard_of
from runtime.embedding.store import ABSENT, Handle, RowGradients, TablePlan
from runtime.engines.processes.channel import Channel, close_all
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    Placed,
    unpack_placed,
    unpack_segment,
)
from runtime.engines.processes.segments import Segment

_NOTHING = Batch(
    np.zeros(0, np.uint64), None, np.zeros((0, 0), np.float32), np.zeros((0, 1), np.float32)
)
"""A server needs the distinct ids only, not the samples."""


@dataclass(slots=True)
class OpenBatch:
    """A batch between its lookup and the end of its push."""

    handle: Handle
    gradients: RowGradients
    segment: int
    answers_to: Channel | None = None
    """Who is told that its push is closed."""


class Desk:
    """Of one rank, at one server."""

    def __init__(self, rank: int, shard: int, shards: int, tables: Sequence[TableConfig]) -> None:
        self.rank = rank
        self._shard, self._shards, self._tables = shard, shards, tables
        self._row_bytes = [t.dim * np.dtype(t.dtype).itemsize for t in tables]
        self._segments: dict[int, Segment] = {}
        self._open: dict[int, OpenBatch] = {}
        self._lock = threading.Lock()

    def attach(self, message: Message, descriptors: Sequence[int]) -> None:
        """Map a segment; one of the same number is let go."""
        if len(descriptors) != 1:
            raise BadMessageError("a segment comes with its descriptor")
        try:
            number, size = unpack_segment(message.body)
        except BadMessageError:
            close_all(descriptors)
            raise
        segment = Segment.attach(descriptors[0], size)
        segment.close()  # it is mapped; the descriptor is not needed
        with self._lock:
            self._segments[number] = segment

    def batch(self, message: Message) -> Handle:
        """The batch of a lookup, which is opened by its first one."""
        with self._lock:
            known = self._open.get(message.step)
            if known is None:
                sizes = {number: s.size for number, s in self._segments.items()}
                placed = unpack_placed(message.body, sizes, self._row_bytes)
                used_by = [s for s, b in self._open.items() if b.segment == placed.segment]
                if used_by:
                    raise BadMessageError(
                        f"segment {placed.segment} holds the batch of step {used_by[0]}, which is"
                        f" not pushed, and step {message.step} is to lie there"
                    )
                known = self._opened(self.rank, message.step, placed)
                self._open[message.step] = known
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
            sizes = {number: s.size for number, s in self._segments.items()}
            placed = unpack_placed(message.body, sizes, self._row_bytes)
            return self._opened(ALL, ALL, placed).handle

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
        return OpenBatch(handle, gradients, placed.segment)

    def _check_owner(self, ids: np.ndarray, table: str) -> None:
        if self._shards > 1 and len(ids):
            owners = shard_of(ids, self._shards)
            if (owners != self._shard).any():
                wrong = int(np.flatnonzero(owners != self._shard)[0])
                raise BadMessageError(
                    f"id {ids[wrong]} of table {table} belongs to server {owners[wrong]},"
                    f" not to {self._shard}"
                )
