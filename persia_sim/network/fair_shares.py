"""Max-min fair levels after a change, found by looking at the links that the change reaches.

Levels are max-min fair if every link that holds flows back is full, every other one has room, and
no flow crosses a link whose level is below that of its bottleneck. So a link that is looked at
takes over the flows that are too fast for it, and tells those whose levels depend on its own. Links
with small shares come first: their levels depend on no higher one.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from persia_sim.network.links import Bound, Crossing, Flow, Link

SAME = 1e-12
"""Relative difference below which two levels are one: no flow changes its bottleneck for less."""
UNCHANGED = 1e-15
"""Share of a link below which a change of what its flows take is none."""


NEAR = 0.9
"""Share of its leader's level down to which a link foresees its ends without being looked at: with
0, 512 GPUs on the 100T cluster's hosts ask nearly twice as often which flow ends first."""


PATIENCE = 8
"""Times that a link is looked at before those that were looked at less come first. Two links that
take a flow from each other in turn, since a third one's level is not found yet, else go on for
ever."""


MOST_LOOKS = 10_000
"""A link that is looked at more often after one change never gets its level: better an error than a
simulation that does not end."""


class FairShares:
    """The links whose levels are to be found, and how flows go from one bottleneck to another."""

    def __init__(self) -> None:
        self.at_bound: list[tuple[float, int, Flow]] = []
        """A heap by end of flows at their own bounds; out of date where `Flow.end` is another."""
        self._waiting: list[tuple[int, float, int, Link | Bound]] = []
        self._looks: dict[Link | Bound, int] = {}
        """How often each was looked at since the change."""

    def join(self, flow: Flow, bottleneck: Link | Bound, left_bytes: float, now_s: float) -> None:
        """Let a flow be held back by a link of its path, or by nothing but its own bound."""
        flow.bottleneck = bottleneck
        weight = flow.weight
        for link in flow.path:
            crossing = link.crossings.get(bottleneck)
            if crossing is None:
                crossing = link.crossings[bottleneck] = Crossing(link, bottleneck)
            crossing.flows[flow] = None
            crossing.weight += weight
        bound = flow.bound
        if isinstance(bottleneck, Bound):
            flow.end = now_s + left_bytes / flow.rate
            heappush(self.at_bound, (flow.end, flow.number, flow))
            return

        # Behind a link it drains on the link's clock, and must not get above its own bound.
        bottleneck.advance(now_s)
        flow.end = bottleneck.clock + left_bytes / weight
        heappush(bottleneck.queue, (flow.end, flow.number, flow))
        crossing = bound.crossings.get(bottleneck)
        if crossing is None:
            crossing = bound.crossings[bottleneck] = Crossing(bound, bottleneck)
            self._limit(crossing, bound.level)
        crossing.flows[flow] = None

    def leave(self, flow: Flow) -> None:
        """Take a flow away from its bottleneck."""
        bottleneck = flow.bottleneck
        for link in flow.path:
            crossing = link.crossings[bottleneck]
            del crossing.flows[flow]
            crossing.weight -= flow.weight
            if not crossing.flows:
                del link.crossings[bottleneck]
                if isinstance(bottleneck, Link):
                    bottleneck.limits.drop(crossing)
                    bottleneck.dependents.pop(link, None)
        if isinstance(bottleneck, Link):
            crossing = flow.bound.crossings[bottleneck]
            del crossing.flows[flow]
            if not crossing.flows:
                bottleneck.limits.drop(crossing)
                del flow.bound.crossings[bottleneck]

    def look_at(self, link: Link | Bound) -> None:
        """What crosses this link, or the level of a bottleneck there, is not what it was."""
        if not link.waits:
            link.waits = True
            turn = self._looks.get(link, 0) // PATIENCE
            heappush(self._waiting, (turn, link.mean_share(), link.number, link))

    def settle(self, now_s: float) -> dict[Link, None]:
        """Find the levels of all links that wait for it, and of those that they reach: these."""
        waiting = self._waiting
        looks = self._looks
        settled: dict[Link, None] = {}
        while waiting:
            link = heappop(waiting)[-1]
            link.waits = False
            looks[link] = looks.get(link, 0) + 1
            if looks[link] > MOST_LOOKS:
                raise RuntimeError(f"shares of link {link.number} are not found at {now_s} s")
            if isinstance(link, Link):
                self._find_level(link, now_s)
                settled[link] = None
            else:
                self._take_over(link, link.level, now_s)
                for crossing in link.crossings.values():
                    self._limit(crossing, link.level)
        looks.clear()
        return settled

    def _find_level(self, link: Link, now_s: float) -> None:
        """Share out what a link has among the flows that it holds back, or hold nobody back."""
        link.advance(now_s)

        # What flows with other bottlenecks take of it, and the highest of their levels.
        bounds_take = 0.0
        links_take = 0.0
        highest = 0.0
        highest_bound = 0.0
        others: list[Crossing] = []
        for crossing in link.crossings.values():
            other = crossing.bottleneck
            if other is link:
                continue
            level = other.level if other.leader is None else other.level_now()
            if level > highest:
                highest = level
            if isinstance(other, Link):
                links_take += crossing.weight * level
                others.append(crossing)
            else:
                bounds_take += crossing.weight * level
                highest_bound = max(highest_bound, level)
        spare = link.capacity - bounds_take
        left = spare - links_take

        # It takes over those that would be faster than the ones that it holds back, or all that
        # would share it if it had no room.
        own = link.crossings.get(link)
        if own is None:
            if not link.tight or left >= -SAME * link.capacity:
                self._hold_nobody(link, left, others)
            elif self._take_over(link, self._fill_level(link), now_s):
                self._find_level(link, now_s)
            return
        level = left / own.weight
        if level < highest * (1 - SAME) and self._take_over(link, self._fill_level(link), now_s):
            self._find_level(link, now_s)
            return

        # Those whose levels depend on its own look at it again.
        changed = abs(level - link.level) * own.weight > UNCHANGED * link.capacity
        if changed or link.leader is not None:
            link.level = level
            for dependent, always in link.dependents.items():
                if always:
                    self.look_at(dependent)
        self._warn(link)
        self._depend(link, own.weight, spare, highest_bound, others, now_s)

    def _hold_nobody(self, link: Link, room: float, others: list[Crossing]) -> None:
        """A link that has room is looked at again when others take more than their part of it."""
        if link.level < inf:
            link.free()
        weight = sum([crossing.weight for crossing in others])
        for crossing in others:
            bottleneck = crossing.bottleneck
            assert isinstance(bottleneck, Link)
            bottleneck.dependents.pop(link, None)
            if link.tight:
                self._limit(crossing, bottleneck.level_now() + max(0.0, room) / weight)

    def _fill_level(self, link: Link) -> float:
        """The level at which a link is full, if flows below it go on as they do."""
        own = link.crossings.get(link)
        loads = [own.weight] if own is not None else []
        others = [c for c in link.crossings.values() if c is not own]
        slow_first = sorted([(c.bottleneck.level_now(), c.weight) for c in others])
        loads += [weight for _, weight in reversed(slow_first)]
        growing = list(accumulate(loads))
        left = link.capacity
        for level, weight in slow_first:
            if level * growing[-1] >= left or len(growing) == 1:
                break
            left -= level * weight
            growing.pop()
        return left / growing[-1]

    def _take_over(self, link: Link | Bound, level: float, now_s: float) -> bool:
        """Hold back all flows on a link whose levels are higher; whether there were any."""
        highest = level * (1 + SAME)
        taken = [
            crossing
            for crossing in link.crossings.values()
            if crossing.bottleneck is not link and crossing.bottleneck.level_now() > highest
        ]
        if taken and link.level == inf:
            link.level = level
        for crossing in taken:
            for flow in list(crossing.flows):
                self._move(flow, link, now_s)
        return bool(taken)

    def _move(self, flow: Flow, bottleneck: Link | Bound, now_s: float) -> None:
        """Let another link hold a flow back."""
        before = flow.bottleneck
        if isinstance(before, Link):
            before.advance(now_s)
            left = (flow.end - before.clock) * flow.weight
        else:
            left = (flow.end - now_s) * flow.rate
        self.leave(flow)
        self.join(flow, bottleneck, max(0.0, left), now_s)
        for link in flow.path:
            if link is not bottleneck and (link.tight or link.level < inf):
                self.look_at(link)

    def _limit(self, crossing: Crossing, level: float) -> None:
        """Have the link looked at, at the latest, when the bottleneck's level is really above this:
        where it is nearly the same, looking would change nothing, and be asked for again."""
        bottleneck = crossing.bottleneck
        assert isinstance(bottleneck, Link)
        limit = level * (1 + SAME)
        if limit < bottleneck.limits.number_of(crossing):
            bottleneck.limits.put(limit, crossing)
            if bottleneck.leader is not None and bottleneck.floor_for(limit) > bottleneck.floor:
                self.look_at(bottleneck)

    def _warn(self, link: Link) -> None:
        """Have those looked at for which a link's level has become too high or too low."""
        level = link.level
        for crossing in link.limits.take_below(level):
            self.look_at(crossing.link)
        for follower in link.floors.take_below(-level):
            if follower.leader is link:
                self.look_at(follower)

    def _depend(
        self,
        link: Link,
        own_weight: float,
        spare: float,
        highest_bound: float,
        others: list[Crossing],
        now_s: float,
    ) -> None:
        """Note whose levels its own depends on; a single one may lead it without looking at it."""
        always = len(others) > 1 or bool(link.dependents)
        for crossing in others:
            bottleneck = crossing.bottleneck
            assert isinstance(bottleneck, Link)
            bottleneck.dependents[link] = always
            if bottleneck.leader is not None:
                self.look_at(bottleneck)  # from now on its level must be known
        link.leader = None
        if always or not others:
            return

        # As long as its flows are as fast as others that cross it, and slow enough for other links.
        crossing = others[0]
        leader = crossing.bottleneck
        assert isinstance(leader, Link)
        leader.advance(now_s)
        link.leader = leader
        link.leader_clock = leader.clock
        link.leader_weight = crossing.weight
        link.own_weight = own_weight
        link.spare = spare
        left = spare - own_weight * highest_bound
        self._limit(crossing, min(spare / (own_weight + crossing.weight), left / crossing.weight))
        link.floor = max(link.floor_for(link.limits.head()[0]), NEAR * leader.level)
        leader.floors.put(-link.floor, link)
