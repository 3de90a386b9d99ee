"""What a server does not take: the connection ends with a sentence, the server goes on."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from persia_sim.base.trace import TraceRecorder
from runtime import stop
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.dense.async_weights import DenseServer
from runtime.hosts.launch.hosts import HostedProcesses, ProcessHost
from runtime.hosts.launch.process_config import ServerConfig, WorkerConfig
from runtime.hosts.launch.processes import Address
from runtime.hosts.loading.loader_process import Consumers
from runtime.hosts.rank_process import GroupedRank
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.server_process import Service
from runtime.hosts.wire import listener as listeners
from runtime.hosts.wire import peers
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack,
    pack_json,
    pack_segment,
    unpack_json,
)
from runtime.hosts.wire.peers import connect, listen, open_channel
from runtime.hosts.wire.segments import Segment
from runtime.hosts.wire.tls import TLS, proof
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of, one_step, served
from tests.runtime.hosts.test_faults import until
from tests.runtime.worlds import config

SHARED = "what the run and its hosts share"


def greeted(address: Address, **changes) -> Channel:
    channel = open_channel(address.names[0], 20)
    channel.authenticated()
    known = proof(changes.pop("secret", address.secrets[0]), "client")
    hello = {
        "proof": known, "role": "lookups", "client": "c", "ranks": "rank 1", "pid": 1,
    } | changes  # fmt: skip
    rank = hello.pop("rank", 1)
    channel.send(Message(MessageKind.HELLO, rank, body=pack_json(hello)))
    return channel


def refusal(channel: Channel) -> str:
    """What the server says before it closes the connection."""
    message, _ = channel.receive()
    assert message.kind is MessageKind.FAILED
    with pytest.raises(PeerGoneError):
        channel.receive()
    return str(unpack_json(message.body)["sentence"])


@pytest.fixture(scope="module")
def one_of_two():
    with served(ServerRules(ranks=2, tau=None), ranks=[0]) as found:
        yield found


def check(found, step: int) -> None:
    """Another rank trains as if nothing had happened."""
    found.store.begin_run(ServerRules(ranks=2, tau=None), stop.Stop())
    one_step(found.store, 0, step, 7)
    found.store.drain()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"secret": "0" * 64}, "the first message does not know the secret of this run"),
        ({"proof": None}, "the first message does not know the secret of this run"),
        ({"role": "boss"}, "the first message lacks role, client, ranks or pid"),
        ({"pid": "x"}, "the first message lacks role, client, ranks or pid"),
        ({"rank": 2}, "rank 2 does not exist, the run has 2"),
        ({"rank": 0}, "lookups of rank 0 are connected already, by pid {own}"),
    ],
)
def test_a_stranger_is_refused_in_a_sentence(one_of_two, changes, sentence):
    assert refusal(greeted(one_of_two.processes.address, **changes)) == sentence.format(
        own=os.getpid()
    )
    check(one_of_two, 0)


@pytest.mark.parametrize(
    "body",
    [b"[" * 60_000, b'{"secret": "\\ud800"}', b'{"secret": [[]]}', b"9" * 5000, b"\xff\xfe", b"{}"],
    ids=["deep", "surrogate", "no text", "long number", "no UTF-8", "empty"],
)
def test_no_first_message_of_a_stranger_ends_the_run(one_of_two, body):
    channel = open_channel(one_of_two.processes.address.names[0], 20)
    channel.send(Message(MessageKind.HELLO, 1, body=body))
    told = refusal(channel)
    assert re.search("the first message|is no JSON|is JSON, but", told), told
    check(one_of_two, 0)
    heart = greeted(one_of_two.processes.address, role="heartbeat", client="another")
    assert heart.receive()[0].kind is MessageKind.WELCOME
    heart.send(Message(MessageKind.PING, number=1))
    assert unpack_json(heart.receive()[0].body) == {"failed": None}
    heart.send(Message(MessageKind.DISCONNECT))


def test_another_user_is_not_even_heard(one_of_two):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    name = one_of_two.processes.address.names[0]
    script = (
        "import os, socket, sys; os.setuid(65534);"
        " s = socket.socket(socket.AF_UNIX);"
        " s.connect(bytes.fromhex(sys.argv[1])); s.settimeout(60); print(s.recv(9))"
    )
    words = [sys.executable, "-c", script, name.encode().hex()]
    found = subprocess.run(words, capture_output=True, text=True, cwd="/")
    if "Permission" in found.stderr:
        pytest.skip("another user may not start this Python")
    assert (found.stdout.strip(), found.returncode) == ("b''", 0), found.stderr
    check(one_of_two, 0)


def test_a_server_of_another_user_is_told_nothing(one_of_two, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    processes = one_of_two.processes
    with pytest.raises(stop.PeerError, match="embedding server 0 is another user's"):
        ServerClient(processes.address, [1], processes.how_it_ended)


def test_ranks_that_are_processes_never_say_the_secret_to_the_store():
    said = []

    def gather(name: str, told: str) -> list[str]:
        said.append(told)
        return [told]

    rank = GroupedRank(SimpleNamespace(rank=0, ranks=1, gather=gather))
    chosen = config(servers=1, executor="concurrent")
    store = rank.open_rows(chosen, LAYOUT, [SGD], TraceRecorder(), stop.Stop()).store
    try:
        assert said
        assert not [told for told in said if store._client._address.secrets[0] in told]
    finally:
        store.close()


def test_whoever_does_not_greet_first_is_refused(one_of_two):
    channel = open_channel(one_of_two.processes.address.names[0], 20)
    channel.send(Message(MessageKind.PING))
    assert refusal(channel) == "the first message is PING, not HELLO"


GOOD = bytes.fromhex("50746252" + "0b00" + "0b00" + "00000000" + "01000000" + "00" * 32)
"""A LOOK_UP of rank 1, step 0, that says nothing about where the batch lies."""


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (GOOD, "the place of a batch takes more than 0 bytes"),
        (GOOD[:4] + b"\x0c\0" + GOOD[6:], "version 12 of the protocol, this side speaks 11"),
        (b"x" * 100_000, "a message starts with b'xxxx', not with b'PtbR'"),
        (GOOD[:24] + b"\x08" + GOOD[25:], "the place of a batch takes more than 0 bytes"),
        (GOOD[:31] + b"\x01" + GOOD[32:], "a message has 72057594037927936 bytes of arrays"),
        (GOOD[:6] + b"\x0a\0" + GOOD[8:], "a segment comes with its descriptor"),
        (GOOD[:6] + b"\x1e\0" + GOOD[8:], "the push of rank 1, step 0 has had no lookup here"),
        (GOOD[:6] + b"\x0d\0" + GOOD[8:], "step 0 of rank 1 was never prefetched"),
        (GOOD[:23] + b"\xff" + GOOD[24:], "of a LOOK_UP does not exist"),
    ],
)
def test_what_breaks_the_protocol_ends_its_connection_and_nothing_else(one_of_two, data, sentence):
    channel = greeted(one_of_two.processes.address)
    assert channel.receive()[0].kind is MessageKind.WELCOME
    channel.connection.socket.send(data)
    assert sentence in refusal(channel)
    check(one_of_two, 0)


def test_an_id_of_another_servers_shard_is_refused():
    table = replace(SGD, name="rows")
    with served(servers=2, tables=[table]) as found:
        store = found.store
        handle = store.begin(0, 0, batch_of(*range(50)))
        sent = store._sent[0, 0]
        ids = sent.segment.array(sent.starts[0], (50,), np.uint64)
        ids[:] = ids[::-1].copy()
        with pytest.raises(BadMessageError, match=r"id \d+ of table rows belongs to server"):
            store.look_up(handle)


# Whoever listens: an embedding server, the dense weights at rank 0, a loader; plain or encrypted.


@contextmanager
def embedding_server(name: str):
    sock, name = listen(name)
    service = Service(ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,)))
    yield Listener(sock, "secret", service.serve, "server", tls=name.startswith(TLS)), name


@contextmanager
def dense_server(name: str):
    failed = stop.Stop()
    host = DenseServer(SimpleNamespace(), failed)
    sock, name = listen(name)
    yield Listener(sock, "secret", host._converse, "rank 0", tls=name.startswith(TLS)), name
    host.close()
    assert not failed


@contextmanager
def loader(name: str):
    sock, name = listen(name)
    yield Listener(sock, "secret", Consumers(1).serve, "loader", tls=name.startswith(TLS)), name


def hello(secret: str) -> bytes:
    return pack(Message(MessageKind.HELLO, body=pack_json({"proof": proof(secret, "client")})))


WORDS = {
    "no word": [],
    "a wrong secret": [hello("another")],
    "too many bytes": [b"x" * (1 << 20)],
    "a long body": [hello("secret")[:8] + b"\xff\xff\xff\xff" + hello("secret")[12:]],
    "arrays of a stranger": [hello("secret")[:24] + b"\xff" * 5 + bytes(3) + hello("secret")[32:]],
    "slow bytes": [bytes([b]) for b in pack(Message(MessageKind.HELLO, body=b" " * 60_000))],
    "half a handshake": [b"\x16\x03\x01"],
}


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("name", ["unix", "tls:127.0.0.1:0"])
@pytest.mark.parametrize("kind", [embedding_server, dense_server, loader])
def test_no_stranger_stays_or_ends_who_listens(kind, name, words, monkeypatch):
    monkeypatch.setattr(peers, "FIRST_WORD_WITHIN_S", 0.1)
    own = f"\0test-strangers-{os.getpid()}-{time.monotonic_ns()}" if name == "unix" else name
    with kind(own) as (listener, at):
        accepting = threading.Thread(target=listener.serve_all, daemon=True)
        accepting.start()
        stranger = _socket_to(at)
        with suppress(OSError):  # it has been turned away
            for data in WORDS[words]:
                stranger.sendall(data)
                time.sleep(0.02)
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
        until(lambda: not listener._tasks)
        assert accepting.is_alive()
        monkeypatch.setattr(peers, "FIRST_WORD_WITHIN_S", 60.0)
        client = {"role": "control", "client": "c", "ranks": "rank 0", "pid": 1}
        channel = connect(at, "server", "secret", client)
        until(lambda: bool(listener._by_name))
        channel.send(Message(MessageKind.DISCONNECT))
        channel.close()
        listener.close()


@pytest.mark.parametrize("name", ["127.0.0.1:0", "tls:127.0.0.1:0"])
def test_a_stranger_is_given_no_memory(name, monkeypatch, capfd):
    """Of who has only sent HELLO, too: he has proved nothing yet."""
    asked: list[int] = []
    monkeypatch.setattr(Segment, "private", asked.append)
    segment = Message(MessageKind.SEGMENT, body=pack_segment(0, 1 << 40))
    with embedding_server(name) as (listener, at):
        threading.Thread(target=listener.serve_all, daemon=True).start()
        for first in ([], [Message(MessageKind.HELLO, body=pack_json({"nonce": "1"}))]):
            stranger = open_channel(at, 20)
            for message in [*first, segment]:
                stranger.send(message)
            if first:
                assert stranger.receive()[0].kind is MessageKind.CHALLENGE
            assert refusal(stranger) == "a SEGMENT of a stranger brings arrays"
        listener.close()
    assert not asked
    assert "Traceback" not in capfd.readouterr().err


def test_no_secret_travels_in_plain_between_hosts():
    """Neither that of a server, which its host makes, nor that of others, which a worker is told;
    and both are known where they belong."""
    host = ProcessHost("127.0.0.1:0", SHARED)
    threading.Thread(target=host.serve, daemon=True).start()
    with Overheard(host.name) as to_server, Overheard(host.name) as to_worker:
        config = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))
        servers = HostedProcesses([config], [to_server.name], SHARED, tls=False)
        own = servers.address
        worker = WorkerConfig(
            worker=0, workers=1, ranks=(0,), may_return=False, servers_may_return=False,
            names=own.names, segments=4,
            secrets=own.secrets, layout=LAYOUT, tables=(SGD,), seed=0,
        )  # fmt: skip
        workers = HostedProcesses([worker], [to_worker.name], SHARED, tls=False)
        workers.close()
        servers.close()
    host.close()
    for way in (to_server, to_worker):
        said = bytes(way.there + way.back)
        assert len(said) > 1000, "the conversation was overheard"
        for secret in (SHARED, *own.secrets, *workers.address.secrets):
            for form in (secret.encode(), secret.encode().hex().encode(), _raw(secret)):
                assert form not in said


def _raw(secret: str) -> bytes:
    """As bytes, where it is written in hexadecimal digits."""
    try:
        return bytes.fromhex(secret)
    except ValueError:
        return secret.encode()


class Overheard:
    """One connection to who listens at an address, and what was said over it."""

    def __init__(self, at: str) -> None:
        self._door, self._at = socket.create_server(("127.0.0.1", 0)), at
        self.name = f"127.0.0.1:{self._door.getsockname()[1]}"
        self.there, self.back = bytearray(), bytearray()

    def __enter__(self) -> Overheard:
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(20)
        self._door.close()

    def _carry(self) -> None:
        client, (server, ends) = self._door.accept()[0], (_socket_to(self._at), set())
        for sock, other, kept in ((client, server, self.there), (server, client, self.back)):
            ends.add(threading.Thread(target=self._one_way, args=(sock, other, kept)))
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    def _one_way(self, sock: socket.socket, other: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := sock.recv(1 << 16):
                kept += data
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)


def test_many_strangers_take_few_descriptors_and_keep_nobody_out(monkeypatch):
    with embedding_server("127.0.0.1:0") as (listener, at):
        threading.Thread(target=listener.serve_all, daemon=True).start()
        silent = [_socket_to(at) for _ in range(3 * listeners.MOST_STRANGERS)]
        client = {"role": "control", "client": "c", "ranks": "rank 0", "pid": 1}
        channel = connect(at, "server", "secret", client)
        assert len(listener._tasks) <= listeners.MOST_STRANGERS + 1
        channel.send(Message(MessageKind.DISCONNECT))
        channel.close()
        for sock in silent:
            sock.close()
        listener.close()


def _socket_to(name: str) -> socket.socket:
    if name.startswith("\0"):
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.connect(name)
    else:
        found = socket.create_connection(("127.0.0.1", int(name.rpartition(":")[2])))
    found.settimeout(60)
    return found
