"""The embedding store of a rank process: its rows live in server processes.

A batch lies in one segment of shared memory from its lookup until every server has closed its
push. All servers see it: each reads its own distinct ids there, its kernels write the rows in place
for the pooling to read, and read the gradients in place. Requests go to all servers first, answers
are collected after.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from persia_sim.words.events import ALL
from runtime.data.batch import Batch, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import plan_natively
from runtime.embedding.server import RankPush
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import Handle, Plans, RowGradients
from runtime.embedding.verbs import Lease
from runtime.engines.processes.links import Links
from runtime.engines.processes.messages import (
    Message,
    MessageKind,
    Part,
    pack_fate,
    pack_lease,
    pack_placed,
    pack_segment,
    unpack_json,
    unpack_version,
)
from runtime.engines.processes.parcels import unpack_arrays
from runtime.engines.processes.remote_control import RemoteControl
from runtime.engines.processes.segments import Places, Segment, SegmentPool
from runtime.stop import Stop, wait_for


@dataclass(slots=True)
class _Lent:
    """A batch in its segment."""

    number: int
    segment: Segment
    placed: list[bytes]
    """By server, where its part lies: the body of a lookup."""
    gradients: RowGradients
    open_at: set[int]
    """Servers that have not closed its push."""


class RemoteStore(RemoteControl):
    """As an `EmbeddingStore`, for the ranks of this process."""

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[TableConfig],
        links: Links,
        *,
        seed: int,
        segments: int,
        stop: Stop | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """``segments``: batches of a rank in flight; ``close`` ends what was started for it."""
        super().__init__(layout, tables, links, seed)
        self._stop = Stop() if stop is None else stop
        self._pools = {
            rank: SegmentPool(segments, self._stop, f"rank {rank}") for rank in links.ranks
        }
        self._lent: dict[tuple[int, int], _Lent] = {}
        self._known: dict[tuple[Any, ...], Segment] = {}  # what each server has mapped
        self._changed = threading.Condition()
        self._on_closed: Callable[[int, int], None] = lambda rank, step: None
        links.stop = self._stop
        own = weakref.WeakMethod(self._closed)
        links.on_closed = lambda rank, step, shard: _call(own, rank, step, shard)
        self._peeks = SegmentPool(1, Stop(), "evaluation")
        self.close = weakref.finalize(self, _close, links, close)

    # The verbs of a rank.

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; waits for a segment of shared memory."""
        plans = self._plan(batch)
        lent, values = self._place(plans, *self._segment(self._pools[rank], plans))
        with self._changed:
            self._lent[rank, step] = lent
        return Handle(rank, step, batch, plans, values, {}, {})

    def look_up(self, handle: Handle) -> None:
        """Read the batch's rows at all servers, creating absent ones, when each allows it."""
        self._ask(MessageKind.LOOK_UP, handle)

    def look_up_ahead(self, handle: Handle) -> None:
        """A prefetch of lookahead: read at any time, without side effect."""
        self._ask(MessageKind.LOOK_AHEAD, handle)

    def bring_up_to_date(self, handle: Handle) -> None:
        """Replace prefetched rows that were written since, when all earlier pushes are applied."""
        self._ask(MessageKind.BRING_UP_TO_DATE, handle)

    def lease(self, handle: Handle, ahead: int) -> Lease:
        """lookahead `forwarded`: the batch's rows with their state, at most ``ahead`` steps old."""
        lent, key = self._lent[handle.rank, handle.step], (handle.rank, handle.step)
        for shard in range(self.shards):
            self._attach("prefetches", shard, handle.rank, lent)
            body = pack_lease(ahead, lent.placed[shard])
            self._links.send("prefetches", shard, Message(MessageKind.LEASE, *key, body))
        found: Lease = []
        for shard in range(self.shards):
            message, descriptors = self._links.answer("prefetches", shard, *key, "the leased rows")
            said = unpack_json(message.body)
            tables: dict[str, dict[str, Any]] = {
                name: {"latest_step": step} for name, step in said["latest_step"].items()
            }
            for name, array in unpack_arrays(said, descriptors[0]).items():
                table, _, column = name.rpartition("/")
                tables[table][column] = array
            found.append(tables)
        return found

    def gradient_arrays(self, handle: Handle) -> RowGradients:
        """Where the servers will read the batch's gradients."""
        return self._lent[handle.rank, handle.step].gradients

    def give(self, push: RankPush) -> None:
        """Hand over a rank's gradients; the servers say later that they have closed the push."""
        handle, rows = push
        lent = self._lent[handle.rank, handle.step]
        for name, gradients in (rows or {}).items():
            if gradients is not lent.gradients[name]:
                np.copyto(lent.gradients[name], gradients)
        body = pack_fate(rows is None)
        for shard in range(self.shards):
            push_it = Message(MessageKind.PUSH, handle.rank, handle.step, body)
            self._links.send("pushes", shard, push_it)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more: it holds nobody up."""
        for shard in range(self.shards):
            self._links.send("lookups", shard, Message(MessageKind.FINISH, rank, steps))

    def drain(self) -> None:
        """Return when every push of this process is closed at every server."""
        with self._changed, self._stop.waiting_elsewhere():
            wait_for(
                self._changed,
                lambda: not self._lent,
                self._stop,
                lambda: f"batches {sorted(self._lent)} wait for their pushes to be closed",
            )

    def on_closed(self, told: Callable[[int, int], None]) -> None:
        """Have ``told`` called with (rank, step) by each server that closes its push."""
        self._on_closed = told

    def begin_run(self, rules: ServerRules, stop: Stop) -> None:
        """A run starts at step 0 on the rows as they are."""
        for shard in range(self.shards):
            self._links.call(shard, "begin_run", rules=asdict(rules))
        with self._changed:
            for (rank, _), lent in self._lent.items():
                self._pools[rank].give_back(lent.number, lent.segment)
            self._lent.clear()
        self._stop = self._links.stop = stop
        for pool in self._pools.values():
            pool.begin_run(stop)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks begin, or go on, with these steps; every push before them is closed."""
        for shard in range(self.shards):
            self._links.call(shard, "begin_leg", first_steps=list(first_steps))

    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""
        plans = self._plan(batch)
        with self._links.alone():
            number, segment = self._segment(self._peeks, plans)
            try:
                lent, values = self._place(plans, number, segment)
                for shard in range(self.shards):
                    self._attach("control", shard, ALL, lent)
                    asked = Message(MessageKind.LOOK_AHEAD, body=lent.placed[shard])
                    self._links.tell_control(shard, asked)
                for shard in range(self.shards):
                    self._links.hear_control(shard, "rows to evaluate")
                copies = {name: array.copy() for name, array in values.items()}
            finally:
                self._peeks.give_back(number, segment)
        return Handle(ALL, ALL, batch, plans, copies, {}, {})

    # Inside.

    def _plan(self, batch: Batch) -> Plans:
        tables = list(self.tables.values())
        return plan_natively(batch, self.layout.fields, tables, self.shards)

    def _segment(self, pool: SegmentPool, plans: Plans) -> tuple[int, Segment]:
        places = Places()
        for name, plan in plans.items():
            for size in _sizes(len(plan.ids), self.tables[name]):
                places.take(size)
        return pool.take(places.size)

    def _place(
        self, plans: Plans, number: int, segment: Segment
    ) -> tuple[_Lent, dict[str, np.ndarray]]:
        """Lay the batch out in the segment: ids are there, rows and gradients have their place."""
        places, values, gradients = Places(), {}, {}
        parts: list[list[Part]] = [[] for _ in range(self.shards)]
        for name, plan in plans.items():
            table, rows = self.tables[name], len(plan.ids)
            ids_at, values_at, gradients_at = map(places.take, _sizes(rows, table))
            segment.array(ids_at, (rows,), np.uint64)[:] = plan.ids
            shape = rows, table.dim
            values[name] = segment.array(values_at, shape, table.dtype)
            gradients[name] = segment.array(gradients_at, shape, table.dtype)
            row_bytes = values[name].itemsize * table.dim
            for shard, found in enumerate(parts):
                own = plan.part(shard)
                at = ids_at + 8 * own.start, values_at + row_bytes * own.start
                there = gradients_at + row_bytes * own.start
                found.append(Part(own.stop - own.start, *at, there))
        placed = [pack_placed(number, found) for found in parts]
        return _Lent(number, segment, placed, gradients, set(range(self.shards))), values

    def _attach(self, role: str, shard: int, rank: int, lent: _Lent) -> None:
        key = shard, rank, lent.number
        if self._known.get(key) is lent.segment:
            return
        body = pack_segment(lent.number, lent.segment.size)
        there = Message(MessageKind.SEGMENT, rank, ALL, body)
        if role == "control":
            self._links.tell_control(shard, there, [lent.segment.descriptor])
        else:
            self._links.send(role, shard, there, [lent.segment.descriptor])
        self._known[key] = lent.segment

    def _ask(self, kind: MessageKind, handle: Handle) -> None:
        """Ask all servers, then wait for all answers.

        Prefetches have connections of their own: while one waits, the step before it is refreshed.
        """
        lent = self._lent[handle.rank, handle.step]
        role = "prefetches" if kind is MessageKind.LOOK_AHEAD else "lookups"
        for shard in range(self.shards):
            self._attach(role, shard, handle.rank, lent)
            body = lent.placed[shard] if kind is not MessageKind.BRING_UP_TO_DATE else b""
            self._links.send(role, shard, Message(kind, handle.rank, handle.step, body))
        for shard in range(self.shards):
            found, _ = self._links.answer(role, shard, handle.rank, handle.step, "the rows")
            handle.version[shard] = unpack_version(found.body)

    def _closed(self, rank: int, step: int, shard: int) -> None:
        """A server has closed a push; what it says of a repeated one is no news."""
        with self._changed:
            lent = self._lent.get((rank, step))
            if lent is None or shard not in lent.open_at:
                return
            lent.open_at.remove(shard)
            done = not lent.open_at
        self._on_closed(rank, step)
        if done:
            self._pools[rank].give_back(lent.number, lent.segment)
            with self._changed:
                del self._lent[rank, step]
                self._changed.notify_all()


def _sizes(rows: int, table: TableConfig) -> tuple[int, int, int]:
    """Bytes of ids, values and gradients."""
    values = rows * table.dim * np.dtype(table.dtype).itemsize
    return rows * 8, values, values


def _call(method: weakref.WeakMethod[Callable[..., None]], *told: int) -> None:
    """Not kept alive by the threads that listen."""
    found = method()
    if found is not None:
        found(*told)


def _close(links: Links, close: Callable[[], None]) -> None:
    links.close()
    close()
