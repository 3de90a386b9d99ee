"""The embedding store of a rank process: its rows live in server processes.

A batch lies in one segment from its lookup until every server has closed its push. Servers of this
host see it: each reads its own distinct ids there, its kernels write the rows in place for the
pooling to read, and read the gradients in place. To and from servers of other hosts these arrays
travel. Requests go to all servers first, answers are collected after.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from persia_sim.base.vocabulary import ALL
from runtime.data.batch import Batch, Layout
from runtime.embedding.batch_rows import Handle, RankPush
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import Planner
from runtime.embedding.store import Lease
from runtime.engines.rows.batch_layout import SentBatch, lay_out
from runtime.engines.rows.client import Links
from runtime.engines.rows.connections import Life, ServerRevivedError
from runtime.engines.rows.remote_control import RemoteControl
from runtime.engines.wire.calls import said_in
from runtime.engines.wire.messages import Message, MessageKind, pack_placed, pack_segment
from runtime.engines.wire.peers import START_WITHIN_S
from runtime.engines.wire.segments import SegmentPool
from runtime.stop import PeerError, Stop


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
        half: bool = False,
        stop: Stop | None = None,
        close: Callable[[], None] = lambda: None,
        restart: Callable[[int], None] | None = None,
    ) -> None:
        """``segments``: batches of a rank in flight; ``half``: as of `ServerRules`; ``close`` ends
        what was started for it; ``restart`` starts a server again that awaits its rows, where this
        process may do that."""
        stop = Stop() if stop is None else stop
        super().__init__(layout, tables, links, stop, seed, segments, restart)
        self.half = half
        self._planner = Planner(layout.fields, self.tables.values(), self.shards)
        self._dtype = next(iter(self.tables.values())).dtype
        own = weakref.WeakMethod(self._closed)
        links.on_closed = lambda rank, step, shard: call_living(own, rank, step, shard)
        again = weakref.WeakMethod(self._rejoin)
        links.rejoin = lambda life: call_living(again, life) or 0
        self._peeks = SegmentPool(1, Stop(), "evaluation")
        pools = [*self._pools.values(), self._peeks]
        self._end = weakref.finalize(self, _close, links, close, pools, self._sent)

    # The verbs of a rank.

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; waits for a segment of shared memory."""
        plan = self._planner.plan(batch)
        sent, values = lay_out(plan, self._dtype, self._pools[rank], half=self.half)
        with self._changed:
            self._sent[rank, step] = sent
            self._begun[rank] = step + 1
        return Handle(rank, step, batch, plan, values, gradients=sent.gradients)

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
        sent, key = self._sent[handle.rank, handle.step], (handle.rank, handle.step)
        lives = [
            self._ask_one(MessageKind.LEASE, handle, sent, "prefetches", shard, ahead)
            for shard in range(self.shards)
        ]
        found: Lease = []
        for life in lives:
            message, rows = self._links.answer("prefetches", life, *key, "the leased rows")
            tables: dict[str, dict[str, Any]] = {name: {} for name in self.tables}
            for name, array in said_in(message, rows).items():
                table, _, column = name.rpartition("/")
                tables[table][column] = array if array.ndim else int(array)
            found.append(tables)
        return found

    def give(self, push: RankPush) -> None:
        """Hand over a rank's gradients; the servers say later that they have closed the push."""
        handle, rows = push
        sent = self._sent[handle.rank, handle.step]
        if rows is not None and rows is not sent.gradients:
            for name, gradients in rows.items():
                np.copyto(sent.gradients[name], gradients)
        push_it = Message(MessageKind.PUSH, handle.rank, handle.step, number=int(rows is None))
        with self._changed:
            sent.push = push_it  # from now on a server that comes back is sent it, too
        for shard in range(self.shards):
            given = () if rows is None else sent.arrays("gradients", shard)
            self._links.push(shard, push_it, given)

    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""
        plan = self._planner.plan(batch)
        with self._links.alone:
            sent, values = lay_out(plan, self._dtype, self._peeks)
            handle = Handle(ALL, ALL, batch, plan, values)
            try:
                self._read(MessageKind.LOOK_AHEAD, handle, sent, "control")
                handle.values = values.of(values.flat.copy())
            finally:
                self._peeks.give_back(sent.number, sent.segment)
        return handle

    def close(self) -> None:
        """End the connections, the threads that listen, the segments, and the servers, if they were
        started here."""
        self._end()

    # Inside.

    def _ask(self, kind: MessageKind, handle: Handle) -> None:
        """Prefetches have connections of their own: while one waits, the step before it is
        refreshed."""
        role = "prefetches" if kind is MessageKind.LOOK_AHEAD else "lookups"
        self._read(kind, handle, self._sent[handle.rank, handle.step], role)

    def _read(self, kind: MessageKind, handle: Handle, sent: SentBatch, role: str) -> None:
        """Ask all servers for the batch's rows, then wait for all answers: for each server's first
        in turn, so that what all take is not counted as waiting for one."""
        lives = [self._ask_one(kind, handle, sent, role, shard) for shard in range(self.shards)]
        for place in range(self.shards):
            shard = (handle.step + place) % self.shards
            began_s = time.perf_counter()
            while not self._answered(handle, sent, role, lives[shard]):
                lives[shard] = self._ask_one(kind, handle, sent, role, shard)
            waited_s = time.perf_counter() - began_s
            with self._changed:
                key = handle.rank, shard
                self.waited_s[key] = self.waited_s.get(key, 0.0) + waited_s

    def _ask_one(
        self,
        kind: MessageKind,
        handle: Handle,
        sent: SentBatch,
        role: str,
        shard: int,
        number: int = 0,
    ) -> Life:
        """Ask one server; in which of its lives."""
        known = kind is MessageKind.BRING_UP_TO_DATE
        body = b"" if known else pack_placed(sent.placed(shard))
        ids = () if known else sent.arrays("ids", shard)
        asked = Message(kind, handle.rank, handle.step, body, number)
        while True:
            life = self._links.at(shard)
            with suppress(ServerRevivedError):
                self._links.attach(role, shard, handle.rank, sent.number, sent.segment)
                self._links.send(role, shard, asked, ids)
                return life

    def _answered(self, handle: Handle, sent: SentBatch, role: str, life: Life) -> bool:
        """Whether the server has answered in the life in which it was asked."""
        shard = life.shard
        rows = sent.arrays("values", shard)
        try:
            found, _ = self._links.answer(
                role, life, handle.rank, handle.step, "the rows", lambda message: rows.room()
            )
        except ServerRevivedError:
            return False
        rows.arrived()
        with self._changed:
            if life.is_over:
                return False
            sent.read_at.add(shard)
        handle.version[shard] = found.number
        return True

    def _rejoin(self, life: Life) -> int:
        """Tell a server that has come back what of each rank is closed, and what is open: batches
        that were read are opened again, pushes on their way are sent again. How many are lost."""
        shard, ranks, lost = life.shard, list(self._pools), 0
        with self._changed:
            self._links.at(shard).is_over = True
            batches = {k: b for k, b in sorted(self._sent.items()) if shard in b.open_at}
            begun = {rank: self._begun.get(rank, 0) for rank in ranks}
            finished = {r: steps for r, steps in self._finished.items() if r in ranks}
        for rank, steps in begun.items():
            still_open = [step for r, step in batches if r == rank]
            said = {"rank": rank, "begun": steps, "open": still_open}
            control = life.channels["control", ALL]
            found = self._links.call_on(control, life, "rejoin", within_s=START_WITHIN_S, **said)
            lost += int(found["lost"])
        for (rank, step), sent in batches.items():
            if shard not in sent.read_at:
                continue  # whoever waits for its rows asks again
            channel = life.channels["lookups", rank]
            body = pack_segment(sent.number, sent.segment.size)
            channel.send(Message(MessageKind.SEGMENT, rank, ALL, body), segment=sent.segment)
            life.mapped[rank, sent.number] = sent.segment
            reopen = Message(MessageKind.REOPEN, rank, step, pack_placed(sent.placed(shard)))
            channel.send(reopen, sent.arrays("ids", shard))
            answer, _ = self._links.receive(channel, life, stops=False, within_s=START_WITHIN_S)
            if answer.kind is not MessageKind.ROWS:
                raise PeerError(f"embedding server {shard} does not open a batch again: {answer}")
            if sent.push is not None:
                given = () if sent.push.number else sent.arrays("gradients", shard)
                life.channels["pushes", rank].send(sent.push, given)
        for rank, steps in finished.items():
            life.channels["pushes", rank].send(Message(MessageKind.FINISH, rank, steps))
        return lost

    def _closed(self, rank: int, step: int, shard: int) -> None:
        """A server has closed a push; what it says of a repeated one is no news."""
        with self._changed:
            sent = self._sent.get((rank, step))
            if sent is None or shard not in sent.open_at:
                return
            sent.open_at.remove(shard)
            done = not sent.open_at
        self._on_closed(rank, step)
        if done:
            self._pools[rank].give_back(sent.number, sent.segment)
            with self._changed:
                del self._sent[rank, step]
                self._changed.notify_all()


def call_living(method: weakref.WeakMethod[Callable[..., Any]], *told: Any) -> Any:
    """Not kept alive by the threads that listen."""
    found = method()
    return None if found is None else found(*told)


def _close(
    links: Links,
    close: Callable[[], None],
    pools: Sequence[SegmentPool],
    sent: dict[tuple[int, int], SentBatch],
) -> None:
    links.close()
    close()
    for pool in pools:
        pool.close()
    sent.clear()  # a segment goes with its last array
