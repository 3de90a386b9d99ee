"""One connection of a rank to the host of the dense weights: headers, and tensors as plain bytes.

A stream between processes of one host and one user. The receiver knows from the kind of a message
how long it must be and refuses any other; nothing that it receives is code.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.dense.optimizer import DenseGradients
from runtime.engines.processes.peers import STUCK_S
from runtime.stop import PeerError, Silence

MAGIC, VERSION = b"PtbD", 1
_ALIGNED = 64
_MOST_WORDS_BYTES = 1 << 22
_LOOK_EVERY_S = 1
"""How often a send looks whether anything was taken."""
_HEADER = struct.Struct("<4sHHiqdqQ")  # magic, version, kind, rank, step, loss, samples, bytes


class Kind(IntEnum):
    """What a message says; of which rank and step stands in every header."""

    HELLO = 1
    """First: which rank this is; the bytes of its weights as ``samples``. To the host."""
    PULL = 2
    """async: asks for the weights before step. To the host, which answers WEIGHTS."""
    PUSH = 3
    """async: gradients, loss and samples of a step. To the host, which answers PUSHED."""
    TRAINED = 4
    """averaging: loss and samples of a step that the rank's own replica has taken. To the host."""
    SNAPSHOT = 5
    """averaging: the replica after a step, for the round under way. To the host."""
    MEAN = 6
    """averaging: the mean of all ranks' snapshots. To every rank."""
    WRITTEN = 7
    """averaging: the replica was moved by the mean after a step. To the host."""
    OPEN = 8
    """averaging: a new round, whose number is ``step``, may begin a period from now. To ranks."""
    GIVE = 9
    """averaging: asks for the replica as it is, for an evaluation. To a rank: WEIGHTS."""
    WEIGHTS = 10
    """All weights, whole."""
    SETTLE = 11
    """averaging: asks for an answer when all that was sent before has taken effect: SETTLED."""
    SETTLED = 12
    BYE = 13
    """The connection will be closed, and all is well."""
    TELL_STATE = 14
    """averaging: asks for replica and optimiser, between two legs. To a rank: STATE."""
    STATE = 15
    """Replica and optimiser, as torch writes tensors, numbers and words."""
    PUSHED = 16
    """async: the push has taken effect."""


class Message(NamedTuple):
    """A header and its payload."""

    kind: Kind
    rank: int
    step: int = 0
    loss: float = 0.0
    samples: int = 0
    payload: bytes | bytearray | memoryview = b""


class Layout:
    """How a network's tensors lie in a payload, one after the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._like = [(t.shape, t.dtype, t.numel() * t.element_size()) for t in tensors]
        self.weight_bytes = sum(size for _, _, size in self._like)
        self._head_bytes = -(-len(self._like) // _ALIGNED) * _ALIGNED
        self.gradient_bytes = self._head_bytes + self.weight_bytes

    def fits(self, kind: Kind, size: int) -> bool:
        """Whether the payload of a message of this kind may have so many bytes."""
        if kind is Kind.STATE:  # an optimiser keeps a few numbers for each weight
            return size <= 8 * self.weight_bytes + _MOST_WORDS_BYTES
        return size == self._length(kind)

    def _length(self, kind: Kind) -> int:
        if kind in (Kind.SNAPSHOT, Kind.MEAN, Kind.WEIGHTS):
            return self.weight_bytes
        return self.gradient_bytes if kind is Kind.PUSH else 0

    def pack(self, tensors: Sequence[Tensor]) -> bytearray:
        """The weights' bytes."""
        payload = bytearray(self.weight_bytes)
        for mine, theirs in zip(self.views(payload), tensors, strict=True):
            mine.copy_(theirs.detach())
        return payload

    def views(self, payload: bytes | bytearray | memoryview, start: int = 0) -> list[Tensor]:
        """The tensors in a payload, in place."""
        found = []
        for shape, dtype, size in self._like:
            if size:
                part = memoryview(payload)[start : start + size]
                found.append(torch.frombuffer(part, dtype=dtype).view(shape))
            else:
                found.append(torch.empty(shape, dtype=dtype))
            start += size
        return found

    def pack_gradients(self, gradients: DenseGradients) -> bytearray:
        """Which parameters have a gradient, a byte each, and the gradients' bytes."""
        payload = bytearray(self.gradient_bytes)
        views = self.views(payload, self._head_bytes)
        for number, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
            if gradient is not None:
                payload[number] = 1
                view.copy_(gradient)
        return payload

    def gradients(self, payload: bytearray) -> DenseGradients:
        """What `pack_gradients` packed, in place."""
        views = self.views(payload, self._head_bytes)
        return [view if payload[number] else None for number, view in enumerate(views)]


class Link:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, sock: socket.socket, layout: Layout, who: str) -> None:
        """``who``: the other end, in words."""
        self._socket, self._layout, self.who = sock, layout, who
        self._sending = threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _LOOK_EVERY_S, 0))

    def send(self, message: Message) -> None:
        """All of it. Raises PeerError when the other end has gone, or takes nothing for long."""
        payload = message.payload
        header = _HEADER.pack(MAGIC, VERSION, *message[:5], len(payload))
        try:
            with self._sending:
                self._send_all(header)
                self._send_all(payload)
        except PeerError:  # an OSError, too
            raise
        except OSError as error:
            raise PeerError(f"{self.who} has gone: {error.strerror}") from None

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        left, silence = memoryview(data), Silence()
        while left:
            try:
                left = left[self._socket.send(left) :]
                silence.heard()
            except BlockingIOError:
                if (silent_s := silence.look()) > STUCK_S:
                    raise PeerError(
                        f"{self.who} has taken nothing of a message of {len(data):,} bytes for"
                        f" {silent_s:.0f} s: it is stopped or stuck"
                    ) from None

    def receive(self) -> Message:
        """The next message. Raises PeerError at the end, and for what is no message."""
        magic, version, number, rank, step, loss, samples, size = _HEADER.unpack(
            self._exactly(_HEADER.size)
        )
        if magic != MAGIC or version != VERSION or number not in list(Kind):
            raise PeerError(f"{self.who} sent no message of version {VERSION}")
        kind = Kind(number)
        if not self._layout.fits(kind, size):
            raise PeerError(f"{self.who} sent {size} bytes as {kind.name}, which do not fit")
        return Message(kind, rank, step, loss, samples, self._exactly(size))

    def close(self) -> None:
        """Wake whoever waits at either end."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise PeerError(f"{self.who} has gone: {error.strerror}") from None
            if not count:
                raise PeerError(f"{self.who} has gone before the end of the run")
            view = view[count:]
        return found


def open_door() -> tuple[socket.socket, str]:
    """A listening socket with a name that leaves no file behind."""
    name = f"persia-testbed-dense-{secrets.token_hex(16)}"
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(f"\0{name}")
    door.listen(128)
    return door, name


def knock(name: str) -> socket.socket:
    """A connection to the door of that name."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{name}")
    except OSError as error:
        sock.close()
        raise PeerError(f"the dense weights' host cannot be reached: {error.strerror}") from None
    return sock
