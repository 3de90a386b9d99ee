"""A loader as a process: `runtime.hosts.loading.loader_process`.

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
from runtime.hosts.launch.process_config import LoaderConfig
from runtime.hosts.launch.processes import serve
from runtime.hosts.wire.calls import Payload, payload_of, send_error, send_payload
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import BadMessageError, Message, MessageKind, pack_json
from runtime.hosts.wire.segments import Segment

AHEAD = 4
"""Chunks that the stream of a process may be behind its loader."""
ROW_BITS = 24
"""Bits of a sample's name for its row in a chunk; the number of the chunk stands above."""
Position = tuple[int, int]
"""The number of a pass, and of a loader's chunk in it, or of its end."""


def by_loader(names: np.ndarray, loaders: int) -> tuple[np.ndarray | None, dict[int, np.ndarray]]:
    """Names of samples in the stream of all loaders: an order in which those of loader 0 come first
    (None: this one), and the names of each loader, as it counts its chunks."""
    # Sort by loader, where the names are not sorted so already.
    order = None
    key = names + ((names >> ROW_BITS) % loaders << 56)
    if (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
        names = names[order]

    # Chunk n of the stream is chunk n // loaders of its loader.
    numbers = names >> ROW_BITS
    at_loader = names - ((numbers - numbers // loaders) << ROW_BITS)
    present = np.unique(numbers % loaders).tolist()
    return order, {k: at_loader[numbers % loaders == k] for k in present}


class ParsedChunk(NamedTuple):
    """A chunk, or None for the end of a pass; what comes next, and what consumers are sent."""

    batch: Batch | None
    after: Position
    announcement: Message


class PendingRequest(NamedTuple):
    """Samples that a consumer wants: rows by chunk; some may have to be read again."""

    channel: Channel
    message: Message
    rows: dict[Position, np.ndarray]


@dataclass(slots=True)
class Consumer:
    """A process that trains, as its loader knows it."""

    needs: Position
    """The first chunk of which it may want samples."""
    reached: Position
    """What its stream comes to next."""
    next: Position
    """What is announced to it next."""


class Consumers:
    """All processes that train, the chunks that are kept for them, and whether to read more."""

    def __init__(self, expected: int) -> None:
        """``expected``: processes; nobody else is admitted."""
        self._expected = expected
        self._admitted = 0
        self._consumers: dict[Channel, Consumer] = {}
        self._chunks: dict[Position, ParsedChunk] = {}
        self._requests: list[PendingRequest] = []
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._reads_since_s: float | None = None

    # The thread that reads.

    def wait_for_all(self) -> None:
        """Return when all that are expected are there."""
        with self._changed:
            self._reads_since_s = time.monotonic()
            self._changed.wait_for(lambda: self._admitted == self._expected)

    def next_missing(self) -> Position:
        """The first chunk that any consumer misses, as soon as it is to be read."""
        with self._changed:
            self._reads_since_s = None
            self._changed.wait_for(self._is_due)
            self._reads_since_s = time.monotonic()
            return self._missing()

    def keep(self, position: Position, chunk: ParsedChunk) -> bool:
        """Send it to those that want it; whether what comes after it is to be read next."""
        with self._changed:
            # A new dict: a request that is being answered keeps the chunks that it has.
            self._chunks = self._chunks | {position: chunk}
            for channel in self._consumers:
                self._announce(channel)
        self._answer_requests()
        return self.next_missing() == chunk.after

    def fail(self, error: Exception) -> None:
        """Send each consumer what is wrong; what there is can be read all the same."""
        with self._changed:
            self._error = error
            for channel in self._consumers:
                send_error(channel, error)

    # The connections.

    def serve(self, channel: Channel, hello: Message, payload: Payload) -> Coroutine[None]:
        """Serve one process until it ends: whatever is wrong with it is its own end only."""
        # Admit it once: every consumer gets every announcement from its position on.
        channel.is_alive = lambda: True  # the run itself sees to processes that are stuck
        with self._changed:
            if self._admitted == self._expected:
                raise BadMessageError(f"all {self._expected} consumers of this loader are there")
            needs, reached = _positions_in(payload)
            self._consumers[channel] = Consumer(needs, reached, reached)
            self._admitted += 1
            self._announce(channel)
            if self._error is not None:
                send_error(channel, self._error)
            self._changed.notify_all()

        # Its requests until it goes, and what only it still needed is forgotten then.
        try:
            while True:
                message, segment = yield from channel.receiving()
                if message.kind is MessageKind.DISCONNECT:
                    return
                self._receive(channel, message, segment)
        finally:
            with self._changed:
                del self._consumers[channel]
                self._requests = [r for r in self._requests if r.channel is not channel]
                self._forget()

    def _receive(self, channel: Channel, message: Message, segment: Segment | None) -> None:
        payload = payload_of(message, segment) if message.body else {}
        # A sign of life is answered by how long it has been reading.
        if message.kind is MessageKind.PING:
            since_s = self._reads_since_s
            reads_s = 0.0 if since_s is None else time.monotonic() - since_s
            channel.send(Message(MessageKind.PONG, body=pack_json({"reads_s": reads_s})))
        elif message.kind is MessageKind.PROGRESS:
            # The stream of a consumer has come further: it is sent more, and old chunks may go.
            with self._changed:
                consumer = self._consumers[channel]
                consumer.needs, consumer.reached = _positions_in(payload)
                consumer.next = max(consumer.next, consumer.reached)
                self._announce(channel)
                self._forget()
        elif message.kind is MessageKind.READ_SAMPLES:
            # Samples, which are sent as soon as their chunks are here.
            with self._changed:
                self._requests.append(PendingRequest(channel, message, _by_chunk(payload)))
            self._answer_requests()
        else:
            raise BadMessageError(message.kind.name)

    def _answer_requests(self) -> None:
        """Send the samples whose chunks are here."""
        # Take the requests that can be answered out under the lock, and answer them without it.
        with self._changed:
            chunks = self._chunks
            requests = self._requests
            self._requests = [r for r in requests if not chunks.keys() >= r.rows.keys()]

        # Samples of one request may lie in several chunks.
        for channel, message, rows_by_chunk in requests:
            if not chunks.keys() >= rows_by_chunk.keys():
                continue
            pieces = []
            for position, rows in rows_by_chunk.items():
                batch = chunks[position].batch
                if batch is not None:
                    pieces.append(batch.take(rows))
            samples = Batch.concat(pieces)
            arrays = samples.named()
            answer = message._replace(kind=MessageKind.SAMPLES)
            with suppress(PeerGoneError, TimeoutError):
                send_payload(channel.send, answer, arrays)

    # Under the lock.

    def _announce(self, channel: Channel) -> None:
        """Announce chunks to a consumer that it does not know of, as far as it may be behind."""
        consumer = self._consumers[channel]
        due = [consumer.reached, *self._behind(consumer.reached)][:AHEAD]
        while consumer.next in due and (chunk := self._chunks.get(consumer.next)):
            consumer.next = chunk.after
            with suppress(PeerGoneError, TimeoutError):  # it comes again, or not
                channel.send(chunk.announcement)

    def _is_due(self) -> bool:
        """Whether to read: no process is behind by so much, or one was sent what is missing by a
        loader that has died."""
        consumers = self._consumers.values()
        missing = self._missing()
        return bool(consumers) and (
            any(consumer.needs <= missing < consumer.reached for consumer in consumers)
            or all(len(self._behind(consumer.reached)) < AHEAD for consumer in consumers)
        )

    def _missing(self) -> Position:
        """The first chunk that any consumer needs and that is not kept."""
        needs = [consumer.needs for consumer in self._consumers.values()]
        return min(([first, *self._behind(first)][-1] for first in needs), default=(0, 0))

    def _behind(self, position: Position) -> list[Position]:
        """What comes after each chunk that is kept from this one on."""
        positions = list[Position]()
        while chunk := self._chunks.get(position):
            position = chunk.after
            positions.append(position)
        return positions

    def _forget(self) -> None:
        """Drop the chunks that no consumer needs any more."""
        first = min((consumer.needs for consumer in self._consumers.values()), default=(0, 0))
        self._chunks = {at: chunk for at, chunk in self._chunks.items() if at >= first}
        self._changed.notify_all()


def load(config: LoaderConfig, consumers: Consumers) -> None:
    """Read and parse every chunk of this loader for all consumers, pass after pass."""
    # A loader that was started again does not wait: one of them may not have noticed yet.
    if not config.incarnation:
        consumers.wait_for_all()
    data = config.data
    fraction = data.validation_fraction
    try:
        opened = open_source(
            data.name, data.dir, data.rows, data.skip_bad_rows, validation_fraction=fraction
        )
        source = cast(SharedSource, opened)

        # From the first chunk that is missing, until a consumer needs an earlier one again.
        while True:
            first = consumers.next_missing()
            for position, after, batch in _chunks(source, config.loader, config.loaders, first):
                payload: Payload = {"position": position, "left_out": source.left_out("train")}
                if batch is not None:
                    payload |= {"size": batch.size, "has_offsets": batch.offsets is not None}
                kind = MessageKind.PASS_ENDED if batch is None else MessageKind.CHUNK
                number = config.loader + position[1] * config.loaders
                announcement = Message(kind, -1, number, pack_json(payload))
                if not consumers.keep(position, ParsedChunk(batch, after, announcement)):
                    break
    except Exception as error:
        consumers.fail(error)


def _chunks(
    source: SharedSource, loader: int, loaders: int, first: Position
) -> Iterator[tuple[Position, Position, Batch | None]]:
    """Chunks from the ``first`` one on, pass after pass: the position of each, the one after it,
    and the chunk; None for the end of a pass."""
    for number in count(first[0]):
        place = 0
        for batch in source.turns("train", loader, loaders):
            if (number, place) >= first:
                yield (number, place), (number, place + 1), batch
            place += 1
        yield (number, place), (number + 1, 0), None


def _positions_in(payload: Payload) -> tuple[Position, Position]:
    """What a process needs, and has come to. Raises BadMessageError."""
    match payload.get("needs", [0, 0]), payload.get("reached", [0, 0]):
        case [[int(a), int(b)], [int(c), int(d)]]:
            return (a, b), (c, d)
        case other:
            raise BadMessageError(f"a consumer says {other}, which are no positions")


def _by_chunk(payload: Payload) -> dict[Position, np.ndarray]:
    """The rows of each chunk that are wanted, int64."""
    names = np.asarray(payload["names"], np.int64)
    places = names >> ROW_BITS
    rows = names & ((1 << ROW_BITS) - 1)
    return {(payload["pass"], int(at)): rows[places == at] for at in np.unique(places)}


def _listener(sock: socket.socket, text: str) -> Listener:
    config = parse(LoaderConfig, json.loads(text), "the loader")
    consumers = Consumers(config.consumers)
    who = f"loader {config.loader}"
    threading.Thread(target=load, args=(config, consumers), daemon=True).start()
    return Listener(sock, config.secret, consumers.serve, who, tls=config.tls)


if __name__ == "__main__":
    serve(_listener)
