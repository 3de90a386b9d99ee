"""The protocol between rank processes and embedding servers, in one place.

A message is a header, a body, and perhaps arrays. A batch's arrays lie in a *segment*, memory of
one number and size on both sides, and a message says where. On one host both have mapped the same
pages; between hosts ids, rows and gradients follow the message that names them. What is asked for
rarely (a table, a trace) comes in a segment of its own, with the message or behind it.

All numbers are little-endian. The receiver checks everything before it uses anything: a message
that breaks a rule closes its connection, and nothing else. Over plain TCP a CRC-32C stands behind
header, body and arrays each, before which none of them is used: one that is wrong breaks the
connection, which is made again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from persia_sim.base.files import MORE_FILES, TOO_MANY_OPEN
from runtime.data.errors import DataError
from runtime.embedding.native.extension import native
from runtime.files import BrokenFileError
from runtime.stop import PeerError

MAGIC = b"PtbR"
VERSION = 11
MOST_BODY_BYTES = 1 << 16
MOST_SEGMENTS = 1 << 16
"""Segments of one rank: far beyond any window that fits a memory."""
MOST_SEGMENT_BYTES = 1 << 40
SECRET_BYTES = 32
RANK_ROLES = ("lookups", "pushes", "prefetches")
"""Connections of one rank with an embedding server; those of a process are ``control``, for what
is rare, and ``heartbeat``."""

_HEADER = struct.Struct("<4sHHIiqQQq")
# magic, version, kind, body bytes, rank, step, array bytes, messages received so far, number
HEADER_BYTES = _HEADER.size
CHECKSUM_BYTES = 4
_OURS = struct.pack("<4sH", MAGIC, VERSION)
_SEGMENT = struct.Struct("<IQ")  # number, bytes
_BATCH = struct.Struct("<IIQQQ")  # tables, segment; where ids, values and gradients start


class MessageKind(IntEnum):
    """What a message asks for or answers; ``rank``, ``step`` and a number are in every header."""

    HELLO = 1
    """First on a connection: JSON with role, pid and client; on one host with a proof of the
    secret; between hosts with the connection's own name, how many messages have been received over
    it before it broke, and a nonce."""
    WELCOME = 2
    """The answer: JSON with pid, shard and shards."""
    RESTORING = 3
    """To who waits for WELCOME: the server is getting its rows; it may take minutes."""
    CHALLENGE = 5
    """The first answer between hosts: JSON with a nonce. PROOF,
    which covers it, so that one that was overheard is of no use."""
    PROOF = 6
    """JSON with a proof of the secret. ACCEPTED."""
    ACCEPTED = 4
    """JSON with a proof, too, which covers HELLO's number, and how many messages have been received
    here."""
    SEGMENT = 10
    """A segment's number and size, on one host its descriptor with it; not answered."""
    LOOK_UP = 11
    """Where a batch lies: read its rows when window and order allow it. ROWS."""
    LOOK_AHEAD = 12
    """lookahead: the same at any time, without side effect. ROWS."""
    BRING_UP_TO_DATE = 13
    """lookahead, fresh tables: replace what was written since. ROWS."""
    LEASE = 14
    """lookahead forwarded: where the batch lies; number: ahead. RESULT: rows with their state."""
    REOPEN = 15
    """After a restart of the server: where a batch lies that an earlier one has read, and
    (number 1) brought up to date. ROWS."""
    ROWS = 20
    """The rows are in the segment; number: the server's version when they were read."""
    PUSH = 30
    """The gradients are in the segment, or (number 1) lost. CLOSED, whenever that is."""
    CLOSED = 31
    """The push of (rank, step) is applied or lost here, where tables are fresh both its pushes
    are; its gradients are no longer needed."""
    WRITE_BACK = 33
    """lookahead forwarded: PUSH of a batch that was on lease, and before it the lookup whose rows
    nobody needs. CLOSED."""
    FINISH = 32
    """The rank has ``step`` steps and no more; not answered."""
    FRESH_PUSH = 35
    """As PUSH, of the fresh tables alone, whose rows the next step waits for; before PUSH, which
    is of the others then."""
    RUN_BEGINS = 34
    """What came before it over this connection was of a run that was stopped. RUN_BEGINS, behind
    the last answer to that."""
    CALL = 40
    """A rare request: JSON with verb and arguments, arrays among them. RESULT."""
    RESULT = 41
    """JSON, and arrays."""
    PING = 50
    """I am alive; number 1: nobody works here. PONG."""
    PONG = 51
    FAILED = 60
    """JSON with the kind of an error and its sentence."""
    CHUNK = 70
    """From a loader: chunk ``step`` of the pass is there; its turn, size and what was left out."""
    PROGRESS = 71
    """To a loader: JSON with what the stream has come to, and the first that it needs."""
    PASS_ENDED = 72
    """From a loader: this pass over the data has no chunk ``step``."""
    READ_SAMPLES = 73
    """To a loader: names of samples of its chunks, as runs. SAMPLES, when these are parsed."""
    SAMPLES = 74
    """Their arrays, under the number of the question."""
    DISCONNECT = 61
    """The connection will be closed, and all is well."""


class BadMessageError(ValueError):
    """A message that breaks the protocol; its connection is closed."""


class Message(NamedTuple):
    """One message."""

    kind: MessageKind
    rank: int = -1
    step: int = -1
    body: bytes = b""
    number: int = 0


Place = Callable[[Message], Sequence[memoryview] | None]
"""Where the arrays of a message belong; None: nobody wants them."""


class Placed(NamedTuple):
    """Where a batch lies: its segment, and in it the tables' ids, values and gradients, those of
    all tables side by side."""

    segment: int
    ids_at: int
    """Bytes from the start of the segment; so the next two."""
    values_at: int
    gradients_at: int
    spans: np.ndarray
    """int64 [tables, 3], as those of a `BatchPlan`: of the rows that this server holds."""

    def elements(self, dims: np.ndarray) -> int:
        """Numbers of values, or of gradients, up to the end of the last row."""
        if not len(self.spans):
            return 0
        _, rows, at = self.spans[-1]
        return int(at + rows * dims[-1])


_SAMPLES = {MessageKind.READ_SAMPLES, MessageKind.SAMPLES}
WITH_ARRAYS = frozenset({MessageKind.CALL, MessageKind.RESULT, *_SAMPLES})
"""Kinds whose arrays come in a segment of their own, not in that of a batch."""


def pack(message: Message, array_bytes: int = 0, received: int = 0) -> bytes:
    """Header and body; ``array_bytes`` will follow, ``received`` messages have come so far."""
    size = len(message.body)
    if size > MOST_BODY_BYTES:
        raise BadMessageError(_too_large(size))
    kind, rank, step, body, number = message
    head = _HEADER.pack(MAGIC, VERSION, kind, size, rank, step, array_bytes, received, number)
    return head + body


def checksum_of(parts: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """What stands behind them over plain TCP: their CRC-32C."""
    checksum = 0
    for part in parts:
        checksum = native.crc32c(part, checksum)
    return checksum.to_bytes(CHECKSUM_BYTES, "little")


def is_of_this_release(header: bytes | bytearray, check: bytes | bytearray) -> bool:
    """Whether a header is one of ours, be it damaged: magic and version are ours, or all the rest
    is what was summed up. Any other has no checksum; it has to be refused, not asked for again."""
    known = len(_OURS)
    return header.startswith(_OURS) or checksum_of([_OURS, header[known:]]) == check


def unpack_header(data: bytes | bytearray) -> tuple[Message, int, int, int]:
    """The message without its body, the bytes of that, and of the arrays that follow; how many
    messages its sender had received.

    Raises BadMessageError.
    """
    # Another program, or another release.
    magic, version, kind, size, rank, step, array_bytes, received, number = _HEADER.unpack(data)
    if magic != MAGIC:
        raise BadMessageError(f"a message starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise BadMessageError(
            f"a message has version {version} of the protocol, this side speaks {VERSION};"
            " run the same release on both sides"
        )

    # Bound what a stranger can make us allocate.
    if size > MOST_BODY_BYTES:
        raise BadMessageError(_too_large(size))
    if array_bytes > MOST_SEGMENT_BYTES:
        raise BadMessageError(f"a message has {array_bytes} bytes of arrays")

    # Kinds that this release knows.
    try:
        message = Message(MessageKind(kind), rank, step, number=number)
        return message, size, array_bytes, received
    except ValueError:
        raise BadMessageError(f"a message is of kind {kind}, which is not known") from None


def _too_large(size: int) -> str:
    return f"a message has a body of {size} bytes, more than the {MOST_BODY_BYTES} allowed"


def pack_segment(number: int, size: int) -> bytes:
    """Body of SEGMENT."""
    return _SEGMENT.pack(number, size)


def unpack_segment(body: bytes) -> tuple[int, int]:
    """Number and size of a segment."""
    if len(body) != _SEGMENT.size:
        raise BadMessageError(f"a segment is told in {_SEGMENT.size} bytes, not in {len(body)}")
    number, size = _SEGMENT.unpack(body)
    if number >= MOST_SEGMENTS or not 0 < size <= MOST_SEGMENT_BYTES:
        raise BadMessageError(
            f"segment {number} of {size} bytes: numbers go to {MOST_SEGMENTS - 1},"
            f" sizes from 1 to {MOST_SEGMENT_BYTES}"
        )
    return number, size


def pack_placed(placed: Placed) -> bytes:
    """Body of LOOK_UP and LOOK_AHEAD."""
    *head, spans = placed
    return _BATCH.pack(len(spans), *head) + spans.astype("<i8").tobytes()


def unpack_placed(
    body: bytes, segment_bytes: Mapping[int, int], dims: np.ndarray, number_bytes: int
) -> Placed:
    """Where a batch lies, every array inside its segment and none over another.

    ``segment_bytes`` are the segments that the receiver has mapped, ``dims`` int64 [tables] the
    numbers of a row, each of ``number_bytes``.
    """
    # A segment that was handed over, and as many tables as the server has.
    if len(body) < _BATCH.size:
        raise BadMessageError(f"the place of a batch takes more than {len(body)} bytes")
    tables, segment, ids_at, values_at, gradients_at = _BATCH.unpack_from(body)
    if segment not in segment_bytes:
        raise BadMessageError(f"a batch lies in segment {segment}, which was never handed over")
    if tables != len(dims) or len(body) != _BATCH.size + tables * 24:
        raise BadMessageError(
            f"a batch has {tables} tables in {len(body)} bytes, the server has {len(dims)}"
        )

    # Numbers come from another process: bound them before any is multiplied.
    size = segment_bytes[segment]
    numbers = np.frombuffer(body, "<u8", offset=_BATCH.size)
    if (most := numbers.max()) > size:  # so that no product below overflows
        raise BadMessageError(
            f"a batch has spans of up to {most} in segment {segment}, which has {size} bytes"
        )

    # Tables lie one behind the other.
    spans = numbers.view("<i8").reshape(-1, 3)
    first, rows, at = spans.T
    ends = first + rows
    tops = at + rows * dims
    if (first[1:] < ends[:-1]).any() or (at[1:] < tops[:-1]).any():
        raise BadMessageError(f"tables of a batch lie over each other in segment {segment}")

    # So do ids, values and gradients, all inside the segment.
    ids_bytes = int(ends[-1]) * 8
    value_bytes = int(tops[-1]) * number_bytes
    for start, taken, limit in (
        (ids_at, ids_bytes, values_at),
        (values_at, value_bytes, gradients_at),
        (gradients_at, value_bytes, size),
    ):
        if start % 8 or start + taken > limit:
            raise BadMessageError(
                f"an array of a batch takes bytes {start} to {start + taken} of segment {segment},"
                f" and may go to {limit}"
            )
    return Placed(segment, ids_at, values_at, gradients_at, spans)


def pack_json(document: Any) -> bytes:
    """Body of everything that is rare."""
    return json.dumps(document).encode()


def unpack_json(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        result = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"a body of {len(body)} bytes is no JSON: {error}") from None
    if not isinstance(result, dict):
        raise BadMessageError(f"a body is JSON, but a {type(result).__name__} and no object")
    return result


def role_in(hello: Mapping[str, Any]) -> str:
    """The role of a connection, by what a server's client says first. Raises BadMessageError."""
    fits = (
        hello.get("role") in (*RANK_ROLES, "control", "heartbeat")
        and isinstance(hello.get("client"), str)
        and isinstance(hello.get("pid"), int)
        and isinstance(hello.get("ranks"), str)
        and isinstance(hello.get("client_incarnation"), int | None)
    )
    if not fits:
        raise BadMessageError("the first message lacks role, client, ranks or pid")
    return str(hello["role"])


_KNOWN = ValueError, MemoryError, OSError, PeerError, BadMessageError, DataError, BrokenFileError
_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in _KNOWN}


def error_document(error: BaseException) -> dict[str, str]:
    """An error as JSON: of which known kind it is, and its sentence."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    known = next((name for name in kinds if name in _ERRORS), kinds[0])
    sentence = str(error)
    if isinstance(error, OSError) and error.errno in TOO_MANY_OPEN:  # whose number does not travel
        sentence = f"{error.strerror}; {MORE_FILES}"
    return {"kind": known, "sentence": sentence[:4000]}


def error_from(document: dict[str, Any], more: str = "") -> Exception:
    """The error of such a document, ``more`` behind its sentence."""
    kind = _ERRORS.get(str(document.get("kind")), RuntimeError)
    return kind(f"{document.get('sentence')}{more}")
