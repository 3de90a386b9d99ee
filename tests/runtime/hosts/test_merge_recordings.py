"""Recordings of several processes become one order, and what they cannot become is said."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.trace import ALL, Event, Kind, Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import constant_lag
from runtime.executors.open import merged_trace
from runtime.hosts.merge_recordings import merge_recordings

READS = (Kind.LOOKUP, Kind.REFRESH)
WRITES = (Kind.PUSH, Kind.LOST_PUSH, Kind.FRESH_PUSH, Kind.FRESH_LOST_PUSH)
TAUGHT = (Kind.DENSE_UPDATE, Kind.DENSE_PUSH)


def table(*events: tuple) -> np.ndarray:
    return np.array(events, np.int64).reshape(-1, 5)


def spread(order: list[Event], shards: int, shuffle: random.Random) -> list[np.ndarray]:
    """The order as its processes would write it down: one of each shard, one of the dense part."""
    recordings: list[list[Event]] = [[] for _ in range(shards + 1)]
    for event in order:
        if event.kind in READS + WRITES:
            for shard in shuffle.sample(range(shards), shards):
                recordings[shard].append(event._replace(shard=shard))
        else:
            recordings[shards].append(event)
    return [table(*events) for events in recordings]


@settings(max_examples=25)
@given(
    mode=st.sampled_from(list(Mode)),
    ranks=st.integers(1, 4),
    steps=st.integers(0, 12),
    tau=st.integers(0, 3),
    shards=st.integers(1, 3),
    merged=st.booleans(),
    fresh=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
@pytest.mark.law12
def test_the_merged_order_obeys_every_recording_and_every_ranks_program(
    mode, ranks, steps, tau, shards, merged, fresh, shuffle
):
    order = list(
        constant_lag(
            mode, ranks=ranks, has_batch=lambda k: k < steps, tau=tau, merge_pushes=merged,
            average_every=2, fresh=fresh and mode.may_merge,
        )
    )  # fmt: skip
    recordings = spread(order, shards, shuffle)
    merged_order = merge_recordings(recordings, ranks)
    found = [tuple(row) for row in merged_order.tolist()]
    assert sorted(found) == sorted(tuple(row) for r in recordings for row in r.tolist())
    at = {event: place for place, event in enumerate(found)}
    for recording in recordings:
        places = [at[tuple(row)] for row in recording.tolist()]
        assert places == sorted(places)
    for here, (kind, rank, step, *_) in enumerate(found):
        for there, (other, by, of, *_) in enumerate(found):
            if step != of or not (ALL in (rank, by) or rank == by):
                continue
            if kind in READS and other in TAUGHT:
                assert here < there
            # In async the dense push is not waited for, the pull is.
            known = (Kind.DENSE_PULL,) if mode.has_dense_server else TAUGHT
            if kind in WRITES and other in READS + known:
                assert there < here


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.law12
def test_an_update_of_all_ranks_comes_behind_the_reads_of_each_of_them(late):
    """One rank reads its second step behind the push of the first, when the others have."""
    early = [rank for rank in range(3) if rank != late]
    server = [
        *(Event(Kind.LOOKUP, rank, 0, 0, 0) for rank in range(3)),
        *(Event(Kind.LOOKUP, rank, 1, 0, 0) for rank in early),
        Event(Kind.PUSH, ALL, 0, 0, 0),
        Event(Kind.LOOKUP, late, 1, 0, 1),
        Event(Kind.PUSH, ALL, 1, 0, 1),
    ]
    dense = [Event(Kind.DENSE_UPDATE, ALL, step, ALL, step) for step in (0, 1)]
    for recordings in ([server, dense], [dense, server]):
        merged = merge_recordings([table(*events) for events in recordings], 3)
        found = [tuple(row) for row in merged.tolist()]
        assert found.index(tuple(dense[0])) < found.index(tuple(server[5]))
        assert found.index(tuple(server[6])) < found.index(tuple(dense[1]))


@pytest.mark.law12
def test_in_async_a_ranks_rows_may_be_written_before_its_dense_push_arrives():
    """Rank 1 has read rank 0's rows, and pushed its own dense gradients, while those of rank 0 were
    on their way: nobody waits for a push."""
    server = [
        Event(Kind.LOOKUP, 0, 0, 0, 0),
        Event(Kind.PUSH, 0, 0, 0, 0),
        Event(Kind.LOOKUP, 1, 0, 0, 1),
        Event(Kind.PUSH, 1, 0, 0, 1),
    ]
    dense = [
        Event(Kind.DENSE_PULL, 0, 0, ALL, 0),
        Event(Kind.DENSE_PULL, 1, 0, ALL, 0),
        Event(Kind.DENSE_PUSH, 1, 0, ALL, 0),
        Event(Kind.DENSE_PUSH, 0, 0, ALL, 1),
    ]
    for recordings in ([server, dense], [dense, server]):
        merged = merge_recordings([table(*events) for events in recordings], 2)
        found = [tuple(row) for row in merged.tolist()]
        assert found.index(tuple(dense[0])) < found.index(tuple(server[1]))
        assert found.index(tuple(server[2])) < found.index(tuple(dense[2]))


def test_recordings_that_contradict_each_other_are_told_by_their_heads():
    server = table((Kind.PUSH, 0, 0, 0, 0), (Kind.LOOKUP, 0, 0, 0, 1))
    dense = table((Kind.DENSE_PUSH, 0, 0, ALL, 0))
    wanted = (
        "no order obeys all recordings; they wait for each other at recording 0 at row 0: push of"
        " rank 0, step 0, shard 0; recording 1 at row 0: dense_push of rank 0, step 0, shard -1"
    )
    with pytest.raises(ValueError, match=re.escape(wanted)):
        merge_recordings([server, dense], 1)


@pytest.mark.law12
def test_of_replicas_only_each_ranks_own_order_counts_and_the_rounds():
    """Rank 1's update was heard of late; a mean is known when all replicas have been read."""
    heard = [
        Event(Kind.DENSE_PUSH, 0, 0, ALL, 0),
        Event(Kind.AVERAGE_READ, 0, 0, ALL, 0),
        Event(Kind.DENSE_PUSH, 0, 1, ALL, 1),
        Event(Kind.DENSE_PUSH, 1, 0, ALL, 2),
        Event(Kind.AVERAGE_READ, 1, 0, ALL, 0),
        Event(Kind.AVERAGE_WRITE, 0, 1, ALL, 0),
    ]
    server = [
        Event(Kind.LOOKUP, 0, 0, 0, 0),
        Event(Kind.LOOKUP, 1, 0, 0, 0),
        Event(Kind.PUSH, 1, 0, 0, 0),
        Event(Kind.LOOKUP, 0, 1, 0, 1),
    ]
    facts = {"mode": "async_averaging", "ranks": 2}
    merged = list(merged_trace(Trace.of(heard, **facts), [table(*server)]))
    order = {event._replace(version=0): place for place, event in enumerate(merged)}

    def at(event: Event) -> int:
        return order[event._replace(version=0)]

    assert len(order) == len(heard) + len(server)
    assert at(heard[3]) < at(server[2]) < at(server[3]) < at(heard[2])
    assert max(at(heard[1]), at(heard[4])) < at(heard[5])
    assert [e.version for e in merged if e.kind == Kind.DENSE_PUSH] == [0, 1, 2]
    with pytest.raises(ValueError, match="no order obeys"):  # as one recording they contradict
        merged_trace(Trace.of(heard, **(facts | {"mode": "async"})), [table(*server)])


@pytest.mark.law11
@pytest.mark.law12
def test_what_was_merged_before_a_resume_stays_as_it_is_before_all_that_follows():
    """Its last writes, too: rank 1's push came before that of rank 0."""
    merged = [
        Event(Kind.LOOKUP, 0, 0, 0, 0), Event(Kind.LOOKUP, 1, 0, 0, 0),
        Event(Kind.DENSE_PUSH, 0, 0, ALL, 0), Event(Kind.DENSE_PUSH, 1, 0, ALL, 1),
        Event(Kind.PUSH, 1, 0, 0, 0), Event(Kind.PUSH, 0, 0, 0, 1),
    ]  # fmt: skip
    heard = [Event(Kind.DENSE_PUSH, rank, 1, ALL, 2 + n) for n, rank in enumerate((1, 0, 2))]
    server = [
        Event(Kind.LOOKUP, 1, 1, 0, 2), Event(Kind.LOOKUP, 0, 1, 0, 2),
        Event(Kind.LOOKUP, 2, 1, 0, 2), Event(Kind.PUSH, 0, 1, 0, 2),
        Event(Kind.PUSH, 1, 1, 0, 3), Event(Kind.PUSH, 2, 1, 0, 4),
    ]  # fmt: skip
    whole = Trace.of([*merged, *heard], mode="async_averaging", ranks=3)
    found = list(merged_trace(whole, [table(*server)]))
    assert found[: len(merged)] == merged
    assert len(found) == len(merged) + len(heard) + len(server)
    assert [event for event in found[len(merged) :] if event.kind in READS + WRITES] == server


LONG_ORDER = """
import tracemalloc
import numpy as np
from persia_sim.base import trace
from persia_sim.base.trace import ALL, Kind
from runtime.hosts.merge_recordings import merge_recordings

trace.MOST_BYTES_IN_MEMORY = 1 << 18
ranks, steps = 2, 12_000
step = np.repeat(np.arange(steps), 2 * ranks)
kind = np.tile([Kind.LOOKUP] * ranks + [Kind.PUSH] * ranks, steps)
rank = np.tile(np.arange(ranks), 2 * steps)
shards = [np.stack([kind, rank, step, step * 0 + k, step], 1) for k in (0, 1)]
dense = np.array([(Kind.DENSE_UPDATE, ALL, s, ALL, s) for s in range(steps)], np.int64)
tracemalloc.start()
events = merge_recordings([*shards, dense], ranks)
print(len(events), (events[:, 0] == Kind.DENSE_UPDATE).sum(), tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.long
def test_a_long_order_is_merged_block_by_block_and_not_held_in_memory():
    """An event of 40 bytes takes 300 as a tuple of numbers; what is counted takes 8 per step.

    In a process of its own: threads that other tests have left allocate, too.
    """
    done = subprocess.run(
        [sys.executable, "-c", LONG_ORDER], capture_output=True, text=True, check=True
    )
    events, dense_updates, peak_bytes = map(int, done.stdout.split())
    assert (events, dense_updates) == (9 * 12_000, 12_000)
    assert peak_bytes < 60 * events
