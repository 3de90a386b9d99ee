"""Servers on other hosts: started by who knows the secret, reached over TCP, accounted for."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.config import DataConfig
from runtime.data.errors import DataError
from runtime.data.open import open_source
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.store import SavedServer
from runtime.hosts.launch import hosts
from runtime.hosts.launch.hosts import HostedProcesses, ProcessHost, read_secret
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import Address
from runtime.hosts.loading.loaded_source import LoadedSource
from runtime.hosts.row_processes import start_loaders
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.failover import Failover
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.coroutines import Future
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack,
    pack_json,
)
from runtime.hosts.wire.peers import listen, open_channel
from runtime.stop import PeerError, RunStopped
from tests.runtime.hosts.served import LAYOUT, SGD, one_step
from tests.runtime.hosts.test_faults import until
from tests.runtime.worlds import config, host_of_servers

SECRET = "a secret for tests alone"


def pair(kind: int = socket.AF_INET) -> tuple[Channel, Channel]:
    """Two ends of a connection, both of which know each other."""
    if kind == socket.AF_UNIX:
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as door:
            ends = socket.create_connection(door.getsockname()), door.accept()[0]
    channels = Channel(ends[0]), Channel(ends[1])
    for channel in channels:
        channel.is_authenticated = True
    return channels


def push(step: int) -> Message:
    return Message(MessageKind.PUSH, 0, step, b"\0")


@pytest.mark.parametrize("kind", [socket.AF_INET, socket.AF_UNIX])
def test_arrays_follow_a_message_where_memory_is_not_shared(kind):
    one, other = pair(kind)
    rows, room = np.arange(70_000, dtype=np.float32), np.zeros(70_000, np.float32)
    sender = threading.Thread(target=one.send, args=(push(1), [rows, rows[:0]]))
    sender.start()
    message, _ = other.receive(place=lambda m: [memoryview(room).cast("B")])
    sender.join()
    assert message == push(1)
    assert room.sum() == (rows.sum() if kind == socket.AF_INET else 0)


def test_what_nobody_wants_is_dropped_and_the_next_message_is_whole():
    one, other = pair()
    sender = threading.Thread(
        target=lambda: [one.send(push(k), [np.ones(1_000_000)]) for k in range(3)]
    )
    sender.start()
    assert [other.receive()[0].step for _ in range(3)] == [0, 1, 2]
    sender.join()


def test_on_one_host_nobody_cuts_out_the_arrays_of_a_message():
    def arrays():
        raise AssertionError("both ends see them")
        yield

    one, other = pair(socket.AF_UNIX)
    one.send(push(1), arrays())
    assert other.receive()[0] == push(1)


@pytest.mark.parametrize("cut", [5, 50, 55, 62, 80, 106])
def test_a_wait_that_is_given_up_inside_a_message_loses_that_message_alone(cut):
    """At any byte of header, body, arrays or their checksums; a header that is not whole is waited
    for."""
    one, other = pair()
    head = pack(Message(MessageKind.ROWS, 0, 7, b"12345678"), 40)
    data = b"".join(one.connection.frame(head, [memoryview(np.arange(5.0)).cast("B")]))
    room = memoryview(bytearray(40))

    def give_up() -> None:
        raise RunStopped

    one.connection.socket.send(data[:cut])
    with pytest.raises(RunStopped):
        other.receive(give_up, lambda m: [room])
    one.connection.socket.send(data[cut:])
    one.send(push(8))
    found = other.receive(place=lambda m: [room])[0]
    assert len(data) == 48 + 4 + 8 + 4 + 40 + 4
    assert found.step == (7 if cut < 52 else 8)


def test_a_message_that_was_given_up_is_not_sent_again_and_the_one_before_it_is():
    one, _ = pair()
    one.send(push(0))
    with pytest.raises(TimeoutError):
        while True:  # until the network takes no more
            one.connection.socket.send(bytes(1 << 20))
    with pytest.raises(TimeoutError):
        one.send(push(1), within_s=0.1)
    again, other = pair()
    one.resume(again, received=0)
    one.send(push(2))
    assert [other.receive()[0].step for _ in range(2)] == [0, 2]


def test_arrays_of_another_size_than_their_place_are_refused():
    one, other = pair()
    one.send(push(1), [np.ones(4)])
    with pytest.raises(BadMessageError, match="a PUSH brings 32 bytes of arrays, 8 belong to it"):
        other.receive(place=lambda m: [memoryview(bytearray(8))])


def test_a_stranger_brings_no_arrays():
    one, other = pair()
    other.is_authenticated = False
    one.send(push(1), [np.ones(4)])
    with pytest.raises(BadMessageError, match="a PUSH of a stranger brings arrays"):
        other.receive()


# Hosts.


def test_loaders_are_so_many_in_all_on_the_hosts_that_follow_those_of_servers():
    """And serve two processes from there."""
    (first,), secret = host_of_servers()
    second = ProcessHost("127.0.0.1:0", read_secret(secret))
    threading.Thread(target=second.serve, daemon=True).start()
    at = {"servers_at": (first, second.name), "servers_secret": secret}
    chosen = config(executor="concurrent", servers=1, loaders=2, **at)
    chosen = replace(chosen, data=DataConfig(name="synthetic", rows=40_000))
    processes = start_loaders(chosen, consumers=2)
    assert processes._at == [second.name, first]
    own = open_source("synthetic", None, 40_000)
    sources = [LoadedSource(own, processes.address, one) for one in (processes, None)]
    for source in sources:
        assert sum(names.size for names in source.chunks("train")) == 40_000
        source.close()
    processes.close()
    second.close()


def hosted(rules: ServerRules, servers: int = 1) -> HostedProcesses:
    configs = [
        ServerConfig(shard=k, shards=servers, seed=0, tables=(SGD,), rules=rules)
        for k in range(servers)
    ]
    return HostedProcesses(configs, host_of_servers()[0], SECRET)


@pytest.mark.long
def test_a_server_that_is_killed_on_its_host_comes_back_there():
    rules = ServerRules(ranks=1, tau=None)
    processes = hosted(rules, 2)
    client = ServerClient(processes.address, [0], processes.how_it_ended)
    store = RemoteStore(LAYOUT, [SGD], client, seed=0, segments=4, close=processes.close)
    told: list[str] = []
    restart = partial(processes.restart, awaits_rows=True)
    client.failover = Failover(restart, lambda k: [SavedServer(rules, [0])], told.append)
    for step in range(20):
        one_step(store, 0, step, *range(12))
        if step == 9:
            os.kill(client.pids[0], signal.SIGKILL)
            until(lambda: bool(told))
    store.drain()
    lost = [status["lost"] for status in store.statuses()]
    counts = {int(i): int(-v[0]) for i, v in zip(*store.export()["rows"][:2], strict=True)}
    assert lost[0] >= 1 and lost[1] == 0
    assert sorted(set(counts.values())) == [20 - lost[0], 20]  # every push is there, or counted
    pids = list(client.pids)
    store.close()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert re.fullmatch(
        r"embedding server 0 \(pid \d+\) was killed by SIGKILL.*; it is back, and \d+ pushes of"
        r" rank 0 are lost with it", told[0],
    )  # fmt: skip


def test_a_host_that_is_stopped_is_not_waited_for(monkeypatch):
    """It has started a server, and says nothing more: as a frozen machine does."""
    monkeypatch.setattr(hosts, "STUCK_S", 0.5)
    sock, name = listen("127.0.0.1:0")

    def starts_and_stops(channel: Channel, hello: Message, said: dict):
        yield from channel.receiving()
        address = Address(("127.0.0.1:1",), ("x",)).sealed(SECRET, channel.session)
        found = {"address": address}
        channel.send(Message(MessageKind.RESULT, body=pack_json(found)))
        yield Future(lambda: False)

    listener = Listener(sock, SECRET, starts_and_stops, "a host")
    threading.Thread(target=listener.serve_all, daemon=True).start()
    server = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))
    processes = HostedProcesses([server], [name], SECRET)
    assert processes.how_it_ended(0) == f"has gone with its host {name}"
    with pytest.raises(PeerError, match="has closed the connection of embedding server 0"):
        processes.restart(0)
    processes.close()
    listener.close()


@pytest.mark.parametrize("said", [{"secret": "wrong"}, {}, {"secret": None}])
def test_who_does_not_know_the_secret_starts_nothing(said):
    channel = open_channel(host_of_servers()[0][0], 20)
    channel.send(Message(MessageKind.HELLO, body=pack_json(said)))
    assert channel.receive()[0].kind is MessageKind.CHALLENGE
    channel.send(Message(MessageKind.PROOF, body=pack_json(said)))
    channel.send(Message(MessageKind.CALL, body=pack_json({"method": "how_it_ended"})))
    assert channel.receive()[0].kind is MessageKind.FAILED
    with pytest.raises(ConnectionError):
        channel.receive()
    with pytest.raises(PeerError, match=r"lets nobody in: .* does not know the secret of this run"):
        HostedProcesses(
            [ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))], host_of_servers()[0], "wrong"
        )


def test_what_a_server_cannot_start_for_is_told_with_its_host():
    wrong = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,), threads=-5)
    with pytest.raises((ValueError, RuntimeError), match=r".*\(127\.0\.0\.1:\d+\)"):
        HostedProcesses([wrong], host_of_servers()[0], SECRET)


def test_a_host_that_is_not_there_is_told_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    gone = f"127.0.0.1:{port}"
    with pytest.raises(PeerError, match=rf"{gone} cannot .*; start `persia-runtime serve`"):
        HostedProcesses([ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))], [gone], SECRET)


def test_a_secret_is_a_file_of_ones_own_and_long_enough(tmp_path):
    file = tmp_path / "secret"
    with pytest.raises(DataError, match="no file"):
        read_secret(file)
    file.write_text(SECRET)
    file.chmod(0o644)
    with pytest.raises(DataError, match=rf"readable by others; .*: chmod 600 {file}"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == SECRET
    file.write_text("short")
    with pytest.raises(DataError, match="has 5 characters, a secret 16 at least"):
        read_secret(file)
    file.write_bytes(b"caf\xe9" * 9)
    with pytest.raises(DataError, match=f"{file} is not text in UTF-8"):
        read_secret(file)
    file.write_text("x" * 5000)
    with pytest.raises(DataError, match="has 5,000 bytes, a secret 4,096 at most"):
        read_secret(file)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError):
        read_secret(tmp_path / "fifo")


PLACE = "HOST:PORT, PORT from 0 to 65535, an IPv6 address in brackets"


def test_serve_says_why_it_cannot_listen(tmp_path, capsys):
    def told(at: str) -> str:
        assert main(["serve", "--secret", str(secret), "--listen", at]) == 2
        return capsys.readouterr().err

    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    assert f"listen must be {PLACE}, got '127.0.0.1:99999'" in told("127.0.0.1:99999")
    for nowhere in ("0.0.0.0:7800", "0:7800"):
        assert "is every address of this host, and a run must be told one that leads to it" in told(
            nowhere
        )
    with socket.create_server(("127.0.0.1", 0)) as door:
        taken = f"127.0.0.1:{door.getsockname()[1]}"
        assert f"--listen {taken}: another program listens there already" in told(taken)
    assert "--listen 203.0.113.1:0: that is no address of this host" in told("203.0.113.1:0")
    assert "--listen no.such.host.invalid:0: no host of that name is known" in told(
        "no.such.host.invalid:0"
    )


def test_a_host_that_is_closed_starts_no_more():
    host = ProcessHost("127.0.0.1:0", SECRET)
    thread = threading.Thread(target=host.serve)
    thread.start()
    host.close()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(OSError):
        open_channel(host.name, 5)
