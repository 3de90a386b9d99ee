"""One connection: whole messages, each with the memory that belongs to it.

On one host a connection is a Unix socket. Arrays lie in memory that both sides have mapped; its
descriptor travels with the message that names it. Between hosts it is TCP, and the arrays follow
the message: they are sent from where they lie and received where they belong.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from runtime.engines.processes.messages import (
    HEADER_BYTES,
    WITH_ARRAYS,
    BadMessageError,
    Message,
    MessageKind,
    pack,
    unpack_header,
    unpack_segment,
)
from runtime.engines.processes.segments import Segment
from runtime.stop import Silence

_LOOK_EVERY_S = 0.2
"""How often a wait looks whether the run has stopped."""
_MOST_BUFFERS = 512
"""Of one system call; the kernel takes 1,024."""
_DROPPED_BYTES = 1 << 20
"""At a time, of what nobody wants."""

Place = Callable[[Message], Sequence[memoryview] | None]
"""Where the arrays of a message belong; None: nobody wants them."""


class PeerGoneError(ConnectionError):
    """The other end of a connection is closed: its process has ended."""


class Channel:
    """A connected stream socket; any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(_LOOK_EVERY_S)
        self.shares_memory = sock.family == socket.AF_UNIX
        """Whether both ends see the same segments; else arrays follow their message."""
        if not self.shares_memory:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.takes_arrays = False
        """Whether the other end has said who it is: a stranger's message has no arrays."""
        self._sending = threading.Lock()
        self._header, self._header_bytes = bytearray(HEADER_BYTES), 0
        self._descriptor = -1  # came with the header
        self._left_bytes = 0  # of the message that is being received

    def fileno(self) -> int:
        """Of the socket, for selectors."""
        return self._socket.fileno()

    def who(self) -> str:
        """The process or host at the other end, in words, as the kernel knows it."""
        if self.shares_memory:
            return f"pid {_peer(self._socket)[0]}"
        with contextlib.suppress(OSError):
            host, port = self._socket.getpeername()[:2]
            return f"{host}:{port}"
        return "a host that has gone"

    def keep_alive(self, options: Sequence[tuple[int, int]]) -> None:
        """Have the kernel look whether the other host is there, while nothing is said."""
        if not self.shares_memory:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def is_own_user(self) -> bool:
        """Whether a process of this user is at the other end; abstract names have no permissions.

        Who comes over a network is asked for the secret alone.
        """
        return not self.shares_memory or _peer(self._socket)[1] == os.getuid()

    def send(
        self,
        message: Message,
        arrays: Sequence[Any] = (),
        *,
        segment: Segment | None = None,
        within_s: float = 20.0,
    ) -> None:
        """Send all of it.

        ``arrays``, of a batch, lie in a segment that the other end knows, and travel where it has
        one of its own. ``segment`` comes with the message: all of it, but for SEGMENT, where the
        other end makes one as large. Raises PeerGoneError, TimeoutError when the other end takes
        nothing for ``within_s``.
        """
        descriptor, views = -1, []
        if self.shares_memory:
            descriptor = -1 if segment is None else segment.descriptor
        elif segment is not None:
            views = [] if message.kind is MessageKind.SEGMENT else [segment.view()]
        else:
            views = [memoryview(array).cast("B") for array in arrays if len(array)]
        buffers = [memoryview(pack(message, sum(map(len, views)))), *views]
        if not self._sending.acquire(timeout=within_s):
            raise TimeoutError
        try:
            self._send_all(buffers, descriptor, within_s)
        finally:
            self._sending.release()

    def receive(
        self, goes_on: Callable[[], None] = lambda: None, place: Place = lambda message: None
    ) -> tuple[Message, Segment | None]:
        """The next message, whenever it comes, and the memory that came with it.

        ``place`` says where its arrays belong if they follow it. ``goes_on`` is called again and
        again while nothing comes, and may raise: the rest of the message is then dropped. Raises
        PeerGoneError at the end, BadMessageError for what is no message.
        """
        while self._left_bytes:  # of a message in whose middle a wait was given up
            self._fill(memoryview(bytearray(min(self._left_bytes, _DROPPED_BYTES))), goes_on)
        while self._header_bytes < HEADER_BYTES:
            self._receive_header(goes_on)
        descriptor, self._descriptor, self._header_bytes = self._descriptor, -1, 0
        try:
            message, body_bytes, array_bytes = unpack_header(self._header)
            if (array_bytes or descriptor >= 0) and not self.takes_arrays:
                raise BadMessageError(f"a {message.kind.name} of a stranger brings arrays")
            self._left_bytes = body_bytes + array_bytes
            body = bytearray(body_bytes)
            self._fill(memoryview(body), goes_on)
            message = message._replace(body=bytes(body))
            if descriptor >= 0:
                taken, descriptor = descriptor, -1
                return message, Segment.attach(taken)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if message.kind is MessageKind.SEGMENT and not self.shares_memory:
            return message, Segment.private(unpack_segment(message.body)[1])
        return message, self._receive_arrays(message, array_bytes, goes_on, place)

    def close(self) -> None:
        """Both directions; whoever waits at either end is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, buffers: list[memoryview], descriptor: int, within_s: float) -> None:
        silence, begun = Silence(), False
        while buffers:
            try:
                if descriptor >= 0:
                    sent = socket.send_fds(self._socket, buffers[:1], [descriptor])
                    descriptor = -1
                else:
                    sent = self._socket.sendmsg(buffers[:_MOST_BUFFERS])
            except TimeoutError:
                if silence.look() < within_s:
                    continue
                if begun:
                    self.close()  # the rest of a message cannot be left out
                raise
            except OSError as error:
                raise PeerGoneError(str(error)) from None
            begun = True
            silence.heard()
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]

    def _receive_header(self, goes_on: Callable[[], None]) -> None:
        """Some of it; what has come stays if ``goes_on`` raises."""
        try:
            data, found, flags, _ = socket.recv_fds(
                self._socket, HEADER_BYTES - self._header_bytes, 1, socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError:
            return goes_on()
        except OSError as error:
            raise PeerGoneError(str(error)) from None
        if found and self._descriptor < 0 and not flags & socket.MSG_CTRUNC:
            self._descriptor = found[0]
        elif found or flags & socket.MSG_CTRUNC:
            for descriptor in found:
                os.close(descriptor)
            raise BadMessageError("a message brings more than 1 descriptor")
        if not data:
            raise PeerGoneError("closed")
        self._header[self._header_bytes : self._header_bytes + len(data)] = data
        self._header_bytes += len(data)

    def _receive_arrays(
        self, message: Message, size: int, goes_on: Callable[[], None], place: Place
    ) -> Segment | None:
        if size and message.kind in WITH_ARRAYS:
            segment = Segment.private(size)
            self._fill(segment.view(), goes_on)
            return segment
        views = place(message) if size else None
        if views is not None:
            if (room := sum(map(len, views))) != size:
                raise BadMessageError(
                    f"a {message.kind.name} brings {size} bytes of arrays, {room} belong to it"
                )
            for view in views:
                self._fill(view, goes_on)
        return None

    def _fill(self, view: memoryview, goes_on: Callable[[], None]) -> None:
        while view:
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                goes_on()
                continue
            except OSError as error:
                raise PeerGoneError(str(error)) from None
            if not count:
                raise PeerGoneError("closed")
            self._left_bytes -= count
            view = view[count:]


def listen(name: str) -> tuple[socket.socket, str]:
    """A listening socket, and its name as `connect` takes it: an abstract one of this host (it
    starts with a zero byte, and leaves no file behind), or HOST:PORT, where port 0 is any."""
    if name.startswith("\0"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(name)
        sock.listen(128)
        return sock, name
    host, _, port = name.rpartition(":")
    sock = socket.create_server((host, int(port)), backlog=128)
    return sock, f"{host}:{sock.getsockname()[1]}"


def connect(name: str, within_s: float) -> Channel:
    """A connection to who listens there. Raises OSError."""
    if not name.startswith("\0"):
        host, _, port = name.rpartition(":")
        return Channel(socket.create_connection((host, int(port)), within_s))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(within_s)
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return Channel(sock)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", found)
    return pid, user
