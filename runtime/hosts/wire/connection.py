"""One connection as the kernel has it: a Unix socket, whose messages may bring a descriptor, or
TCP, plain or encrypted."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from runtime.hosts.wire.messages import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    BadMessageError,
    Message,
    MessageKind,
    checksum_of,
    is_of_this_release,
)
from runtime.hosts.wire.segments import Segment
from runtime.hosts.wire.tls import TlsSocket
from runtime.stop import Silence

_MOST_BUFFERS = 512
"""Buffers of one system call; the kernel takes 1,024."""
_DROPPED_BYTES = 1 << 20
"""Bytes that are read at a time of what nobody wants."""
_TRUNCATED = int(socket.MSG_CTRUNC)  # an enum's `&` takes longer than the system call
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""While nothing is said the kernel looks whether the other host is there: 25 s. For what was sent
it waits 30 s, of its own accord a quarter of an hour: longer than signs of life are missed, so that
these decide first, where there are any."""


class PeerGoneError(ConnectionError):
    """The other end of a connection is closed, for good: its process has ended."""


class Connection:
    """A connected socket, and how far the message has come that it brings."""

    def __init__(self, sock: socket.socket | TlsSocket, timeout_s: float) -> None:
        # What kind of connection it is decides how arrays travel, and who checks them.
        self.shares_memory = sock.family == socket.AF_UNIX
        """Whether both ends see the same segments; else arrays follow their message."""
        self.is_encrypted = isinstance(sock, TlsSocket)
        self.timeout_s = timeout_s
        self.has_checksums = not self.shares_memory and not self.is_encrypted
        """Whether a checksum follows each part of a message: TCP's own, of 16 bits, lets a damaged
        packet in 65,536 through, and each that a NIC damages; TLS has its own."""
        # The socket, with its options.
        sock.settimeout(timeout_s)
        if not self.shares_memory:
            for level, option, value in _OPTIONS:
                sock.setsockopt(level, option, value)
        self.socket: Any = sock
        self.fileno = sock.fileno
        self.close = sock.close

        # What has come of the next message.
        self.header = bytearray()
        """The header's bytes that have come, with its checksum."""
        self._header_bytes = HEADER_BYTES + self.has_checksums * CHECKSUM_BYTES
        self.left_bytes = 0
        """Bytes still to come of the message that is being received, behind its header."""
        self._descriptor = -1  # came with the header

    def fingerprint(self) -> str:
        """Digest of the certificate with which the connection is encrypted, if it is."""
        return str(self.socket.fingerprint()) if self.is_encrypted else ""

    def has_buffered(self) -> bool:
        """Whether something has come of which no selector knows: it is decrypted already."""
        return self.is_encrypted and self.socket.pending() > 0

    def who(self) -> str:
        """The process or host at the other end, in words, as the kernel knows it."""
        if self.shares_memory:
            return f"pid {self._peer()[0]}"
        with contextlib.suppress(OSError):
            host, port = self.socket.getpeername()[:2]
            return f"{host}:{port}"
        return "a host that has gone"

    def is_same_user(self) -> bool:
        """Whether a process of this user is at the other end (abstract names have no permissions);
        who comes over a network is asked for the secret alone."""
        return not self.shares_memory or self._peer()[1] == os.getuid()

    def is_broken(self) -> bool:
        """Whether what makes the socket readable is its end."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:
            return True

    def cut(self) -> None:
        """What has come can still be received. Whoever waits at either end is woken."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def attachments(
        self, message: Message, arrays: Iterable[Any], segment: Segment | None
    ) -> tuple[list[memoryview], list[Segment]]:
        """What follows the message, and what is shown with it, of a batch's ``arrays`` and of a
        ``segment`` that is to come along."""
        # On one host both ends have mapped them: nobody cuts them out of the segment.
        if self.shares_memory:
            return [], [] if segment is None else [segment]
        if segment is None:
            return [memoryview(array).cast("B") for array in arrays if len(array)], []
        return [] if message.kind is MessageKind.SEGMENT else [segment.view()], []

    def frame(self, head: bytes, views: list[memoryview]) -> list[memoryview]:
        """A message as it travels: header and body, and the arrays, each with its checksum."""
        if not self.has_checksums:
            return [memoryview(head), *views]
        header = head[:HEADER_BYTES]
        body = head[HEADER_BYTES:]
        checked = header + checksum_of([header]) + (body + checksum_of([body]) if body else b"")
        return [memoryview(checked), *views, *([memoryview(checksum_of(views))] if views else [])]

    def verify(self, parts: Iterable[bytes | bytearray | memoryview], checksum: bytearray) -> None:
        """Raise PeerGoneError where they are not what was sent: this connection is of no use."""
        if checksum_of(parts) != checksum:
            self.cut()
            raise PeerGoneError("what came was damaged on the way")

    def send(self, buffers: list[memoryview], segments: list[Segment]) -> int:
        """Send some bytes; with the first one a descriptor of ``segments``, which is taken out."""
        if not segments:
            return int(self.socket.sendmsg(buffers[:_MOST_BUFFERS]))
        return socket.send_fds(self.socket, buffers[:1], [segments.pop().descriptor])

    def has_header(self) -> bool:
        """Whether all of it has come, and its checksum."""
        return len(self.header) == self._header_bytes

    def check_header(self, is_authenticated: bool) -> bytearray:
        """It without its checksum; what a stranger sends may be of another release, or no message.
        Raises PeerGoneError for a damaged one."""
        header = self.header[:HEADER_BYTES]
        checksum = self.header[HEADER_BYTES:]
        if self.has_checksums and (is_authenticated or is_of_this_release(header, checksum)):
            self.verify([header], checksum)
        return header

    def begin(self, body_bytes: int, array_bytes: int) -> None:
        """So much follows the header, which is done with."""
        self.header.clear()
        parts = bool(body_bytes) + bool(array_bytes)
        self.left_bytes = body_bytes + array_bytes + self.has_checksums * parts * CHECKSUM_BYTES

    def receive_header(self) -> None:
        """Some of it; what has come stays if a wait is given up."""
        # A Unix socket may bring a descriptor of shared memory beside the bytes.
        size = self._header_bytes - len(self.header)
        descriptors = list[int]()
        flags = 0
        if self.shares_memory:
            data, descriptors, flags, _ = socket.recv_fds(
                self.socket, size, 1, socket.MSG_CMSG_CLOEXEC
            )
        else:
            data = self.socket.recv(size)

        # One descriptor a message; others are closed, else a stranger could use up ours.
        if descriptors and self._descriptor < 0 and not flags & _TRUNCATED:
            self._descriptor = descriptors[0]
        elif descriptors or flags & _TRUNCATED:
            for descriptor in descriptors:
                os.close(descriptor)
            raise BadMessageError("a message brings more than 1 descriptor")

        # Nothing at all is the end of the connection.
        if not data:
            raise PeerGoneError("closed")
        self.header += data

    def take_descriptor(self) -> int:
        """What came with the header; -1 if nothing did."""
        descriptor = self._descriptor
        self._descriptor = -1
        return descriptor

    def receive(self, view: memoryview) -> int:
        """Some bytes of what follows the header."""
        count = int(self.socket.recv_into(view))
        if not count:
            raise PeerGoneError("closed")
        self.left_bytes -= count
        return count

    def spare(self) -> memoryview:
        """Room for some of what follows, which nobody wants."""
        return memoryview(bytearray(min(self.left_bytes, _DROPPED_BYTES)))

    def _peer(self) -> tuple[int, int]:
        """Process and user at the other end, as the kernel knows them."""
        option = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", option)
        return pid, user


class Outbox:
    """Messages that have not been sent, and those of which nobody knows whether they came: over a
    connection that is made again they are sent again."""

    def __init__(self) -> None:
        self.unsent: deque[tuple[list[memoryview], list[Segment]]] = deque()
        """Messages, or the rest of one, and the segment that goes with its first byte."""
        self.progress = Silence()
        self._unacknowledged: deque[list[memoryview]] = (
            deque()
        )  # by the other side, as far as is known
        self._acknowledged = 0  # messages before these

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        return bool(self.unsent)

    def stalled_s(self) -> float:
        """For how long the other end has taken nothing of it."""
        return self.progress.look() if self.unsent else 0.0

    def put(self, buffers: list[memoryview], segments: list[Segment], *, may_resend: bool) -> None:
        """One more; ``may_resend`` until the other end is known to have it."""
        if may_resend:
            self._unacknowledged.append(list(buffers))
        self.unsent.append((buffers, segments))

    def take_back(self) -> None:
        """The last one is not sent at all."""
        self.unsent.clear()
        if self._unacknowledged:
            self._unacknowledged.pop()

    def forget(self, received: int) -> None:
        """The other end has that many messages: they need not be sent again."""
        while self._acknowledged < received and self._unacknowledged:
            self._unacknowledged.popleft()
            self._acknowledged += 1

    def begin_again(self) -> None:
        """All that the other end does not have is to be sent."""
        self.unsent = deque((list(buffers), []) for buffers in self._unacknowledged)
        self.progress.heard()

    def send(
        self,
        connection: Connection,
        within_s: float,
        check: Callable[[], None],
        on_partial: Callable[[], None],
    ) -> None:
        """What is unsent, as far as calls may wait for it. Raises TimeoutError when nothing is
        taken for ``within_s``, what ``check`` raises, and PeerGoneError; ``on_partial`` is called
        where a message may be under way in part: its rest cannot be left out."""
        # Message by message, as much as the socket takes.
        is_partial = connection.is_encrypted  # part of it may be under way, encrypted
        while self.unsent:
            buffers, segments = self.unsent[0]
            try:
                sent = connection.send(buffers, segments)
            except BlockingIOError:
                return
            except TimeoutError:
                # Nothing was taken for a while: wait on, unless the run stops or patience ends.
                try:
                    check()
                    if self.progress.look() >= within_s:
                        raise
                except BaseException:
                    if is_partial:
                        on_partial()
                    raise
                continue
            except OSError as error:
                raise PeerGoneError(str(error)) from None

            # Some bytes are under way: the rest of this message must follow before any other.
            is_partial = True
            self.progress.heard()
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][sent:]
            else:
                self.unsent.popleft()
