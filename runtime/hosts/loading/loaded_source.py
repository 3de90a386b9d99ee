"""Loaders as processes: they parse and hash ahead, and give each process that trains its samples.

Whatever the number of loaders, the chunks come in the order of the source, so (rank, step) trains
the same batch. The stream of a process is cut from names of samples; only what one of its ranks
trains is asked for, as soon as it is cut.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.data.batch import Batch, Layout
from runtime.data.source import Part, Provenance, SharedSource
from runtime.hosts.launch.hosts import HostedProcesses
from runtime.hosts.launch.processes import Address, ServerProcesses
from runtime.hosts.loading.loader_process import ROW_BITS, Position, by_loader
from runtime.hosts.wire.calls import Payload, close_channel, payload_of, send_payload
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.messages import Message, MessageKind, error_from
from runtime.hosts.wire.peers import (
    BEATS_EVERY_S,
    START_WITHIN_S,
    STUCK_S,
    clock,
    connect,
    crowding,
)
from runtime.hosts.wire.segments import Segment
from runtime.hosts.wire.tls import TLS
from runtime.stop import MOST_RESTARTS, PeerError, Silence, Stop, pause_before

_LOOK_EVERY_S = 0.1
READ_WITHIN_S = 300.0
"""A loader that reads and parses one chunk for longer than that has files that do not answer."""
_MOST_NAMES = 3000  # of which a list fits into a message
TOGETHER = 8
"""Parts of the stream whose samples are requested at once: each request takes 0.5 ms of CPU beside
its bytes (measured, two cores of family 26, November 2026)."""


class SampleRequest:
    """Parts of the stream whose samples are requested together."""

    def __init__(self) -> None:
        self.names: list[np.ndarray] = []
        self.size = 0
        self.is_sent = False
        self.wait: Callable[[], Batch]
        """Receives the samples; set when the request is sent."""
        self._lock = threading.Lock()
        self._samples: Batch | None = None

    def samples(self) -> Batch:
        """The samples, as soon as they are here."""
        with self._lock:
            if self._samples is None:
                self._samples = self.wait()
            return self._samples


@dataclass(slots=True)
class LoaderConnection:
    """One loader, as a process that trains knows it."""

    channel: Channel
    changed: threading.Condition = field(default_factory=threading.Condition)
    sending: threading.Lock = field(default_factory=threading.Lock)
    """Taken before ``changed``: so messages are sent in their order."""
    announced: deque[Payload | Exception] = field(default_factory=deque)
    """Chunks and ends of passes that the stream has not come to; at last what went wrong."""
    next: Position = (0, 0)
    """What it will announce next."""
    held: dict[Position, int] = field(default_factory=dict)
    """Chunks that the stream has come to: samples that it has not passed."""
    pending: dict[int, Payload] = field(default_factory=dict)
    """Requests that wait for their answers, by number."""
    requested: int = 0
    """How many requests were sent."""
    samples: dict[int, Batch] = field(default_factory=dict)
    """Answers, by the number of the request."""
    silence: Silence = field(default_factory=Silence)
    patience_s: float = START_WITHIN_S
    reads_s: float = 0.0
    """For so long it has been reading one chunk."""
    error: BaseException | None = None

    def progress(self) -> Payload:
        """For the loader: the first chunk that is needed, and the one that the stream comes to."""
        first = self.announced[0] if self.announced else None
        reached = first["position"] if isinstance(first, dict) else self.next
        pending = [
            (payload["pass"], int(payload["names"][0]) >> ROW_BITS)
            for payload in self.pending.values()
        ]
        return {"needs": min([reached, *self.held, *pending]), "reached": reached}


class LoadedSource:
    """A source whose training part comes from loaders, as names of samples (`ask`); everything else
    is read here."""

    def __init__(
        self,
        source: SharedSource,
        address: Address,
        processes: ServerProcesses | HostedProcesses | None = None,
        who: str = "the run",
    ) -> None:
        """``processes``: the loaders, where this process starts them, and restarts those that are
        killed; ``who`` waits for them, in words."""
        self.parsed = source
        self.stop = Stop()
        """The stop of the run: it ends a wait for data."""
        self._address = address
        self._processes = processes
        self._who = who
        self._closed = threading.Event()

        # Per loader its connection, the bad rows that it has left out, and its deaths.
        loaders = range(len(address.names))
        self._connections = [LoaderConnection(self._connect(loader, {})) for loader in loaders]
        self._left_out = [(0, 0) for _ in loaders]
        self._deaths = [0 for _ in loaders]

        # The stream: the pass, its next chunk, and the request that is put together.
        self._counts_left_out = True
        self._pass = 0
        self._next = 0
        self._requesting = threading.Lock()
        self._request = SampleRequest()
        for k in loaders:
            threading.Thread(target=self._listen, args=(k,), name="loader", daemon=True).start()

    @property
    def layout(self) -> Layout:
        """The layout of the source."""
        return self.parsed.layout

    def provenance(self) -> Provenance:
        """The provenance of the source, with the bad rows that the loaders left out."""
        return self.parsed.provenance()

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The training part: one pass of the loaders, in the order of the source, as batches whose
        one id is a sample's name."""
        if part != "train":
            yield from self.parsed.chunks(part)
            return

        # The pass before ends: its last request is sent, and its chunks are let go.
        with self._requesting:
            self._send_request()
        for connection in self._connections:
            with connection.changed:
                connection.held.clear()

        # A pass that was left in its middle, as by --data.rows: nothing is requested of the rest,
        # and bad rows in it do not count, since loaders have read it by now.
        if self._next:
            self._counts_left_out = False
            for names in self._rest_of_pass():
                self.passed(names)
        yield from self._rest_of_pass()

    def ask(self, part: Batch) -> Callable[[], Batch]:
        """Request the samples that a part of the stream names; what is returned waits for them."""
        if not part.size:
            width = len(self.layout.tasks) + self.layout.weighted
            nothing = np.empty((0, len(self.layout.dense)), np.float32)
            return lambda: replace(part, dense=nothing, labels=np.empty((0, width), np.float32))

        # It joins the request that is put together, which is sent when it is large enough ...
        with self._requesting:
            request = self._request
            first = request.size
            request.names.append(part.ids.view(np.int64))
            request.size += part.size
            if len(request.names) == TOGETHER:
                self._send_request()

        # ... or when somebody waits for a part of it.
        def answer() -> Batch:
            with self._requesting:
                if not request.is_sent:
                    self._send_request()
            samples = request.samples().rows(first, first + part.size)
            if part.offsets is not None and samples.offsets is None:  # as others have bags
                samples = replace(samples, offsets=np.arange(len(samples.ids) + 1))
            return samples

        return answer

    def passed(self, names: Batch) -> None:
        """The stream is behind these samples: they are requested, or nobody will."""
        loaders = len(self._connections)
        numbers, counts = np.unique(names.ids.view(np.int64) >> ROW_BITS, return_counts=True)

        # Where a chunk is let go, what is wanted of it is requested before.
        held = []
        for number in numbers.tolist():
            place, loader = divmod(number, loaders)
            held.append(self._connections[loader].held.get((self._pass, place), 0))
        if (held <= counts).any():
            with self._requesting:
                self._send_request()

        # Count the samples down; a loader may forget a chunk that has none left.
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            place, loader = divmod(number, loaders)
            connection = self._connections[loader]
            position = (self._pass, place)
            with connection.changed:
                left = connection.held.pop(position, 0) - count
                if left > 0:
                    connection.held[position] = left
            if left <= 0:
                self._send_progress(loader)

    def close(self) -> None:
        """Tell the loaders that nothing more is needed."""
        self._closed.set()
        for connection in self._connections:
            close_channel(connection.channel)

    # The stream.

    def _rest_of_pass(self) -> Iterator[Batch]:
        """What has not been taken of the present pass."""
        loaders = len(self._connections)
        while (chunk := self._take(self._next % loaders, self._next)) is not None:
            first = self._next << ROW_BITS
            size = chunk["size"]
            self._next += 1
            if size:
                offsets = np.arange(size + 1) if chunk["has_offsets"] else None
                names = np.arange(first, first + size).view(np.uint64)
                nothing = np.empty((size, 0), np.float32)
                yield Batch(names, offsets, nothing, nothing)

        # The other loaders have come to the end of this pass, too.
        for loader in range(loaders):
            if loader != self._next % loaders:
                self._take(loader, None)
        self._next = 0

    def _take(self, loader: int, number: int | None) -> Payload | None:
        """What a loader announces next; None: the end of a pass."""
        connection = self._connections[loader]
        what = "the end of the data" if number is None else f"chunk {number}"
        self._wait(loader, lambda: bool(connection.announced), what)
        with connection.changed:
            announcement = connection.announced[0]
            if isinstance(announcement, Exception):
                raise announcement
            connection.announced.popleft()
            if announcement.get("size"):
                connection.held[announcement["position"]] = announcement["size"]
        self._send_progress(loader)

        # Bad rows so far: each loader counts those of its chunks, and all of those of no part.
        if self._counts_left_out:
            skipped, outside, row = announcement["left_out"]
            self._left_out[loader] = (skipped, outside)
            skipped_rows, outside_rows = zip(*self._left_out, strict=True)
            self.parsed.note_left_out("train", sum(skipped_rows), max(outside_rows), row)
        if "size" not in announcement:
            return None
        self._pass = announcement["position"][0]
        return announcement

    # Messages to loaders.

    def _send_request(self) -> None:
        """Under the lock: request what was put together, and begin another one."""
        request = self._request
        if not request.size:
            return
        names = np.concatenate(request.names)
        order, names_of_loaders = by_loader(names, len(self._connections))
        sent = [(k, *self._send_names(k, of_one)) for k, of_one in names_of_loaders.items()]

        def wait() -> Batch:
            pieces = [self._receive_samples(loader, *about) for loader, *about in sent]
            samples = Batch.concat(pieces)
            return samples if order is None else samples.take(np.argsort(order))

        request.wait = wait
        request.is_sent = True
        self._request = SampleRequest()

    def _send_names(self, loader: int, names: np.ndarray) -> tuple[int, int]:
        """The number of the request, and of the first chunk that it is about."""
        connection = self._connections[loader]
        is_short = len(names) <= _MOST_NAMES
        payload = {"pass": self._pass, "names": names.tolist() if is_short else names}
        with connection.sending:
            with connection.changed:
                number = connection.requested
                connection.requested += 1
                connection.pending[number] = payload
            self._send(loader, Message(MessageKind.READ_SAMPLES, number=number), payload)
        return number, (int(names[0]) >> ROW_BITS) * len(self._connections) + loader

    def _receive_samples(self, loader: int, number: int, chunk: int) -> Batch:
        connection = self._connections[loader]
        self._wait(loader, lambda: number in connection.samples, f"samples of chunk {chunk}")
        with connection.changed:
            return connection.samples.pop(number)

    def _send_progress(self, loader: int) -> None:
        connection = self._connections[loader]
        with connection.sending:
            with connection.changed:
                progress = connection.progress()
            self._send(loader, Message(MessageKind.PROGRESS), progress)

    def _send(self, loader: int, message: Message, payload: Payload) -> None:
        """Send; to one that has gone, or takes nothing, nothing: its successor is sent it all."""
        channel = self._connections[loader].channel
        try:
            send_payload(channel.send, message, payload)
        except (PeerGoneError, TimeoutError):
            channel.close()

    def _wait(self, loader: int, holds: Callable[[], bool], what: str) -> None:
        """Wait, however long another rank holds the loader up; while nothing comes, it is sent
        pings. Raises PeerError where it is stuck."""
        connection = self._connections[loader]
        started_s = time.monotonic()
        pinged_s = 0.0
        while True:
            with connection.changed:
                connection.changed.wait_for(
                    lambda: holds() or bool(connection.error), _LOOK_EVERY_S
                )
                if holds():
                    return
                if connection.error is not None:
                    raise connection.error
            self.stop.check()

            # A sign of life, once a second.
            now_s = time.monotonic()
            if now_s - pinged_s > BEATS_EVERY_S:
                pinged_s = now_s
                self._send(loader, Message(MessageKind.PING), {})

            # It is silent, or alive and its files do not answer.
            crowded = crowding(len(self._connections))
            if (silent_s := connection.silence.look()) > connection.patience_s * crowded:
                reason = f"has given no sign of life for {silent_s:.0f} s: it is stopped or stuck"
            elif connection.reads_s > READ_WITHIN_S:
                read_s = f"{connection.reads_s:.0f} s"
                reason = f"is alive and has been reading for {read_s}: do its files answer?"
            else:
                continue
            waited_s = now_s - started_s
            raise PeerError(
                f"{self._name(loader)} {reason}; {self._who} has waited {waited_s:.0f} s for"
                f" {what} of it, since {clock(waited_s)}"
            )

    # The thread of each loader.

    def _listen(self, loader: int) -> None:
        """Receive what a loader sends; when it dies, go on with the one that is started for it."""
        # Messages until the loader ends: then another one takes its place, unless the run is over.
        connection = self._connections[loader]
        try:
            while True:
                try:
                    self._store(connection, *connection.channel.receive())
                except PeerGoneError:
                    if self._closed.is_set():
                        return
                    if connection.announced and isinstance(connection.announced[-1], Exception):
                        raise connection.announced[-1] from None
                    self._fail_over(loader)
        except BaseException as error:
            # What goes wrong here is raised where a rank waits for this loader.
            with connection.changed:
                connection.error = error
                connection.changed.notify_all()
            if isinstance(error, PeerError):  # another rank may wait for it, and all for that one
                self.stop.set(error)

    def _store(
        self, connection: LoaderConnection, message: Message, segment: Segment | None
    ) -> None:
        """Store what a message brings, and wake who waits for it."""
        # Any message is a sign of life.
        payload = payload_of(message, segment)
        with connection.changed:
            connection.silence.heard()
            connection.patience_s = STUCK_S
            connection.reads_s = payload.get("reads_s", 0.0)

            # A chunk or the end of a pass, in order; one that a dead loader has announced is not
            # counted twice.
            if message.kind in (MessageKind.CHUNK, MessageKind.PASS_ENDED):
                number, place = payload["position"]
                if (number, place) == connection.next:  # else a loader that has died announced it
                    connection.announced.append({**payload, "position": connection.next})
                    is_chunk = "size" in payload
                    connection.next = (number, place + 1) if is_chunk else (number + 1, 0)
            elif message.kind is MessageKind.SAMPLES and message.number in connection.pending:
                # Samples that were asked for, or why there are none.
                del connection.pending[message.number]
                connection.samples[message.number] = Batch(**{"offsets": None, **payload})
            elif message.kind is MessageKind.FAILED:
                connection.announced.append(error_from(payload))
            connection.changed.notify_all()

    def _fail_over(self, loader: int) -> None:
        """Connect to the loader that is started in its place, here or by another process. Raises
        PeerError where none is."""
        connection = self._connections[loader]
        processes = self._processes
        started_s = time.monotonic()
        connection.channel.close()
        connection.patience_s = math.inf  # whoever waits is told by ``error``
        how = processes.how_it_ended(loader) if processes else "has died"
        tries = 0
        while not self._closed.is_set():
            # It died too often, or nobody has started it.
            is_lost = processes and self._deaths[loader] == MOST_RESTARTS
            if is_lost or time.monotonic() - started_s > START_WITHIN_S:
                raise PeerError(f"{self._name(loader)} {how}; its data is missing")
            with suppress(PeerError, PeerGoneError):
                if processes:
                    self._deaths[loader] += 1
                    processes.restart(loader)
                    warning = f"warning: loader {loader} {how}; another one goes on for it"
                    print(warning, file=sys.stderr, flush=True)
                    processes = None

                # It reads on from the first chunk that is needed here.
                with connection.changed:
                    progress = connection.progress()
                channel = self._connect(loader, progress)
                with connection.sending:
                    connection.channel = channel
                connection.silence.heard()
                connection.patience_s = START_WITHIN_S
                threading.Thread(target=self._request_again, args=(loader,), daemon=True).start()
                return
            tries += 1  # its host may be starting
            self.stop.sleep(pause_before(tries) if processes else _LOOK_EVERY_S)

    def _request_again(self, loader: int) -> None:
        """Send what the dead one did not answer, in a thread of its own: answers come meanwhile."""
        connection = self._connections[loader]
        with connection.sending:
            with connection.changed:
                pending = list(connection.pending.items())
            for number, payload in pending:
                self._send(loader, Message(MessageKind.READ_SAMPLES, number=number), payload)
        self._send_progress(loader)

    def _connect(self, loader: int, progress: Payload) -> Channel:
        name = self._address.names[loader]
        return connect(name, f"loader {loader}", self._address.secrets[loader], progress)

    def _name(self, loader: int) -> str:
        pids = self._address.pids
        if isinstance(self._processes, ServerProcesses):
            pids = tuple(self._processes.pids)
        where = f"(pid {pids[loader]})" if pids else self._address.names[loader].removeprefix(TLS)
        return f"loader {loader} {where}"
