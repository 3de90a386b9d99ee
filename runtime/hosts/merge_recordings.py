"""One order from what several processes have written down.

Each process records its own instants in their order: a server its reads and writes, the dense
weights theirs. Between processes only the program order of each rank is known: its rows are read
before its gradient reaches the dense weights, and that comes before its rows are written. In async
a dense push is not waited for, so there rows are written behind the rank's dense pull. Every order
that obeys all of these gives the same bytes in a replay, because two instants of different
processes meet in no other place; this module finds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, starmap

import numpy as np

from persia_sim.base.trace import ALL, Event, Kind, Trace, TraceRecorder
from persia_sim.base.vocabulary import Mode

_READS = (Kind.LOOKUP, Kind.REFRESH)
_WRITES = (Kind.PUSH, Kind.LOST_PUSH, Kind.FRESH_PUSH, Kind.FRESH_LOST_PUSH)
_TAUGHT = (Kind.DENSE_UPDATE, Kind.DENSE_PUSH)
"""A batch's gradient reaches the dense weights."""
_BLOCK_EVENTS = 8192


def merge_recordings(
    recordings: Sequence[np.ndarray], ranks: int, *, numbers: bool = False
) -> np.ndarray:
    """One linear extension of the recordings, int64 [n, 5].

    Each recording is int64 [n, 5], the columns of `Event`, in its own order. With ``numbers`` dense
    pushes are numbered in the merged order. Raises ValueError when no order obeys them all.
    """
    return _Merging(recordings, ranks, numbers=numbers).run().finish().events


def merged_with_servers(leaders: Trace, of_servers: Sequence[np.ndarray]) -> Trace:
    """What a process has written down itself, merged with what its servers have."""
    ranks = leaders.meta["ranks"]
    averages = Mode(leaders.meta["mode"]).averages_replicas
    first = _by_rank(leaders.events, ranks) if averages else [leaders.events]
    merged = merge_recordings([*first, *of_servers], ranks, numbers=averages)
    return replace(leaders, events=merged)


def _by_rank(events: np.ndarray, ranks: int) -> list[np.ndarray]:
    """What each rank has done to its own replica, in its order.

    Replicas meet in rounds only. How the news of different ranks came to the one who wrote them
    down is not the order of the instants: an update may be heard of after the rank's next push.
    What was merged before, of a run that was resumed, stays before all of it.
    """
    rows = np.flatnonzero(np.isin(events[:, 0], [*_READS, *_WRITES]))
    begins = int(rows[-1]) + 1 if len(rows) else 0
    new = events[begins:]
    by_rank = [new[new[:, 1] == rank] for rank in range(ranks)]
    return [np.concatenate([events[:begins], by_rank[0]]), *by_rank[1:]] if begins else by_rank


class _Merging:
    """Heads of recordings are taken as soon as all that must come before them has been.

    What is held in memory is a block of each recording, and two numbers for each rank and step.
    """

    def __init__(self, recordings: Sequence[np.ndarray], ranks: int, *, numbers: bool) -> None:
        self._recordings = recordings
        self._ranks = ranks
        self._numbers = numbers
        self._lists = [_Head(events) for events in recordings]
        steps = 1 + max((int(e[:, 2].max()) for e in recordings if len(e)), default=0)
        self._reads_left = self._counted(_READS, steps)
        pulls = any((e[:, 0] == Kind.DENSE_PULL).any() for e in recordings)
        self._before_writes = (Kind.DENSE_PULL,) if pulls else _TAUGHT
        """With which a batch's gradient is known, once its rows are read."""
        self._unknown = self._counted(self._before_writes, steps)
        reads = [e[e[:, 0] == Kind.AVERAGE_READ, 4] for e in recordings]
        self._unread = Counter(np.concatenate([np.zeros(0, np.int64), *reads]).tolist())
        """Per round of averaging: replicas not yet read."""
        self._pushes = 0

    def run(self) -> TraceRecorder:
        """All events."""
        taken = TraceRecorder()
        while any(head.event is not None for head in self._lists):
            moved = False
            for head in self._lists:
                while (event := head.event) is not None and self._may_come(event):
                    self._take(event, taken)
                    head.move()
                    moved = True
            if not moved:
                raise ValueError(self._contradiction())
        return taken

    def _counted(self, kinds: Sequence[Kind], steps: int) -> list[list[int]]:
        """How often each step of each rank occurs; an event of all ranks counts for each."""
        totals = np.zeros((self._ranks, steps), np.int64)
        for events in self._recordings:
            for start in range(0, len(events), _BLOCK_EVENTS):
                block = events[start : start + _BLOCK_EVENTS]
                block = block[np.isin(block[:, 0], kinds)]
                of_all = block[:, 1] == ALL
                np.add.at(totals, (block[~of_all, 1], block[~of_all, 2]), 1)
                for counts in totals:
                    np.add.at(counts, block[of_all, 2], 1)
        return [counts.tolist() for counts in totals]

    def _may_come(self, event: Event) -> bool:
        if event.kind == Kind.AVERAGE_WRITE:
            return not self._unread[event.version]
        if event.kind not in (*_WRITES, *_TAUGHT):
            return True
        before = [self._reads_left, *[self._unknown] * (event.kind in _WRITES)]
        return not any(left[rank][event.step] for left in before for rank in self._ranks_of(event))

    def _take(self, event: Event, taken: TraceRecorder) -> None:
        if event.kind == Kind.AVERAGE_READ:
            self._unread[event.version] -= 1
        if event.kind in _READS or event.kind in self._before_writes:
            left = self._reads_left if event.kind in _READS else self._unknown
            for rank in self._ranks_of(event):
                left[rank][event.step] -= 1
        if self._numbers and event.kind == Kind.DENSE_PUSH:
            event = event._replace(version=self._pushes)
            self._pushes += 1
        taken.record(Kind(event.kind), *event[1:])

    def _ranks_of(self, event: Event) -> Sequence[int]:
        return range(self._ranks) if event.rank == ALL else (event.rank,)

    def _contradiction(self) -> str:
        heads = [
            f"recording {k} at row {head.row}: {Kind(event.kind).name.lower()} of rank"
            f" {event.rank}, step {event.step}, shard {event.shard}"
            for k, head in enumerate(self._lists)
            if (event := head.event) is not None
        ]
        return f"no order obeys all recordings; they wait for each other at {'; '.join(heads)}"


class _Head:
    """The next event of a recording, of which a block is in memory."""

    event: Event | None
    """None: there is no more."""

    def __init__(self, events: np.ndarray) -> None:
        starts = range(0, len(events), _BLOCK_EVENTS)
        blocks = (events[start : start + _BLOCK_EVENTS].tolist() for start in starts)
        self._rest = enumerate(starmap(Event, chain.from_iterable(blocks)))
        self.move()

    def move(self) -> None:
        """On to the next one."""
        self.row, self.event = next(self._rest, (-1, None))
