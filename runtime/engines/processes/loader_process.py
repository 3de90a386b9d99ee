"""A loader as a process: `python -m runtime.engines.processes.loader_process`.

It parses and hashes every n-th chunk of the training data, ahead of the ranks that take them, pass
after pass, and gives each chunk to all of them in a memory file. Started by `loaders` with three
inherited descriptors: a listening socket, a memory file that says what to read, and a socket whose
other end lives as long as the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, cast

from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import SharedSource
from runtime.engines.processes.channel import Channel, PeerGoneError, greeting
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    error_document,
    pack_json,
)
from runtime.engines.processes.segments import Segment, pack_arrays
from runtime.torchrun import die_with_parent

AHEAD = 4
"""Chunks that a rank may be behind its loader."""


def main() -> None:
    """Load until nobody takes anything any more, or the launcher is gone."""
    listening, document, life = (int(text) for text in sys.argv[1:4])
    with os.fdopen(document) as file:
        asked = json.load(file)
    if asked["dies_with_parent"]:
        die_with_parent(signal.SIGKILL)  # also while it is stopped
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the launcher ends us
    threading.Thread(target=_end_with, args=(socket.socket(fileno=life),), daemon=True).start()
    takers = Takers(socket.socket(fileno=listening), asked["secret"], asked["takers"])
    takers.wait_for_all()
    try:
        give_out(asked, takers)
    except Exception as error:
        body = pack_json(error_document(error))
        takers.send(Message(MessageKind.FAILED, body=body))


class Taker:
    """A process that is given every chunk of this loader."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.behind = 0
        self.is_there = True


class Takers:
    """All of them; a thread for each hears what it has taken, and whether it asks for a sign of
    life."""

    def __init__(self, door: socket.socket, secret: str, seats: int) -> None:
        """``seats``: processes of this user that know the secret; nobody else is let in."""
        self._door, self._secret, self._seats = door, secret, seats
        self._taken: list[Taker] = []
        self._changed = threading.Condition()
        self._reads_since_s: float | None = None
        threading.Thread(target=self._let_in, daemon=True).start()

    def any_there(self) -> bool:
        """Whether somebody still takes chunks."""
        return any(taker.is_there for taker in self._taken)

    def wait_for_all(self) -> None:
        """Return when every seat is taken."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._taken) == self._seats)
            self._reads_since_s = time.monotonic()

    def give(self, message: Message, segment: Segment | None = None) -> None:
        """Send it to each, as soon as that one is less than `AHEAD` chunks behind."""
        self._reads_since_s = None
        for taker in self._taken:
            with self._changed:
                self._changed.wait_for(lambda t=taker: t.behind < AHEAD or not t.is_there)  # type: ignore[misc]
                taker.behind += 1
            self._send_to(taker, message, segment)
        self._reads_since_s = time.monotonic()

    def send(self, message: Message) -> None:
        """Send it to each at once."""
        for taker in self._taken:
            self._send_to(taker, message)

    def _send_to(self, taker: Taker, message: Message, segment: Segment | None = None) -> None:
        try:
            if taker.is_there:
                taker.channel.send(message, segment=segment)
        except PeerGoneError:
            taker.is_there = False

    def _let_in(self) -> None:
        while True:
            channel = Channel(self._door.accept()[0])
            if channel.is_own_user():
                threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
            else:
                channel.close()

    def _serve(self, channel: Channel) -> None:
        """One visitor, from the first word on: whatever is wrong with it is its own end only."""
        taker = Taker(channel)
        try:
            self._greet(taker)
            while True:
                self._hear(taker)
        except Exception:
            channel.close()
        finally:
            with self._changed:
                taker.is_there = False
                self._changed.notify_all()

    def _greet(self, taker: Taker) -> None:
        greeting(taker.channel, self._secret)
        with self._changed:
            if len(self._taken) == self._seats:
                raise BadMessageError(f"all {self._seats} takers of this loader are there already")
            self._taken.append(taker)
            self._changed.notify_all()

    def _hear(self, taker: Taker) -> None:
        message, _ = taker.channel.receive()
        if message.kind is MessageKind.PING:
            since_s = self._reads_since_s
            reads_s = 0.0 if since_s is None else time.monotonic() - since_s
            taker.channel.send(Message(MessageKind.PONG, body=pack_json({"reads_s": reads_s})))
            return
        if message.kind is not MessageKind.TAKEN:
            raise BadMessageError(message.kind.name)
        with self._changed:
            taker.behind -= 1
            self._changed.notify_all()


def give_out(asked: dict[str, Any], takers: Takers) -> None:
    """Every own chunk to every taker, pass after pass, as long as one of them is there."""
    data, own, of = asked["data"], asked["loader"], asked["loaders"]
    source = cast(SharedSource, open_source(**data))
    while takers.any_there():
        number = own
        for batch in source.turns("train", own, of):
            document, segment = pack_arrays(arrays_of(batch))
            body = pack_json(document | {"left_out": source.left_out("train")})
            takers.give(Message(MessageKind.CHUNK, -1, number, body), segment)
            segment.close()
            number += of
            if not takers.any_there():
                return
        body = pack_json({"left_out": source.left_out("train")})
        takers.give(Message(MessageKind.PASS_ENDED, -1, number, body))


def arrays_of(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch by name; no offsets where every bag holds one id."""
    arrays = {"ids": batch.ids, "dense": batch.dense, "labels": batch.labels}
    return arrays if batch.offsets is None else arrays | {"offsets": batch.offsets}


def _end_with(life: socket.socket) -> None:
    while life.recv(1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
