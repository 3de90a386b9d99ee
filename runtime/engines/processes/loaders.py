"""Loaders as processes: they parse and hash ahead, and ranks take their chunks in turn.

Whatever the number of loaders, the chunks come in the order of the source, so (rank, step) trains
the same batch. Every rank takes every chunk and cuts its own share out of it: copying is cheap
beside parsing.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from runtime.config import DataConfig
from runtime.data.batch import Batch, Layout
from runtime.data.errors import regular_file
from runtime.data.source import Part, Provenance, SharedSource
from runtime.engines.processes.channel import Channel, PeerGoneError, connect, listen
from runtime.engines.processes.messages import (
    SECRET_BYTES,
    Message,
    MessageKind,
    error_from,
    pack_json,
    unpack_json,
)
from runtime.engines.processes.peers import BEATS_EVERY_S, STUCK_S, clock
from runtime.engines.processes.segments import Segment, unpack_arrays
from runtime.stop import PeerError, Silence, Stop

_ROOT = Path(__file__).parents[3]
_CONNECT_WITHIN_S = 20.0
_START_WITHIN_S = 60.0
"""A loader that has not spoken yet may still be loading Python."""
READ_WITHIN_S = 300.0
"""A loader that reads and parses one chunk for longer than that has files that do not answer."""


@dataclass(frozen=True, slots=True)
class LoaderAddress:
    """How a process of this host reaches the loaders."""

    names: tuple[str, ...]
    pids: tuple[int, ...]
    secret: str

    @classmethod
    def found_at(cls, place: str) -> LoaderAddress:
        """What another process of this user has left."""
        regular_file(Path(place))
        names, pids, secret = json.loads(Path(place).read_text())
        return cls(tuple(names), tuple(pids), secret)


class LoaderProcesses:
    """The loaders of one host; they end with this process, however it ends."""

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
        token, secret = secrets.token_hex(16), secrets.token_hex(SECRET_BYTES)
        # The kernel kills a loader with the *thread* that started it.
        of_main = threading.current_thread() is threading.main_thread()
        common = {"data": opened, "loaders": loaders, "takers": takers, "secret": secret}
        names = tuple(f"\0persia-testbed-{token}-loader-{k}" for k in range(loaders))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lives: list[socket.socket | IO[str]] = []
        self._end = weakref.finalize(self, _end_all, self._processes, self._lives)
        try:
            for k, name in enumerate(names):
                self._spawn(name, common | {"loader": k, "dies_with_parent": of_main})
        except BaseException:
            self._end()
            raise
        self.address = LoaderAddress(names, tuple(p.pid for p in self._processes), secret)

    def leave_address(self) -> str:
        """The place of the address, which only this user's processes can read: the place may be
        known. Whoever has the address may take the data."""
        note = os.fdopen(os.memfd_create("loaders", os.MFD_CLOEXEC), "w")
        json.dump(astuple(self.address), note)
        note.flush()
        self._lives.append(note)
        return f"/proc/{os.getpid()}/fd/{note.fileno()}"

    def how_it_ended(self, loader: int) -> str:
        """Words for what became of a loader's process."""
        try:
            code = self._processes[loader].wait(1.0)
        except subprocess.TimeoutExpired:
            return "has closed its connection, and is alive"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def close(self) -> None:
        """End them all."""
        self._end()

    def _spawn(self, name: str, asked: dict[str, Any]) -> None:
        door, _ = listen(name)
        ours, theirs = socket.socketpair()
        document = os.memfd_create("loader-config", os.MFD_CLOEXEC)
        try:
            os.write(document, json.dumps(asked).encode())
            os.lseek(document, 0, os.SEEK_SET)
            inherited = (door.fileno(), document, theirs.fileno())
            path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "runtime.engines.processes.loader_process",
                     *map(str, inherited)],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path},
                )
            )  # fmt: skip
            self._lives.append(ours)
        finally:
            door.close()
            theirs.close()
            os.close(document)


class LoadedSource:
    """A source whose training part comes from loaders; everything else is read here."""

    def __init__(
        self,
        source: SharedSource,
        address: LoaderAddress,
        how_it_ended: Callable[[int], str] = lambda loader: "has died",
        who: str = "the run",
    ) -> None:
        """``who`` waits for the loaders, in words."""
        self._source, self._address, self._who = source, address, who
        self._how_it_ended = how_it_ended
        self.stop = Stop()
        """Ends a wait for data when the run stops; that of the run."""
        self._channels = [_connect(address, k) for k in range(len(address.names))]
        self._has_spoken = [False] * len(self._channels)
        self._left_out = [(0, 0)] * len(self._channels)

    @property
    def layout(self) -> Layout:
        """That of the source."""
        return self._source.layout

    def provenance(self) -> Provenance:
        """That of the source, with the bad rows that the loaders left out."""
        return self._source.provenance()

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The training part: one pass of the loaders, in the order of the source."""
        if part != "train":
            yield from self._source.chunks(part)
            return
        loaders = len(self._channels)
        for number in count():
            batch = self._take(number % loaders, number)
            if batch is None:
                break
            if batch.size:
                yield batch
        for loader in range(loaders):  # the others have come to the same end
            if loader != number % loaders:
                self._take(loader, None)

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
        said = unpack_json(message.body)
        if message.kind is MessageKind.FAILED:
            raise error_from(said)
        self._note(loader, *said["left_out"])
        if message.kind is MessageKind.PASS_ENDED:
            return None
        if message.step != number or segment is None:
            raise PeerError(f"{who} sent chunk {message.step}, not {number}")
        found = unpack_arrays(said, segment)
        return Batch(found["ids"], found.get("offsets"), found["dense"], found["labels"])

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
            patience_s = STUCK_S if self._has_spoken[loader] else _START_WITHIN_S
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
        self._source.note_left_out("train", total, max(o for _, o in self._left_out), row)


def _connect(address: LoaderAddress, loader: int) -> Channel:
    try:
        channel = connect(address.names[loader], _CONNECT_WITHIN_S)
    except OSError as error:
        raise PeerError(f"loader {loader} cannot be reached: {error.strerror or error}") from None
    if not channel.is_own_user():
        channel.close()
        raise PeerError(f"loader {loader} is another user's; start the run again")
    channel.takes_arrays = True
    channel.send(Message(MessageKind.HELLO, body=pack_json({"secret": address.secret})))
    return channel


def _end_all(
    processes: list[subprocess.Popen[bytes]], lives: list[socket.socket | IO[str]]
) -> None:
    for life in lives:
        life.close()
    for process in processes:
        process.kill()
        process.wait()
