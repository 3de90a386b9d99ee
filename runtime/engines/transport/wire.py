"""One connection as the kernel has it: a Unix socket, whose messages may bring a descriptor, or
TCP, plain or encrypted."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any

from runtime.engines.transport.messages import HEADER_BYTES, BadMessageError
from runtime.engines.transport.segments import Segment
from runtime.engines.transport.tls import TlsSocket

_MOST_BUFFERS = 512
"""Of one system call; the kernel takes 1,024."""
_CUT = int(socket.MSG_CTRUNC)  # an enum's `&` takes longer than the system call
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""While nothing is said the kernel looks whether the other host is there: 25 s."""


class PeerGoneError(ConnectionError):
    """The other end of a connection is closed, for good: its process has ended."""


class Wire:
    """A connected socket, and how far the message has come that it brings."""

    def __init__(self, sock: socket.socket | TlsSocket, waits_s: float) -> None:
        self.shares_memory = sock.family == socket.AF_UNIX
        """Whether both ends see the same segments; else arrays follow their message."""
        self.encrypts, self.waits_s = isinstance(sock, TlsSocket), waits_s
        sock.settimeout(waits_s)
        if not self.shares_memory:
            for level, option, value in _OPTIONS:
                sock.setsockopt(level, option, value)
        self.socket: Any = sock
        self.fileno, self.close = sock.fileno, sock.close
        self.header = bytearray()
        """As much of it as has come."""
        self.left_bytes = 0
        """Of the message that is being received, behind its header."""
        self._descriptor = -1  # came with the header

    def fingerprint(self) -> str:
        """Of the certificate with which the connection is encrypted, if it is."""
        return str(self.socket.fingerprint()) if self.encrypts else ""

    def has_more(self) -> bool:
        """Whether something has come of which no selector knows: it is decrypted already."""
        return self.encrypts and self.socket.pending() > 0

    def who(self) -> str:
        """The process or host at the other end, in words, as the kernel knows it."""
        if self.shares_memory:
            return f"pid {self._peer()[0]}"
        with contextlib.suppress(OSError):
            host, port = self.socket.getpeername()[:2]
            return f"{host}:{port}"
        return "a host that has gone"

    def is_own_user(self) -> bool:
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

    def send(self, buffers: list[memoryview], shown: list[Segment]) -> int:
        """Some bytes; with the first the descriptor of a segment to be ``shown``, which then is."""
        if not shown:
            return int(self.socket.sendmsg(buffers[:_MOST_BUFFERS]))
        return socket.send_fds(self.socket, buffers[:1], [shown.pop().descriptor])

    def receive_header(self) -> None:
        """Some of it; what has come stays if a wait is given up."""
        size, found, flags = HEADER_BYTES - len(self.header), list[int](), 0
        if self.shares_memory:
            data, found, flags, _ = socket.recv_fds(self.socket, size, 1, socket.MSG_CMSG_CLOEXEC)
        else:
            data = self.socket.recv(size)
        if found and self._descriptor < 0 and not flags & _CUT:
            self._descriptor = found[0]
        elif found or flags & _CUT:
            for descriptor in found:
                os.close(descriptor)
            raise BadMessageError("a message brings more than 1 descriptor")
        if not data:
            raise PeerGoneError("closed")
        self.header += data

    def take_descriptor(self) -> int:
        """What came with the header; -1 if nothing did."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def receive(self, view: memoryview) -> int:
        """Some bytes of what follows the header."""
        count = int(self.socket.recv_into(view))
        if not count:
            raise PeerGoneError("closed")
        self.left_bytes -= count
        return count

    def _peer(self) -> tuple[int, int]:
        """Process and user at the other end, as the kernel knows them."""
        option = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", option)
        return pid, user
