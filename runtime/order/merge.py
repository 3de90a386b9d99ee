"""One order from what several processes have written down.

Each process records its own instants in their order: a server its reads and writes, the dense
weights theirs. Between processes only the program order of each rank is known: its rows are read
before its gradient reaches the dense weights, and that comes before its rows are written. Every
order that obeys all of these gives the same bytes in a replay, because two instants of different
processes meet in no other place; this module finds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from persia_sim.words.trace import ALL, Event, Kind, Trace, TraceRecorder
from persia_sim.words.vocabulary import Mode

_READS = (Kind.LOOKUP, Kind.REFRESH)
_WRITES = (Kind.PUSH, Kind.LOST_PUSH)
_TAUGHT = (Kind.DENSE_UPDATE, Kind.DENSE_PUSH)
"""A batch's gradient reaches the dense weights; it is known from here on."""
_Place = tuple[int, int]
"""Rank and step."""


def merge_recordings(recordings: Sequence[np.ndarray], ranks: int) -> np.ndarray:
    """One linear extension of the recordings, int64 [n, 5].

    Each recording is int64 [n, 5], the columns of `Event`, in its own order. An instant of all
    ranks that several have written down (a dense update) stands once. Raises ValueError when no
    order obeys them all.
    """
    merging = _Merging(recordings, ranks)
    return np.array(merging.run(), np.int64).reshape(-1, len(Event._fields))


def whole_trace(
    recorder: TraceRecorder, of_servers: Sequence[np.ndarray], meta: dict[str, Any]
) -> Trace:
    """The trace of a run: what it has written down itself, merged with what its servers have.

    ``meta`` are the facts of the trace, ``ranks`` among them.
    """
    return merged_trace(recorder.finish(**meta), of_servers)


def merged_trace(own: Trace, of_servers: Sequence[np.ndarray]) -> Trace:
    """What a process has written down itself, merged with what its servers have."""
    if not of_servers:
        return own
    ranks = own.meta["ranks"]
    if own.meta["mode"] != Mode.ASYNC_AVERAGING:
        return replace(own, events=merge_recordings([own.events, *of_servers], ranks))
    events = merge_recordings([*_by_rank(own.events, ranks), *of_servers], ranks)
    pushed = events[:, 0] == Kind.DENSE_PUSH
    events[pushed, 4] = np.arange(pushed.sum())
    return replace(own, events=events)


def _by_rank(events: np.ndarray, ranks: int) -> list[np.ndarray]:
    """What each rank has done to its own replica, in its order.

    Replicas meet in rounds only. How the news of different ranks came to the one who wrote them
    down is not the order of the instants: an update may be heard of after the rank's next push.
    What was merged before, of a run that was resumed, stays before all of it.
    """
    rows = np.flatnonzero(np.isin(events[:, 0], [*_READS, *_WRITES]))
    begins = int(rows[-1]) + 1 if len(rows) else 0
    new = events[begins:]
    own = [new[new[:, 1] == rank] for rank in range(ranks)]
    return [np.concatenate([events[:begins], own[0]]), *own[1:]] if begins else own


class _Merging:
    """Heads of recordings are taken as soon as all that must come before them has been."""

    def __init__(self, recordings: Sequence[np.ndarray], ranks: int) -> None:
        self._lists = [[Event(*row) for row in events.tolist()] for events in recordings]
        self._next = [0] * len(recordings)
        self._ranks = ranks
        self._reads_left: Counter[_Place] = Counter()
        self._untaught: Counter[_Place] = Counter()
        self._unread: Counter[int] = Counter()  # per round of averaging: replicas not yet read
        self._shared: dict[Event, int] = {}  # instants of all ranks: recordings that have them
        for events in self._lists:
            for event in events:
                for place in self._places(event):
                    if event.kind in _READS:
                        self._reads_left[place] += 1
                    elif event.kind in _TAUGHT:
                        self._untaught[place] += 1
                if event.kind == Kind.AVERAGE_READ:
                    self._unread[event.version] += 1
                if event.kind == Kind.DENSE_UPDATE:
                    self._shared[event] = self._shared.get(event, 0) + 1
        for event, copies in self._shared.items():
            for place in self._places(event):
                self._untaught[place] -= copies - 1

    def run(self) -> list[Event]:
        """All events."""
        taken: list[Event] = []
        while any(self._next[k] < len(events) for k, events in enumerate(self._lists)):
            before = sum(self._next)
            for k in range(len(self._lists)):
                self._take_from(k, taken)
            if sum(self._next) == before and not self._take_shared(taken):
                raise ValueError(self._contradiction())
        return taken

    def _take_from(self, k: int, taken: list[Event]) -> None:
        events = self._lists[k]
        while self._next[k] < len(events):
            event = events[self._next[k]]
            if self._shared.get(event, 1) > 1 or not self._may_come(event):
                return
            self._take(event, taken)
            self._next[k] += 1

    def _take_shared(self, taken: list[Event]) -> bool:
        """An instant that stands at the head of every recording that has it."""
        heads = [(k, e[self._next[k]]) for k, e in enumerate(self._lists) if self._next[k] < len(e)]
        at_head = Counter(event for _, event in heads)
        for event, copies in at_head.items():
            if self._shared.get(event, 1) == copies > 1 and self._may_come(event):
                self._take(event, taken)
                for k, head in heads:
                    self._next[k] += head == event
                return True
        return False

    def _may_come(self, event: Event) -> bool:
        if event.kind in _WRITES:
            return not any(self._untaught[place] for place in self._places(event))
        if event.kind == Kind.AVERAGE_WRITE:
            return not self._unread[event.version]
        if event.kind in _TAUGHT:
            return not any(self._reads_left[place] for place in self._places(event))
        return True

    def _take(self, event: Event, taken: list[Event]) -> None:
        taken.append(event)
        if event.kind == Kind.AVERAGE_READ:
            self._unread[event.version] -= 1
        if event.kind in _READS or event.kind in _TAUGHT:
            left = self._reads_left if event.kind in _READS else self._untaught
            for place in self._places(event):
                left[place] -= 1

    def _places(self, event: Event) -> list[_Place]:
        ranks = range(self._ranks) if event.rank == ALL else (event.rank,)
        return [(rank, event.step) for rank in ranks]

    def _contradiction(self) -> str:
        heads = [
            f"recording {k} at row {n}: {Kind(events[n].kind).name.lower()} of rank"
            f" {events[n].rank}, step {events[n].step}, shard {events[n].shard}"
            for k, (n, events) in enumerate(zip(self._next, self._lists, strict=True))
            if n < len(events)
        ]
        return f"no order obeys all recordings; they wait for each other at {'; '.join(heads)}"
