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
from runtime.engines.launch.hosts import HostedServers
from runtime.engines.launch.processes import Address, ServerProcesses
from runtime.engines.loading.loader_process import ROW_BITS, Turn, by_loader
from runtime.engines.wire.calls import Said, goodbye, said_in, send_said
from runtime.engines.wire.channel import Channel
from runtime.engines.wire.connection import PeerGoneError
from runtime.engines.wire.messages import Message, MessageKind, error_from
from runtime.engines.wire.peers import BEATS_EVERY_S, START_WITHIN_S, STUCK_S, clock, come_in
from runtime.engines.wire.segments import Segment
from runtime.engines.wire.tls import TLS
from runtime.stop import PeerError, Silence, Stop
from runtime.torchrun import MOST_RESTARTS, pause_before

_LOOK_EVERY_S = 0.1
READ_WITHIN_S = 300.0
"""A loader that reads and parses one chunk for longer than that has files that do not answer."""
_FEW = 3000  # names fit into a message
TOGETHER = 8
"""Parts of the stream whose samples are asked for at once: each question takes 0.5 ms of CPU beside
its bytes (measured, two cores of family 26, November 2026)."""


class Question:
    """Parts of the stream that are asked for together."""

    def __init__(self) -> None:
        self.names: list[np.ndarray] = []
        self.size = 0
        self.is_sent, self._lock = False, threading.Lock()
        self.wait: Callable[[], Batch]
        self._found: Batch | None = None

    def answer(self) -> Batch:
        """Their samples, as soon as they are here."""
        with self._lock:
            if self._found is None:
                self._found = self.wait()
            return self._found


@dataclass(slots=True)
class Link:
    """One loader, as who takes from it knows it."""

    channel: Channel
    changed: threading.Condition = field(default_factory=threading.Condition)
    sending: threading.Lock = field(default_factory=threading.Lock)
    """Taken before ``changed``: so what is said comes in its order."""
    told: deque[Said | Exception] = field(default_factory=deque)
    """Chunks and ends of passes that the stream has not come to; at last what went wrong."""
    next: Turn = (0, 0)
    """What it will tell of next."""
    held: dict[Turn, int] = field(default_factory=dict)
    """Chunks that the stream has come to: samples that it has not passed."""
    asked: dict[int, Said] = field(default_factory=dict)
    """Questions that wait for their answers; both by number."""
    questions: int = 0
    answers: dict[int, Batch] = field(default_factory=dict)
    silence: Silence = field(default_factory=Silence)
    patience_s: float = START_WITHIN_S
    reads_s: float = 0.0
    """For so long it has been reading one chunk."""
    error: BaseException | None = None

    def state(self) -> Said:
        """For the loader: the first chunk that is needed, and the one that the stream comes to."""
        first = self.told[0] if self.told else None
        taken = first["turn"] if isinstance(first, dict) else self.next
        asked = [(said["pass"], int(said["names"][0]) >> ROW_BITS) for said in self.asked.values()]
        return {"needs": min([taken, *self.held, *asked]), "taken": taken}


class LoadedSource:
    """A source whose training part comes from loaders, as names of samples (`ask`); everything else
    is read here."""

    def __init__(
        self,
        source: SharedSource,
        address: Address,
        processes: ServerProcesses | HostedServers | None = None,
        who: str = "the run",
    ) -> None:
        """``processes``: the loaders, where this process starts them, and those that are killed
        again; ``who`` waits for them, in words."""
        self.parsed, self._address, self._who = source, address, who
        self._processes, self._closed = processes, threading.Event()
        self.stop = Stop()
        """Ends a wait for data when the run stops; that of the run."""
        loaders = range(len(address.names))
        self._links = [Link(self._come_in(loader, {})) for loader in loaders]
        self._left_out, self._deaths = [(0, 0) for _ in loaders], [0 for _ in loaders]
        self._counts = True  # bad rows that loaders have left out
        self._pass = self._next = 0  # the chunk of this pass that is taken next
        self._asking, self._question = threading.Lock(), Question()
        for k in loaders:
            threading.Thread(target=self._listen, args=(k,), name="loader", daemon=True).start()

    @property
    def layout(self) -> Layout:
        """That of the source."""
        return self.parsed.layout

    def provenance(self) -> Provenance:
        """That of the source, with the bad rows that the loaders left out."""
        return self.parsed.provenance()

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The training part: one pass of the loaders, in the order of the source, as batches whose
        one id is a sample's name."""
        if part != "train":
            yield from self.parsed.chunks(part)
            return
        with self._asking:  # of the pass before
            self._send_question()
        for link in self._links:
            with link.changed:
                link.held.clear()
        if self._next:  # a pass that was left in its middle, as by --data.rows: of what lies behind
            self._counts = False  # nothing was asked for, and loaders have read it by now
            for names in self._rest():
                self.passed(names)
        yield from self._rest()

    def ask(self, part: Batch) -> Callable[[], Batch]:
        """Ask for the samples that a part of the stream names; what is given waits for them."""
        if not part.size:
            width = len(self.layout.tasks) + self.layout.weighted
            nothing = np.empty((0, len(self.layout.dense)), np.float32)
            return lambda: replace(part, dense=nothing, labels=np.empty((0, width), np.float32))
        with self._asking:
            question, first = self._question, self._question.size
            question.names.append(part.ids.view(np.int64))
            question.size += part.size
            if len(question.names) == TOGETHER:
                self._send_question()

        def answer() -> Batch:
            with self._asking:
                if not question.is_sent:
                    self._send_question()
            found = question.answer().rows(first, first + part.size)
            if part.offsets is not None and found.offsets is None:  # as others have bags
                found = replace(found, offsets=np.arange(len(found.ids) + 1))
            return found

        return answer

    def passed(self, names: Batch) -> None:
        """The stream is behind these: they have been asked for, or nobody will."""
        numbers, counts = np.unique(names.ids.view(np.int64) >> ROW_BITS, return_counts=True)
        places = [divmod(number, len(self._links)) for number in numbers.tolist()]
        held = [self._links[k].held.get((self._pass, place), 0) for place, k in places]
        if (held <= counts).any():  # a chunk is let go: what is wanted of it is asked for before
            with self._asking:
                self._send_question()
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            place, loader = divmod(number, len(self._links))
            link, turn = self._links[loader], (self._pass, place)
            with link.changed:
                left = link.held.pop(turn, 0) - count
                if left > 0:
                    link.held[turn] = left
            if left <= 0:
                self._say_taken(loader)

    def close(self) -> None:
        """Nothing more is taken."""
        self._closed.set()
        for link in self._links:
            goodbye(link.channel)

    # The stream.

    def _rest(self) -> Iterator[Batch]:
        """What has not been taken of the present pass."""
        loaders = len(self._links)
        while (said := self._take(self._next % loaders, self._next)) is not None:
            first, size = self._next << ROW_BITS, said["size"]
            self._next += 1
            if size:
                offsets = np.arange(size + 1) if said["has_offsets"] else None
                ids, nothing = np.arange(first, first + size), np.empty((size, 0), np.float32)
                yield Batch(ids.view(np.uint64), offsets, nothing, nothing)
        for loader in range(loaders):  # the others have come to the same end
            if loader != self._next % loaders:
                self._take(loader, None)
        self._next = 0

    def _take(self, loader: int, number: int | None) -> Said | None:
        """What a loader tells next of; None: the end of a pass."""
        link, what = self._links[loader], "the end of the data"
        self._wait(loader, lambda: bool(link.told), what if number is None else f"chunk {number}")
        with link.changed:
            said = link.told[0]
            if isinstance(said, Exception):
                raise said
            link.told.popleft()
            if said.get("size"):
                link.held[said["turn"]] = said["size"]
        self._say_taken(loader)
        if self._counts:
            skipped, outside, row = said["left_out"]
            self._left_out[loader] = skipped, outside
            of_all, of_no_part = zip(*self._left_out, strict=True)
            self.parsed.note_left_out("train", sum(of_all), max(of_no_part), row)
        if "size" not in said:
            return None
        self._pass = said["turn"][0]
        return said

    # What is said.

    def _send_question(self) -> None:
        """Under the lock: ask for what was put together, and begin another one."""
        question = self._question
        if not question.size:
            return
        order, of = by_loader(np.concatenate(question.names), len(self._links))
        asked = [(loader, self._ask(loader, own)) for loader, own in of.items()]

        def wait() -> Batch:
            found = Batch.concat([self._answer(loader, *about) for loader, about in asked])
            return found if order is None else found.take(np.argsort(order))

        question.wait, question.is_sent, self._question = wait, True, Question()

    def _ask(self, loader: int, names: np.ndarray) -> tuple[int, int]:
        """The number of the question, and of the first chunk that it is about."""
        link, few = self._links[loader], len(names) <= _FEW
        said = {"pass": self._pass, "names": names.tolist() if few else names}
        with link.sending:
            with link.changed:
                number, link.questions = link.questions, link.questions + 1
                link.asked[number] = said
            self._send(loader, Message(MessageKind.ASK_SAMPLES, number=number), said)
        return number, (int(names[0]) >> ROW_BITS) * len(self._links) + loader

    def _answer(self, loader: int, number: int, chunk: int) -> Batch:
        link = self._links[loader]
        self._wait(loader, lambda: number in link.answers, f"samples of chunk {chunk}")
        with link.changed:
            return link.answers.pop(number)

    def _say_taken(self, loader: int) -> None:
        link = self._links[loader]
        with link.sending:
            with link.changed:
                state = link.state()
            self._send(loader, Message(MessageKind.TAKEN), state)

    def _send(self, loader: int, message: Message, said: Said) -> None:
        """To one that has gone, or takes nothing, nothing: another is told all that matters."""
        channel = self._links[loader].channel
        try:
            send_said(channel.send, message, said)
        except (PeerGoneError, TimeoutError):
            channel.close()

    def _wait(self, loader: int, holds: Callable[[], bool], what: str) -> None:
        """However long it waits for another rank; while nothing comes, it is asked for signs of
        life."""
        link, began_s, asked_s = self._links[loader], time.monotonic(), 0.0
        while True:
            with link.changed:
                link.changed.wait_for(lambda: holds() or bool(link.error), _LOOK_EVERY_S)
                if holds():
                    return
                if link.error is not None:
                    raise link.error
            self.stop.check()
            now_s = time.monotonic()
            if now_s - asked_s > BEATS_EVERY_S:
                asked_s = now_s
                self._send(loader, Message(MessageKind.PING), {})
            if (silent_s := link.silence.look()) > link.patience_s:
                why = f"has given no sign of life for {silent_s:.0f} s: it is stopped or stuck"
            elif link.reads_s > READ_WITHIN_S:
                read_s = f"{link.reads_s:.0f} s"
                why = f"is alive and has been reading for {read_s}: do its files answer?"
            else:
                continue
            raise PeerError(
                f"{self._name(loader)} {why}; {self._who} has waited {now_s - began_s:.0f} s for"
                f" {what} of it, since {clock(now_s - began_s)}"
            )

    # The thread of each loader.

    def _listen(self, loader: int) -> None:
        link = self._links[loader]
        try:
            while True:
                try:
                    self._file(link, *link.channel.receive())
                except PeerGoneError:
                    if self._closed.is_set():
                        return
                    if link.told and isinstance(link.told[-1], Exception):
                        raise link.told[-1] from None
                    self._find_again(loader)
        except BaseException as error:
            with link.changed:
                link.error = error
                link.changed.notify_all()
            if isinstance(error, PeerError):  # another rank may wait for it, and all for that one
                self.stop.set(error)

    def _file(self, link: Link, message: Message, segment: Segment | None) -> None:
        said = said_in(message, segment)
        with link.changed:
            link.silence.heard()
            link.patience_s, link.reads_s = STUCK_S, said.get("reads_s", 0.0)
            if message.kind in (MessageKind.CHUNK, MessageKind.PASS_ENDED):
                number, place = said["turn"]
                if (number, place) == link.next:  # else it is known from one that has died
                    link.told.append({**said, "turn": link.next})
                    link.next = (number, place + 1) if "size" in said else (number + 1, 0)
            elif message.kind is MessageKind.SAMPLES and message.number in link.asked:
                del link.asked[message.number]
                link.answers[message.number] = Batch(**{"offsets": None, **said})
            elif message.kind is MessageKind.FAILED:
                link.told.append(error_from(said))
            link.changed.notify_all()

    def _find_again(self, loader: int) -> None:
        """One that is started again in its place, here or by another process. Raises PeerError
        where none is."""
        link, started, began_s = self._links[loader], self._processes, time.monotonic()
        link.channel.close()
        link.patience_s = math.inf  # who waits is told by ``error``
        how = started.how_it_ended(loader) if started else "has died"
        tries = 0
        while not self._closed.is_set():
            is_lost = started and self._deaths[loader] == MOST_RESTARTS
            if is_lost or time.monotonic() - began_s > START_WITHIN_S:
                raise PeerError(f"{self._name(loader)} {how}; its data is missing")
            with suppress(PeerError, PeerGoneError):
                if started:
                    self._deaths[loader] += 1
                    started.restart(loader)
                    told = f"warning: loader {loader} {how}; another one goes on for it"
                    print(told, file=sys.stderr, flush=True)
                    started = None
                with link.changed:
                    state = link.state()
                found = self._come_in(loader, state)
                with link.sending:
                    link.channel = found
                link.silence.heard()
                link.patience_s = START_WITHIN_S
                threading.Thread(target=self._ask_again, args=(loader,), daemon=True).start()
                return
            tries += 1  # its host may be starting
            self.stop.sleep(pause_before(tries) if started else _LOOK_EVERY_S)

    def _ask_again(self, loader: int) -> None:
        """What the one before did not answer, in a thread of its own: answers come meanwhile."""
        link = self._links[loader]
        with link.sending:
            with link.changed:
                asked = list(link.asked.items())
            for number, said in asked:
                self._send(loader, Message(MessageKind.ASK_SAMPLES, number=number), said)
        self._say_taken(loader)

    def _come_in(self, loader: int, state: Said) -> Channel:
        name, secret = self._address.names[loader], self._address.secrets[loader]
        return come_in(name, f"loader {loader}", secret, state)

    def _name(self, loader: int) -> str:
        pids, started = self._address.pids, self._processes
        if isinstance(started, ServerProcesses):
            pids = tuple(started.pids)
        where = f"(pid {pids[loader]})" if pids else self._address.names[loader].removeprefix(TLS)
        return f"loader {loader} {where}"
