"""The protocol between rank processes and embedding servers, in one place.

A message is a header, a body, and perhaps arrays. A batch's arrays lie in a *segment*, memory of
one number and size on both sides, and a message says where. On one host both have mapped the same
pages; between hosts ids, rows and gradients follow the message that names them. What is asked for
rarely (a table, a trace) comes in a segment of its own, with the message or behind it.

All numbers are little-endian. The receiver checks everything before it uses anything: a message
that breaks a rule closes its connection, and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from runtime.data.errors import DataError
from runtime.stop import PeerError

MAGIC = b"PtbR"
VERSION = 4
MOST_BODY_BYTES = 1 << 16
MOST_SEGMENTS = 1 << 16
"""Of one rank: far beyond any window that fits a memory."""
MOST_SEGMENT_BYTES = 1 << 40
SECRET_BYTES = 32

_HEADER = struct.Struct("<4sHHIiqQQ")
# magic, version, kind, body bytes, rank, step, array bytes, messages received so far
HEADER_BYTES = _HEADER.size
_SEGMENT = struct.Struct("<IQ")  # number, bytes
_BATCH = struct.Struct("<IH")  # segment, tables
_PART = struct.Struct("<QQQQ")  # rows of this server; where ids, values and gradients start
_VERSION = struct.Struct("<q")
_FATE = struct.Struct("<B")


class MessageKind(IntEnum):
    """What a message asks for or answers; ``rank`` and ``step`` are in every header."""

    HELLO = 1
    """First on a connection: JSON with secret, role, pid and client; between hosts also with the
    connection's own name and how many messages have been received over it before it broke."""
    WELCOME = 2
    """The answer: JSON with pid, shard and shards."""
    FILLING = 3
    """To who waits for WELCOME: the server is getting its rows; it may take minutes."""
    ACCEPTED = 4
    """The first answer between hosts: JSON with how many messages have been received here."""
    SEGMENT = 10
    """A segment's number and size, on one host its descriptor with it; not answered."""
    LOOK_UP = 11
    """Where a batch lies: read its rows when window and order allow it. ROWS."""
    LOOK_AHEAD = 12
    """lookahead: the same at any time, without side effect. ROWS."""
    BRING_UP_TO_DATE = 13
    """lookahead: replace what was written since. ROWS."""
    LEASE = 14
    """lookahead forwarded: ``ahead``, and where the batch lies. RESULT: rows with their state."""
    REOPEN = 15
    """After a restart of the server: where a batch lies that an earlier one has read. ROWS."""
    ROWS = 20
    """The rows are in the segment; the server's version when they were read."""
    PUSH = 30
    """The gradients are in the segment, or lost. CLOSED, whenever that is."""
    CLOSED = 31
    """The push of (rank, step) is applied or lost here; its gradients are no longer needed."""
    FINISH = 32
    """The rank has ``step`` steps and no more; not answered."""
    CALL = 40
    """A rare request: JSON with verb and arguments, arrays among them. RESULT."""
    RESULT = 41
    """JSON, and arrays."""
    PING = 50
    """I am alive; a byte says whether nobody works here. PONG."""
    PONG = 51
    FAILED = 60
    """JSON with the kind of an error and its sentence."""
    CHUNK = 70
    """From a loader: chunk ``step`` of the pass, its arrays and what was left out."""
    TAKEN = 71
    """To a loader: the chunk has been copied; another one may come."""
    PASS_ENDED = 72
    """From a loader: this pass over the data has no chunk ``step``."""
    GOODBYE = 61
    """The connection will be closed, and all is well."""


class Fate(IntEnum):
    """What has become of a push."""

    APPLIED = 0
    LOST = 1
    REPEATED = 2
    """It had been closed before, and was not applied again."""


class BadMessageError(ValueError):
    """A message that breaks the protocol; its connection is closed."""


class Message(NamedTuple):
    """One message."""

    kind: MessageKind
    rank: int = -1
    step: int = -1
    body: bytes = b""


class Part(NamedTuple):
    """Of one table, the distinct rows of a batch that one server holds; bytes from the start of
    the segment."""

    rows: int
    ids_at: int
    values_at: int
    gradients_at: int


class Placed(NamedTuple):
    """Where a batch lies: its segment, and a part for each table of the server."""

    segment: int
    parts: list[Part]


WITH_ARRAYS = frozenset({MessageKind.CALL, MessageKind.RESULT, MessageKind.CHUNK})
"""Kinds whose arrays come in a segment of their own, not in that of a batch."""


def pack(message: Message, array_bytes: int = 0, received: int = 0) -> bytes:
    """Header and body; ``array_bytes`` will follow, ``received`` messages have come so far."""
    size = len(message.body)
    if size > MOST_BODY_BYTES:
        raise BadMessageError(_too_large(size))
    kind, rank, step, body = message
    return _HEADER.pack(MAGIC, VERSION, kind, size, rank, step, array_bytes, received) + body


def unpack_header(data: bytes | bytearray) -> tuple[Message, int, int, int]:
    """The message without its body, the bytes of that, and of the arrays that follow; how many
    messages its sender had received.

    Raises BadMessageError.
    """
    magic, version, kind, size, rank, step, array_bytes, received = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BadMessageError(f"a message starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise BadMessageError(
            f"a message has version {version} of the protocol, this side speaks {VERSION};"
            " run the same release on both sides"
        )
    if size > MOST_BODY_BYTES:
        raise BadMessageError(_too_large(size))
    if array_bytes > MOST_SEGMENT_BYTES:
        raise BadMessageError(f"a message has {array_bytes} bytes of arrays")
    try:
        return Message(MessageKind(kind), rank, step), size, array_bytes, received
    except ValueError:
        raise BadMessageError(f"a message is of kind {kind}, which is not known") from None


def _too_large(size: int) -> str:
    return f"a message has a body of {size} bytes, more than the {MOST_BODY_BYTES} allowed"


def pack_segment(number: int, size: int) -> bytes:
    """Body of SEGMENT."""
    return _SEGMENT.pack(number, size)


def unpack_segment(body: bytes) -> tuple[int, int]:
    """Number and size of a segment."""
    number, size = _fixed(_SEGMENT, body)
    if number >= MOST_SEGMENTS or not 0 < size <= MOST_SEGMENT_BYTES:
        raise BadMessageError(
            f"segment {number} of {size} bytes: numbers go to {MOST_SEGMENTS - 1},"
            f" sizes from 1 to {MOST_SEGMENT_BYTES}"
        )
    return number, size


def pack_placed(segment: int, parts: Sequence[Part]) -> bytes:
    """Body of LOOK_UP and LOOK_AHEAD."""
    return _BATCH.pack(segment, len(parts)) + b"".join(_PART.pack(*part) for part in parts)


def unpack_placed(body: bytes, segment_bytes: dict[int, int], row_bytes: Sequence[int]) -> Placed:
    """Where a batch lies, every array inside its segment and none over another.

    ``segment_bytes`` are the segments that the receiver has mapped, ``row_bytes`` the bytes of a
    row's values in each table of the server.
    """
    if len(body) < _BATCH.size:
        raise BadMessageError(f"the place of a batch takes more than {len(body)} bytes")
    segment, tables = _BATCH.unpack_from(body)
    if segment not in segment_bytes:
        raise BadMessageError(f"a batch lies in segment {segment}, which was never handed over")
    if tables != len(row_bytes) or len(body) != _BATCH.size + tables * _PART.size:
        raise BadMessageError(
            f"a batch has {tables} tables in {len(body)} bytes, the server has {len(row_bytes)}"
        )
    parts = [Part(*found) for found in _PART.iter_unpack(body[_BATCH.size :])]
    spans = []
    for part, size in zip(parts, row_bytes, strict=True):
        spans += [(part.ids_at, 8), (part.values_at, size), (part.gradients_at, size)]
        spans[-3:] = [(start, start + part.rows * each) for start, each in spans[-3:]]
    end = 0
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if start % 4 or start < end or stop > segment_bytes[segment]:
            raise BadMessageError(
                f"an array of a batch takes bytes {start} to {stop} of segment {segment}, which"
                f" has {segment_bytes[segment]} and is used to {end}"
            )
        end = stop
    return Placed(segment, parts)


def pack_version(version: int) -> bytes:
    """Body of ROWS."""
    return _VERSION.pack(version)


def unpack_version(body: bytes) -> int:
    """The number in it."""
    (version,) = _fixed(_VERSION, body)
    return int(version)


def pack_lease(ahead: int, placed: bytes) -> bytes:
    """Body of LEASE; ``placed`` is that of a lookup."""
    return _VERSION.pack(ahead) + placed


def unpack_lease(body: bytes) -> tuple[int, bytes]:
    """``ahead``, and the body of a lookup."""
    return unpack_version(body[: _VERSION.size]), body[_VERSION.size :]


def pack_fate(fate: int) -> bytes:
    """Body of CLOSED, PUSH (1: the gradients are lost) and PING (1: nobody works here)."""
    return _FATE.pack(fate)


def unpack_fate(body: bytes) -> int:
    """The byte."""
    (fate,) = _fixed(_FATE, body)
    return int(fate)


def pack_json(document: Any) -> bytes:
    """Body of everything that is rare."""
    return json.dumps(document).encode()


def unpack_json(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"a body of {len(body)} bytes is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadMessageError(f"a body is JSON, but a {type(found).__name__} and no object")
    return found


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, MemoryError, OSError, PeerError, BadMessageError, DataError)
}


def error_document(error: BaseException) -> dict[str, str]:
    """An error as JSON: of which known kind it is, and its sentence."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    known = next((name for name in kinds if name in _ERRORS), kinds[0])
    return {"kind": known, "sentence": str(error)[:4000]}


def error_from(document: dict[str, Any], more: str = "") -> Exception:
    """The error of such a document, ``more`` behind its sentence."""
    kind = _ERRORS.get(str(document.get("kind")), RuntimeError)
    return kind(f"{document.get('sentence')}{more}")


def _fixed(shape: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) != shape.size:
        raise BadMessageError(f"a body has {len(body)} bytes, its kind takes {shape.size}")
    return shape.unpack(body)
