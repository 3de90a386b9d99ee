"""What travels between hosts, encrypted or sealed: who reads along, who stands between, what is
sent again."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.hosts.launch import hosts
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.listener import Listener, Task
from runtime.hosts.wire.messages import Message, MessageKind, pack_json, unpack_json
from runtime.hosts.wire.peers import connect, listen, open_channel
from runtime.hosts.wire.tls import Certificate, _made_now, named, sealed, unsealed
from runtime.stop import PeerError
from tests.runtime.hosts.served import SGD
from tests.runtime.hosts.wire.broken_cables import HYBRID, SECRET, Proxy
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, run

SOURCE = ArraySource(300)


@pytest.fixture
def over_tls(monkeypatch):
    """Hosts and servers of this machine are reached as if they were others."""
    monkeypatch.setattr(hosts, "named", lambda at, tls: f"tls:{at}" if tls else at)
    host = hosts.ProcessHost("127.0.0.1:0", SECRET)
    threading.Thread(target=host.serve, daemon=True).start()
    yield host.name
    host.close()


@pytest.mark.parametrize("mode", [HYBRID])
def test_encrypted_runs_end_with_the_bytes_of_threads(over_tls, mode, tmp_path):
    (file := tmp_path / "secret").touch(0o600)
    file.write_text(SECRET)
    far = {"servers": 2, "servers_at": (over_tls,), "servers_secret": file}
    expected = run(config(executor="concurrent", shards=2, **mode), SOURCE)
    found = run(config(executor="concurrent", **far, **mode), SOURCE)
    assert {name[:4] for name in found.store._client._address.names} == {"tls:"}
    assert_same_bytes(expected, found)
    found.store.close()


@pytest.mark.parametrize("cut", ["before", "middle", "after"])
def test_what_was_lost_with_an_encrypted_connection_is_sent_again(cut):
    """A proxy that cannot read it cuts after so many bytes."""
    heard: list[int] = []

    def hears(channel: Channel, hello: Message, said: dict):
        while (message := (yield from channel.receiving())[0]).kind is MessageKind.PUSH:
            heard.append(message.step)

    sock, name = listen("tls:127.0.0.1:0")
    listener = Listener(sock, SECRET, hears, "the server", tls=True)
    threading.Thread(target=listener.serve_all, daemon=True).start()
    target = name.removeprefix("tls:")
    left = {"before": [2000], "middle": [9000, 5000], "after": [30_000, 100, 4000]}[cut]
    proxy = Proxy(target, lambda message, size: None)
    proxy._message = lambda source: _some(source, left)
    proxy._cut = lambda message, size: size if message is None else None
    here = connect(f"tls:{proxy.name}", "the server", SECRET, {})
    for step in range(40):
        here.send(Message(MessageKind.PUSH, 0, step), [np.zeros(300)])
    here.send(Message(MessageKind.DISCONNECT))
    while len(heard) < 40:
        if here.connection.is_broken():
            with suppress(PeerGoneError):
                here.await_reconnection(lambda: None)
    assert heard == list(range(40))
    here.close()
    proxy.close()
    listener.close()


def _some(source: socket.socket, left: list[int]) -> tuple[Message | None, bytes] | None:
    """What a proxy lets through at once; no message: then it cuts."""
    data = source.recv(1500)
    if not data:
        return None
    if left:
        left[0] -= len(data)
        if left[0] <= 0:
            left.pop(0)
            return None, data
    return Message(MessageKind.PING), data


def test_who_stands_between_learns_nothing_and_lets_nobody_in():
    """With a certificate of its own, and without the secret."""
    sock, name = listen("tls:127.0.0.1:0")
    heard: list[dict] = []

    class Between(Listener):
        def _converse(self, task: Task):
            channel = task.channel
            with suppress(OSError):
                heard.append(unpack_json((yield from channel.receiving())[0].body))
                channel.send(Message(MessageKind.CHALLENGE, body=pack_json({"nonce": "0"})))
                heard.append(unpack_json((yield from channel.receiving())[0].body))
                told = pack_json({"received": 0, "proof": heard[1]["proof"]})
                channel.send(Message(MessageKind.ACCEPTED, body=told))

    listener = Between(sock, "another", lambda *said: None, "between", tls=True)
    threading.Thread(target=listener.serve_all, daemon=True).start()
    with pytest.raises(PeerError, match="does not know the secret of this run"):
        connect(name, "the server", SECRET, {})
    assert SECRET not in str(heard)
    # What it heard is of no use at the true server, whose certificate is another one.
    true, name = listen("tls:127.0.0.1:0")
    server = Listener(true, SECRET, lambda *said: None, "the server", tls=True)
    threading.Thread(target=server.serve_all, daemon=True).start()
    channel = open_channel(name, 20)
    channel.send(Message(MessageKind.HELLO, body=pack_json(heard[0])))
    assert channel.receive()[0].kind is MessageKind.CHALLENGE
    channel.send(Message(MessageKind.PROOF, body=pack_json(heard[1])))
    assert channel.receive()[0].kind is MessageKind.FAILED
    for one in (listener, server):
        one.close()


def test_who_does_not_encrypt_at_a_host_that_does_is_told_so():
    """Not that the host has ended: it closes a connection whose first word it cannot read."""
    sock, name = listen("tls:127.0.0.1:0")
    is_encrypted = Listener(sock, SECRET, lambda *said: None, "the host", tls=True)
    threading.Thread(target=is_encrypted.serve_all, daemon=True).start()
    with pytest.raises(PeerError, match=r"encrypts.*say --no-tls on both sides, or on none$"):
        connect(name.removeprefix("tls:"), "the host", SECRET, {}, remedy="; start it there first")
    is_encrypted.close()


WORDS = st.text(max_size=40)


@given(st.binary(max_size=300), WORDS, WORDS, st.data())
def test_a_seal_opens_for_one_secret_and_one_place_and_only_whole(data, secret, about, draw):
    """What is changed, cut, sent again elsewhere or of another run is refused, all of it."""
    seal = sealed(data, secret, about)
    assert unsealed(seal, secret, about) == data
    assert sealed(data, secret, about) != seal
    at = draw.draw(st.integers(0, len(seal) - 1), label="changed byte")
    flipped = bytearray(seal)
    flipped[at] ^= draw.draw(st.integers(1, 255), label="flipped bits")
    other = draw.draw(WORDS.filter(lambda text: text not in (secret, about)), label="another")
    for text, key, place in (
        (bytes(flipped), secret, about),
        (seal[:at], secret, about),
        (seal + b"0", secret, about),
        (seal, other, about),
        (seal, secret, other),
    ):
        with pytest.raises(ValueError, match="sealed"):
            unsealed(text, key, place)


def test_a_certificate_that_is_given_is_the_one_that_clients_see(tmp_path, monkeypatch):
    """Of the host and of what it starts; the secret stands for it as for one that is made."""
    (file := tmp_path / "host.pem").write_text(_made_now())
    monkeypatch.setattr(hosts, "named", lambda at, tls: f"tls:{at}" if tls else at)
    host = hosts.ProcessHost("127.0.0.1:0", SECRET, tls=file)
    threading.Thread(target=host.serve, daemon=True).start()
    server = ServerConfig(shard=0, shards=1, seed=0, tables=(SGD,))
    processes = hosts.HostedProcesses([server], [host.name], SECRET)
    (name,), (secret,) = processes.address.names, processes.address.secrets
    of_server = connect(name, "the server", secret, {"role": "data"})
    seen = {channel.connection.fingerprint() for channel in (processes._channels[0], of_server)}
    assert seen == {Certificate(file).fingerprint} != {Certificate().fingerprint}
    of_server.close()
    processes.close()
    host.close()


@pytest.mark.parametrize("content", ["nothing", "a key alone", "a certificate alone", "bytes", ""])
def test_a_file_without_a_certificate_and_its_key_is_refused_by_its_name(tmp_path, content):
    pem = _made_now()
    begins = pem.index("-----BEGIN CERTIFICATE")
    text = {"a key alone": pem[:begins], "a certificate alone": pem[begins:], "bytes": "\xff"}
    file = tmp_path / "host.pem"
    if content:
        file.write_text(text.get(content, content))
    with pytest.raises(ValueError, match=rf"--certificate {file}.*PEM|--certificate {file} cannot"):
        Certificate(file)


def test_what_travels_in_plain_is_warned_of_and_loopback_is_plain(capfd):
    assert named("127.0.0.1:7", tls=True) == "127.0.0.1:7"
    assert named("10.0.0.2:7", tls=True) == "tls:10.0.0.2:7"
    with pytest.raises(PeerError):
        hosts.HostedProcesses([ServerConfig(shard=0, shards=1, seed=0, tables=())],
                            ["127.0.0.1:1"], SECRET, tls=False)  # fmt: skip
    assert "warning: --no-tls: ids, rows and gradients travel in plain" in capfd.readouterr().err
