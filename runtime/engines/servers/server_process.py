"""An embedding server as a process: `persia-runtime.engines.servers.server_process`.

What it does for each message of each connection; `RareVerbs`: what is asked now and then, figures,
tables, traces, evaluation, a new run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.words.schema import parse
from persia_sim.words.trace import TraceRecorder
from persia_sim.words.vocabulary import ALL
from runtime.checkpoint.shard import load_rows, see_folder, write_rows
from runtime.embedding.cut import PushGate
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import NativeShard, freeze
from runtime.embedding.server import EmbeddingServer
from runtime.embedding.server_rules import ServerRules
from runtime.engines.servers.launch import serve
from runtime.engines.servers.server_config import ServerConfig
from runtime.engines.transport.batches import RankBatches
from runtime.engines.transport.calls import Said, Verbs, answer, send_said, tell
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.listener import Listener, LoopTurns, patiently
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
from runtime.engines.transport.segments import Segment
from runtime.engines.transport.waits import Steps
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
            return (yield from self._beat(channel, said["client"]))
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

    def _beat(self, channel: Channel, client: str) -> Steps[None]:
        def others() -> None:
            stuck = self.peers.stuck()
            if stuck and not self._stop:
                self._stop.set(PeerError(stuck))

        while True:
            message, _ = yield from channel.receiving(others)
            if message.kind is MessageKind.GOODBYE:
                return
            if message.kind is not MessageKind.PING:
                raise BadMessageError(f"a {message.kind.name} is no sign of life")
            self.peers.heard(client, bool(message.number))
            others()
            error = self._stop.error
            told = {"failed": f"{error}" if isinstance(error, PeerError) else None}
            channel.send(Message(MessageKind.PONG, body=pack_json(told)))


class RareVerbs:
    """The control connection of one client; its requests are answered one after the other."""

    def __init__(self, service: Service, channel: Channel, run: str | None) -> None:
        """``run``: the folder below which files may be written; None: nowhere."""
        self._service, self._channel, self._run = service, channel, run
        server = self._server = service.server
        self._tables = service.rows.tables
        self._batches = RankBatches(ALL, server.shard, service.config.shards, service.config.tables)
        self._turns = service.turns
        self._held = 0
        self._verbs: Verbs = {
            "begin_run": service.begin_run, "begin_leg": service.begin_leg, "go_on": service.go_on,
            "status": service.status, "counters": server.counters, "export": server.export,
            "wait_until_closed": server.wait_until_closed,
            "freeze": self._freeze, "thaw": self._thaw,
            "closed": lambda: {"closed": server.closed()},
            "trace": lambda after, most: {"events": service.recorder.after(after, most)},
            "freeze_rows": partial(freeze, self._tables.values()), "settle_rows": self._settle_rows,
            "see_folder": partial(see_folder, service.rows), "write_rows": self._write_rows,
            "load_rows": partial(load_rows, service.rows),
            "come_back": self._come_back, "rejoin": self._rejoin,
        }  # fmt: skip

    def work(self) -> Steps[None]:
        """Answer until the connection ends; what it holds is let go."""
        try:
            while True:
                message, segment = yield from self._channel.receiving(place=self._batches.place)
                if message.kind is MessageKind.GOODBYE:
                    return
                try:
                    yield from patiently(partial(self._answer, message, segment))
                except RunStopped as error:
                    tell(self._channel, error)
        finally:
            while self._held:
                self._thaw()

    def _answer(self, message: Message, segment: Segment | None) -> None:
        held = self._turns.passed(lambda: self._held > 0) if self._held else nullcontext()
        with held:
            if message.kind is MessageKind.SEGMENT:
                self._batches.attach(message, segment)
            elif message.kind is MessageKind.LOOK_AHEAD:
                self._peek(message)
            else:
                answer(self._channel, message, segment, self._verbs)

    def _peek(self, message: Message) -> None:
        handle = self._batches.unpushed(message)
        self._server.peek(handle)
        rows = Message(MessageKind.ROWS, number=handle.version[self._server.shard])
        self._channel.send(rows, self._batches.values(handle))

    def _freeze(self) -> None:
        with self._turns:
            self._turns.is_held = True
        self._held += 1

    def _thaw(self) -> None:
        self._held = max(0, self._held - 1)
        self._turns.is_held, self._turns.is_news = self._held > 0, True

    def _settle_rows(self, kept: bool) -> None:
        for table in self._tables.values():
            table.settle(kept)

    def _write_rows(self, folder: str, part: str) -> Said:
        """In the run's folder and nowhere else."""
        to = Path(os.path.normpath(Path(folder) / part))
        if self._run is None or not to.is_relative_to(self._run):
            raise OSError(f"it writes only below the folder of its run, not {folder}/{part}")
        return write_rows(self._service.rows, folder=str(to.parent), part=to.name)

    def _come_back(
        self,
        rules: Mapping[str, Any],
        first_steps: Sequence[int],
        counters: dict[str, Any],
        folder: str | None,
    ) -> None:
        """This server was started again: what a checkpoint has of it, and ranks are let in."""
        service = self._service
        service.filling.begin()
        if folder is not None:
            load_rows(service.rows, folder=folder)
        service.go_on(rules, counters)
        self._server.begin_leg(first_steps)
        service.filling.is_done = True

    def _rejoin(self, rank: int, begun: int, open: Sequence[int]) -> Said:
        with self._server.lock:
            return {"lost": self._server.rejoin(rank, begun, set(open))}


def _listener(sock: socket.socket, text: str) -> Listener:
    config = parse(ServerConfig, json.loads(text), "the server")
    native.set_threads(config.threads)
    service, who = Service(config), f"embedding server {config.shard}"
    return Listener(sock, config.secret, service.serve, who, tls=config.tls, turns=service.turns)


if __name__ == "__main__":
    serve(_listener)
