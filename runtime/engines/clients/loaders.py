"""Loaders as processes: they parse and hash ahead, and ranks take their chunks in turn.

Whatever the number of loaders, the chunks come in the order of the source, so (rank, step) trains
the same batch. Every rank takes every chunk and cuts its own share out of it: copying is cheap
beside parsing.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from runtime.config import DataConfig
from runtime.data.batch import Batch, Layout
from runtime.data.source import Part, Provenance, SharedSource
from runtime.engines.servers.launch import Address, Processes
from runtime.engines.transport.calls import said_in
from runtime.engines.transport.channel import Channel
from runtime.engines.transport.messages import Message, MessageKind, error_from, unpack_json
from runtime.engines.transport.peers import BEATS_EVERY_S, START_WITHIN_S, STUCK_S, clock, come_in
from runtime.engines.transport.segments import Segment
from runtime.engines.transport.wire import PeerGoneError
from runtime.stop import PeerError, Silence, Stop
from runtime.torchrun import MOST_RESTARTS

_LOOK_EVERY_S = 0.1
READ_WITHIN_S = 300.0
"""A loader that reads and parses one chunk for longer than that has files that do not answer."""


class LoaderProcesses(Processes):
    """The loaders of one host. One that is killed is started again, and begins where its takers
    are: nothing is lost, and nothing comes twice."""

    def __init__(self, data: DataConfig, loaders: int, takers: int) -> None:
        """``takers``: processes that will take every chunk; nothing is loaded before all are
        there."""
        alike = "rows", "skip_bad_rows", "validation_fraction"
        opened = {name: getattr(data, name) for name in alike} | {"name_or_path": data.name}
        opened |= {"data_dir": None if data.dir is None else str(data.dir)}
        common = {"data": opened, "loaders": loaders, "takers": takers, "again": False}
        super().__init__("loader", [common | {"loader": k} for k in range(loaders)])
        self._killed = [0] * loaders
        watched = (weakref.ref(self),)
        threading.Thread(target=_watch, args=watched, name="loaders", daemon=True).start()

    def is_over(self, loader: int) -> bool:
        """Whether it has ended, and does not come back."""
        process = self._processes[loader]
        code = None if process is None else process.poll()
        return code is not None and (code >= 0 or self._killed[loader] == MOST_RESTARTS)

    def replace_killed(self) -> None:
        """Start those again that were killed since. Raises PeerError when all are ended."""
        for k, process in enumerate(self._processes):
            if process is None or process.poll() is None or self.is_over(k):
                continue
            told = f"warning: loader {k} {self.how_it_ended(k)}; another one goes on for it"
            print(told, file=sys.stderr, flush=True)
            self._killed[k] += 1
            self.start_again(k, again=True)


def _watch(processes: weakref.ref[LoaderProcesses]) -> None:
    """As long as they are there."""
    while True:
        time.sleep(_LOOK_EVERY_S)
        found = processes()
        if found is None:
            return
        try:
            found.replace_killed()
        except PeerError:
            return
        del found


class LoadedSource:
    """A source whose training part comes from loaders; everything else is read here."""

    def __init__(
        self,
        source: SharedSource,
        address: Address,
        processes: LoaderProcesses | None = None,
        who: str = "the run",
    ) -> None:
        """``processes``: the loaders, where they were started here; ``who`` waits for them, in
        words."""
        self.parsed, self._address, self._who = source, address, who
        self._processes, self._turns = processes, [(0, 0)] * len(address.names)
        """Of each loader, what it gives next."""
        self.stop = Stop()
        """Ends a wait for data when the run stops; that of the run."""
        self._channels = [self._come_in(loader) for loader in range(len(address.names))]
        self._has_spoken = [False] * len(self._channels)
        self._left_out = [(0, 0)] * len(self._channels)
        self._counts = True  # bad rows that loaders have left out
        self._next = 0  # the chunk of this pass that is taken next

    @property
    def layout(self) -> Layout:
        """That of the source."""
        return self.parsed.layout

    def provenance(self) -> Provenance:
        """That of the source, with the bad rows that the loaders left out."""
        return self.parsed.provenance()

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The training part: one pass of the loaders, in the order of the source."""
        if part != "train":
            yield from self.parsed.chunks(part)
            return
        if self._next:  # a pass that was left in its middle, as by --data.rows: of what lies behind
            self._counts = False  # nothing was asked for, and loaders have read it by now
            deque(self._rest(), 0)
        yield from self._rest()

    def _rest(self) -> Iterator[Batch]:
        """What has not been taken of the present pass."""
        loaders = len(self._channels)
        while (batch := self._take(self._next % loaders, self._next)) is not None:
            self._next += 1
            if batch.size:
                yield batch
        for loader in range(loaders):  # the others have come to the same end
            if loader != self._next % loaders:
                self._take(loader, None)
        self._next = 0

    def close(self) -> None:
        """Nothing more is taken."""
        for channel in self._channels:
            channel.close()

    def _take(self, loader: int, number: int | None) -> Batch | None:
        while True:
            with suppress(PeerGoneError):
                message, segment = self._next_of(loader, number)
                break
            self._find_again(loader)
        with suppress(PeerGoneError):  # its next chunk shows that it has gone
            if message.kind is not MessageKind.FAILED:
                self._channels[loader].send(Message(MessageKind.TAKEN))
        said, (passes, place) = said_in(message, segment), self._turns[loader]
        if message.kind is MessageKind.FAILED:
            raise error_from(said)
        if self._counts:
            skipped, outside, row = said["left_out"]
            self._left_out[loader] = skipped, outside
            of_all, of_no_part = zip(*self._left_out, strict=True)
            self.parsed.note_left_out("train", sum(of_all), max(of_no_part), row)
        if message.kind is MessageKind.PASS_ENDED:
            self._turns[loader] = passes + 1, 0
            return None
        self._turns[loader] = passes, place + 1
        if message.step != number or segment is None:
            raise PeerError(f"{self._name(loader)} sent chunk {message.step}, not {number}")
        return Batch(said["ids"], said.get("offsets"), said["dense"], said["labels"])

    def _come_in(self, loader: int) -> Channel:
        said = {"from": self._turns[loader]}
        name, secret = self._address.names[loader], self._address.secrets[loader]
        return come_in(name, f"loader {loader}", secret, said)

    def _find_again(self, loader: int) -> None:
        """Another one is started in its place. Raises PeerError where none is."""
        self._channels[loader].close()
        began_s, started = time.monotonic(), self._processes
        while not (started and started.is_over(loader)):
            with suppress(PeerError, PeerGoneError):
                self._channels[loader] = self._come_in(loader)
                self._has_spoken[loader] = False
                return
            if time.monotonic() - began_s > START_WITHIN_S:
                break
            self.stop.sleep(_LOOK_EVERY_S)
        how = started.how_it_ended(loader) if started else "has died"
        raise PeerError(f"{self._name(loader)} {how}; its data is missing")

    def _next_of(self, loader: int, number: int | None) -> tuple[Message, Segment | None]:
        """What a loader gives next, however long it waits for another rank; while nothing comes, it
        is asked for signs of life."""
        channel, silence, asked_s = self._channels[loader], Silence(), 0.0
        began_s = time.monotonic()

        def look() -> None:
            nonlocal asked_s
            self.stop.check()
            if time.monotonic() - asked_s > BEATS_EVERY_S:
                asked_s = time.monotonic()
                channel.send(Message(MessageKind.PING))
            patience_s = STUCK_S if self._has_spoken[loader] else START_WITHIN_S
            if (silent_s := silence.look()) > patience_s:
                stuck = f"has given no sign of life for {silent_s:.0f} s: it is stopped or stuck"
                raise self._waited(loader, number, began_s, stuck)

        while True:
            message, segment = channel.receive(look)
            silence.heard()
            self._has_spoken[loader] = True
            if message.kind is not MessageKind.PONG:
                return message, segment
            reads_s = unpack_json(message.body)["reads_s"]
            if reads_s > READ_WITHIN_S:
                reads = f"is alive and has been reading for {reads_s:.0f} s: do its files answer?"
                raise self._waited(loader, number, began_s, reads)

    def _waited(self, loader: int, number: int | None, began_s: float, why: str) -> PeerError:
        waited_s = time.monotonic() - began_s
        what = "the end of the data" if number is None else f"chunk {number}"
        return PeerError(
            f"{self._name(loader)} {why}; {self._who} has waited {waited_s:.0f} s for {what} of it,"
            f" since {clock(waited_s)}"
        )

    def _name(self, loader: int) -> str:
        pids = self._address.pids if self._processes is None else self._processes.pids
        return f"loader {loader} (pid {pids[loader]})"
