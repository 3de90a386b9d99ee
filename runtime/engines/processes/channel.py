"""One connection: whole messages, each with the descriptors that come with it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

from runtime.engines.processes.messages import (
    MOST_MESSAGE_BYTES,
    BadMessageError,
    Message,
    pack,
    unpack,
)

_LOOK_EVERY_S = 0.2
"""How often a wait looks whether the run has stopped."""
_MOST_DESCRIPTORS = 1


class PeerGoneError(ConnectionError):
    """The other end of a connection is closed: its process has ended."""


class Channel:
    """A connected SOCK_SEQPACKET socket; any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(_LOOK_EVERY_S)

    def fileno(self) -> int:
        """Of the socket, for selectors."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """The process at the other end, as the kernel knows it."""
        return _peer(self._socket)[0]

    def send(
        self, message: Message, descriptors: Sequence[int] = (), *, within_s: float = 20.0
    ) -> None:
        """Send all of it. Raises PeerGoneError, TimeoutError when nobody takes it out."""
        data, ends_s = pack(message), time.monotonic() + within_s
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [data], list(descriptors))
                else:
                    self._socket.send(data)
                return
            except TimeoutError:
                if time.monotonic() > ends_s:
                    raise
            except OSError as error:
                raise PeerGoneError(str(error)) from None

    def receive(
        self, goes_on: Callable[[], None] = lambda: None
    ) -> tuple[Message, tuple[int, ...]]:
        """The next message, whenever it comes; the descriptors are the caller's to close.

        ``goes_on`` is called again and again while nothing comes, and may raise. Raises
        PeerGoneError at the end, BadMessageError for what is no message.
        """
        while True:
            try:
                data, found, flags, _ = socket.recv_fds(
                    self._socket,
                    MOST_MESSAGE_BYTES + 1,
                    _MOST_DESCRIPTORS,
                    socket.MSG_CMSG_CLOEXEC,
                )
                break
            except TimeoutError:
                goes_on()
            except OSError as error:
                raise PeerGoneError(str(error)) from None
        try:
            if not data:
                raise PeerGoneError("closed")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise BadMessageError(
                    f"a message is longer than {MOST_MESSAGE_BYTES} bytes, or brings more than"
                    f" {_MOST_DESCRIPTORS} descriptor"
                )
            return unpack(data), tuple(found)
        except BaseException:
            close_all(found)
            raise

    def close(self) -> None:
        """Both directions; whoever waits at either end is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def is_own_user(sock: socket.socket) -> bool:
    """Whether a process of this user is at the other end; abstract names have no permissions."""
    return _peer(sock)[1] == os.getuid()


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", found)
    return pid, user


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
