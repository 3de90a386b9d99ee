"""What stands between client and server in tests: it cuts, damages or silences messages."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from persia_sim.base.vocabulary import Mode
from runtime.embedding.server_rules import ServerRules
from runtime.hosts import row_processes
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import Address, ServerProcesses
from runtime.hosts.rows import client
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.messages import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    BadMessageError,
    Message,
    MessageKind,
    unpack_header,
)
from runtime.hosts.wire.peers import connect
from runtime.stop import Stop
from tests.runtime.hosts.served import LAYOUT, SGD

SECRET = "a secret for tests alone"
Cut = Callable[[Message, int], int | None]
"""Of a message of so many bytes how many are let through before the cut; None: no cut."""


class Proxy:
    """Stands before one server."""

    def __init__(
        self, target: str, cut: Cut, damage: Callable[[bytes], bytes] = lambda data: data
    ) -> None:
        """``damage``: what becomes of a message's bytes, behind a mended checksum of TCP."""
        host, _, port = target.rpartition(":")
        self._target, self._cut, self._damage = (host, int(port)), cut, damage
        self._door = socket.create_server(("127.0.0.1", 0))
        self.name = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._lock, self._open = threading.Lock(), list[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut_all()

    def cut_all(self) -> None:
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()  # who waits for an answer would wait long
                continue
            self._open += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, drain: socket.socket) -> None:
        # Whose greeting was cut asks whether the server encrypts, which ends here as it does there.
        with suppress(OSError, BadMessageError):
            while (whole := self._message(source)) is not None:
                message, data = whole
                with self._lock:
                    through = self._cut(message, len(data))
                drain.sendall(self._damage(data)[:through])
                if through is not None:
                    if through % 2:  # a reset, else a plain end
                        drain.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                    break
        for sock in (source, drain):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        drain.close()

    def _message(self, source: socket.socket) -> tuple[Message, bytes] | None:
        header = _exactly(source, HEADER_BYTES + CHECKSUM_BYTES)
        if len(header) < HEADER_BYTES + CHECKSUM_BYTES:
            return None
        message, body_bytes, array_bytes, _ = unpack_header(header[:HEADER_BYTES])
        size = sum(part + CHECKSUM_BYTES for part in (body_bytes, array_bytes) if part)
        rest = _exactly(source, size)
        return None if len(rest) < size else (message, header + rest)


def _exactly(source: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (data := source.recv(size - len(found))):
        found += data
    return bytes(found)


class AtKinds:
    """Of messages of each kind, cuts before the first, in the middle of the third, and after the
    sixth."""

    def __init__(self, kinds: Collection[MessageKind]) -> None:
        self.seen, self.cut = dict.fromkeys(kinds, 0), set[MessageKind]()

    def __call__(self, message: Message, size: int) -> int | None:
        kind = message.kind
        if kind not in self.seen:
            return None
        self.seen[kind] += 1
        where = {1: 0, 3: size // 2, 6: size}.get(self.seen[kind])
        if where is not None:
            self.cut.add(kind)
        return where


class Flips:
    """Turns a bit round, each time that so many bytes have gone through."""

    def __init__(self, every: list[int]) -> None:
        self.left, self.flips, self._lock = every, 0, threading.Lock()

    def __call__(self, data: bytes) -> bytes:
        found = bytearray(data)
        with self._lock:
            if self.left and self.left[0] < len(found):
                place = self.left.pop(0)
                found[place] ^= 1 << place % 8
                self.flips += 1
            elif self.left:
                self.left[0] -= len(found)
        return bytes(found)


def no_cut(message: Message, size: int) -> None:
    """Nothing is cut."""


@contextmanager
def proxied(monkeypatch, cut: Cut, damage: Callable[[bytes], bytes] = lambda data: data):
    """The servers of runs are over TCP, behind proxies."""
    proxies = []

    def launched(configs) -> ServerProcesses:
        found = ServerProcesses(configs, "127.0.0.1")
        proxies.extend(Proxy(name, cut, damage) for name in found.address.names)
        found.address = replace(found.address, names=tuple(p.name for p in proxies))
        return found

    monkeypatch.setattr(row_processes, "ServerProcesses", launched)
    yield proxies
    for proxy in proxies:
        proxy.close()


SYNC = {"mode": Mode.SYNC, "ranks": 2}
LOOKAHEAD = {"mode": Mode.LOOKAHEAD, "ranks": 2}
HYBRID = {"mode": Mode.HYBRID, "ranks": 2, "tau": 0}
FRESH = {**HYBRID, "fresh": ("item",)}
FORWARDED = {"mode": Mode.LOOKAHEAD, "ranks": 2, "lookahead": "forwarded"}


Kinds = MessageKind


class AtByte:
    """Cuts as soon as so many bytes have gone through, again and again."""

    def __init__(self, every: list[int]) -> None:
        self._left, self.cuts = every, 0

    def __call__(self, message: Message, size: int) -> int | None:
        if not self._left:
            return None
        self._left[0] -= size
        if self._left[0] > 0:
            return None
        self.cuts += 1
        return size + self._left.pop(0)


@contextmanager
def store_behind(
    cut: Cut,
    rules: ServerRules,
    *,
    damage: Callable[[bytes], bytes] = lambda data: data,
    **changes,
):
    server = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,), rules=rules, **changes)
    processes = ServerProcesses([server], "127.0.0.1")
    proxy = Proxy(processes.address.names[0], cut, damage)
    address = replace(processes.address, names=(proxy.name,))
    ended = partial(processes.how_it_ended, within_s=0.5)  # where the server lives, it waits
    found = ServerClient(address, range(rules.ranks), ended)
    store = RemoteStore(LAYOUT, [SGD], found, seed=0, segments=8, close=processes.close)
    try:
        yield store, processes, proxy
    finally:
        store.close()
        proxy.close()


def asks(address: Address, incarnation: int) -> Channel:
    """A connection for rare requests, of a client that has met servers up to this incarnation."""
    hello = {
        "role": "control",
        "client": "c",
        "ranks": "rank 0",
        "pid": 1,
        "incarnation": incarnation,
    }
    return connect(address.names[0], "server", address.secrets[0], hello)


@contextmanager
def silent_at(monkeypatch, kind: MessageKind):
    """A store whose server is cut off, for good and without a word, by the first message of this
    kind that comes from a connection made from now on; its signs of life are missed soon."""
    goes, armed = threading.Event(), threading.Event()
    goes.set()

    def stalls(message: Message, size: int) -> None:
        if armed.is_set() and message.kind is kind:
            goes.clear()
        goes.wait()

    monkeypatch.setattr(client, "STUCK_S", 1.0)
    with store_behind(stalls, ServerRules()) as (store, _, _):
        store._client.stop = stop = Stop()
        armed.set()
        try:
            yield store, stop
        finally:
            goes.set()
