"""A loader as a process: `runtime.engines.loading.loader_process`.

It parses and hashes every n-th chunk of the training data, ahead of the processes that train, pass
after pass. It tells all of these how large each chunk is, gives each the samples that it asks for,
and forgets a chunk that none of them needs any more.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, cast

import numpy as np

from persia_sim.base.schema import parse
from runtime.data.batch import Batch
from runtime.data.open import open_source
from runtime.data.source import SharedSource
from runtime.engines.launch.process_config import LoaderConfig
from runtime.engines.launch.processes import serve
from runtime.engines.wire.calls import Said, said_in, send_said, tell
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.coroutines import Steps
from runtime.engines.wire.listener import Listener
from runtime.engines.wire.messages import BadMessageError, Message, MessageKind, pack_json
from runtime.engines.wire.segments import Segment

AHEAD = 4
"""Chunks that the stream of a process may be behind its loader."""
ROW_BITS = 24
"""Of a sample's name: its row in a chunk, whose number stands above."""
Turn = tuple[int, int]
"""The number of a pass, and of a loader's chunk in it, or of its end."""


def by_loader(names: np.ndarray, loaders: int) -> tuple[np.ndarray | None, dict[int, np.ndarray]]:
    """Names of samples in the stream of all loaders: an order in which those of loader 0 come first
    (None: this one), and of each loader its own, as it counts its chunks."""
    key, order = names + ((names >> ROW_BITS) % loaders << 56), None
    if (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        names = names[order]
    numbers = names >> ROW_BITS
    own = names - ((numbers - numbers // loaders) << ROW_BITS)
    return order, {k: own[numbers % loaders == k] for k in np.unique(numbers % loaders).tolist()}


class Kept(NamedTuple):
    """A chunk, or None for the end of a pass; what comes next, and what everybody is told."""

    batch: Batch | None
    after: Turn
    told: Message


@dataclass(slots=True)
class Taker:
    """A process that trains, as its loader knows it."""

    needs: Turn
    """The first chunk of which it may want samples."""
    taken: Turn
    """What its stream comes to next."""
    next: Turn
    """What it is told of next."""


class Takers:
    """All of them, what is kept for them, and whether more is to be read."""

    def __init__(self, expected: int) -> None:
        """``expected``: processes; nobody else is let in."""
        self._expected, self._came = expected, 0
        self._there: dict[Channel, Taker] = {}
        self._kept: dict[Turn, Kept] = {}
        self._asked: list[tuple[Channel, Message, dict[Turn, np.ndarray]]] = []
        """For samples: rows by chunk; some may have to be read again."""
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._reads_since_s: float | None = None

    def wait_for_all(self) -> None:
        """Return when all that are expected are there."""
        with self._changed:
            self._reads_since_s = time.monotonic()
            self._changed.wait_for(lambda: self._came == self._expected)

    def first(self) -> Turn:
        """The first that any misses, as soon as it is to be read."""
        with self._changed:
            self._reads_since_s = None
            self._changed.wait_for(self._is_due)
            self._reads_since_s = time.monotonic()
            return self._missing()

    def keep(self, turn: Turn, kept: Kept) -> bool:
        """Give it to who asks; whether what comes after it is to be read next."""
        with self._changed:
            self._kept = self._kept | {turn: kept}  # what is being answered keeps what it has
            for channel in self._there:
                self._tell(channel)
        self._answer()
        return self.first() == kept.after

    def fail(self, error: Exception) -> None:
        """Tell each what is wrong; what there is is given all the same."""
        with self._changed:
            self._error = error
            for channel in self._there:
                tell(channel, error)

    def serve(self, channel: Channel, hello: Message, said: Said) -> Steps[None]:
        """One process, until it ends: whatever is wrong with it is its own end only."""
        channel.is_heard = lambda: True  # the run itself sees to processes that are stuck
        with self._changed:
            if self._came == self._expected:
                raise BadMessageError(f"all {self._expected} takers of this loader are there")
            needs, taken = _turns_in(said)
            self._there[channel] = Taker(needs, taken, taken)
            self._came += 1
            self._tell(channel)
            if self._error is not None:
                tell(channel, self._error)
            self._changed.notify_all()
        try:
            while (found := (yield from channel.receiving()))[0].kind is not MessageKind.GOODBYE:
                self._hear(channel, *found)
        finally:
            with self._changed:
                del self._there[channel]
                self._asked = [one for one in self._asked if one[0] is not channel]
                self._forget()

    def _hear(self, channel: Channel, message: Message, segment: Segment | None) -> None:
        said = said_in(message, segment) if message.body else {}
        if message.kind is MessageKind.PING:
            since_s = self._reads_since_s
            reads_s = 0.0 if since_s is None else time.monotonic() - since_s
            channel.send(Message(MessageKind.PONG, body=pack_json({"reads_s": reads_s})))
        elif message.kind is MessageKind.TAKEN:
            with self._changed:
                taker = self._there[channel]
                taker.needs, taker.taken = _turns_in(said)
                taker.next = max(taker.next, taker.taken)
                self._tell(channel)
                self._forget()
        elif message.kind is MessageKind.ASK_SAMPLES:
            with self._changed:
                self._asked.append((channel, message, _by_chunk(said)))
            self._answer()
        else:
            raise BadMessageError(message.kind.name)

    def _answer(self) -> None:
        """Who asks for what is kept."""
        with self._changed:
            kept, asked = self._kept, self._asked
            self._asked = [one for one in asked if not kept.keys() >= one[2].keys()]
        for channel, message, rows in asked:
            if not kept.keys() >= rows.keys():
                continue
            found = [(kept[turn].batch, own) for turn, own in rows.items()]
            pieces = [batch.take(own) for batch, own in found if batch is not None]
            whole, answer = Batch.concat(pieces), message._replace(kind=MessageKind.SAMPLES)
            arrays = {"ids": whole.ids, "dense": whole.dense, "labels": whole.labels}
            if whole.offsets is not None:
                arrays["offsets"] = whole.offsets
            with suppress(PeerGoneError, TimeoutError):
                send_said(channel.send, answer, arrays)

    # Under the lock.

    def _tell(self, channel: Channel) -> None:
        """Of what is kept and it has not heard of, as far as it may be behind."""
        taker = self._there[channel]
        due = [taker.taken, *self._behind(taker.taken)][:AHEAD]
        while taker.next in due and (kept := self._kept.get(taker.next)):
            taker.next = kept.after
            with suppress(PeerGoneError, TimeoutError):  # it comes again, or not
                channel.send(kept.told)

    def _is_due(self) -> bool:
        """Whether to read: no process is behind by so much, or one was given what is missing by a
        loader that has died."""
        takers, turn = self._there.values(), self._missing()
        return bool(takers) and (
            any(one.needs <= turn < one.taken for one in takers)
            or all(len(self._behind(one.taken)) < AHEAD for one in takers)
        )

    def _missing(self) -> Turn:
        """The first that any needs and that is not kept."""
        needs = [one.needs for one in self._there.values()]
        return min(([turn, *self._behind(turn)][-1] for turn in needs), default=(0, 0))

    def _behind(self, turn: Turn) -> list[Turn]:
        """What comes after each that is kept from this one on."""
        found = list[Turn]()
        while kept := self._kept.get(turn):
            found.append(turn := kept.after)
        return found

    def _forget(self) -> None:
        """What nobody needs any more."""
        first = min((one.needs for one in self._there.values()), default=(0, 0))
        self._kept = {turn: kept for turn, kept in self._kept.items() if turn >= first}
        self._changed.notify_all()


def load(config: LoaderConfig, takers: Takers) -> None:
    """Keep every own chunk for all takers, pass after pass."""
    if not config.life:  # else one that waits for another's data may not see that the old died
        takers.wait_for_all()
    data, own, of = config.data, config.loader, config.loaders
    fraction = data.validation_fraction
    try:
        found = open_source(
            data.name, data.dir, data.rows, data.skip_bad_rows, validation_fraction=fraction
        )
        source = cast(SharedSource, found)
        while True:
            for turn, after, batch in _turns(source, own, of, takers.first()):
                said: Said = {"turn": turn, "left_out": source.left_out("train")}
                if batch is not None:
                    said |= {"size": batch.size, "has_offsets": batch.offsets is not None}
                kind = MessageKind.PASS_ENDED if batch is None else MessageKind.CHUNK
                told = Message(kind, -1, own + turn[1] * of, pack_json(said))
                if not takers.keep(turn, Kept(batch, after, told)):
                    break
    except Exception as error:
        takers.fail(error)


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


def _turns_in(said: Said) -> tuple[Turn, Turn]:
    """What a process needs, and has come to. Raises BadMessageError."""
    match said.get("needs", [0, 0]), said.get("taken", [0, 0]):
        case [[int(a), int(b)], [int(c), int(d)]]:
            return (a, b), (c, d)
        case other:
            raise BadMessageError(f"a taker says {other}, which are no turns")


def _by_chunk(said: Said) -> dict[Turn, np.ndarray]:
    """int64: rows of each chunk that are asked for."""
    names = np.asarray(said["names"], np.int64)
    places, rows = names >> ROW_BITS, names & ((1 << ROW_BITS) - 1)
    return {(said["pass"], int(place)): rows[places == place] for place in np.unique(places)}


def _listener(sock: socket.socket, text: str) -> Listener:
    config = parse(LoaderConfig, json.loads(text), "the loader")
    takers, who = Takers(config.takers), f"loader {config.loader}"
    threading.Thread(target=load, args=(config, takers), daemon=True).start()
    return Listener(sock, config.secret, takers.serve, who, tls=config.tls)


if __name__ == "__main__":
    serve(_listener)
