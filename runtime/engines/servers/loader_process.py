"""A loader as a process: `persia-runtime.engines.servers.loader_process`.

It parses and hashes every n-th chunk of the training data, ahead of the ranks that take them, pass
after pass, and gives each chunk to all of them in a memory file.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, cast

from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import SharedSource
from runtime.engines.servers.launch import launched
from runtime.engines.transport.calls import send_said, tell
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.listener import Listener
from runtime.engines.transport.messages import BadMessageError, Message, MessageKind, pack_json
from runtime.engines.transport.waits import Steps
from runtime.engines.transport.wire import PeerGoneError

AHEAD = 4
"""Chunks that a rank may be behind its loader."""
Turn = tuple[int, int]
"""The number of a pass, and of a loader's chunk in it, or of its end."""


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


class Takers:
    """All of them: what each has taken, and whether it asks for a sign of life."""

    def __init__(self, expected: int) -> None:
        """``expected``: processes; nobody else is let in."""
        self._expected = expected
        self._behind: dict[Channel, int] = {}
        """Of each that is there, how many chunks it has not taken yet."""
        self._from: dict[Channel, Turn] = {}
        """The first that it is given: others it had of a loader that has died."""
        self._came = 0
        self._changed = threading.Condition()
        self._reads_since_s: float | None = None

    def any_there(self) -> bool:
        """Whether somebody still takes chunks."""
        return bool(self._behind)

    def wait_for_all(self) -> None:
        """Return when all that are expected are there."""
        with self._changed:
            self._reads_since_s = time.monotonic()
            self._changed.wait_for(lambda: self._came == self._expected)
            self._reads_since_s = time.monotonic()

    def first(self) -> Turn:
        """The first that any misses."""
        return min(self._from.values(), default=(0, 0))

    def give(self, turn: Turn, message: Message, said: dict[str, Any]) -> None:
        """Send it to each that misses it, as soon as that one is less than `AHEAD` behind."""
        self._reads_since_s = None
        send_said(partial(self._give, turn), message, said)
        self._reads_since_s = time.monotonic()

    def tell(self, error: Exception) -> None:
        """Tell each at once what is wrong."""
        for channel in list(self._behind):
            tell(channel, error)

    def serve(self, channel: Channel, hello: Message, said: dict[str, Any]) -> Steps[None]:
        """One process, until it ends: whatever is wrong with it is its own end only."""
        with self._changed:
            if self._came == self._expected:
                raise BadMessageError(f"all {self._expected} takers of this loader are there")
            match said.get("from", [0, 0]):
                case [int(number), int(place)]:
                    self._from[channel] = number, place
                case other:
                    raise BadMessageError(f"a taker begins with {other}, which is no turn")
            self._behind[channel], self._came = 0, self._came + 1
            self._changed.notify_all()
        try:
            while True:
                message, _ = yield from channel.receiving()
                if message.kind is MessageKind.GOODBYE:
                    return
                self._hear(channel, message)
        finally:
            with self._changed:
                self._behind.pop(channel, None)
                self._changed.notify_all()

    def _give(self, turn: Turn, message: Message, **segment: Any) -> None:
        for channel in list(self._behind):
            if turn < self._from[channel]:
                continue
            with self._changed:
                self._changed.wait_for(lambda c=channel: self._behind.get(c, 0) < AHEAD)  # type: ignore[misc]
                if channel not in self._behind:
                    continue
                self._behind[channel] += 1
            with suppress(PeerGoneError):
                channel.send(message, **segment)

    def _hear(self, channel: Channel, message: Message) -> None:
        if message.kind is MessageKind.PING:
            since_s = self._reads_since_s
            reads_s = 0.0 if since_s is None else time.monotonic() - since_s
            channel.send(Message(MessageKind.PONG, body=pack_json({"reads_s": reads_s})))
            return
        if message.kind is not MessageKind.TAKEN:
            raise BadMessageError(message.kind.name)
        with self._changed:
            self._behind[channel] -= 1
            self._changed.notify_all()


def give_out(asked: dict[str, Any], takers: Takers) -> None:
    """Every own chunk to every taker, pass after pass, as long as one of them is there."""
    data, own, of = asked["data"], asked["loader"], asked["loaders"]
    source, first = cast(SharedSource, open_source(**data)), takers.first()
    for number in count(first[0]):
        place = 0
        for batch in source.turns("train", own, of):
            if (number, place) >= first:
                said = arrays_of(batch) | {"left_out": source.left_out("train")}
                chunk = Message(MessageKind.CHUNK, -1, own + place * of)
                takers.give((number, place), chunk, said)
            place += 1
            if not takers.any_there():
                return
        ended = Message(MessageKind.PASS_ENDED, -1, own + place * of)
        takers.give((number, place), ended, {"left_out": source.left_out("train")})
        if not takers.any_there():
            return


def arrays_of(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch by name; no offsets where every bag holds one id."""
    arrays = {"ids": batch.ids, "dense": batch.dense, "labels": batch.labels}
    return arrays if batch.offsets is None else arrays | {"offsets": batch.offsets}


if __name__ == "__main__":
    main()
