"""One channel: whole messages, each once, with the memory that belongs to it.

On one host a connection is a Unix socket, and arrays lie in memory that both sides have mapped: its
descriptor travels with the message that names it. Between hosts it is TCP, and arrays follow their
message, sent from where they lie and received where they belong.

Who has connected waits in its own thread (`Channel.receive`). Who listens has a coroutine for each
connection, which yields where that thread would wait (`Channel.receiving`). The states of a channel
and the messages of one request are nonce in `docs/wire.md`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from runtime.hosts.wire.connection import Connection, Outbox, PeerGoneError
from runtime.hosts.wire.coroutines import (
    Coroutine,
    Future,
    T,
    nothing_to_check,
    run_until_complete,
)
from runtime.hosts.wire.messages import (
    CHECKSUM_BYTES,
    WITH_ARRAYS,
    BadMessageError,
    Message,
    MessageKind,
    Place,
    pack,
    unpack_header,
    unpack_segment,
)
from runtime.hosts.wire.segments import Segment
from runtime.hosts.wire.tls import LOOK_EVERY_S, TlsSocket
from runtime.stop import PeerError, Silence

RESUMED_WITHIN_S = 20.0
"""A peer that has not reconnected until then, or takes nothing for so long, is gone."""
Reconnect = Callable[[int], tuple["Channel", int]]
"""Connects again and says how many messages were received here; how many were there."""


class Channel:
    """A connected stream socket; any thread may send, one receives.

    Between hosts a connection may break though both processes live. Who has connected then connects
    again, and each side says how many messages it has: what is missing is sent again. So every
    message is received once, in order, or the channel ends. On one host it ends with a process.
    """

    def __init__(self, sock: socket.socket | TlsSocket, *, timeout_s: float = LOOK_EVERY_S) -> None:
        """``timeout_s``: how long one call waits for the network, 0 for coroutines."""
        # The socket below, and whether the other end has said the secret.
        self.connection = Connection(sock, timeout_s)
        self.is_authenticated = False
        """Whether the other end has said who it is: a stranger's message has no arrays."""
        # One thread sends and one receives at a time.
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._ended = threading.Event()

        # What is left to send, and who is called when it waits.
        self.outbox = Outbox()
        """What `send` has left to `flush`, and what may have to be sent again."""
        self.check: Callable[[], None] = nothing_to_check
        """Called while a coroutine awaits its next bytes; given to `receiving`."""
        self.on_unsent: Callable[[], None] = nothing_to_check
        """Called when `send` has left something to `flush`."""
        self.is_alive: Callable[[], bool] = lambda: False
        """Whether the other end gives signs of life elsewhere: then it may be busy, or not have
        noticed that this connection is broken, since it has nothing to say."""
        self._reconnect: Reconnect | None = None
        self.received = 0
        """Messages that have come, whole."""
        self.session = ""
        """Between hosts: what both ends have drawn for this channel. What is sealed for it can be
        read in no other one; it stays when the connection is made again."""

    def authenticated(self, reconnect: Reconnect | None = None) -> None:
        """The other end has said who it is: from now on nothing is lost. ``reconnect`` makes the
        connection again; without it the other end does."""
        self.is_authenticated = True
        self._reconnect = reconnect

    def fileno(self) -> int:
        """The descriptor of the socket, for selectors."""
        return int(self.connection.fileno())

    # Sending.

    def send(
        self,
        message: Message,
        arrays: Iterable[Any] = (),
        *,
        segment: Segment | None = None,
        within_s: float = RESUMED_WITHIN_S,
        check: Callable[[], None] = nothing_to_check,
    ) -> None:
        """Send all of it; over a connection that has broken, as soon as it is made again. Where no
        call waits, what the network does not take at once is left to `flush`.

        ``arrays``, of a batch, lie in a segment that the other end knows, and travel where it has
        one of its own; they stay as they are until they are received. ``segment`` comes with the
        message: all of it, but for SEGMENT, where the other end makes one as large. Raises
        PeerGoneError, TimeoutError when the other end takes nothing for ``within_s``, and what
        ``check`` raises, which is called again and again meanwhile.
        """
        # One sender at a time: bytes of two messages never mix.
        views, segments = self.connection.attachments(message, arrays, segment)
        if not self._sending.acquire(timeout=min(within_s, threading.TIMEOUT_MAX)):
            raise TimeoutError
        try:
            # It stays in the outbox until the other end has it: a new connection sends it again.
            head = pack(message, sum(map(len, views)), self.received)
            buffers = self.connection.frame(head, views)
            self.outbox.put(buffers, segments, may_resend=self._resumes())
            self._send_all(within_s, check)
        except PeerGoneError:
            self.outbox.unsent.clear()
            if not self._resumes():
                raise
            self.connection.cut()  # who receives reconnects
        except BaseException:
            self.outbox.take_back()
            raise
        finally:
            self._sending.release()

        # An event loop sends the rest when the socket takes it.
        if self.outbox:
            self.on_unsent()

    def flush(self) -> bool:
        """Send what the network takes now; whether that is all. Who receives notices a break."""
        if self.outbox:
            with self._sending:
                self._send_or_cut(0.0)
        return not self.outbox

    def _send_all(self, within_s: float, check: Callable[[], None] = nothing_to_check) -> None:
        self.outbox.send(self.connection, within_s, check, on_partial=self.close)

    def _send_or_cut(self, within_s: float) -> None:
        """Who receives notices a break."""
        try:
            self._send_all(within_s)
        except OSError:
            self.outbox.unsent.clear()
            self.connection.cut()

    # Receiving.

    def receive(
        self, check: Callable[[], None] = nothing_to_check, place: Place = lambda message: None
    ) -> tuple[Message, Segment | None]:
        """The next message, and the memory that came with it. ``place`` says where arrays belong
        that follow it; ``check`` is called again and again until all is there, and may raise: the
        rest of the message is then dropped. Raises PeerGoneError at the end, BadMessageError."""
        return run_until_complete(self.receiving(check, place), check)

    def receiving(
        self, check: Callable[[], None] = nothing_to_check, place: Place = lambda message: None
    ) -> Coroutine[tuple[Message, Segment | None]]:
        """What `receive` does, as a coroutine."""
        self.check = check
        while True:
            connection = self.connection
            try:
                return (yield from self._message(connection, place))
            except PeerGoneError:
                if not self._resumes():
                    raise
            yield from self._reconnected(connection)

    def _message(
        self, connection: Connection, place: Place
    ) -> Coroutine[tuple[Message, Segment | None]]:
        """One message over one connection; PeerGoneError where that breaks in its middle."""
        # The header, behind what is left of a message in whose middle a wait was given up.
        yield from self._drop(connection)
        if not connection.timeout_s and not connection.has_buffered():
            yield None  # whoever comes here has just been answered
        while not connection.has_header():
            yield from self._when_ready(connection, connection.receive_header)
            if not connection.has_header():
                yield None
        descriptor = connection.take_descriptor()
        try:
            header = connection.check_header(self.is_authenticated)
            message, body_bytes, array_bytes, acknowledged = unpack_header(header)
            has_arrays = array_bytes or descriptor >= 0 or message.kind is MessageKind.SEGMENT
            if has_arrays and not self.is_authenticated:
                raise BadMessageError(f"a {message.kind.name} of a stranger brings arrays")

            # It also says how many messages the other end has: these need not be sent again.
            with self._receiving:
                if self.connection is not connection:
                    raise PeerGoneError("made again")
                connection.begin(body_bytes, array_bytes)
                self.outbox.forget(acknowledged)
                self._count()

            # The body, and the segment whose descriptor came with the header.
            if body_bytes:
                body = bytearray(body_bytes)
                yield from self._fill_part([memoryview(body)], connection)
                message = message._replace(body=bytes(body))
            attached = descriptor
            descriptor = -1
            segment = None if attached < 0 else Segment.attach(attached)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

        # Between hosts each end has a segment of its own, and arrays follow the body.
        is_segment = message.kind is MessageKind.SEGMENT
        if segment is None and is_segment and not connection.shares_memory:
            return message, Segment.private(unpack_segment(message.body)[1])
        if segment is None and array_bytes:
            if message.kind in WITH_ARRAYS:
                segment = Segment.private(array_bytes)
            views = place(message) if segment is None else [segment.view()]
            yield from self._place(views, message, array_bytes, connection)
        return message, segment

    def _when_ready(self, connection: Connection, receive: Callable[[], T]) -> Coroutine[T]:
        """What a call gives as soon as it does; it belongs to one connection, and ends with it."""
        while True:
            try:
                with self._receiving:
                    if self.connection is not connection:
                        raise PeerGoneError("made again")
                    return receive()
            except (TimeoutError, BlockingIOError):
                yield None
            except OSError as error:
                raise PeerGoneError(str(error)) from None

    def _receive_some(
        self, connection: Connection, view: memoryview, verify: Callable[[], None]
    ) -> int:
        count = connection.receive(view)
        if count == len(view):
            verify()
        self._count()
        return count

    def _count(self) -> None:
        """A message that is here whole need not be sent again."""
        self.received += self.is_authenticated and not self.connection.left_bytes

    def _place(
        self,
        views: Sequence[memoryview] | None,
        message: Message,
        array_bytes: int,
        connection: Connection,
    ) -> Coroutine[None]:
        """Arrays go where they belong."""
        if views is None:
            return (yield from self._drop(connection))
        if (expected := sum(map(len, views))) != array_bytes:
            sent = f"a {message.kind.name} brings {array_bytes} bytes of arrays"
            raise BadMessageError(f"{sent}, {expected} belong to it")
        yield from self._fill_part(views, connection)

    def _drop(self, connection: Connection) -> Coroutine[None]:
        """What is left of a message that nobody wants."""
        while connection.left_bytes:
            yield from self._fill(connection.spare(), connection)

    def _fill_part(self, views: Sequence[memoryview], connection: Connection) -> Coroutine[None]:
        """A body, or arrays, which are what was sent: else the message does not count as received,
        and comes again."""
        for view in views:
            yield from self._fill(view, connection)
        if connection.has_checksums:
            checksum = bytearray(CHECKSUM_BYTES)
            verify = partial(connection.verify, views, checksum)
            yield from self._fill(memoryview(checksum), connection, verify)

    def _fill(
        self,
        view: memoryview,
        connection: Connection,
        verify: Callable[[], None] = nothing_to_check,
    ) -> Coroutine[None]:
        while view:
            receive = partial(self._receive_some, connection, view, verify)
            count = yield from self._when_ready(connection, receive)
            view = view[count:]
            if view and connection.timeout_s:  # whoever sends byte by byte
                yield None

    # A connection that has broken.

    def await_reconnection(self, check: Callable[[], None]) -> None:
        """Return when the connection is there again. Raises PeerGoneError if it will not be."""
        if not self._resumes():
            raise PeerGoneError("closed")
        run_until_complete(self._reconnected(self.connection), check)

    def _reconnected(self, broken: Connection) -> Coroutine[None]:
        silence = Silence()
        reason = "closed"

        def is_decided() -> bool:
            has_changed = self.connection is not broken or self._ended.is_set()
            return has_changed or (silence.look() > RESUMED_WITHIN_S and not self.is_alive())

        # The end that has connected connects again; the other one awaits that.
        while not is_decided():
            try:
                if self._reconnect is not None:
                    return self.resume(*self._reconnect(self.received))
            except (ConnectionRefusedError, PeerError) as error:  # its process has ended
                reason = str(error)
                break
            except OSError:
                time.sleep(LOOK_EVERY_S)
            yield Future(is_decided, self.check)

        # Nobody came in time: the channel ends.
        if self.connection is broken:
            self.shut_down()
            raise PeerGoneError(reason)

    def resume(
        self,
        newer: Channel,
        received: int,
        answer: Callable[[int], None] = lambda received: None,
    ) -> None:
        """Go on over the connection of ``newer``, whose end has ``received`` messages of ours; what
        it has not is sent again. ``answer`` tells it how many are here. Raises OSError."""
        # Whoever sends or receives over the broken one lets go.
        self.connection.cut()
        with self._sending:
            with self._receiving:
                if self._ended.is_set():
                    raise PeerGoneError("closed")
                self.connection.close()
                self.outbox.forget(received)
                answer(self.received)
                self.connection = newer.connection

            # All that the other end does not have is sent once more, before anything new.
            self.outbox.begin_again()
            self._send_or_cut(RESUMED_WITHIN_S)

        # It may have been closed meanwhile.
        if self._ended.is_set():
            self.close() if self.connection.timeout_s else self.connection.cut()

    def _resumes(self) -> bool:
        """Whether a broken connection is made again: between hosts, once both know each other."""
        has_network = not self.connection.shares_memory
        return self.is_authenticated and has_network and not self._ended.is_set()

    # The end.

    def shut_down(self) -> None:
        """End it for good; what has come can still be received. Whoever waits is woken."""
        self._ended.set()
        self.connection.cut()

    def close(self) -> None:
        """End it for good, and give the socket back."""
        self.shut_down()
        self.connection.close()
