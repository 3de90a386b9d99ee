"""An embedding server as a process: `persia-runtime.engines.servers.server_process`.

What it does for each message of each connection.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from persia_sim.words.schema import parse
from persia_sim.words.trace import TraceRecorder
from runtime.embedding.cut import PushGate
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import NativeShard
from runtime.embedding.server import EmbeddingServer
from runtime.embedding.server_rules import ServerRules
from runtime.engines.servers.launch import serve
from runtime.engines.servers.rank_batches import RankBatches
from runtime.engines.servers.rare_verbs import RareVerbs
from runtime.engines.servers.server_config import ServerConfig
from runtime.engines.transport.calls import Said, send_said, tell
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.listener import Listener
from runtime.engines.transport.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    role_in,
)
from runtime.engines.transport.peers import Peer, Peers, ServerStop
from runtime.engines.transport.revival import Filling
from runtime.engines.transport.waits import LoopTurns, Steps, patiently
from runtime.engines.transport.wire import PeerGoneError
from runtime.stop import PeerError, RunStopped


class Service:
    """One embedding server, and everybody who is connected to it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self._rules = config, config.rules
        self.peers = Peers(config.patience_s)
        self._stop = ServerStop(self.peers)
        self.recorder = TraceRecorder(keep=config.records)
        self.rows = NativeShard(config.shard, config.tables, config.seed, config.shards)
        self.gate = PushGate([config.shard])
        self.turns = LoopTurns()
        self.server = EmbeddingServer(
            config.shard, self.rows, config.rules, self.recorder, self.gate, self._stop, self.turns
        )
        self.server.on_closed = self._closed
        self.repeated_pushes = 0
        self.filling = Filling(awaited=config.awaits_rows, patience_s=config.patience_s)
        self._batches: dict[int, RankBatches] = {}
        self._traffic: dict[Channel, Counter[str]] = {}  # one thread at a time counts of each

    def serve(self, channel: Channel, hello: Message, said: dict[str, Any]) -> Steps[None]:
        """One connection of a client, from its first word to its end.

        Raises BadMessageError for what breaks the protocol.
        """
        role, rank = role_in(said), hello.rank
        if said.get("life", 0) > self.config.life:
            self._make_way(channel)
        if role != "control":  # a heartbeat too: it does not beat before its ranks are in
            yield from self.filling.wait(channel)
        self._admit(channel, role, rank, said)
        if role != "heartbeat":
            channel.is_heard = partial(self.peers.__contains__, said["client"])
        own = self.config
        about = {"pid": os.getpid(), "shard": own.shard, "shards": own.shards, "life": own.life}
        who = f"{said['ranks']} (pid {said['pid']})"
        try:
            channel.send(Message(MessageKind.WELCOME, body=pack_json(about)))
            yield from self._work(channel, role, rank, said)
        except BadMessageError as error:
            if role in RANK_ROLES:
                self._stop.set(PeerError(f"{who} sent what no server takes: {error}"))
            raise
        except PeerGoneError:
            if role == "heartbeat" and said.get("own_life") is not None:
                self._let_go(said["client"])
            elif role == "heartbeat":
                ended = f"its connection to embedding server {self.config.shard} ended"
                self._stop.set(PeerError(f"{who} has died: {ended} without a goodbye"))
        except Exception as error:  # an error of this process, which goes on serving others
            tell(channel, error)
            self._stop.set(error)
        finally:
            users = self._batches[rank].users if role in RANK_ROLES else {}
            if users.get(role, (None,))[0] is channel:
                users.pop(role, None)
            if role == "heartbeat":
                self.peers.pop(said["client"], None)

    # The first word.

    def _make_way(self, channel: Channel) -> None:
        """A newer server of this shard has begun: what is applied here would be lost."""
        own = self.config
        sentence = f"embedding server {own.shard} (pid {os.getpid()}) ends: a newer one has begun"
        tell(channel, PeerError(sentence))
        print(sentence, file=sys.stderr, flush=True)
        os._exit(0)

    def _admit(self, channel: Channel, role: str, rank: int, said: Mapping[str, Any]) -> None:
        if role == "heartbeat":
            for client, peer in list(self.peers.items()) if said.get("own_life") else ():
                if peer.ranks == said["ranks"]:  # an earlier life of a worker
                    self._let_go(client)
            self.peers[said["client"]] = Peer(said["pid"], said["ranks"])
        if role not in RANK_ROLES:
            return
        ranks, own = self._rules.ranks, self.config
        if not 0 <= rank < ranks:
            raise BadMessageError(f"rank {rank} does not exist, the run has {ranks}")
        half = self._rules.half
        none = RankBatches(rank, own.shard, own.shards, own.tables, half=half)
        batches = self._batches.setdefault(rank, none)
        user, pid = batches.users.setdefault(role, (channel, said["pid"]))
        if user is not channel:
            raise BadMessageError(f"{role} of rank {rank} are connected already, by pid {pid}")
        batches.client = said["client"]

    def _let_go(self, client: str) -> None:
        """An embedding worker has died and may come back: nothing that it asked for is done from
        now on. What it has pushed may still be merged; its next life says what else was open."""
        self.turns.acquire()  # also while somebody holds the server
        for rank, batches in list(self._batches.items()):
            if batches.client == client:
                self._batches[rank] = batches.anew()
                for channel, _ in list(batches.users.values()):
                    channel.hang_up()
        self.peers.pop(client, None)
        self.turns.release()

    # The words after it.

    def _work(self, channel: Channel, role: str, rank: int, said: Mapping[str, Any]) -> Steps[None]:
        if role == "heartbeat":
            return (yield from self.peers.listen_to(channel, said["client"], lambda: self._stop))
        if role == "control":
            return (yield from RareVerbs(self, channel, said.get("run")).work())
        batches = self._batches[rank]
        traffic = self._traffic[channel] = Counter()

        def place(message: Message) -> list[memoryview] | None:
            found = batches.place(message)
            traffic["received_bytes"] += sum(map(len, found or ()))
            return found

        while True:
            message, segment = yield from channel.receiving(place=place)
            if message.kind is MessageKind.SEGMENT:
                batches.attach(message, segment)
                continue
            if message.kind is MessageKind.GOODBYE:
                return None
            if message.kind is not MessageKind.FINISH and not 0 <= message.step < 2**62:
                raise BadMessageError(
                    f"step {message.step} of a {message.kind.name} does not exist"
                )
            traffic["requests"] += message.kind is not MessageKind.FINISH
            stop = self._stop
            try:
                yield from patiently(partial(self._answer, channel, batches, message, stop))
            except (BadMessageError, PeerGoneError):
                raise
            except RunStopped:
                tell(channel, stop.error, message)
            except Exception as error:
                tell(channel, error)
                stop.set(error)

    def _answer(
        self, channel: Channel, batches: RankBatches, message: Message, stop: ServerStop
    ) -> None:
        if stop is not self._stop or batches is not self._batches[batches.rank]:
            raise RunStopped  # the run has been stopped that asked for it, or who asked let go
        kind, step, server = message.kind, message.step, self.server
        if kind is MessageKind.LOOK_UP:
            server.look_up(handle := batches.batch(message))
        elif kind is MessageKind.LOOK_AHEAD:
            server.look_up_ahead(handle := batches.batch(message))
        elif kind is MessageKind.REOPEN:
            server.read(handle := batches.reopen(message))
        elif kind is MessageKind.BRING_UP_TO_DATE:
            known = batches.known(step)
            if known is None:
                raise BadMessageError(f"step {step} of rank {batches.rank} was never prefetched")
            server.bring_up_to_date(handle := known.handle)
        elif kind is MessageKind.LEASE:
            return self._lease(channel, batches, message)
        elif kind is MessageKind.PUSH:
            return self._push(channel, batches, message)
        elif kind is MessageKind.FINISH:
            return server.finish(batches.rank, step)
        else:
            raise BadMessageError(f"a {kind.name} is no request about a batch")
        version = handle.version[self.config.shard]
        rows = () if kind is MessageKind.REOPEN else batches.values(handle)
        sent = self._counted(channel, rows)
        channel.send(Message(MessageKind.ROWS, batches.rank, step, number=version), sent)

    def _lease(self, channel: Channel, batches: RankBatches, message: Message) -> None:
        """Rows with their state, per table and column an array."""
        leased = self.server.lease(batches.batch(message), message.number)
        said = {
            f"{table}/{column}": np.asarray(array)
            for table, found in leased.items()
            for column, array in found.items()
        }
        self._counted(channel, said.values())
        send_said(channel.send, Message(MessageKind.RESULT, batches.rank, message.step), said)

    def _counted(self, channel: Channel, rows: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Those that travel."""
        travel = [] if channel.wire.shares_memory else list(rows)
        self._traffic[channel]["sent_bytes"] += sum(array.nbytes for array in travel)
        return travel

    def status(self) -> Said:
        """What this server has counted; ids, rows and gradients in bytes where they travel."""
        found, counts = list(self._traffic.values()), ("requests", "received_bytes", "sent_bytes")
        traffic = {name: sum(one[name] for one in found) for name in counts}
        own = {"repeated_pushes": self.repeated_pushes, "life": self.config.life}
        return self.server.status() | traffic | own

    def _push(self, channel: Channel, batches: RankBatches, message: Message) -> None:
        """At most once: what is closed is acknowledged again, what waits is not taken twice."""
        step, lost = message.step, bool(message.number)
        with self.server.lock:  # a push is closed under it
            batch = batches.known(step)
            repeated = self.server.has_closed(batches.rank, step)
            waiting = batch is not None and batch.answers_to is not None
            self.repeated_pushes += repeated or waiting
            if batch is not None and not waiting:
                batch.answers_to = channel
            if not waiting and not repeated:
                if batch is None:
                    raise BadMessageError(
                        f"the push of rank {batches.rank}, step {step} has had no lookup here"
                    )
                return self.server.give((batch.handle, None) if lost else batch.pushed())
        if repeated:
            channel.send(Message(MessageKind.CLOSED, batches.rank, step))

    def _closed(self, rank: int, step: int) -> None:
        """Under the server's lock: a push is applied or lost."""
        channel = self._batches[rank].close(step)
        if channel is not None:
            with suppress(PeerGoneError):  # who receives there notices, too
                channel.send(Message(MessageKind.CLOSED, rank, step))

    def begin_run(self, rules: Mapping[str, Any]) -> None:
        """A run starts at step 0 on the rows as they are."""
        self._stop.set(None)
        self._stop = ServerStop(self.peers)
        self._rules = parse(ServerRules, rules, "rules")
        self._forget_batches()
        self.server.begin_run(self._rules, self._stop)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps; nothing is in flight."""
        self._forget_batches()
        self.server.begin_leg(first_steps)

    def go_on(self, rules: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Count on under these rules."""
        self._rules = parse(ServerRules, rules, "rules")
        self.server.go_on(self._rules, counters)

    def _forget_batches(self) -> None:
        for batches in list(self._batches.values()):
            batches.forget_all()


def _listener(sock: socket.socket, text: str) -> Listener:
    config = parse(ServerConfig, json.loads(text), "the server")
    native.set_threads(config.threads)
    service, who = Service(config), f"embedding server {config.shard}"
    return Listener(sock, config.secret, service.serve, who, tls=config.tls, turns=service.turns)


if __name__ == "__main__":
    serve(_listener)
