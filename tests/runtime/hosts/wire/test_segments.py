"""Shared memory without a name: bounded, sealed, and refused in a sentence where there is none."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest

from runtime.embedding.native.plan import Planner
from runtime.hosts.rows.batch_layout import lay_out
from runtime.hosts.rows.rank_batches import RankBatches
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_placed,
    pack_segment,
)
from runtime.hosts.wire.segments import (
    Segment,
    SegmentPool,
    pack_arrays,
    unpack_arrays,
)
from runtime.stop import Stop
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of


def test_what_one_side_writes_the_other_reads():
    mine = Segment.make(8192)
    theirs = Segment.attach(os.dup(mine.descriptor))
    mine.array(64, (3,), np.float32)[:] = [1, 2, 3]
    assert theirs.array(64, (3,), np.float32).tolist() == [1, 2, 3]


def test_nobody_can_take_the_pages_away_and_none_has_a_name():
    segment = Segment.make(1 << 20)
    assert os.fstat(segment.descriptor).st_blocks * 512 == 1 << 20  # all pages are there
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)
    assert os.readlink(f"/proc/self/fd/{segment.descriptor}").startswith("/memfd:")


def test_memory_that_could_be_taken_away_or_is_too_small_is_refused(tmp_path):
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    whole = Segment.make(4096)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for descriptor, sentence in (loose, "not sealed"), (plain, "no memory file"):
        with pytest.raises(BadMessageError, match=sentence):
            Segment.attach(descriptor)
        with pytest.raises(OSError):  # it has been closed
            os.fstat(descriptor)
    said = Message(MessageKind.SEGMENT, body=pack_segment(0, 8192))
    batches = RankBatches(0, 0, 1, [SGD])
    with pytest.raises(BadMessageError, match="a segment has 4096 bytes, said to have 8192"):
        batches.attach(said, Segment.attach(os.dup(whole.descriptor)))
    with pytest.raises(BadMessageError, match="comes with its descriptor"):
        batches.attach(said, None)


def test_a_segment_is_used_again_and_a_small_one_gives_its_number_to_a_larger_one():
    pool = SegmentPool(2, Stop(), "rank 0")
    number, first = pool.take(100)
    pool.give_back(number, first)
    assert pool.take(1000) == (number, first)
    pool.give_back(number, first)
    again, larger = pool.take(first.size + 1)
    assert again == number
    assert larger.size > first.size
    assert first.descriptor == -1  # closed: the pool never holds more than its bound


def test_a_pool_at_its_bound_makes_the_next_batch_wait():
    pool = SegmentPool(1, Stop(), "rank 0")
    held = pool.take(100)
    found = []
    waiting = threading.Thread(target=lambda: found.append(pool.take(100)), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert not found
    pool.give_back(*held)
    waiting.join(60)
    assert found == [held]


def test_arrays_travel_in_a_segment_of_their_own():
    arrays = {
        "ids": np.arange(5, dtype=np.uint64),
        "rows": np.arange(6.0).reshape(3, 2),
        "none": np.zeros((0, 4), np.float32),
    }
    document, segment = pack_arrays(arrays)
    found = unpack_arrays(document, segment)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()


@pytest.mark.parametrize(
    "entry", [[8000, [100], "<f8"], [-8, [1], "<f8"], [0, [2**62, 8], "<f8"], [0, [1], "|O"]]
)
def test_an_array_outside_its_segment_is_refused(entry):
    segment, index = Segment.make(8192), json.dumps({"a": entry}).encode()
    segment.array(64, (len(index),), np.uint8)[:] = np.frombuffer(index, np.uint8)
    document = {"index": [64, len(index)]}
    with pytest.raises(BadMessageError, match="is not inside it"):
        unpack_arrays(document, segment)


def test_gradients_come_into_the_segment_in_which_their_batch_was_opened():
    """Also where a segment of its number has been handed over again meanwhile."""
    plan = Planner(LAYOUT.fields, [SGD], 1).plan(batch_of(1, 2, 3))
    sent, _ = lay_out(plan, "float32", SegmentPool(4, Stop(), "a rank"))
    batches = RankBatches(0, 0, 1, [SGD])
    told = Message(MessageKind.SEGMENT, 0, -1, pack_segment(sent.number, sent.segment.size))
    batches.attach(told, Segment.private(sent.segment.size))
    asked = Message(MessageKind.LOOK_AHEAD, 0, 0, pack_placed(sent.placed(0)))
    for to, of in zip(batches.place(asked), sent.ids(0).room(), strict=True):
        to[:] = of
    batches.batch(asked)
    batches.attach(told, Segment.private(sent.segment.size))
    for view in batches.place(Message(MessageKind.PUSH, 0, 0)):
        view[:] = np.full(len(view) // 4, 5.0, np.float32).tobytes()
    assert set(batches.known(0).gradients.flat.tolist()) == {5.0}


def test_a_mapped_segment_keeps_one_open_file_and_an_attached_one_none():
    """64 ranks with ten lookups in flight each must fit below the usual limit of 1,024."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    made = Segment.make(4096)
    assert opened() == before + 1
    attached = Segment.attach(os.dup(made.descriptor))
    attached.close()  # as a server does
    assert opened() == before + 1
    made.array(0, (4096,), np.uint8)[:] = 7
    seen = attached.array(0, (4096,), np.uint8)
    made.close()
    del made, attached
    assert opened() == before
    assert seen.sum() == 7 * 4096, "its memory lives as long as an array of it"
