"""One channel: whole messages, each once, with the memory that belongs to it.

On one host a connection is a Unix socket, and arrays lie in memory that both sides have mapped: its
descriptor travels with the message that names it. Between hosts it is TCP, and arrays follow their
message, sent from where they lie and received where they belong.

Who has connected waits in its own thread (`Channel.receive`). Who listens has a coroutine for each
connection: a generator, which yields where that thread would wait (`Channel.receiving`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from runtime.engines.wire.connection import Outbox, PeerGoneError, Wire
from runtime.engines.wire.coroutines import Steps, T, Wait, driven, goes_on_always
from runtime.engines.wire.messages import (
    CHECK_BYTES,
    WITH_ARRAYS,
    BadMessageError,
    Message,
    MessageKind,
    Place,
    pack,
    unpack_header,
    unpack_segment,
)
from runtime.engines.wire.segments import Segment
from runtime.engines.wire.tls import LOOK_EVERY_S, TlsSocket
from runtime.stop import PeerError, Silence

RESUMED_WITHIN_S = 20.0
"""Who has not come back until then, or takes nothing for so long, is gone."""
Reconnect = Callable[[int], tuple["Channel", int]]
"""Connects again and says how many messages were received here; how many were there."""


class Channel:
    """A connected stream socket; any thread may send, one receives.

    Between hosts a connection may break though both processes live. Who has connected then connects
    again, and each side says how many messages it has: what is missing is sent again. So every
    message is received once, in order, or the channel ends. On one host it ends with a process.
    """

    def __init__(self, sock: socket.socket | TlsSocket, *, waits_s: float = LOOK_EVERY_S) -> None:
        """``waits_s``: how long one call waits for the network, 0 for coroutines."""
        self.wire = Wire(sock, waits_s)
        self.is_known = False
        """Whether the other end has said who it is: a stranger's message has no arrays."""
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self.outbox = Outbox()
        """What `send` has left to `flush`, and what may have to be sent again."""
        self.goes_on: Callable[[], None] = goes_on_always
        """As given to `receiving`: of a coroutine that waits for its next bytes."""
        self.on_unsent: Callable[[], None] = goes_on_always
        """Called when `send` has left something to `flush`."""
        self.is_heard: Callable[[], bool] = lambda: False
        """Whether the other end gives signs of life elsewhere: then it may be busy, or not have
        noticed that this connection is broken, since it has nothing to say."""
        self._reconnect: Reconnect | None = None
        self.received = 0
        """Messages that have come, whole."""

    def know(self, reconnect: Reconnect | None = None) -> None:
        """The other end has said who it is: from now on nothing is lost. ``reconnect`` makes the
        connection again; without it the other end does."""
        self.is_known, self._reconnect = True, reconnect

    def fileno(self) -> int:
        """Of the socket, for selectors."""
        return int(self.wire.fileno())

    def send(
        self,
        message: Message,
        arrays: Iterable[Any] = (),
        *,
        segment: Segment | None = None,
        within_s: float = RESUMED_WITHIN_S,
        goes_on: Callable[[], None] = goes_on_always,
    ) -> None:
        """Send all of it; over a connection that has broken, as soon as it is made again. Where no
        call waits, what the network does not take at once is left to `flush`.

        ``arrays``, of a batch, lie in a segment that the other end knows, and travel where it has
        one of its own; they stay as they are until they are received. ``segment`` comes with the
        message: all of it, but for SEGMENT, where the other end makes one as large. Raises
        PeerGoneError, TimeoutError when the other end takes nothing for ``within_s``, and what
        ``goes_on`` raises, which is called again and again meanwhile.
        """
        views, shown = self.wire.carried(message, arrays, segment)
        if not self._sending.acquire(timeout=min(within_s, threading.TIMEOUT_MAX)):
            raise TimeoutError
        try:
            head = pack(message, sum(map(len, views)), self.received)
            buffers = self.wire.framed(head, views)
            self.outbox.put(buffers, shown, kept=self._resumes())
            self._send_all(within_s, goes_on)
        except PeerGoneError:
            self.outbox.unsent.clear()
            if not self._resumes():
                raise
            self.wire.cut()  # who receives makes it again
        except BaseException:
            self.outbox.take_back()
            raise
        finally:
            self._sending.release()
        if self.outbox:
            self.on_unsent()

    def flush(self) -> bool:
        """Send what the network takes now; whether that is all. Who receives notices a break."""
        if self.outbox:
            with self._sending:
                self._send_or_cut(0.0)
        return not self.outbox

    def receive(
        self, goes_on: Callable[[], None] = goes_on_always, place: Place = lambda message: None
    ) -> tuple[Message, Segment | None]:
        """The next message, and the memory that came with it. ``place`` says where arrays belong
        that follow it; ``goes_on`` is called again and again until all is there, and may raise: the
        rest of the message is then dropped. Raises PeerGoneError at the end, BadMessageError."""
        return driven(self.receiving(goes_on, place), goes_on)

    def receiving(
        self, goes_on: Callable[[], None] = goes_on_always, place: Place = lambda message: None
    ) -> Steps[tuple[Message, Segment | None]]:
        """The same of a coroutine."""
        self.goes_on = goes_on
        while True:
            wire = self.wire
            try:
                return (yield from self._message(wire, place))
            except PeerGoneError:
                if not self._resumes():
                    raise
            yield from self._made_again(wire)

    def make_again(self, goes_on: Callable[[], None]) -> None:
        """Return when the connection is there again. Raises PeerGoneError if it will not be."""
        if not self._resumes():
            raise PeerGoneError("closed")
        driven(self._made_again(self.wire), goes_on)

    def _made_again(self, broken: Wire) -> Steps[None]:
        silence, why = Silence(), "closed"

        def is_decided() -> bool:
            again = self.wire is not broken or self._ended.is_set()
            return again or (silence.look() > RESUMED_WITHIN_S and not self.is_heard())

        while not is_decided():
            try:
                if self._reconnect is not None:
                    return self.resume(*self._reconnect(self.received))
            except (ConnectionRefusedError, PeerError) as error:  # its process has ended
                why = str(error)
                break
            except OSError:
                time.sleep(LOOK_EVERY_S)
            yield Wait(is_decided, self.goes_on)  # for the other end, where that connects
        if self.wire is broken:
            self.hang_up()
            raise PeerGoneError(why)

    def resume(
        self, other: Channel, received: int, answer: Callable[[int], None] = lambda received: None
    ) -> None:
        """Go on over the connection of ``other``, whose end has ``received`` messages of ours; what
        it has not is sent again. ``answer`` tells it how many are here. Raises OSError."""
        self.wire.cut()  # whoever sends or receives there lets go
        with self._sending:
            with self._receiving:
                if self._ended.is_set():
                    raise PeerGoneError("closed")
                self.wire.close()
                self.outbox.forget(received)
                answer(self.received)
                self.wire = other.wire
            self.outbox.begin_again()
            self._send_or_cut(RESUMED_WITHIN_S)
        if self._ended.is_set():  # meanwhile
            self.close() if self.wire.waits_s else self.wire.cut()

    def hang_up(self) -> None:
        """For good; what has come can still be received. Whoever waits at either end is woken."""
        self._ended.set()
        self.wire.cut()

    def close(self) -> None:
        """For good."""
        self.hang_up()
        self.wire.close()

    def _resumes(self) -> bool:
        return self.is_known and not self.wire.shares_memory and not self._ended.is_set()

    def _message(self, wire: Wire, place: Place) -> Steps[tuple[Message, Segment | None]]:
        yield from self._drop(wire)  # of a message in whose middle a wait was given up
        if not wire.waits_s and not wire.has_more():
            yield None  # whoever comes here has just been answered
        while not wire.has_header():
            yield from self._when_there(wire, wire.receive_header)
            if not wire.has_header():
                yield None
        descriptor = wire.take_descriptor()
        try:
            header = wire.check_header(self.is_known)
            message, body_bytes, array_bytes, received = unpack_header(header)
            brings = array_bytes or descriptor >= 0 or message.kind is MessageKind.SEGMENT
            if brings and not self.is_known:
                raise BadMessageError(f"a {message.kind.name} of a stranger brings arrays")
            with self._receiving:
                if self.wire is not wire:
                    raise PeerGoneError("made again")
                wire.begin(body_bytes, array_bytes)
                self.outbox.forget(received)
                self._count()
            if body_bytes:
                body = bytearray(body_bytes)
                yield from self._fill_part([memoryview(body)], wire)
                message = message._replace(body=bytes(body))
            taken, descriptor = descriptor, -1
            found = None if taken < 0 else Segment.attach(taken)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if found is None and message.kind is MessageKind.SEGMENT and not wire.shares_memory:
            return message, Segment.private(unpack_segment(message.body)[1])
        if found is None and array_bytes:
            if message.kind in WITH_ARRAYS:
                found = Segment.private(array_bytes)
            views = place(message) if found is None else [found.view()]
            yield from self._place(views, message, array_bytes, wire)
        return message, found

    def _send_all(self, within_s: float, goes_on: Callable[[], None] = goes_on_always) -> None:
        self.outbox.send(self.wire, within_s, goes_on, on_half=self.close)

    def _send_or_cut(self, within_s: float) -> None:
        """Who receives notices a break."""
        try:
            self._send_all(within_s)
        except OSError:
            self.outbox.unsent.clear()
            self.wire.cut()

    def _when_there(self, wire: Wire, call: Callable[[], T]) -> Steps[T]:
        """What a call gives as soon as it does; it belongs to one connection, and ends with it."""
        while True:
            try:
                with self._receiving:
                    if self.wire is not wire:
                        raise PeerGoneError("made again")
                    return call()
            except (TimeoutError, BlockingIOError):
                yield None
            except OSError as error:
                raise PeerGoneError(str(error)) from None

    def _receive_some(self, wire: Wire, view: memoryview, verify: Callable[[], None]) -> int:
        count = wire.receive(view)
        if count == len(view):
            verify()
        self._count()
        return count

    def _count(self) -> None:
        """A message that is here whole need not be sent again."""
        self.received += self.is_known and not self.wire.left_bytes

    def _place(
        self, views: Sequence[memoryview] | None, message: Message, array_bytes: int, wire: Wire
    ) -> Steps[None]:
        """Arrays go where they belong."""
        if views is None:
            return (yield from self._drop(wire))
        if (room := sum(map(len, views))) != array_bytes:
            what = f"a {message.kind.name} brings {array_bytes} bytes of arrays"
            raise BadMessageError(f"{what}, {room} belong to it")
        yield from self._fill_part(views, wire)

    def _drop(self, wire: Wire) -> Steps[None]:
        """What is left of a message that nobody wants."""
        while wire.left_bytes:
            yield from self._fill(wire.spare(), wire)

    def _fill_part(self, views: Sequence[memoryview], wire: Wire) -> Steps[None]:
        """A body, or arrays, which are what was sent: else the message does not count as received,
        and comes again."""
        for view in views:
            yield from self._fill(view, wire)
        if wire.checks:
            check = bytearray(CHECK_BYTES)
            yield from self._fill(memoryview(check), wire, partial(wire.verify, views, check))

    def _fill(
        self, view: memoryview, wire: Wire, verify: Callable[[], None] = goes_on_always
    ) -> Steps[None]:
        while view:
            receive = partial(self._receive_some, wire, view, verify)
            count = yield from self._when_there(wire, receive)
            view = view[count:]
            if view and wire.waits_s:  # whoever sends byte by byte
                yield None
