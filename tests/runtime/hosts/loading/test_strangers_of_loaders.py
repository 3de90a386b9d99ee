"""Whoever is no process of the run gets nothing of a loader, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time

import numpy as np
import pytest

from runtime.config import DataConfig
from runtime.hosts.launch.processes import Address
from runtime.hosts.loading import loaded_source
from runtime.hosts.loading.loaded_source import LoadedSource
from runtime.hosts.loading.loader_process import Consumers
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import (
    HEADER_BYTES,
    Message,
    MessageKind,
    pack,
    pack_json,
    unpack_header,
)
from runtime.hosts.wire.segments import pack_arrays
from runtime.hosts.wire.tls import proof
from runtime.stop import PeerError
from tests.runtime.hosts.loading.loaders import (
    chunks,
    opened,
    started,
)


@pytest.fixture
def loader():
    """A loader's door with one seat, in this process; who comes in finds nobody who reads."""
    name = f"\0persia-testbed-test-{os.getpid()}-{time.monotonic_ns()}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(name)
    door.listen(8)
    consumers = Consumers(1)
    listener = Listener(door, "the secret", consumers.serve, "loader 0")
    threading.Thread(target=listener.serve_all, daemon=True).start()
    yield consumers, Address((name,), ("the secret",), (os.getpid(),))
    door.close()


def test_a_loader_whose_files_do_not_answer_is_named(loader, monkeypatch):
    monkeypatch.setattr(loaded_source, "BEATS_EVERY_S", 0.05)
    monkeypatch.setattr(loaded_source, "READ_WITHIN_S", 0.3)
    consumers, address = loader
    source = LoadedSource(opened(DataConfig(name="synthetic")), address, who="rank 3")
    consumers.wait_for_all()
    with pytest.raises(PeerError, match=r"is alive and has been reading for .*; rank 3 has waited"):
        next(chunks(source))


STRANGERS = {
    "says nothing": b"",
    "half a message": b"hello",
    "no message": b"hello" * 20,
    "no JSON": pack(Message(MessageKind.HELLO, body=b"[" * 60_000)),
    "no text": pack(Message(MessageKind.HELLO, body=b'{"secret": "\\ud800"}')),
    "no secret": pack(Message(MessageKind.HELLO, body=b"{}")),
    "asks for a chunk": pack(Message(MessageKind.PROGRESS)),
}


def turned_away(visitor: socket.socket) -> bool:
    """Whether nothing is said to him but why; a reset, where he had said more than was read."""
    visitor.settimeout(60)
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while data := visitor.recv(1 << 17):
            heard += data
    return not heard or unpack_header(heard[:HEADER_BYTES])[0].kind is MessageKind.FAILED


def test_a_stranger_gets_nothing_and_takes_nobodys_place():
    processes = started(DataConfig(name="synthetic", rows=30_000), 1, consumers=1)
    strangers = []
    for words in STRANGERS.values():
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        strangers[-1].connect(processes.address.names[0])
        if words:
            strangers[-1].send(words)
    source = LoadedSource(opened(DataConfig(name="synthetic")), processes.address)
    assert sum(batch.size for batch in chunks(source)) == 30_000
    for name, stranger in zip(STRANGERS, strangers, strict=True):
        if name not in ("says nothing", "half a message"):
            assert turned_away(stranger), name
    strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    strangers[-1].connect(processes.address.names[0])
    known = {"proof": proof(processes.address.secrets[0], "client")}
    late = Message(MessageKind.HELLO, body=pack_json(known))
    strangers[-1].send(pack(late))
    assert turned_away(strangers[-1]), "the only seat is taken"
    source.close()
    processes.close()


def test_another_user_is_not_let_in_even_with_the_secret(loader, monkeypatch):
    consumers, address = loader
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    with pytest.raises(PeerError, match="loader 0 is another user's"):
        LoadedSource(opened(DataConfig(name="synthetic")), address)
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    visitor.connect(address.names[0])
    with contextlib.suppress(BrokenPipeError):  # it was turned away before a word
        visitor.send(
            pack(
                Message(
                    MessageKind.HELLO,
                    body=pack_json({"proof": proof(address.secrets[0], "client")}),
                )
            )
        )
    assert turned_away(visitor)
    assert not consumers._consumers


def test_the_loaders_address_is_a_place_of_this_user_and_says_nothing_of_the_secret():
    processes = started(DataConfig(name="synthetic"), 1, consumers=1)
    place = processes.address.publish(notes := [])
    assert Address.read_from(place) == processes.address
    assert processes.address.secrets[0] not in place
    processes.close()
    notes[0].close()
    with pytest.raises(PeerError, match="cannot be read"):
        Address.read_from(place)


def test_nobody_writes_into_what_he_is_shown():
    _, segment = pack_arrays({"ids": np.arange(1000)})
    again = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR)
    for descriptor in (segment.descriptor, again):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, segment.size)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"poison", 0)
    os.close(again)
