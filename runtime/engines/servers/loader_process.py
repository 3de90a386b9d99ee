"""A loader as a process: `persia-runtime.engines.servers.loader_process`.

It parses and hashes every n-th chunk of the training data, ahead of the ranks that take them, pass
after pass, and gives each chunk to all of them in a memory file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
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
    if not asked["again"]:  # else one that waits for another's data may not see that the old died
        takers.wait_for_all()
    try:
        give_out(asked, takers)
    except Exception as error:
        takers.tell(error)


class Takers:
    """All of them: what each has taken, what it is given next, and whether it asks for a sign of
    life."""

    def __init__(self, expected: int) -> None:
        """``expected``: processes; nobody else is let in."""
        self._expected = expected
        self._behind: dict[Channel, int] = {}
        """Of each that is there, how many chunks it has not taken yet."""
        self._next: dict[Channel, Turn] = {}
        """What it is given next: others it had of a loader that has died."""
        self._came = 0
        self._changed = threading.Condition()
        self._reads_since_s: float | None = None

    def wait_for_all(self) -> None:
        """Return when all that are expected are there."""
        with self._changed:
            self._reads_since_s = time.monotonic()
            self._changed.wait_for(lambda: self._came == self._expected)

    def first(self) -> Turn | None:
        """The first that any misses, when somebody is there; None when all have come and gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._came == self._expected)
            self._reads_since_s = time.monotonic()
            return min(self._next.values(), default=None)

    def give(self, turn: Turn, after: Turn, message: Message, said: dict[str, Any]) -> bool:
        """Send it to each that misses it, as soon as that one is less than `AHEAD` behind; False
        where nobody is there, or somebody has come who misses what was before: see `first`."""
        self._reads_since_s = None
        send_said(partial(self._give, turn, after), message, said)
        self._reads_since_s = time.monotonic()
        return bool(self._next) and not self._any_misses(turn)

    def _any_misses(self, turn: Turn) -> bool:
        """This one, or what was before it."""
        return any(due <= turn for due in list(self._next.values()))

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
                    due = number, place
                case other:
                    raise BadMessageError(f"a taker begins with {other}, which is no turn")
            self._behind[channel], self._next[channel] = 0, due
            self._came += 1
            self._changed.notify_all()
        try:
            while True:
                message, _ = yield from channel.receiving()
                if message.kind is MessageKind.GOODBYE:
                    return
                self._hear(channel, message)
        finally:
            with self._changed:
                del self._behind[channel], self._next[channel]
                self._changed.notify_all()

    def _give(self, turn: Turn, after: Turn, message: Message, **segment: Any) -> None:
        for channel in list(self._next):

            def goes_on(of: Channel = channel) -> bool:
                due = min(self._next.values(), default=turn)
                return due < turn or self._next.get(of) != turn or self._behind[of] < AHEAD

            with self._changed:
                self._changed.wait_for(goes_on)
                if min(self._next.values(), default=turn) < turn:
                    return
                if self._next.get(channel) != turn:
                    continue
                self._behind[channel] += 1
                self._next[channel] = after
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
    """Every own chunk to every taker, pass after pass, until all have gone."""
    source = cast(SharedSource, open_source(**asked["data"]))
    while first := takers.first():
        for turn, after, batch in _turns(source, asked["loader"], asked["loaders"], first):
            number = asked["loader"] + turn[1] * asked["loaders"]
            kind = MessageKind.PASS_ENDED if batch is None else MessageKind.CHUNK
            said = {} if batch is None else arrays_of(batch)
            said |= {"left_out": source.left_out("train")}
            if not takers.give(turn, after, Message(kind, -1, number), said):
                break


def _turns(
    source: SharedSource, own: int, of: int, first: Turn
) -> Iterator[tuple[Turn, Turn, Batch | None]]:
    """From the ``first`` one on, pass after pass: each, the one after it, and its chunk; None for
    the end of a pass."""
    for number in count(first[0]):
        place = 0
        for batch in source.turns("train", own, of):
            if (number, place) >= first:
                yield (number, place), (number, place + 1), batch
            place += 1
        yield (number, place), (number + 1, 0), None


def arrays_of(batch: Batch) -> dict[str, Any]:
    """The arrays of a batch by name; no offsets where every bag holds one id."""
    arrays = {"ids": batch.ids, "dense": batch.dense, "labels": batch.labels}
    return arrays if batch.offsets is None else arrays | {"offsets": batch.offsets}


if __name__ == "__main__":
    main()
