"""An embedding server as a process: `runtime.engines.rows.server_process`.

Who is connected to it; what it is asked now and then is `RareVerbs`: figures, tables, traces,
evaluation, a new run, the rows of a checkpoint.
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

from persia_sim.base.schema import parse
from persia_sim.base.vocabulary import ALL
from runtime.checkpoint.shard import load_rows, see_folder, write_rows
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import freeze
from runtime.engines.launch.process_config import ServerConfig
from runtime.engines.launch.processes import serve
from runtime.engines.rows.rank_batches import RankBatches
from runtime.engines.rows.served_shard import ServedShard
from runtime.engines.wire.calls import Said, Verbs, answer, tell
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.coroutines import Steps, patiently
from runtime.engines.wire.listener import Listener
from runtime.engines.wire.messages import (
    RANK_ROLES,
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    role_in,
)
from runtime.engines.wire.peers import Peer
from runtime.engines.wire.segments import Segment
from runtime.stop import PeerError, RunStopped


class Service(ServedShard):
    """One embedding server, and everybody who is connected to it."""

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
                self.stop.set(PeerError(f"{who} sent what no server takes: {error}"))
            raise
        except PeerGoneError:
            if role == "heartbeat" and said.get("own_life") is not None:
                self._let_go(said["client"])
            elif role == "heartbeat":
                ended = f"its connection to embedding server {self.config.shard} ended"
                self.stop.set(PeerError(f"{who} has died: {ended} without a goodbye"))
        except Exception as error:  # an error of this process, which goes on serving others
            tell(channel, error)
            self.stop.set(error)
        finally:
            users = self.batches[rank].users if role in RANK_ROLES else {}
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
        ranks, own = self.rules.ranks, self.config
        if not 0 <= rank < ranks:
            raise BadMessageError(f"rank {rank} does not exist, the run has {ranks}")
        half = self.rules.half
        none = RankBatches(rank, own.shard, own.shards, own.tables, half=half)
        batches = self.batches.setdefault(rank, none)
        user, pid = batches.users.setdefault(role, (channel, said["pid"]))
        if user is not channel:
            raise BadMessageError(f"{role} of rank {rank} are connected already, by pid {pid}")
        batches.client = said["client"]

    def _let_go(self, client: str) -> None:
        """An embedding worker has died and may come back: nothing that it asked for is done from
        now on. What it has pushed may still be merged; its next life says what else was open."""
        self.turns.acquire()  # also while somebody holds the server
        for rank, batches in list(self.batches.items()):
            if batches.client == client:
                self.batches[rank] = batches.anew()
                for channel, _ in list(batches.users.values()):
                    channel.hang_up()
        self.peers.pop(client, None)
        self.turns.release()

    # The words after it.

    def _work(self, channel: Channel, role: str, rank: int, said: Mapping[str, Any]) -> Steps[None]:
        if role == "heartbeat":
            return (yield from self.peers.listen_to(channel, said["client"], lambda: self.stop))
        if role == "control":
            return (yield from RareVerbs(self, channel, said.get("run")).work())
        batches = self.batches[rank]
        traffic = self.traffic[channel] = Counter()

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
            stop = self.stop
            try:
                yield from patiently(partial(self.answer, channel, batches, message, stop))
            except (BadMessageError, PeerGoneError):
                raise
            except RunStopped:
                tell(channel, stop.error, message)
            except Exception as error:
                tell(channel, error)
                stop.set(error)


class RareVerbs:
    """The control connection of one client; its requests are answered one after the other."""

    def __init__(self, shard: ServedShard, channel: Channel, run: str | None) -> None:
        """``run``: the folder below which files may be written; None: nowhere."""
        self._shard, self._channel, self._run = shard, channel, run
        server, config = shard.server, shard.config
        self._server, self._tables, self._turns = server, shard.rows.tables, shard.turns
        self._batches = RankBatches(ALL, server.shard, config.shards, config.tables)
        self._held = 0
        self._verbs: Verbs = {
            "begin_run": shard.begin_run, "begin_leg": shard.begin_leg, "go_on": shard.go_on,
            "status": shard.status, "counters": server.counters, "export": server.export,
            "wait_until_closed": server.wait_until_closed,
            "freeze": self._freeze, "thaw": self._thaw,
            "closed": lambda: {"closed": server.closed()},
            "trace": lambda after, most: {"events": shard.recorder.after(after, most)},
            "freeze_rows": partial(freeze, self._tables.values()), "settle_rows": self._settle_rows,
            "see_folder": partial(see_folder, shard.rows), "write_rows": self._write_rows,
            "load_rows": partial(load_rows, shard.rows),
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
        return write_rows(self._shard.rows, folder=str(to.parent), part=to.name)

    def _come_back(
        self,
        rules: Mapping[str, Any],
        first_steps: Sequence[int],
        counters: dict[str, Any],
        folder: str | None,
    ) -> None:
        """This server was started again: what a checkpoint has of it, and ranks are let in."""
        self._shard.filling.begin()
        if folder is not None:
            load_rows(self._shard.rows, folder=folder)
        self._shard.go_on(rules, counters)
        self._server.begin_leg(first_steps)
        self._shard.filling.is_done = True

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
