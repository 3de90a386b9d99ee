"""The embedding store of a rank process: its rows live in server processes.

A batch lies in one segment from its lookup until every server has closed its push. Servers of this
host see it: each reads its own distinct ids there, its kernels write the rows in place for the
pooling to read, and read the gradients in place. To and from servers of other hosts these arrays
travel. Requests go to all servers first, answers are collected after: of one batch, or, by `ask`,
of later batches meanwhile. A server answers what comes over a connection in its order.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np

from persia_sim.base.vocabulary import ALL
from runtime.data.batch import Batch, Layout
from runtime.embedding.batch_rows import Handle, RankPush
from runtime.embedding.config import TableConfig
from runtime.embedding.native.plan import Planner
from runtime.embedding.store import Lease
from runtime.hosts.rows.batch_layout import SentBatch, fresh_among, lay_out
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.connections import Incarnation, ServerRestoredError
from runtime.hosts.rows.remote_control import RemoteControl
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.calls import payload_of
from runtime.hosts.wire.messages import Message, MessageKind, pack_placed, pack_segment
from runtime.hosts.wire.peers import START_WITHIN_S
from runtime.hosts.wire.segments import SegmentPool
from runtime.stop import PeerError, Stop

PEEKS_IN_FLIGHT = 4
"""Batches of an evaluation whose rows are on their way: each has 8,192 samples."""


class RemoteStore(RemoteControl):
    """An `EmbeddingStore` of server processes, for the ranks of this process."""

    answers_later = True

    def __init__(
        self,
        layout: Layout,
        tables: Sequence[TableConfig],
        client: ServerClient,
        *,
        seed: int,
        segments: int,
        half: bool = False,
        fresh: Collection[str] = (),
        stop: Stop | None = None,
        close: Callable[[], None] = lambda: None,
        restart: Callable[[int], None] | None = None,
    ) -> None:
        """``segments``: batches of a rank in flight; ``half`` and ``fresh``: as of `ServerRules`;
        ``close`` ends what was started for it; ``restart`` starts a server again that awaits its
        rows, where this process may do that."""
        stop = Stop() if stop is None else stop
        super().__init__(layout, tables, client, stop, seed, segments, restart)
        self.half = half
        self.fresh = fresh
        """Tables that are brought up to date, and pushed, apart."""
        self._is_fresh = fresh_among(list(self.tables), fresh)
        self._look_ups = "prefetches" if fresh else "lookups"
        """Over which connections: where tables are fresh they are brought up to date over the
        other ones, so that this waits for no late rows that are on their way."""
        self._pushes = [MessageKind.FRESH_PUSH] * bool(fresh) + [MessageKind.PUSH]
        self._planner = Planner(layout.fields, self.tables.values(), self.shards)
        self._dtype = next(iter(self.tables.values())).dtype
        closed = weakref.WeakMethod(self._closed)
        client.on_closed = lambda rank, step, shard: call_living(closed, rank, step, shard)
        rejoin = weakref.WeakMethod(self._rejoin)
        client.rejoin = lambda server: call_living(rejoin, server) or 0
        self._peeks = SegmentPool(PEEKS_IN_FLIGHT, Stop(), "evaluation")
        pools = [*self._pools.values(), self._peeks]
        self._end = weakref.finalize(self, _close, client, close, pools, self._sent)

    # The verbs of a rank.

    def begin(self, rank: int, step: int, batch: Batch) -> Handle:
        """Merge duplicates and plan the shards; waits for a segment of shared memory."""
        plan = self._planner.plan(batch)
        pool = self._pools[rank]
        sent, values = lay_out(plan, self._dtype, pool, half=self.half, is_fresh=self._is_fresh)
        with self._changed:
            self._sent[rank, step] = sent
            self._begun[rank] = step + 1
        return Handle(rank, step, batch, plan, values, gradients=sent.gradients)

    def ask(self, handle: Handle) -> None:
        """Send off what `look_up` waits for."""
        self._ask(MessageKind.LOOK_UP, handle, self._sent_of(handle), self._look_ups)

    def ask_ahead(self, handle: Handle) -> None:
        """Send off what `look_up_ahead` waits for: over a connection of its own, since the step
        before is brought up to date while it is on its way."""
        self._ask(MessageKind.LOOK_AHEAD, handle, self._sent_of(handle), "prefetches")

    def ask_lease(self, handle: Handle, ahead: int) -> None:
        """Send off what `lease` waits for."""
        self._ask(MessageKind.LEASE, handle, self._sent_of(handle), "prefetches", ahead)

    def look_up(self, handle: Handle) -> None:
        """Read the batch's rows at all servers, creating absent ones, when each allows it."""
        self._read(MessageKind.LOOK_UP, handle, self._sent_of(handle), self._look_ups)

    def look_up_ahead(self, handle: Handle) -> None:
        """A prefetch of lookahead: read at any time, without side effect."""
        self._read(MessageKind.LOOK_AHEAD, handle, self._sent_of(handle), "prefetches")

    def bring_up_to_date(self, handle: Handle) -> None:
        """Replace prefetched rows that were written since, when all earlier pushes are applied;
        where tables are fresh, theirs."""
        self._read(MessageKind.BRING_UP_TO_DATE, handle, self._sent_of(handle), "lookups")

    def lease(self, handle: Handle, ahead: int) -> Lease:
        """lookahead `forwarded`: the batch's rows with their state, at most ``ahead`` steps old."""
        if not self._is_asked(handle, "prefetches"):
            self.ask_lease(handle, ahead)
        key = handle.rank, handle.step
        leases: Lease = []
        for shard in range(self.shards):
            server = self._unanswered["prefetches", handle.rank, shard][handle.step]
            message, rows = self._client.answer("prefetches", server, *key, "the leased rows")
            with self._changed:
                del self._unanswered["prefetches", handle.rank, shard][handle.step]
            tables: dict[str, dict[str, Any]] = {name: {} for name in self.tables}
            for name, array in payload_of(message, rows).items():
                table, _, column = name.rpartition("/")
                tables[table][column] = array if array.ndim else int(array)
            leases.append(tables)
        return leases

    def give(self, push: RankPush) -> None:
        """Hand over a rank's gradients; the servers say later that they have closed the push."""
        self._push(self._pushes, push)

    def write_back(self, push: RankPush) -> None:
        """The lookup of a batch that was on lease, and its push, in one message: what comes back is
        that the push is closed."""
        self._push([MessageKind.WRITE_BACK], push)

    def _push(self, kinds: Sequence[MessageKind], push: RankPush) -> None:
        handle, rows = push
        sent = self._sent_of(handle)
        if rows is not None and rows is not sent.gradients:
            for name, gradients in rows.items():
                np.copyto(sent.gradients[name], gradients)
        rank = handle.rank
        step = handle.step
        with self._changed:  # from now on a server that comes back is sent them, too
            sent.pushes = [Message(kind, rank, step, number=int(rows is None)) for kind in kinds]
        for push_it, shard in product(sent.pushes, range(self.shards)):
            self._client.push(shard, push_it, sent.given(shard, push_it))

    def peek(self, batch: Batch) -> Handle:
        """The batch's rows as they are now, for evaluation: creates and records nothing."""
        (handle,) = self.peek_all([batch])
        return handle

    def peek_all(self, batches: Iterable[Batch]) -> Generator[Handle, None, None]:
        """As `peek` of each batch; the rows of later ones are on their way meanwhile."""
        asked = deque[tuple[Handle, SentBatch]]()
        with self._client.alone:
            try:
                for number, batch in enumerate(batches):
                    asked.append(self._ask_peek(batch, number))
                    if len(asked) == PEEKS_IN_FLIGHT:
                        yield self._peeked(*asked.popleft())
                while asked:
                    yield self._peeked(*asked.popleft())
            finally:
                # Given up in the middle: what comes later must find nothing of it.
                for handle, sent in asked:
                    with suppress(PeerError):
                        self._peeked(handle, sent)

    def _ask_peek(self, batch: Batch, number: int) -> tuple[Handle, SentBatch]:
        """Ask for a batch's rows, behind those that were asked for before: also where the server of
        these has died, since they are asked for again in their order."""
        plan = self._planner.plan(batch)
        sent, values = lay_out(plan, self._dtype, self._peeks)
        handle = Handle(ALL, number, batch, plan, values)
        for shard in range(self.shards):
            unanswered = self._unanswered["control", ALL, shard]
            server = next(reversed(unanswered.values()), self._client.at(shard))
            unanswered[number] = server
            with suppress(ServerRestoredError):
                self._send(MessageKind.LOOK_AHEAD, handle, sent, "control", server)
        return handle, sent

    def _peeked(self, handle: Handle, sent: SentBatch) -> Handle:
        """The rows of the batch that was asked for first, out of their segment."""
        try:
            self._read(MessageKind.LOOK_AHEAD, handle, sent, "control")
            handle.values = handle.values.of(handle.values.flat.copy())
        finally:
            self._peeks.give_back(sent.number, sent.segment)
        return handle

    def close(self) -> None:
        """End the connections, the threads that listen, the segments, and the servers, if they were
        started here."""
        self._end()

    # Inside.

    def _sent_of(self, handle: Handle) -> SentBatch:
        return self._sent[handle.rank, handle.step]

    def _is_asked(self, handle: Handle, role: str) -> bool:
        return handle.step in self._unanswered[role, handle.rank, 0]

    def _read(self, kind: MessageKind, handle: Handle, sent: SentBatch, role: str) -> None:
        """Wait for all servers' answers, after asking for them where that was not done: for each
        server's first in turn, so that what all take is not counted as waiting for one."""
        if not self._is_asked(handle, role):
            self._ask(kind, handle, sent, role)
        for place in range(self.shards):
            shard = (handle.step + place) % self.shards
            began_s = time.perf_counter()
            while not self._has_answered(kind, handle, sent, role, shard):
                self._ask_again(kind, handle, sent, role, shard)
            waited_s = time.perf_counter() - began_s
            with self._changed:
                key = handle.rank, shard
                self.waited_s[key] = self.waited_s.get(key, 0.0) + waited_s

    def _ask(
        self, kind: MessageKind, handle: Handle, sent: SentBatch, role: str, number: int = 0
    ) -> None:
        """Ask every server for the batch's rows, behind what it was asked for before.

        Of one that has died meanwhile, whoever waits for the answers asks the one in its place for
        all of them again, in their order: what is new waits until that is done.
        """
        rank = handle.rank
        step = handle.step
        for shard in range(self.shards):
            unanswered = self._unanswered[role, rank, shard]

            def is_its_turn(shard: int = shard, asked: Mapping[int, Any] = unanswered) -> bool:
                server = self._client.at(shard)
                return all(at is server or other == step for other, at in asked.items())

            with self._changed:
                if not is_its_turn():
                    self._changed.wait_until(
                        is_its_turn,
                        self._stop,
                        lambda: f"rank {rank}, step {step} waits for lookups that are asked again",
                    )
                unanswered[step] = server = self._client.at(shard)
            with suppress(ServerRestoredError):
                self._send(kind, handle, sent, role, server, number)

    def _ask_again(
        self, kind: MessageKind, handle: Handle, sent: SentBatch, role: str, shard: int
    ) -> None:
        """Ask the server that is in the place of one that has not answered."""
        while True:
            server = self._client.at(shard)
            with suppress(ServerRestoredError):
                self._send(kind, handle, sent, role, server)
                break
        with self._changed:
            self._unanswered[role, handle.rank, shard][handle.step] = server
            self._changed.notify_all()

    def _send(
        self,
        kind: MessageKind,
        handle: Handle,
        sent: SentBatch,
        role: str,
        server: Incarnation,
        number: int = 0,
    ) -> None:
        """Send the request to one server."""
        shard = server.shard
        is_known = kind is MessageKind.BRING_UP_TO_DATE  # then the server has its ids
        body = b"" if is_known else pack_placed(sent.placed(shard))
        ids = () if is_known else sent.ids(shard)
        request = Message(kind, handle.rank, handle.step, body, number)
        self._client.attach(role, server, handle.rank, sent.number, sent.segment)
        self._client.send(role, shard, request, ids, server=server)

    def _has_answered(
        self, kind: MessageKind, handle: Handle, sent: SentBatch, role: str, shard: int
    ) -> bool:
        """Whether the server has answered in the incarnation that has the request."""
        rank = handle.rank
        step = handle.step
        rows = sent.rows(shard, kind)
        unanswered = self._unanswered[role, rank, shard]
        server = unanswered[step]
        try:
            rows_message, _ = self._client.answer(
                role, server, rank, step, "the rows", lambda message: rows.room()
            )
        except ServerRestoredError:
            return False
        rows.arrived()
        with self._changed:
            if server.has_ended:
                return False
            is_known = kind is MessageKind.BRING_UP_TO_DATE
            (sent.up_to_date_at if is_known else sent.read_at).add(shard)
            del unanswered[step]
            self._changed.notify_all()
        handle.version[shard] = rows_message.number
        return True

    def _rejoin(self, server: Incarnation) -> int:
        """Tell a server that has come back what of each rank is closed, and what is open: batches
        that were read are opened again, pushes on their way are sent again. How many are lost."""
        # What this process knows of the shard; the dead incarnation adds nothing from now on.
        shard = server.shard
        ranks = list(self._pools)
        lost = 0
        with self._changed:
            self._client.at(shard).has_ended = True
            batches = {k: b for k, b in sorted(self._sent.items()) if shard in b.open_at}
            begun = {rank: self._begun.get(rank, 0) for rank in ranks}
            finished = {r: steps for r, steps in self._finished.items() if r in ranks}

        # Per rank: how far it is, and what is open.
        for rank, steps in begun.items():
            still_open = [step for r, step in batches if r == rank]
            result = self._client.call_on(
                server.channels["control", ALL],
                server,
                ServerCalls.rejoin,
                within_s=START_WITHIN_S,
                rank=rank,
                begun=steps,
                open=still_open,
            )
            lost += int(result["lost"])

        # Batches whose rows were read are opened again, and pushes that were sent are sent again.
        for (rank, step), sent in batches.items():
            if shard not in sent.read_at:
                continue  # whoever waits for its rows asks again
            channel = server.channels["lookups", rank]
            body = pack_segment(sent.number, sent.segment.size)
            channel.send(Message(MessageKind.SEGMENT, rank, ALL, body), segment=sent.segment)
            server.mapped[rank, sent.number] = sent.segment
            place = pack_placed(sent.placed(shard))
            is_up_to_date = int(shard in sent.up_to_date_at)
            reopen = Message(MessageKind.REOPEN, rank, step, place, is_up_to_date)
            channel.send(reopen, sent.ids(shard))
            answer, _ = self._client.receive(channel, server, stops=False, within_s=START_WITHIN_S)
            if answer.kind is not MessageKind.ROWS:
                raise PeerError(f"embedding server {shard} does not open a batch again: {answer}")
            for push in sent.pushes:
                server.channels["pushes", rank].send(push, sent.given(shard, push))

        # Ranks that have no more steps hold nobody up.
        for rank, steps in finished.items():
            server.channels["pushes", rank].send(Message(MessageKind.FINISH, rank, steps))
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


def call_living(method: weakref.WeakMethod[Callable[..., Any]], *arguments: Any) -> Any:
    """Call a method of an object that the threads which listen do not keep alive."""
    living = method()
    return None if living is None else living(*arguments)


def _close(
    client: ServerClient,
    close: Callable[[], None],
    pools: Sequence[SegmentPool],
    sent: dict[tuple[int, int], SentBatch],
) -> None:
    client.close()
    close()
    for pool in pools:
        pool.close()
    sent.clear()  # a segment goes with its last array
