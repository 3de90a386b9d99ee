"""An embedding worker as a process: `runtime.hosts.pooling.worker_process`.

Ranks send the ids of their batches and get vectors, then send the gradients of these. What lies
between, rows of the servers and sums over a row's occurrences, stays here. To the servers this
process is what ranks are that have their worker inside.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np

from persia_sim.base.schema import parse
from persia_sim.base.vocabulary import ALL
from runtime.data.batch import Batch
from runtime.embedding.batch_rows import FieldVectors, Handle, VectorGradients
from runtime.embedding.native.plan import Pooling
from runtime.embedding.worker import EmbeddingWorker
from runtime.hosts.launch.process_config import WorkerConfig
from runtime.hosts.launch.processes import Address, serve
from runtime.hosts.pooling.worker_calls import WorkerCalls
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.wire.calls import Payload, asked_of, reply, send_error
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
)
from runtime.hosts.wire.segments import Segment
from runtime.stop import RunStopped, Stop


class WorkerService(WorkerCalls):
    """One embedding worker, and the batches of its ranks between lookup and push."""

    def __init__(self, config: WorkerConfig) -> None:
        """Connect to the servers. Raises PeerError."""
        # To the servers it is what a process of ranks is.
        self._stop = Stop()
        self.who = f"embedding worker {config.worker}"
        client = ServerClient(
            Address(config.names, config.secrets),
            config.ranks,
            who=self.who,
            client_incarnation=config.incarnation if config.may_return else None,
        )
        self._store = RemoteStore(
            config.layout,
            config.tables,
            client,
            seed=config.seed,
            segments=config.segments,
            half=config.half,
            fresh=config.fresh,
            stop=self._stop,
        )
        self._store.on_closed(self._closed_at_one)
        self._worker = EmbeddingWorker(self._store)

        # Late vectors leave when their rows are read, those of fresh tables, and of lookahead, when
        # these are up to date.
        dims = {table.name: table.dim for table in self._store.tables.values()}
        late = dims.keys() - set(config.fresh)
        self._late = Pooling(config.layout.fields, dims, late)
        self._fresh = Pooling(config.layout.fields, dims, config.fresh or None)

        # To its ranks it is what a server is.
        self._handles: dict[tuple[int, int], Handle] = {}
        self._closed: Counter[tuple[int, int]] = Counter()  # counted by one thread
        self._pushes: dict[int, Channel] = {}
        self._reports: list[str] = []
        self._of_earlier_run: set[tuple[str, int]] = set()
        """Roles and ranks over whose connections comes what a run that was stopped has sent."""
        self._welcome = {
            "pid": os.getpid(),
            "incarnation": config.incarnation,
            "shard": config.worker,
            "shards": config.workers,
        }
        roles = [("control", ALL), *product(RANK_ROLES, config.ranks)]
        self._threads = {role: ThreadPoolExecutor(1) for role in roles}
        """Calls in each role of each rank are done in order; so are the rare ones."""
        self._answering = {role: ThreadPoolExecutor(1) for role in roles}
        """Of lookups only the asking is: here their rows are awaited, pooled and sent meanwhile, in
        that order, of as many batches as the rank has lookups in flight."""
        if config.servers_may_return:
            client.failover = Failover(report=lambda text: self._reports.append(text))

    def serve(self, channel: Channel, hello: Message, payload: Payload) -> Coroutine[None]:
        """Serve one connection of a rank, for one of its roles, or of its process."""
        # Each rank has connections for lookups and for pushes, so that one never waits behind the
        # other.
        role = payload.get("role")
        rank = hello.rank
        thread = self._threads.get(("control" if role == "heartbeat" else str(role), rank))
        if thread is None:
            raise BadMessageError(f"{role} of rank {rank} belong elsewhere")
        if role == "pushes":
            self._pushes[rank] = channel

        # Calls are done in a thread of their own; signs of life are answered at once.
        channel.send(Message(MessageKind.WELCOME, body=pack_json(self._welcome)))
        while True:
            message, segment = yield from channel.receiving()
            if message.kind is MessageKind.DISCONNECT:
                return
            if message.kind is MessageKind.PING:
                failed = {"failed": self._stop.error and str(self._stop.error)}
                channel.send(Message(MessageKind.PONG, body=pack_json(failed)))
            elif message.kind is MessageKind.RUN_BEGINS:
                self._of_earlier_run.discard((str(role), rank))
                channel.send(message)
            elif (role, rank) not in self._of_earlier_run:
                thread.submit(self._answer, channel, str(role), message, segment)

    def _answer(
        self, channel: Channel, role: str, message: Message, segment: Segment | None
    ) -> None:
        """Do a call, or the first half of a lookup."""
        with self._told(channel, message):
            asked = asked_of(message, segment, WorkerCalls, self)
            if asked.func == self.look_up:
                answering = self._answering[role, message.rank]
                looked_up = self._asked_for(**asked.keywords)
                answering.submit(self._answer_later, channel, message, looked_up)
            else:
                reply(channel, message, asked)

    def _answer_later(
        self, channel: Channel, message: Message, looked_up: Callable[[], Payload]
    ) -> None:
        with self._told(channel, message):
            reply(channel, message, looked_up)

    @contextmanager
    def _told(self, channel: Channel, message: Message) -> Iterator[None]:
        """What ends a call is told to who called."""
        try:
            yield
        except (RunStopped, BadMessageError) as error:
            send_error(channel, self._stop.error or error, message)
        except PeerGoneError:
            pass  # the servers notice, too, and say so to all
        except Exception as error:
            send_error(channel, error, message)

    # The calls.

    def look_up(
        self,
        rank: int,
        step: int,
        ids: np.ndarray,
        samples: int,
        ahead: bool,
        offsets: np.ndarray | None = None,
    ) -> Payload:
        """The vectors; of a prefetch (``ahead``), and of fresh tables, when it is brought up to
        date."""
        return self._asked_for(rank, step, ids, samples, ahead, offsets)()

    def _asked_for(
        self,
        rank: int,
        step: int,
        ids: np.ndarray,
        samples: int,
        ahead: bool,
        offsets: np.ndarray | None = None,
    ) -> Callable[[], Payload]:
        """Ask the servers for the rows of a batch; what awaits them, and gives its vectors."""
        nothing = np.zeros((samples, 0), np.float32)  # what else a sample has is the rank's
        handle = self._store.begin(rank, step, Batch(ids, offsets, nothing, nothing))
        self._handles[rank, step] = handle
        ask = self._store.ask_ahead if ahead else self._store.ask
        ask(handle)

        def looked_up() -> Payload:
            if ahead:
                self._store.look_up_ahead(handle)
                return {}
            self._store.look_up(handle)
            return self._vectors(handle, self._late)

        return looked_up

    def bring_up_to_date(self, rank: int, step: int) -> Payload:
        """The vectors of a batch that was prefetched, or those of fresh tables alone."""
        handle = self._handles[rank, step]
        self._store.bring_up_to_date(handle)
        return self._vectors(handle, self._fresh)

    def _vectors(self, handle: Handle, pooling: Pooling) -> Payload:
        """The pooled vectors, and what a rank that has its worker inside would know."""
        reports = self._reports
        self._reports = []
        waits = list(self._store.waited_s.items())
        waited = [[shard, seconds] for (rank, shard), seconds in waits if rank == handle.rank]
        vectors = self._worker.pool_as(pooling, handle)
        return {"reports": reports, "waited": waited} | vectors.named()

    def push(self, rank: int, step: int, lost: bool, factor: float, **vectors: Any) -> None:
        """Push the gradients to the servers, or close the step without them (``lost``); no vectors:
        there were no samples."""
        handle = self._handles.pop((rank, step))
        if lost:
            return self._worker.give_up(handle, None)
        gradients = VectorGradients(FieldVectors.of_named(vectors), factor) if vectors else None
        self._worker.give_back(handle, gradients)

    def finish(self, rank: int, steps: int) -> None:
        """The rank has so many steps and no more."""
        self._store.finish(rank, steps)

    def note_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps."""
        self._store.note_leg(first_steps)

    def rejoin(self, rank: int, begun: int, finished: int | None) -> Payload:
        """A rank whose worker was restarted goes on; how many pushes are lost."""
        return self._store.rejoin(rank, begun, finished)

    def _closed_at_one(self, rank: int, step: int) -> None:
        """A server has closed a push; the rank is told when all have."""
        self._closed[rank, step] += 1
        if self._closed[rank, step] == self._store.shards:
            del self._closed[rank, step]
            self._pushes[rank].send(Message(MessageKind.CLOSED, rank, step))

    def begin_run(self) -> None:
        """A run starts; who leads has told the servers."""
        self._of_earlier_run = {key for key in self._threads if key[0] in RANK_ROLES}
        self._stop.set(None)
        for threads in self._threads, self._answering:
            for (role, _), thread in threads.items():
                if role in RANK_ROLES:  # calls of a run that was stopped end first
                    thread.submit(bool).result()
        self._stop = Stop()
        self._handles.clear()
        self._closed.clear()
        self._store.forget(self._stop)


def _listener(sock: socket.socket, text: str) -> Listener:
    config = parse(WorkerConfig, json.loads(text), "the worker")
    service = WorkerService(config)
    return Listener(sock, config.secret, service.serve, service.who, tls=config.tls)


if __name__ == "__main__":
    serve(_listener)
