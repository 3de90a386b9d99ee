"""A loader as a process: `persia-runtime.engines.processes.loader_process`.

It parses and hashes every n-th chunk of the training data, ahead of the ranks that take them, pass
after pass, and gives each chunk to all of them in a memory file.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, cast

from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import SharedSource
from runtime.engines.processes.calls import send_said, tell
from runtime.engines.processes.channel import Channel, PeerGoneError
from runtime.engines.processes.launch import launched
from runtime.engines.processes.messages import BadMessageError, Message, MessageKind, pack_json
from runtime.engines.processes.peers import Listener

AHEAD = 4
"""Chunks that a rank may be behind its loader."""


def main() -> None:
    """Load until nobody takes anything any more, or the launcher is gone."""
    sock, text, _ = launched()
    asked = json.loads(text)
    takers = Takers(asked["takers"])
    listener = Listener(sock, asked["secret"], takers.serve, f"loader {asked['loader']}")
    threading.Thread(target=listener.serve_all, daemon=True).start()
    takers.wait_for_all()
    try:
        give_out(asked, takers)
    except Exception as error:
        takers.tell(error)


class Taker:
    """A process that is given every chunk of this loader."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.behind = 0
        self.is_there = True


class Takers:
    """All of them; a thread for each hears what it has taken, and whether it asks for a sign of
    life."""

    def __init__(self, expected: int) -> None:
        """``expected``: processes; nobody else is let in."""
        self._expected = expected
        self._taken: list[Taker] = []
        self._changed = threading.Condition()
        self._reads_since_s: float | None = None

    def any_there(self) -> bool:
        """Whether somebody still takes chunks."""
        return any(taker.is_there for taker in self._taken)

    def wait_for_all(self) -> None:
        """Return when all that are expected are there."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._taken) == self._expected)
            self._reads_since_s = time.monotonic()

    def give(self, message: Message, said: dict[str, Any]) -> None:
        """Send it to each, as soon as that one is less than `AHEAD` chunks behind."""
        self._reads_since_s = None
        send_said(self._give, message, said)
        self._reads_since_s = time.monotonic()

    def tell(self, error: Exception) -> None:
        """Tell each at once what is wrong."""
        for taker in self._taken:
            tell(taker.channel, error)

    def serve(self, channel: Channel, hello: Message, said: dict[str, Any]) -> None:
        """One process, until it ends: whatever is wrong with it is its own end only."""
        taker = Taker(channel)
        self._admit(taker)
        try:
            while True:
                self._hear(taker)
        finally:
            with self._changed:
                taker.is_there = False
                self._changed.notify_all()

    def _give(self, message: Message, **segment: Any) -> None:
        for taker in self._taken:
            with self._changed:
                self._changed.wait_for(lambda t=taker: t.behind < AHEAD or not t.is_there)  # type: ignore[misc]
                taker.behind += 1
            try:
                if taker.is_there:
                    taker.channel.send(message, **segment)
            except PeerGoneError:
                taker.is_there = False

    def _admit(self, taker: Taker) -> None:
        with self._changed:
            if len(self._taken) == self._expected:
                raise BadMessageError(f"all {self._expected} takers of this loader are there")
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
            said = arrays_of(batch) | {"left_out": source.left_out("train")}
            takers.give(Message(MessageKind.CHUNK, -1, number), said)
            number += of
            if not takers.any_there():
                return
        ended = Message(MessageKind.PASS_ENDED, -1, number)
        takers.give(ended, {"left_out": source.left_out("train")})


def arrays_of(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch by name; no offsets where every bag holds one id."""
    arrays = {"ids": batch.ids, "dense": batch.dense, "labels": batch.labels}
    return arrays if batch.offsets is None else arrays | {"offsets": batch.offsets}


if __name__ == "__main__":
    main()
