"""What a network is, and the two whose messages need no shares: FIFO, and alone on every NIC."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf

import simpy

Role = tuple[int, int]
"""Whose messages they are, and what they are about: a rank, and a kind."""


class Network:
    """A discipline."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        """``capacities`` of each link, and of a ``stream`` alone, bytes a second."""
        self._env = env
        self._capacities = capacities
        self._stream = stream
        self.link_bytes = [0.0] * len(capacities)

    def send(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """An event that fires when the last byte has arrived. What has one ``path`` and ``role``
        travels on one connection; None: on one of its own."""
        raise NotImplementedError


class Unshared(Network):
    """Every message alone: size over the slowest link of its path."""

    def send(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """Fires after the transfer alone."""
        for link in path:
            self.link_bytes[link] += size_bytes
        return self._env.timeout(
            transfer_s(size_bytes, [self._capacities[k] for k in path], self._stream * streams)
        )


def transfer_s(size_bytes: float, rates: Iterable[float], bound: float) -> float:
    """Duration of a message that shares with nobody."""
    return size_bytes / min(*rates, bound)


class Fifo(Network):
    """A NIC passes one message at a time, and those that were sent first come first.

    A message moves whenever all NICs of its path are idle, in pieces where need be; a NIC that is
    faster is free again before the others. So an idle pair is passed in the time of the slower, no
    message delays one that was sent before it, and its end is known when it is sent.
    """

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        super().__init__(env, capacities, stream)
        self._calendars = [Calendar() for _ in capacities]

    def send(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """Fires when the message has left every NIC of its path."""
        # How long it holds each NIC.
        end = at = now = self._env.now
        slowest = size_bytes / (self._stream * streams)
        held = []
        busy = False
        for link in path:
            self.link_bytes[link] += size_bytes
            calendar = self._calendars[link]
            busy = calendar.busy_from(now) or busy
            held.append((calendar, max(size_bytes / self._capacities[link], slowest)))

        # It moves while those that it has not passed yet are idle.
        while held:
            at, until = _all_idle([calendar for calendar, _ in held], at) if busy else (now, inf)
            room = until - at
            waiting = []
            for calendar, left in held:
                if left <= room:
                    calendar.book(at, at + left)
                    end = max(end, at + left)
                else:
                    calendar.book(at, until)
                    waiting.append((calendar, left - room))
            held = waiting
            at = until
        return self._env.timeout(end - now)


class Calendar:
    """When a NIC is busy from now on: disjoint intervals in order of time."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def busy_from(self, now_s: float) -> bool:
        """Drop what is over; whether anything is left."""
        ends = self._ends
        while ends and ends[0] <= now_s:
            del self._starts[0], ends[0]
        return bool(ends)

    def idle(self, from_s: float) -> tuple[float, float]:
        """The first instant, not before this one, at which it is idle, and until when it is."""
        at = bisect_right(self._ends, from_s)
        while at < len(self._starts) and self._starts[at] <= from_s:
            from_s = self._ends[at]
            at += 1
        return from_s, self._starts[at] if at < len(self._starts) else inf

    def book(self, start_s: float, end_s: float) -> None:
        """Make an idle interval a busy one; neighbours that it touches become one with it."""
        if start_s == end_s:
            return
        starts = self._starts
        ends = self._ends
        at = bisect_right(starts, start_s)
        joins_next = at < len(starts) and starts[at] == end_s
        if at and ends[at - 1] == start_s:
            if joins_next:
                end_s = ends.pop(at)
                del starts[at]
            ends[at - 1] = end_s
        elif joins_next:
            starts[at] = start_s
        else:
            starts.insert(at, start_s)
            ends.insert(at, end_s)


def _all_idle(calendars: Sequence[Calendar], from_s: float) -> tuple[float, float]:
    """The first instant, not before this one, at which all are idle, and until when they are."""
    while True:
        start = from_s
        until = inf
        for calendar in calendars:
            start, busy_s = calendar.idle(start)
            until = min(until, busy_s)
        if start == from_s or len(calendars) == 1:
            return start, until
        from_s = start
