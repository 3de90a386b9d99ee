"""An embedding server as a process: `persia-runtime.hosts.rows.server_process`.

`Service` has a coroutine for each connection of a client; `ControlConnection` answers the rare
calls of `ServerCalls`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.schema import parse
from persia_sim.base.vocabulary import ALL, ENDLESS
from runtime.checkpoint.shard import load_rows, load_vectors, see_folder, write_rows
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import freeze
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import serve
from runtime.hosts.rows.rank_batches import RankBatches
from runtime.hosts.rows.served_shard import ServedShard
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.calls import Payload, answer, send_error
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine, retry_until_ready
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    role_in,
)
from runtime.hosts.wire.peers import Peer
from runtime.hosts.wire.segments import Segment
from runtime.stop import PeerError, RunStopped


class Service(ServedShard):
    """One embedding server, and everybody who is connected to it."""

    def serve(self, channel: Channel, hello: Message, payload: Payload) -> Coroutine[None]:
        """Serve one connection of a client, from its first message to its end.

        Raises BadMessageError for what breaks the protocol.
        """
        # Who it is. Ranks wait until a server that was started again has its rows; so does a
        # heartbeat, which does not beat before its ranks are admitted.
        role = role_in(payload)
        rank = hello.rank
        if payload.get("incarnation", 0) > self.config.incarnation:
            self._make_way(channel)
        if role != "control":
            yield from self.restore.wait(channel)
        self._admit(channel, role, rank, payload)
        if role != "heartbeat":
            channel.is_alive = partial(self.peers.__contains__, payload["client"])

        # WELCOME, then its requests until it ends.
        config = self.config
        welcome = {
            "pid": os.getpid(),
            "shard": config.shard,
            "shards": config.shards,
            "incarnation": config.incarnation,
        }
        peer = f"{payload['ranks']} (pid {payload['pid']})"
        try:
            channel.send(Message(MessageKind.WELCOME, body=pack_json(welcome)))
            yield from self._converse(channel, role, rank, payload)
        except BadMessageError as error:
            # The run ends with a rank that breaks the protocol or dies, not with a worker that may
            # be started again.
            if role in RANK_ROLES:
                self.stop.set(PeerError(f"{peer} sent what no server takes: {error}"))
            raise
        except PeerGoneError:
            if role == "heartbeat" and payload.get("client_incarnation") is not None:
                self._release(payload["client"])
            elif role == "heartbeat":
                ended = f"its connection to embedding server {config.shard} ended"
                self.stop.set(PeerError(f"{peer} has died: {ended} without a goodbye"))
        except Exception as error:  # an error of this process, which goes on serving others
            send_error(channel, error)
            self.stop.set(error)
        finally:
            users = self.batches[rank].users if role in RANK_ROLES else {}
            if users.get(role, (None,))[0] is channel:
                users.pop(role, None)
            if role == "heartbeat":
                self.peers.pop(payload["client"], None)

    # The first message.

    def _make_way(self, channel: Channel) -> None:
        """End: a newer server of this shard has begun, and what is applied here would be lost."""
        sentence = (
            f"embedding server {self.config.shard} (pid {os.getpid()}) ends: a newer one has begun"
        )
        send_error(channel, PeerError(sentence))
        print(sentence, file=sys.stderr, flush=True)
        os._exit(0)

    def _admit(self, channel: Channel, role: str, rank: int, payload: Mapping[str, Any]) -> None:
        # A heartbeat is a process that uses this server; of a worker that was restarted the earlier
        # incarnation is released.
        if role == "heartbeat":
            for client, peer in list(self.peers.items()):
                if payload.get("client_incarnation") and peer.ranks == payload["ranks"]:
                    self._release(client)
            self.peers[payload["client"]] = Peer(payload["pid"], payload["ranks"])
        if role not in RANK_ROLES:
            return

        # A rank has one connection of each role.
        config = self.config
        if not 0 <= rank < self.rules.ranks:
            raise BadMessageError(f"rank {rank} does not exist, the run has {self.rules.ranks}")
        rules = self.rules
        empty = RankBatches(
            rank,
            config.shard,
            config.shards,
            config.tables,
            half=rules.half,
            fresh=rules.fresh,
        )
        batches = self.batches.setdefault(rank, empty)
        user, pid = batches.users.setdefault(role, (channel, payload["pid"]))
        if user is not channel:
            raise BadMessageError(f"{role} of rank {rank} are connected already, by pid {pid}")
        batches.client = payload["client"]

    def _release(self, client: str) -> None:
        """An embedding worker has died and may come back: nothing that it requested is done from
        now on. What it has pushed may still be merged; its next incarnation says what else was
        open."""
        self.condition.acquire()  # also while somebody holds the server
        for rank, batches in list(self.batches.items()):
            if batches.client == client:
                self.batches[rank] = batches.anew()
                for channel, _ in list(batches.users.values()):
                    channel.shut_down()
        self.peers.pop(client, None)
        self.condition.release()

    # The messages after it.

    def _converse(
        self, channel: Channel, role: str, rank: int, payload: Mapping[str, Any]
    ) -> Coroutine[None]:
        if role == "heartbeat":
            client = payload["client"]
            return (yield from self.peers.serve_heartbeat(channel, client, lambda: self.stop))
        if role == "control":
            return (yield from ControlConnection(self, channel, payload.get("run")).converse())

        # Where ids and gradients of a batch are received; with the bytes of them counted.
        batches = self.batches[rank]
        traffic = self.traffic[channel] = Counter()

        def place(message: Message) -> list[memoryview] | None:
            views = batches.place(message)
            traffic["received_bytes"] += sum(map(len, views or ()))
            return views

        while True:
            # The next request; a segment is no request, it is only mapped.
            message, segment = yield from channel.receiving(place=place)
            stop = self.stop
            if message.kind is MessageKind.SEGMENT:
                batches.attach(message, segment)
                continue
            if message.kind is MessageKind.DISCONNECT:
                return None
            if message.kind is MessageKind.RUN_BEGINS:
                batches.of_earlier_run.discard(role)
                channel.send(message)
            if role in batches.of_earlier_run or message.kind is MessageKind.RUN_BEGINS:
                continue
            if message.kind is not MessageKind.FINISH and not 0 <= message.step < ENDLESS:
                raise BadMessageError(
                    f"step {message.step} of a {message.kind.name} does not exist"
                )

            # Do it, as soon as window and order allow it; its errors end the run.
            try:
                request = partial(self.answer, channel, batches, message, stop)
                yield from retry_until_ready(request)
            except (BadMessageError, PeerGoneError):
                raise
            except RunStopped:
                send_error(channel, stop.error, message)
            except Exception as error:
                send_error(channel, error)
                stop.set(error)


class ControlConnection(ServerCalls):
    """The control connection of one client; its calls are answered one after the other."""

    def __init__(self, shard: ServedShard, channel: Channel, run: str | None) -> None:
        """``run``: the folder below which files may be written; None: nowhere."""
        self._shard = shard
        self._channel = channel
        self._run = run
        self._server = shard.server
        self._tables = shard.rows.tables
        self._condition = shard.condition
        config = shard.config
        self._batches = RankBatches(ALL, shard.server.shard, config.shards, config.tables)
        self._holds = 0
        """How often this client holds the server."""

    def converse(self) -> Coroutine[None]:
        """Answer until the connection ends; then what it holds goes on."""
        try:
            while True:
                message, segment = yield from self._channel.receiving(place=self._batches.place)
                if message.kind is MessageKind.DISCONNECT:
                    return
                try:
                    yield from retry_until_ready(partial(self._answer, message, segment))
                except RunStopped as error:
                    send_error(self._channel, error, message)
        finally:
            while self._holds:
                self.thaw()

    def _answer(self, message: Message, segment: Segment | None) -> None:
        """Answer one message; the client that holds the server is let through."""
        is_holder = self._holds > 0
        passed = self._condition.released(lambda: self._holds > 0) if is_holder else nullcontext()
        with passed:
            if message.kind is MessageKind.SEGMENT:
                self._batches.attach(message, segment)
            elif message.kind is MessageKind.LOOK_AHEAD:
                self._peek(message)
            else:
                answer(self._channel, message, segment, ServerCalls, self)

    def _peek(self, message: Message) -> None:
        """Read the rows of a batch for an evaluation."""
        handle = self._batches.unpushed(message)
        self._server.peek(handle)
        version = handle.version[self._server.shard]
        rows = Message(MessageKind.ROWS, ALL, message.step, number=version)
        self._channel.send(rows, self._batches.values(handle, message.kind))

    # The calls.

    def begin_run(self, rules: Mapping[str, Any]) -> None:
        """A run starts at step 0 on the rows as they are."""
        self._shard.begin_run(rules)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps; nothing is in flight."""
        self._shard.begin_leg(first_steps)

    def resume_run(self, rules: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Count on under these rules."""
        self._shard.resume_run(rules, counters)

    def rejoin(self, rank: int, begun: int, open: Sequence[int]) -> Payload:
        """Go on with a rank whose open steps are these; how many pushes are lost."""
        with self._server.lock:
            return {"lost": self._server.rejoin(rank, begun, set(open))}

    def status(self) -> Payload:
        """Figures of this server, also of what has travelled."""
        return self._shard.status()

    def counters(self) -> Payload:
        """What `resume_run` takes."""
        return self._server.counters()

    def export(self, table: str) -> dict[str, np.ndarray]:
        """The ids, values and state of a table."""
        return self._server.export(table)

    def trace(self, after: int, most: int) -> Payload:
        """The events of its rows behind the first ones."""
        return {"events": self._shard.recorder.after(after, most)}

    def wait_until_closed(self, steps: int) -> None:
        """Return when every push of the first steps is applied or lost."""
        self._server.wait_until_closed(steps)

    def closed(self) -> Payload:
        """Per rank, the steps whose pushes are closed."""
        return {"closed": self._server.closed()}

    def freeze(self) -> None:
        """Hold the server for this client."""
        with self._condition:
            self._condition.is_held = True
        self._holds += 1

    def thaw(self) -> None:
        """Let it go on."""
        self._holds = max(0, self._holds - 1)
        self._condition.is_held = self._holds > 0
        self._condition.is_notified = True

    def freeze_rows(self) -> None:
        """Remember all rows as they are."""
        freeze(self._tables.values())

    def drop_rows(self) -> None:
        """Forget what was remembered, and not collected."""
        for table in self._tables.values():
            table.drop_snapshot()

    def see_folder(self, mark: str) -> Payload:
        """Whether a file that rank 0 has made is seen here."""
        return see_folder(self._shard.rows, mark=mark)

    def write_rows(self, folder: str, save: str) -> Payload:
        """Write the remembered rows into the run's folder, and nowhere else."""
        to = Path(os.path.normpath(Path(folder) / save))
        if self._run is None or not to.is_relative_to(self._run):
            raise OSError(f"it writes only below the folder of its run, not {folder}/{save}")
        return write_rows(self._shard.rows, folder=str(to.parent), save=to.name)

    def load_rows(self, folder: str, values_only: bool = False) -> Payload:
        """Read rows of a checkpoint."""
        return load_rows(self._shard.rows, folder=folder, values_only=values_only)

    def load_vectors(self, table: str, file: str, digest: str) -> Payload:
        """Begin with rows of a file."""
        return load_vectors(self._shard.rows, table=table, file=file, digest=digest)

    def restore(
        self,
        rules: Mapping[str, Any],
        first_steps: Sequence[int],
        counters: dict[str, Any],
        folder: str | None,
    ) -> None:
        """Take what a checkpoint has of this server, and admit ranks."""
        self._shard.restore.begin()
        if folder is not None:
            load_rows(self._shard.rows, folder=folder)
        self._shard.resume_run(rules, counters)
        self._server.begin_leg(first_steps)
        self._shard.restore.is_done = True


def _listener(sock: socket.socket, text: str) -> Listener:
    config = parse(ServerConfig, json.loads(text), "the server")
    native.set_threads(config.threads)
    service = Service(config)
    who = f"embedding server {config.shard}"
    return Listener(
        sock, config.secret, service.serve, who, tls=config.tls, condition=service.condition
    )


if __name__ == "__main__":
    serve(_listener)
