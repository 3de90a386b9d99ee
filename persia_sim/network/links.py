"""Flows, and the links that hold them back, each on a clock of its own.

A flow is as fast as its *bottleneck* lets it be: a link of its path, or its own bound. All flows of
a bottleneck have one rate per weight, its *level*. They drain on one virtual clock that runs at
that level, so a change of the level costs the same whether it slows ten flows down or ten thousand;
only the order of their ends is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, TypeVar

import simpy

from persia_sim.network.flows import Role

Connection = tuple[tuple[int, ...], Role]
"""What carries its messages in order: a path, and whose they are."""


T = TypeVar("T")


class Agenda(Generic[T]):
    """Things by the number at which they are due; each has one, and the least comes first."""

    __slots__ = ("_heap", "_numbers", "_puts")

    def __init__(self) -> None:
        self._numbers: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []  # some out of date
        self._puts = 0

    def put(self, number: float, thing: T) -> None:
        """Let a thing be due at this number, and no longer at another one."""
        self._numbers[thing] = number
        self._puts += 1
        heappush(self._heap, (number, self._puts, thing))
        if len(self._heap) > 100 + 2 * len(self._numbers):
            entries = enumerate(self._numbers.items())
            self._heap = [(least, order, each) for order, (each, least) in entries]
            heapify(self._heap)

    def drop(self, thing: T) -> None:
        """Forget a thing."""
        self._numbers.pop(thing, None)

    def number_of(self, thing: T) -> float:
        """When it is due; infinite if never."""
        return self._numbers.get(thing, inf)

    def head(self) -> tuple[float, T | None]:
        """The least number, and what is due then."""
        heap = self._heap
        numbers = self._numbers
        while heap:
            number, _, thing = heap[0]
            if numbers.get(thing) == number:
                return number, thing
            heappop(heap)
        return inf, None

    def take_below(self, limit: float) -> list[T]:
        """Take out what is due before this number."""
        taken = []
        heap = self._heap
        numbers = self._numbers
        while heap and heap[0][0] < limit:
            number, _, thing = heappop(heap)
            if numbers.get(thing) == number:
                del numbers[thing]
                taken.append(thing)
        return taken


@dataclass(slots=True, eq=False)
class Flow:
    """A message on its way."""

    number: int
    path: list[Link]
    weight: float
    rate: float  # at most, bytes a second
    bound: Bound  # the same as a level
    done: simpy.Event
    connection: Connection | None  # whose next message begins when it ends
    bottleneck: Link | Bound
    end: float = inf  # by its bottleneck's clock; in seconds at its own bound


class Crossing:
    """The flows of one bottleneck that cross a link, or that have one bound."""

    __slots__ = ("bottleneck", "flows", "link", "weight")

    def __init__(self, link: Link | Bound, bottleneck: Link | Bound) -> None:
        self.link = link
        self.bottleneck = bottleneck
        self.flows: dict[Flow, None] = {}
        self.weight = 0.0


class Bound:
    """The level that flows have if no link holds them back."""

    __slots__ = ("crossings", "level", "number", "waits")
    leader = None
    """It never changes."""

    def __init__(self, number: int, level: float) -> None:
        self.number = number
        self.level = level
        self.crossings: dict[Link, Crossing] = {}
        """Flows with this bound that a link holds back, by that link."""
        self.waits = False
        """Whether it is to be looked at."""

    def mean_share(self) -> float:
        """Its level."""
        return self.level

    def level_now(self) -> float:
        """Its level."""
        return self.level


class Link:
    """One direction of a NIC."""

    __slots__ = (
        *("capacity", "clock", "crossings", "demand", "dependents", "floor", "floors"),
        *("leader", "leader_clock", "leader_weight", "level", "limits", "number", "own_weight"),
        *("queue", "since", "spare", "tight", "waits", "weight"),
    )

    def __init__(self, number: int, capacity: float) -> None:
        # What crosses it.
        self.number = number
        self.capacity = capacity
        self.crossings: dict[Link | Bound, Crossing] = {}
        """The flows on it, by their bottleneck."""
        self.weight = 0.0
        self.demand = 0.0
        """What they would take, all at their bounds."""
        self.tight = False
        """Whether that is more than it has; else it need hold nobody back."""
        self.waits = False
        """Whether it is to be looked at."""

        # The flows that it holds back, on their clock.
        self.level = inf
        """What it was when it was looked at last; infinite where it holds nobody back."""
        self.clock = 0.0
        self.since = 0.0
        self.queue: list[tuple[float, int, Flow]] = []

        # Who has to know its level.
        self.dependents: dict[Link, bool] = {}
        """Links whose levels depend on this one's -> whether they are looked at when it changes."""
        self.limits: Agenda[Crossing] = Agenda()
        """What is to be looked at when it gets above a level."""
        self.floors: Agenda[Link] = Agenda()
        """Whom it leads and who are to be looked at when it gets below a level: by minus that."""

        # Where one other level alone moves its own, it is not looked at as long as that changes
        # nothing else: it has a leader, and its level is (spare - leader's) / own weight.
        self.leader: Link | None = None
        self.leader_clock = 0.0
        self.leader_weight = 0.0
        self.own_weight = 0.0
        self.spare = 0.0
        self.floor = 0.0
        """Level of the leader below which somebody has to know this link's."""

    def ask(self, demand: float) -> None:
        """Its flows would take so much of it, all at their bounds."""
        self.demand = demand
        self.tight = demand > self.capacity * (1 + 1e-9)

    def mean_share(self) -> float:
        """Its level if it held back all of its flows."""
        return self.capacity / self.weight if self.weight > 0 else inf

    def level_now(self) -> float:
        """Its level beside that of its leader, which takes nothing if it holds nobody back."""
        leader = self.leader
        if leader is None:
            return self.level
        taken = self.leader_weight * leader.level if leader.level < inf else 0.0
        return (self.spare - taken) / self.own_weight

    def highest_level(self) -> float:
        """What its level may become without its being looked at."""
        if self.leader is None:
            return self.level
        return (self.spare - self.leader_weight * self.floor) / self.own_weight

    def floor_for(self, level: float) -> float:
        """The leader's level below which its own is above this one."""
        return max(0.0, (self.spare - self.own_weight * level) / self.leader_weight)

    def advance(self, now_s: float) -> None:
        """Run the clock until now."""
        if self.since == now_s:
            return
        leader = self.leader
        if leader is not None:
            leader.advance(now_s)
            own = self.spare * (now_s - self.since)
            others = self.leader_weight * (leader.clock - self.leader_clock)
            self.clock += (own - others) / self.own_weight
            self.leader_clock = leader.clock
        elif self.level < inf:
            self.clock += self.level * (now_s - self.since)
        self.since = now_s

    def first_end(self) -> float:
        """Its clock when the first of its flows ends; infinite where it holds nobody back."""
        queue = self.queue
        while queue:
            end, _, flow = queue[0]
            if flow.bottleneck is self and flow.end == end:
                return end
            heappop(queue)
        return inf

    def free(self) -> None:
        """Hold nobody back. The clock stands still: those that it led may still look at it."""
        self.level = inf
        self.leader = None
        self.queue.clear()
        self.limits = Agenda()
        self.floors = Agenda()
