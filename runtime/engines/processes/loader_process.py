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
from typing import Any, cast

from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import SharedSource
from runtime.engines.processes.channel import Channel, PeerGoneError
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
)
from runtime.engines.processes.parcels import pack_arrays

AHEAD = 4
"""Chunks that a rank may be behind its loader."""


def main() -> None:
    """Load until nobody takes anything any more, or the launcher is gone."""
    listening, document, life = (int(text) for text in sys.argv[1:4])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the launcher ends us
    with os.fdopen(document) as file:
        asked = json.load(file)
    threading.Thread(target=_end_with, args=(socket.socket(fileno=life),), daemon=True).start()
    door = socket.socket(fileno=listening)
    takers = [Taker(Channel(door.accept()[0])) for _ in range(asked["takers"])]
    try:
        give_out(asked, takers)
    except Exception as error:
        body = pack_json({"kind": type(error).__name__, "sentence": str(error)[:4000]})
        for taker in takers:
            taker.send(Message(MessageKind.FAILED, body=body))


class Taker:
    """A process that is given every chunk of this loader."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._behind = 0
        self.is_there = True

    def give(self, message: Message, descriptors: tuple[int, ...]) -> None:
        """Wait until it is less than `AHEAD` chunks behind, and send the next."""
        while self.is_there and self._behind >= AHEAD:
            try:
                answer, _ = self._channel.receive()
                if answer.kind is not MessageKind.TAKEN:
                    raise PeerGoneError(answer.kind.name)
                self._behind -= 1
            except (PeerGoneError, BadMessageError):
                self.is_there = False
        self._behind += 1
        self.send(message, descriptors)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send it, if somebody is there."""
        try:
            if self.is_there:
                self._channel.send(message, descriptors)
        except PeerGoneError:
            self.is_there = False


def give_out(asked: dict[str, Any], takers: list[Taker]) -> None:
    """Every own chunk to every taker, pass after pass, as long as one of them is there."""
    data, own, of = asked["data"], asked["loader"], asked["loaders"]
    source = cast(SharedSource, open_source(**data))
    while any(taker.is_there for taker in takers):
        number = own
        for batch in source.turns("train", own, of):
            document, segment = pack_arrays(arrays_of(batch))
            body = pack_json(document | {"left_out": source.left_out("train")})
            for taker in takers:
                taker.give(Message(MessageKind.CHUNK, -1, number, body), (segment.descriptor,))
            segment.close()
            number += of
            if not any(taker.is_there for taker in takers):
                return
        body = pack_json({"left_out": source.left_out("train")})
        for taker in takers:
            taker.give(Message(MessageKind.PASS_ENDED, -1, number, body), ())


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
