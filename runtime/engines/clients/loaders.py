"""Loaders as processes: they parse and hash ahead, and ranks take their chunks in turn.

Whatever the number of loaders, the chunks come in the order of the source, so (rank, step) trains
the same batch. Every rank takes every chunk and cuts its own share out of it: copying is cheap
beside parsing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from runtime.config import DataConfig
from runtime.data.batch import Batch, Layout
from runtime.data.source import Part, Provenance, SharedSource
from runtime.engines.servers.launch import Address, Processes
from runtime.engines.transport.calls import said_in
from runtime.engines.transport.messages import Message, MessageKind, error_from, unpack_json
from runtime.engines.transport.peers import BEATS_EVERY_S, START_WITHIN_S, STUCK_S, clock, come_in
from runtime.engines.transport.segments import Segment
from runtime.engines.transport.wire import PeerGoneError
from runtime.stop import PeerError, Silence, Stop

READ_WITHIN_S = 300.0
"""A loader that reads and parses one chunk for longer than that has files that do not answer."""


class LoaderProcesses(Processes):
    """The loaders of one host."""

    def __init__(self, data: DataConfig, loaders: int, takers: int) -> None:
        """``takers``: processes that will take every chunk; nothing is loaded before all are
        there."""
        opened = {
            "name_or_path": data.name,
            "data_dir": None if data.dir is None else str(data.dir),
            "rows": data.rows,
            "skip_bad_rows": data.skip_bad_rows,
            "validation_fraction": data.validation_fraction,
        }
        common = {"data": opened, "loaders": loaders, "takers": takers}
        super().__init__("loader", [common | {"loader": k} for k in range(loaders)])


class LoadedSource:
    """A source whose training part comes from loaders; everything else is read here."""

    def __init__(
        self,
        source: SharedSource,
        address: Address,
        how_it_ended: Callable[[int], str] = lambda loader: "has died",
        who: str = "the run",
    ) -> None:
        """``who`` waits for the loaders, in words."""
        self.parsed, self._address, self._who = source, address, who
        self._how_it_ended = how_it_ended
        self.stop = Stop()
        """Ends a wait for data when the run stops; that of the run."""
        self._channels = [
            come_in(name, f"loader {k}", address.secrets[k], {})
            for k, name in enumerate(address.names)
        ]
        self._has_spoken = [False] * len(self._channels)
        self._left_out = [(0, 0)] * len(self._channels)
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
        if self._next:  # a pass that was left in its middle, as by --data.rows
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
        who = self._name(loader)
        try:
            message, segment = self._next_of(loader, number)
            if message.kind is not MessageKind.FAILED:
                self._channels[loader].send(Message(MessageKind.TAKEN))
        except PeerGoneError:
            raise PeerError(f"{who} {self._how_it_ended(loader)}; its data is missing") from None
        said = said_in(message, segment)
        if message.kind is MessageKind.FAILED:
            raise error_from(said)
        self._note(loader, *said["left_out"])
        if message.kind is MessageKind.PASS_ENDED:
            return None
        if message.step != number or segment is None:
            raise PeerError(f"{who} sent chunk {message.step}, not {number}")
        return Batch(said["ids"], said.get("offsets"), said["dense"], said["labels"])

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
        return f"loader {loader} (pid {self._address.pids[loader]})"

    def _note(self, loader: int, skipped: int, outside: int, row: int | None) -> None:
        self._left_out[loader] = skipped, outside
        total = sum(s for s, _ in self._left_out)
        self.parsed.note_left_out("train", total, max(o for _, o in self._left_out), row)
