"""A server that was started again lets ranks in when it has its rows, however long that takes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import Address
from runtime.hosts.rows import connections, server_process
from runtime.hosts.rows import failover as failover
from runtime.hosts.rows.connections import Connections
from runtime.hosts.rows.server_process import Service
from runtime.hosts.wire import listener, peers
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.messages import Message, MessageKind, pack_json, unpack_json
from runtime.hosts.wire.peers import listen, open_channel
from runtime.hosts.wire.tls import proof
from runtime.stop import PeerError
from tests.runtime.hosts.served import SGD

BEAT_S = 0.05


@pytest.fixture
def empty(monkeypatch):
    """A server that awaits its rows, with little patience; each call is one more connection."""
    monkeypatch.setattr(failover, "BEATS_EVERY_S", BEAT_S)
    monkeypatch.setattr(peers, "FIRST_WORD_WITHIN_S", 2 * BEAT_S)
    server = Service(
        ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,), awaits_rows=True, patience_s=0.2)
    )
    opened = []
    sock, name = listen(f"\0test-filling-{id(opened)}")
    door = listener.Listener(sock, "", server.serve, "server", condition=server.condition)
    threading.Thread(target=door.serve_all, daemon=True).start()

    def connected(role: str) -> Channel:
        ours = open_channel(name, 20)
        opened.append(ours)
        hello = {
            "proof": proof("", "client"),
            "role": role,
            "client": "c",
            "ranks": "rank 0",
            "pid": 1,
        }
        ours.send(Message(MessageKind.HELLO, 0, body=pack_json(hello)))
        return ours

    yield connected
    for one in opened:
        with suppress(PeerGoneError):
            one.send(Message(MessageKind.DISCONNECT))
        one.close()
    door.close()


@pytest.fixture
def disk(monkeypatch) -> Iterator[threading.Event]:
    """Rows are read when it is set."""
    found = threading.Event()
    monkeypatch.setattr(server_process, "load_rows", lambda server, folder: found.wait())
    yield found
    found.set()


def reading(empty) -> Channel:
    """The server was told where its rows are."""
    control = empty("control")
    assert control.receive()[0].kind is MessageKind.WELCOME
    counters = {"version": 0, "updates": 0, "rows_replaced": 0, "lost": 0, "row_staleness": []}
    counters["counters"] = {}
    saved = {"rules": {"ranks": 1}, "counters": counters, "first_steps": [0], "folder": "rows"}
    control.send(Message(MessageKind.CALL, body=pack_json({"method": "restore", **saved})))
    return control


def last_word(waiting: Channel) -> tuple[MessageKind, dict]:
    while True:
        message, _ = waiting.receive()
        if message.kind is not MessageKind.RESTORING:
            return message.kind, unpack_json(message.body)


def test_who_comes_while_a_server_reads_is_told_so_and_let_in_when_it_is_done(empty, disk):
    control, waiting = reading(empty), empty("lookups")
    for _ in range(8):  # each after a beat: longer than any other limit here
        assert waiting.receive()[0].kind is MessageKind.RESTORING
    disk.set()
    assert control.receive()[0].kind is MessageKind.RESULT
    assert last_word(waiting)[0] is MessageKind.WELCOME


def test_a_server_that_nobody_tells_where_its_rows_are_refuses_ranks_in_a_sentence(empty):
    kind, said = last_word(empty("lookups"))
    assert kind is MessageKind.FAILED
    assert "does not have the rows of the last checkpoint after 0 s" in said["sentence"]


def test_a_disk_that_is_stuck_is_not_waited_for_for_ever(empty, disk, monkeypatch):
    monkeypatch.setattr(failover, "RESTORED_WITHIN_S", 4 * BEAT_S)
    reading(empty)
    kind, said = last_word(empty("lookups"))
    assert kind is MessageKind.FAILED
    assert "or the disk, is stuck" in said["sentence"]


def test_a_client_waits_as_long_as_it_is_told_that_a_server_is_filled(monkeypatch):
    """A server of the test's own tells it for longer than a connection may otherwise take."""
    monkeypatch.setattr(connections, "START_WITHIN_S", 1.0)
    name = f"\0test-filling-{id(monkeypatch)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(name)
    door.listen(8)
    quiet = threading.Event()

    def answers() -> None:
        for number in range(5):
            channel = Channel(door.accept()[0])
            channel.receive()
            for _ in range(8 if number == 0 else 0):
                quiet.wait(0.2)
                channel.send(Message(MessageKind.RESTORING))
            about = {"pid": 7, "shard": 0, "shards": 1, "incarnation": 0}
            channel.send(Message(MessageKind.WELCOME, body=pack_json(about)))

    server = threading.Thread(target=answers, daemon=True)
    server.start()
    found = Connections(Address((name,), ("",)), [0], lambda shard: "has died", "rank 0")
    server.join(20)
    assert found.pids == [7] and not server.is_alive()
    found.close()
    door.close()


def test_a_client_that_comes_to_a_dying_server_waits_for_the_one_behind_it():
    """Its socket may still let in, for as long as the kernel takes to close it."""
    name = f"\0test-filling-dying-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(name)
        door.listen(8)
        kept: list[Channel] = []

        def answers() -> None:
            for number in range(5):  # twice none, then control, heartbeat and its end
                channel = Channel(door.accept()[0])
                channel.receive()
                if number < 2:
                    channel.close()
                    continue
                kept.append(channel)
                about = {"pid": 7, "shard": 0, "shards": 1, "incarnation": 1}
                channel.send(Message(MessageKind.WELCOME, body=pack_json(about)))

        server = threading.Thread(target=answers, daemon=True)
        server.start()
        address = Address((name,), ("",))
        client = Connections(
            address, (), lambda shard: "has died", "a worker", client_incarnation=1
        )
        assert client.pids == [7] and client.at(0).number == 1
        client.close()


def test_a_server_that_is_stopped_before_it_lets_anybody_in_is_a_peer_that_is_stuck(monkeypatch):
    """And no time-out: behind a `PeerError` a run goes back to its last checkpoint."""
    monkeypatch.setattr(connections, "START_WITHIN_S", 0.5)
    name = f"\0test-filling-{id(monkeypatch)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(name)
        door.listen(8)
        with pytest.raises(PeerError, match="server 0 has not answered for 0 s: it is stopped or"):
            Connections(Address((name,), ("",)), [0], lambda shard: "has died", "rank 0")
