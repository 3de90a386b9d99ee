"""Network cards and the three ways in which messages share them.

A link is one direction of one card. All server cards may be one link: when every fan-out spreads
over the servers in the same shares, the busiest card binds first and the others follow it, so a
single link of capacity (card rate / largest share) is exact under fair sharing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import simpy

from persia_sim.fairshare import max_min


class Network(Protocol):
    """A discipline."""

    link_bytes: list[float]

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """An event that fires when the last byte has arrived."""
        ...


class Unshared:
    """Every message alone: size over the slowest link of its path."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        self._env = env
        self._capacities = capacities
        self._stream = stream
        self.link_bytes = [0.0] * len(capacities)

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """Fires after the transfer alone."""
        for link in path:
            self.link_bytes[link] += size_bytes
        return self._env.timeout(
            transfer_s(size_bytes, [self._capacities[k] for k in path], self._stream * streams)
        )


def transfer_s(size_bytes: float, rates: Iterable[float], bound: float) -> float:
    """Duration of a message that shares with nobody."""
    return size_bytes / min(*rates, bound)


class Fifo:
    """Messages hold a card one after the other, in order of sending; the receiving card starts with
    the sending one, so an idle pair is passed in the time of the slower."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        self._env = env
        self._capacities = capacities
        self._stream = stream
        self._free = [0.0] * len(capacities)
        self.link_bytes = [0.0] * len(capacities)

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """Fires when the message has left every card of its path."""
        start = end = self._env.now
        slowest = size_bytes / (self._stream * streams)
        for link in path:
            start = max(start, self._free[link])
            done = start + max(size_bytes / self._capacities[link], slowest)
            self._free[link] = done
            end = max(end, done)
            self.link_bytes[link] += size_bytes
        return self._env.timeout(end - self._env.now)


class _Flow:
    __slots__ = ("bound", "done", "left", "path", "rate", "since", "version", "weight")

    def __init__(
        self, path: list[_Link], left: float, weight: float, bound: float, done: simpy.Event
    ) -> None:
        self.path = path
        self.left = left
        self.weight = weight
        self.bound = bound
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.version = 0


class _Link:
    __slots__ = ("asked", "capacity", "flows", "index")

    def __init__(self, index: int, capacity: float) -> None:
        self.index = index
        self.capacity = capacity
        self.flows: dict[_Flow, None] = {}
        self.asked = 0.0  # sum of the flows' bounds; the link matters only when above capacity

    @property
    def tight(self) -> bool:
        return self.asked > self.capacity * (1 + 1e-9)


class Fluid:
    """Weighted max-min fair sharing, recomputed only where a change can reach.

    A link whose flows cannot fill it constrains nobody, so a change spreads only over links that
    flows could fill; with idle cards a message starts at once at its own bound.
    """

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        self._env = env
        self._links = [_Link(i, capacity) for i, capacity in enumerate(capacities)]
        self._stream = stream
        self._finishes: list[tuple[float, int, int, _Flow]] = []
        self._sequence = 0
        self._dirty: dict[_Flow, None] = {}
        self._flush_due = False
        self._wake_at = inf
        self.link_bytes = [0.0] * len(capacities)
        self.recomputations = 0

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """Fires when the flow has drained."""
        for index in path:
            self.link_bytes[index] += size_bytes
        done = self._env.event()
        links = [self._links[index] for index in path]
        bound = min([link.capacity for link in links])
        bound = min(bound, self._stream * streams)
        flow = _Flow(links, size_bytes, streams, bound, done)
        flow.since = self._env.now
        free = True
        for link in links:
            link.flows[flow] = None
            link.asked += bound
            free = free and not link.tight
        if free:
            self._set_rate(flow, bound)
            self._wake()
        else:
            self._dirty[flow] = None
            if not self._flush_due:
                # Messages sent at one instant are shared out together, after the last of them.
                self._flush_due = True
                self._env.timeout(0).callbacks.append(self._flush)
        return done

    def _set_rate(self, flow: _Flow, rate: float) -> None:
        now = self._env.now
        flow.left -= flow.rate * (now - flow.since)
        flow.since = now
        flow.rate = rate
        flow.version += 1
        self._sequence += 1
        finish = now + max(flow.left, 0.0) / rate
        heappush(self._finishes, (finish, self._sequence, flow.version, flow))

    def _flush(self, _: simpy.Event) -> None:
        self._flush_due = False
        self._share_out()
        self._wake()

    def _share_out(self) -> None:
        """Solve the part of the network that the dirty flows can reach through tight links."""
        reached = dict.fromkeys(flow for flow in self._dirty if not flow.done.triggered)
        self._dirty.clear()
        frontier = list(reached)
        tight: dict[int, float] = {}
        while frontier:
            flow = frontier.pop()
            for link in flow.path:
                if link.index not in tight and link.tight:
                    tight[link.index] = link.capacity
                    for other in link.flows:
                        if other not in reached:
                            reached[other] = None
                            frontier.append(other)
        if not reached:
            return
        self.recomputations += 1
        # Flows that differ only in links that bind nobody get the same rate: solve them as one.
        alike: dict[tuple[float, ...], list[_Flow]] = {}
        for flow in reached:
            crossed = [link.index for link in flow.path if link.index in tight]
            alike.setdefault((flow.weight, flow.bound, *crossed), []).append(flow)
        rates = max_min(
            [[int(link) for link in key[2:]] for key in alike],
            [key[0] * len(flows) for key, flows in alike.items()],
            [key[1] * len(flows) for key, flows in alike.items()],
            tight,
        )
        for flows, total in zip(alike.values(), rates, strict=True):
            rate = total / len(flows)
            for flow in flows:
                if abs(rate - flow.rate) > 1e-12 * rate:
                    self._set_rate(flow, rate)

    def _wake(self) -> None:
        """Have one timer at the earliest finish."""
        finishes = self._finishes
        while finishes and finishes[0][2] != finishes[0][3].version:
            heappop(finishes)
        if finishes and finishes[0][0] < self._wake_at:
            self._wake_at = finishes[0][0]
            timer = self._env.timeout(max(0.0, self._wake_at - self._env.now))
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        now = self._env.now
        horizon = now * (1 + 1e-14) + 1e-15
        finishes = self._finishes
        if self._wake_at <= horizon:
            self._wake_at = inf
        freed: dict[_Link, None] = {}
        while finishes and finishes[0][0] <= horizon:
            version, flow = heappop(finishes)[2:]
            if version != flow.version:
                continue
            flow.version += 1
            for link in flow.path:
                if link.tight:
                    freed[link] = None
                del link.flows[flow]
                link.asked = link.asked - flow.bound if link.flows else 0.0
            flow.done.succeed()
        for link in freed:
            self._dirty.update(link.flows)
        if self._dirty and not self._flush_due:
            self._share_out()
        self._wake()
