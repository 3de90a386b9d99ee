"""The verbs of a server process: what it does for each message of each connection."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from persia_sim.words.trace import TraceRecorder
from runtime.embedding.config import TableConfig
from runtime.embedding.cut import PushGate
from runtime.embedding.native.store import NativeShard
from runtime.embedding.server import EmbeddingServer
from runtime.engines.processes.batches import RankBatches
from runtime.engines.processes.calls import send_said, tell
from runtime.engines.processes.channel import Channel, PeerGoneError
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
)
from runtime.engines.processes.peers import Peers, ServerStop
from runtime.engines.processes.rare_verbs import RareVerbs
from runtime.engines.processes.revival import Filling
from runtime.engines.processes.server_config import ServerConfig, rules_from
from runtime.stop import PeerError, RunStopped

RANK_ROLES = ("lookups", "pushes", "prefetches")


class Service:
    """One embedding server, and everybody who is connected to it."""

    def __init__(self, config: ServerConfig) -> None:
        self._config, self._rules = config, config.rules
        self.peers = Peers(config.patience_s)
        self._stop = ServerStop(self.peers)
        self.recorder = TraceRecorder(keep=config.records)
        self.rows = NativeShard(config.shard, config.tables, config.seed, config.shards)
        self.gate = PushGate([config.shard])
        self.server = EmbeddingServer(
            config.shard, self.rows, config.rules, self.recorder, self.gate, self._stop
        )
        self.server.on_closed = self._closed
        self.repeated_pushes = 0
        self.filling = Filling(awaited=config.awaits_rows, patience_s=config.patience_s)
        self._batches: dict[int, RankBatches] = {}
        self._users: dict[tuple[int, str], int] = {}  # rank and role: process
        self._lock = threading.Lock()

    @property
    def shards(self) -> int:
        """Of the whole store."""
        return self._config.shards

    @property
    def tables(self) -> tuple[TableConfig, ...]:
        """What is held here."""
        return self._config.tables

    def serve(self, channel: Channel, hello: Message, said: dict[str, Any]) -> None:
        """One connection of a client, from its first word to its end.

        Raises BadMessageError for what breaks the protocol.
        """
        role, rank = self._role_of(said), hello.rank
        if said.get("life", 0) > self._config.life:
            self._make_way(channel)
        if role != "control":  # a heartbeat too: it does not beat before its ranks are in
            self.filling.wait(channel)
        self._admit(role, rank, said)
        own = self._config
        about = {"pid": os.getpid(), "shard": own.shard, "shards": own.shards, "life": own.life}
        who = f"{said['ranks']} (pid {said['pid']})"
        try:
            channel.send(Message(MessageKind.WELCOME, body=pack_json(about)))
            self._work(channel, role, rank, said)
        except BadMessageError as error:
            if role in RANK_ROLES:
                self._stop.set(PeerError(f"{who} sent what no server takes: {error}"))
            raise
        except PeerGoneError:
            if role == "heartbeat":
                ended = f"its connection to embedding server {self._config.shard} ended"
                self._stop.set(PeerError(f"{who} has died: {ended} without a goodbye"))
        except BaseException as error:  # an error of this process, which goes on serving others
            tell(channel, error)
            self._stop.set(error)
        finally:
            with self._lock:
                self._users.pop((rank, role), None)
            if role == "heartbeat":
                self.peers.remove(said["client"])

    # The first word.

    def _role_of(self, said: Mapping[str, Any]) -> str:
        fits = (
            said.get("role") in (*RANK_ROLES, "control", "heartbeat")
            and isinstance(said.get("client"), str)
            and isinstance(said.get("pid"), int)
            and isinstance(said.get("ranks"), str)
        )
        if not fits:
            raise BadMessageError("the first message lacks role, client, ranks or pid")
        return str(said["role"])

    def _make_way(self, channel: Channel) -> None:
        """A newer server of this shard has begun: what is applied here would be lost."""
        own = self._config
        sentence = f"embedding server {own.shard} (pid {os.getpid()}) ends: a newer one has begun"
        tell(channel, PeerError(sentence))
        print(sentence, file=sys.stderr, flush=True)
        os._exit(0)

    def _admit(self, role: str, rank: int, said: Mapping[str, Any]) -> None:
        if role == "heartbeat":
            self.peers.add(said["client"], said["pid"], said["ranks"])
        if role not in RANK_ROLES:
            return
        ranks = self._rules.ranks
        if not 0 <= rank < ranks:
            raise BadMessageError(f"rank {rank} does not exist, the run has {ranks}")
        with self._lock:
            if (rank, role) in self._users:
                pid = self._users[rank, role]
                raise BadMessageError(f"{role} of rank {rank} are connected already, by pid {pid}")
            self._users[rank, role] = said["pid"]
            if rank not in self._batches:
                own = self._config
                self._batches[rank] = RankBatches(rank, own.shard, own.shards, own.tables)

    # The words after it.

    def _work(self, channel: Channel, role: str, rank: int, said: Mapping[str, Any]) -> None:
        if role == "heartbeat":
            return self._beat(channel, said["client"])
        if role == "control":
            return RareVerbs(self, channel, said.get("run")).work()
        batches = self._batches[rank]
        while True:
            message, segment = channel.receive(place=batches.place)
            if message.kind is MessageKind.SEGMENT:
                batches.attach(message, segment)
                continue
            if message.kind is MessageKind.GOODBYE:
                return None
            if message.kind is not MessageKind.FINISH and not 0 <= message.step < 2**62:
                raise BadMessageError(
                    f"step {message.step} of a {message.kind.name} does not exist"
                )
            try:
                self._answer(channel, batches, message)
            except (BadMessageError, PeerGoneError):
                raise
            except RunStopped:
                tell(channel, self._stop.error)
            except Exception as error:
                tell(channel, error)
                self._stop.set(error)

    def _answer(self, channel: Channel, batches: RankBatches, message: Message) -> None:
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
        version = handle.version[self._config.shard]
        rows = () if kind is MessageKind.REOPEN else batches.values(handle)
        channel.send(Message(MessageKind.ROWS, batches.rank, step, number=version), rows)

    def _lease(self, channel: Channel, batches: RankBatches, message: Message) -> None:
        """Rows with their state, per table and column an array."""
        leased = self.server.lease(batches.batch(message), message.number)
        said = {
            f"{table}/{column}": np.asarray(array)
            for table, found in leased.items()
            for column, array in found.items()
        }
        send_said(channel.send, Message(MessageKind.RESULT, batches.rank, message.step), said)

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
        if waiting:
            return
        if repeated:
            return channel.send(Message(MessageKind.CLOSED, batches.rank, step))
        if batch is None:
            raise BadMessageError(
                f"the push of rank {batches.rank}, step {step} has had no lookup here"
            )
        self.server.give((batch.handle, None if lost else batch.gradients))

    def _closed(self, rank: int, step: int) -> None:
        """Under the server's lock: a push is applied or lost."""
        channel = self._batches[rank].close(step)
        if channel is not None:
            try:
                channel.send(Message(MessageKind.CLOSED, rank, step))
            except (PeerGoneError, TimeoutError):
                channel.close()  # its own thread notices

    def begin_run(self, rules: Mapping[str, Any]) -> None:
        """A run starts at step 0 on the rows as they are."""
        self._stop, self._rules = ServerStop(self.peers), rules_from(rules)
        self._forget_batches()
        self.server.begin_run(self._rules, self._stop)

    def begin_leg(self, first_steps: Sequence[int]) -> None:
        """Ranks go on with these steps; nothing is in flight."""
        self._forget_batches()
        self.server.begin_leg(first_steps)

    def go_on(self, rules: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Count on under these rules."""
        self._rules = rules_from(rules)
        self.server.go_on(self._rules, counters)

    def _forget_batches(self) -> None:
        for batches in list(self._batches.values()):
            batches.forget_all()

    def _beat(self, channel: Channel, client: str) -> None:
        def others() -> None:
            stuck = self.peers.stuck()
            if stuck and not self._stop:
                self._stop.set(PeerError(stuck))

        while True:
            message, _ = channel.receive(others)
            if message.kind is MessageKind.GOODBYE:
                return
            if message.kind is not MessageKind.PING:
                raise BadMessageError(f"a {message.kind.name} is no sign of life")
            self.peers.heard(client, bool(message.number))
            others()
            error = self._stop.error
            told = {"failed": f"{error}" if isinstance(error, PeerError) else None}
            channel.send(Message(MessageKind.PONG, body=pack_json(told)))
