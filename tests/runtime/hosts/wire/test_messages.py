"""The protocol: what is packed comes out again, and nothing else is believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.embedding.native.extension import native
from runtime.hosts.wire.messages import (
    HEADER_BYTES,
    MOST_BODY_BYTES,
    BadMessageError,
    Message,
    MessageKind,
    Placed,
    pack,
    pack_placed,
    pack_segment,
    unpack_header,
    unpack_json,
    unpack_placed,
    unpack_segment,
)

SMALL = st.integers(0, 2**31 - 1)


@given(st.sampled_from(MessageKind), SMALL, st.integers(0, 2**63 - 1), st.binary(max_size=99))
def test_a_message_comes_out_as_it_went_in(kind, rank, step, body):
    message = Message(kind, rank, step, body, 5)
    data = pack(message, 7, 9)
    assert data[HEADER_BYTES:] == body
    assert unpack_header(data[:HEADER_BYTES]) == (message._replace(body=b""), len(body), 7, 9)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_bytes_that_are_no_message_are_refused_whatever_they_are(data):
    with pytest.raises(BadMessageError):
        unpack_header(data if data[:4] != b"PtbR" else b"x" + data[1:])


WHOLE = pack(Message(MessageKind.PUSH, 3, 7, b"\0"))[:HEADER_BYTES]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"HTTP" + WHOLE[4:], "a message starts with b'HTTP', not with b'PtbR'"),
        (WHOLE[:4] + b"\x0c\0" + WHOLE[6:], "has version 12 of the protocol, this side speaks 11"),
        (WHOLE[:6] + b"\xff\0" + WHOLE[8:], "of kind 255, which is not known"),
        (WHOLE[:-17] + b"\x01" + WHOLE[-16:], "has 72057594037927936 bytes of arrays"),
        (WHOLE[:8] + b"\0\0\0\x01" + WHOLE[12:], "a body of 16777216 bytes, more than the 65536"),
    ],
)
def test_a_damaged_message_is_told_by_what_is_wrong(data, sentence):
    with pytest.raises(BadMessageError, match=sentence):
        unpack_header(data)


def test_what_is_too_large_is_not_even_sent():
    with pytest.raises(BadMessageError, match="65537 bytes, more than the 65536"):
        pack(Message(MessageKind.CALL, body=bytes(MOST_BODY_BYTES + 1)))


DIMS = np.array([2, 4])


def placed(*spans: tuple[int, int, int], segment: int = 5, starts: tuple = (0, 64, 128)) -> Placed:
    return Placed(segment, *starts, np.array(spans))


def test_a_batch_lies_where_it_is_said_to_lie():
    given = placed((2, 3, 0), (5, 0, 6))
    *head, spans = unpack_placed(pack_placed(given), {5: 256}, DIMS, 4)
    assert head == [5, 0, 64, 128]
    assert spans.tolist() == [[2, 3, 0], [5, 0, 6]]


WHOLE_BATCH = (0, 1, 0), (1, 1, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (placed(*WHOLE_BATCH, segment=4), "lies in segment 4, which was never handed over"),
        (placed((0, 1, 0)), "a batch has 1 tables .* the server has 2"),
        (placed(*WHOLE_BATCH, starts=(0, 64, 250)), "takes bytes 250 to 274 of segment 5, .* 256"),
        (placed(*WHOLE_BATCH, starts=(0, 64, 240)), "takes bytes 240 to 264 of segment 5, .* 256"),
        (placed(*WHOLE_BATCH, starts=(0, 64, 80)), "takes bytes 64 to 88 of segment 5, .* 80"),
        (placed(*WHOLE_BATCH, starts=(0, 8, 80)), "takes bytes 0 to 16 of segment 5, .* 8"),
        (placed((0, 1, 0), (1, 2**61, 2)), "spans of up to 2305843009213693952 in segment 5"),
        (placed((0, 1, 0), (1, -1, 2)), "spans of up to 18446744073709551615 in segment 5"),
        (placed((0, 2, 0), (1, 1, 4)), "tables of a batch lie over each other in segment 5"),
        (placed((0, 1, 0), (1, 1, 1)), "tables of a batch lie over each other in segment 5"),
    ],
)
def test_arrays_outside_their_segment_or_over_each_other_are_refused(given, sentence):
    with pytest.raises(BadMessageError, match=sentence):
        unpack_placed(pack_placed(given), {5: 256}, DIMS, 4)


@pytest.mark.parametrize("number, size", [(2**16, 8), (0, 0), (0, 2**50)])
def test_a_segment_has_a_number_and_a_size_within_bounds(number, size):
    with pytest.raises(BadMessageError, match=f"segment {number} of {size} bytes"):
        unpack_segment(pack_segment(number, size))


@given(st.binary(max_size=80))
def test_bodies_of_any_bytes_end_in_a_value_or_in_a_sentence(body):
    for read in (
        unpack_segment, unpack_json,
        lambda b: unpack_placed(b, {0: 64}, DIMS[:1], 4),
    ):  # fmt: skip
        try:
            read(body)
        except BadMessageError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("data", "check"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_those_of_rfc_3720(data, check):
    """Appendix B.4, and the check value of the catalogue of CRCs."""
    assert native.crc32c(data) == check
    assert native.crc32c(memoryview(bytearray(data))) == check


def remainder(data: bytes) -> int:
    """CRC-32C bit by bit, by long division: its polynomial is 0x1EDC6F41."""
    rest = 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_a_checksum_goes_on_from_part_to_part(parts):
    found = 0
    for part in parts:
        found = native.crc32c(part, found)
    assert found == remainder(b"".join(parts))


def test_of_long_arrays_every_bit_counts():
    data = np.random.default_rng(1).bytes(200_001)
    flipped = bytearray(data)
    flipped[123_457] ^= 16
    assert native.crc32c(data) == remainder(data)
    assert native.crc32c(flipped) != native.crc32c(data)
