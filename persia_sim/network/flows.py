"""Flows and links of the fluid network, and hubs: links that hold thousands of flows back at once.

All flows that a hub holds back have one rate per weight, its level. They drain on one virtual clock
that runs at that level, so a change of the level costs the same whether it slows ten flows down or
ten thousand; only the order of their ends is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
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
        for link in path:
            self.link_bytes[link] += size_bytes
            calendar = self._calendars[link]
            calendar.forget(now)
            held.append((calendar, max(size_bytes / self._capacities[link], slowest)))

        # It moves while those that it has not passed yet are idle.
        while held:
            at, until = _all_idle([calendar for calendar, _ in held], at)
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

    def forget(self, now_s: float) -> None:
        """Drop what is over."""
        while self._ends and self._ends[0] <= now_s:
            del self._starts[0], self._ends[0]

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


Connection = tuple[tuple[int, ...], Role]
"""What carries its messages in order: a path, and whose they are."""
Kind = tuple[float, float, tuple[int, ...]]
"""What flows of one rate have in common: weight, bound, and numbers of the tight links crossed."""


@dataclass(slots=True, eq=False)
class Flow:
    """A message on its way."""

    path: list[LinkState]
    left: float
    weight: float
    bound: float
    done: simpy.Event
    since: float
    rate: float = 0.0
    end_s: float = inf  # at its present rate
    order: int = -1  # of those that end at one instant
    queued_s: float = inf  # when the queue of ends looks at it: never after its end
    held_by: int = -1  # the link that it cannot be faster on; -1: its own bound
    seen: int = 0  # by which of the solutions it was met last
    hub: Hub | None = None  # where it drains with all others, instead of at a rate
    known_kind: Kind | None = None  # None where a link of its path has become tight
    connection: Connection | None = None  # whose next message begins when it ends

    @property
    def kind(self) -> Kind:
        """What its rate depends on."""
        kind = self.known_kind
        if kind is None:
            tight = tuple([link.index for link in self.path if link.tight])
            kind = self.known_kind = (self.weight, self.bound, tight)
        return kind

    def forget_end(self) -> None:
        """Take the rate away from a flow that is over, or drains in a hub."""
        self.end_s = inf
        self.order = -1
        self.queued_s = inf


@dataclass(slots=True, eq=False)
class LinkState:
    """One direction of a NIC."""

    index: int
    capacity: float
    limit: float
    flows: dict[Flow, None] = field(default_factory=dict)  # those with a rate of their own
    is_hub: Hub | None = None
    hub: Hub | None = None  # whose flows also cross this link
    hub_weight: float = 0.0
    hub_flows: int = 0
    hub_rate: float = -1.0  # what the hub took of it when it was last shared out
    weight: float = 0.0  # of all flows
    demand: float = 0.0  # sum of the flows' bounds
    tight: bool = False  # whether that is above its limit; else it constrains nobody
    full: bool = True  # whether the shares given out last left nothing of it, as far as known
    fills_at: float = 0.0  # the level of its hub below which it has certainly something left
    seen: int = 0

    def ask(self, demand: float) -> None:
        """Its flows would take so much of it, all at their bounds."""
        self.demand = demand
        tight = demand > self.limit
        if tight != self.tight:
            self.tight = tight
            self.hub_rate = -1.0  # while it is not tight, rates change without it
            for flow in self.flows:
                flow.known_kind = None

    def held(self) -> list[Flow]:
        """The flows that it holds back."""
        return [flow for flow in self.flows if flow.held_by == self.index]

    def left_by_others(self, solution: int) -> float:
        """What flows that a solution has not met leave of it."""
        left = self.capacity
        if self.hub is not None:
            left -= self.hub_weight * self.hub.level
        return left - sum([flow.rate for flow in self.flows if flow.seen != solution])

    def mean_share(self) -> float:
        """The level of all flows on it that are in no hub, if each had the same."""
        if self.hub is None:
            return self.capacity / self.weight
        left = self.capacity - self.hub_weight * self.hub.level
        return left / (self.weight - self.hub_weight)

    def now_full(self, full: bool) -> None:
        """Its flows have new rates, which leave something of it or nothing."""
        self.full = full
        self.hub_rate = 0.0
        if self.hub is not None:
            self.hub_rate = self.hub_weight * self.hub.level
            self.hub.changed[self] = None

    def feels_hub(self, level: float) -> bool:
        """Whether its other flows have new shares beside those of its hub, which have this level
        now."""
        taken = self.hub_weight * level
        if self.full:
            return taken != self.hub_rate
        used = taken + sum([flow.rate for flow in self.flows])
        return self.tight and used > self.capacity * (1 - 1e-9)


class Hub:
    """A link that is the bottleneck of every flow on it."""

    def __init__(self, link: LinkState, now_s: float) -> None:
        # A common clock for all its flows, so that no event touches each of them.
        self.link = link
        self.clock = 0.0
        self.level = 0.0
        self.since = now_s
        self.weight = 0.0
        self.queue: list[tuple[float, int, Flow]] = []

        # Links of these flows that other flows cross as well.
        self.changed: dict[LinkState, None] = {}
        """Links that its flows cross, where other flows or their rates are not what they were."""
        self._mixed: dict[LinkState, int] = {}
        """Its links with other flows on them, too -> when they came to be so."""
        self._by_fill_level: list[tuple[float, int, LinkState]] = []
        """A heap of these links by `LinkState.fills_at`."""

        # What its flows take of other links.
        self._sequence = 0
        self._ratios: Counter[float] = Counter()
        self._loads: list[tuple[float, int, LinkState]] = []

    def add(self, flow: Flow) -> None:
        """Take a flow that crosses the hub's link and has left its links' ``flows``."""
        flow.hub = self
        flow.forget_end()
        self._sequence += 1
        heappush(self.queue, (self.clock + flow.left / flow.weight, self._sequence, flow))
        self.weight += flow.weight
        self._ratios[flow.bound / flow.weight] += 1
        for link in flow.path:
            if link is not self.link:
                link.hub = self
                link.hub_weight += flow.weight
                link.hub_flows += 1
                self.loaded(link)

    def drop(self, flow: Flow) -> None:
        """Forget a flow that ends or gets a rate of its own."""
        flow.hub = None
        self.weight -= flow.weight
        ratio = flow.bound / flow.weight
        self._ratios[ratio] -= 1
        if not self._ratios[ratio]:
            del self._ratios[ratio]
        for link in flow.path:
            if link is not self.link:
                link.hub_weight -= flow.weight
                link.hub_flows -= 1
                if not link.hub_flows:
                    link.hub = None
                    link.hub_weight = 0.0
                    self._mixed.pop(link, None)

    def loaded(self, link: LinkState) -> None:
        """A link that the hub's flows cross has other flows now."""
        heappush(self._loads, (-link.weight / link.capacity, link.index, link))
        if link.flows:
            self._sequence += 1
            self._mixed.setdefault(link, self._sequence)
            self.changed[link] = None
        else:
            self._mixed.pop(link, None)

    def felt_by(self) -> list[LinkState]:
        """Links whose other flows have new shares at the present level, in the order in which they
        came: those that held somebody back, and those that do so now."""
        due = []
        by_fill_level = self._by_fill_level

        # Links that changed: full ones held somebody back, others fill at a known level.
        for link in self.changed:
            if link in self._mixed:
                if link.full:
                    link.fills_at = 0.0
                    due.append(link)
                else:
                    left = link.capacity * (1 - 2e-9) - sum([flow.rate for flow in link.flows])
                    link.fills_at = left / link.hub_weight
                    heappush(by_fill_level, (link.fills_at, link.index, link))

        # Those that the present level fills now.
        while by_fill_level and by_fill_level[0][0] <= self.level:
            level, _, link = heappop(by_fill_level)
            if link in self._mixed and level == link.fills_at:
                due.append(link)

        # Only links that are short of capacity change other flows' shares.
        self.changed = dict.fromkeys(due)  # looked at again next time
        felt = [link for link in due if link.feels_hub(self.level)]
        return sorted(felt, key=self._mixed.__getitem__)

    def advance(self, now_s: float) -> None:
        """Run the clock until now."""
        self.clock += self.level * (now_s - self.since)
        self.since = now_s

    def holds(self, least_flows: int) -> bool:
        """Set the level; whether the link is a bottleneck of all its flows at that level.

        It is when no flow would reach its own bound and no other link on the way gives a smaller
        share even if all its flows asked for theirs: then the flows' max-min rates are the level.
        """
        if not self.queue or len(self.queue) < least_flows:
            return False
        self.level = self.link.capacity / self.weight
        loads = self._loads
        while loads and (
            loads[0][2].hub is not self or -loads[0][0] != loads[0][2].weight / loads[0][2].capacity
        ):
            heappop(loads)
        most = -loads[0][0] if loads else 0.0
        return most * self.level <= 1 and min(self._ratios) >= self.level

    def next_end_s(self, now_s: float) -> float:
        """When the first of the flows ends if nothing changes."""
        if not self.queue:
            return inf
        return now_s + max(0.0, self.queue[0][0] - self.clock) / self.level

    def dissolve(self) -> list[Flow]:
        """Let every flow have a rate of its own again."""
        flows = []
        for target, _, flow in sorted(self.queue, key=lambda entry: entry[1]):
            flow.known_kind = None
            flow.held_by = -1
            flow.left = max(0.0, target - self.clock) * flow.weight
            flow.rate = 0.0
            flow.since = self.since
            flows.append(flow)
            self.drop(flow)
            for link in flow.path:
                link.flows[flow] = None
        self.queue.clear()
        return flows
