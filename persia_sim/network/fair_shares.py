"""Max-min fair shares of the flows that a change reaches, and of no others.

Flows that come and go change the shares of those that they meet on a full link, of those that these
meet, and so on. Most changes move no flow to another bottleneck; then new levels follow link by
link, and only if they are not fair, the flows reached are filled progressively.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from persia_sim.network.flows import Flow, Kind, LinkState

Share = tuple[list[Flow], float, int]
"""Flows that are alike, the rate of each, and the link that holds them there; -1: their bound."""
SAME = 1e-12
"""Relative difference below which two rates are one."""


def max_min(
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    bounds: Sequence[float],
    capacities: Mapping[int, float],
) -> tuple[list[float], list[int]]:
    """Rate of each flow, and the link that holds it there; -1 for its own bound. ``paths[i]`` names
    links of ``capacities``; links not named are ignored.

    >>> max_min([[0], [0, 1], [1]], [1, 1, 1], [9, 9, 9], {0: 1.0, 1: 2.0})
    ([0.5, 0.5, 1.5], [0, 0, 1])
    """
    # What each link has left, and the weight of the flows that share it.
    rates = [0.0] * len(paths)
    held_by = [-1] * len(paths)
    active = dict.fromkeys(range(len(paths)))
    left: dict[int, float] = {}
    load: dict[int, float] = {}
    flows_of: dict[int, list[int]] = {}
    crossed = [[link for link in path if link in capacities] for path in paths]
    for flow, path in enumerate(crossed):
        for link in path:
            flows = flows_of.get(link)
            if flows is None:
                flows_of[link] = [flow]
                left[link] = capacities[link]
                load[link] = weights[flow]
            else:
                flows.append(flow)
                load[link] += weights[flow]

    # Which link fills first, and which flow is bounded first: two queues by level.
    growing = {link: len(flows) for link, flows in flows_of.items()}
    share = {link: max(left[link], 0.0) / load[link] for link in load}
    by_share = [(level, link) for link, level in share.items()]  # stale entries are skipped
    heapify(by_share)
    by_bound = sorted([(-bounds[flow] / weights[flow], -flow) for flow in active])

    def freeze(flow: int, rate: float) -> None:
        rates[flow] = rate
        del active[flow]
        for link in crossed[flow]:
            load[link] -= weights[flow]
            left[link] -= rate
            growing[link] -= 1  # by count: what is left of a sum of weights may be a rounding error
            if not growing[link]:
                del load[link], share[link]
            else:
                share[link] = max(left[link], 0.0) / load[link]
                heappush(by_share, (share[link], link))

    # Raise the common level until a flow's bound or a link holds somebody back; freeze those.
    while active:
        while -by_bound[-1][1] not in active:
            by_bound.pop()
        bound_level = -by_bound[-1][0]
        while by_share and share.get(by_share[0][1]) != by_share[0][0]:
            heappop(by_share)
        level, full = by_share[0] if by_share else (bound_level, -1)
        if bound_level <= level:
            flow = -by_bound.pop()[1]
            freeze(flow, bounds[flow])
        else:
            for flow in flows_of[full]:
                if flow in active:
                    held_by[flow] = full
                    freeze(flow, weights[flow] * level)
    return rates, held_by


def shares(
    alike: Mapping[Kind, int], capacities: Mapping[int, float]
) -> dict[Kind, tuple[float, int]]:
    """Rate of one flow of each kind, and the link that holds it there (-1: its own bound); of a
    kind there are so many."""
    weights = [weight * count for (weight, _, _), count in alike.items()]
    bounds = [bound * count for (_, bound, _), count in alike.items()]
    totals, held_by = max_min([path for _, _, path in alike], weights, bounds, capacities)
    return {
        kind: (total / count, holder)
        for (kind, count), total, holder in zip(alike.items(), totals, held_by, strict=True)
    }


def _alike(flows: Iterable[Flow]) -> dict[Kind, list[Flow]]:
    """The flows of each `Flow.kind`, which get the same rate."""
    alike: dict[Kind, list[Flow]] = {}
    for flow in dict.fromkeys(flows):
        kind = flow.known_kind or flow.kind
        if kind in alike:
            alike[kind].append(flow)
        else:
            alike[kind] = [flow]
    return alike


class FairShares:
    """Weighted max-min fair rates after changes, computed only where a change can reach."""

    def __init__(self, links: Sequence[LinkState]) -> None:
        self._links = links
        self._solution = 0  # its number; flows and links keep that in which they were met last

    def after(self, dirty: Iterable[Flow], felt: Sequence[LinkState]) -> list[Share]:
        """New rates once these flows came, or lost others that they met, and these links have
        another flow of a hub, or a hub of another level. Rates that come out as they were may be
        among them."""
        dirty = [flow for flow in dirty if not flow.done.triggered]
        self._solution += 1
        shares = self._held_as_before(dirty, felt)
        if shares is None:
            # Flows move to other bottlenecks.
            self._solution += 1
            for flow in dirty:
                if not flow.rate:
                    flow.held_by = -1
            for link in felt:
                dirty += link.held() or link.flows
            shares = self._filled(dirty)
        return shares

    def _held_as_before(
        self, dirty: Iterable[Flow], felt: Iterable[LinkState]
    ) -> list[Share] | None:
        """Shares if every link goes on holding back the flows that it holds, and new ones are held
        back where they get least; None if these would not be max-min fair."""
        # Only those links get new levels that hold dirty flows back, or feel a hub.
        now = self._solution
        links = self._links
        new = [flow for flow in dirty if not flow.rate]
        holders: dict[LinkState, None] = {}
        for flow in new:
            tight = [link for link in flow.path if link.tight]
            if not tight:
                return None
            link = min(tight, key=LinkState.mean_share)
            flow.held_by = link.index
            holders[link] = None
        for flow in dirty:
            if flow.held_by < 0:
                return None
            holders[links[flow.held_by]] = None
        holders.update(dict.fromkeys(felt))
        held_by = [(link, link.held()) for link in holders]
        for link, flows in held_by:
            if not flows or not link.tight:
                return None
            for flow in flows:
                flow.seen = now

        # What others leave of a link, those that it holds back share by weight; the others must not
        # be faster.
        alike = _alike(chain(new, *[flows for _, flows in held_by]))
        load: dict[int, float] = defaultdict(float)
        for (weight, _, _), flows in alike.items():
            load[flows[0].held_by] += weight * len(flows)
        if len(load) < len(held_by):
            return None  # another link was chosen for a new flow than holds back those of its kind
        levels: dict[int, float] = {}
        for link, flows in held_by:
            index = link.index
            levels[index] = level = max(link.left_by_others(now), 0.0) / load[index]
            if len(flows) < len(link.flows):
                highest = level * (1 + SAME)
                for flow in link.flows:
                    if flow.held_by != index and flow.rate > highest * flow.weight:
                        return None

        # Those held back must not reach their bounds.
        shares: list[Share] = []
        used: dict[int, float] = defaultdict(float)
        for (weight, bound, tight_links), flows in alike.items():
            holder = flows[0].held_by
            total = weight * len(flows) * levels[holder]
            rate = total / len(flows)
            if rate >= bound:
                return None
            shares.append((flows, rate, holder))
            for index in tight_links:
                if index != holder:
                    used[index] += total

        # Other links on their ways must have room for that, and hold nobody back at any level.
        for index, total in used.items():
            link = links[index]
            if total >= link.left_by_others(now) - SAME * link.capacity:
                return None
            if any([flow.held_by == index for flow in link.flows]):
                return None

        # Then these shares are fair.
        for link in holders:
            link.now_full(True)
        for index in used:
            links[index].now_full(False)
        return shares

    def _filled(self, dirty: Iterable[Flow]) -> list[Share]:
        """Shares by progressive filling.

        First among the dirty flows, which get what all others leave; then also among those whose
        shares are not fair beside the new ones, until there are none. Each flow is at its own bound
        then, or as fast for its weight as any other on a link that has nothing left: max-min fair
        shares are like that, and no others.
        """
        joining = self._first_reached(dirty)
        alike: dict[Kind, list[Flow]] = {}
        rates: dict[Kind, tuple[float, int]] = {}
        left: dict[int, float] = {}

        # More flows join until all others have what is fair beside these. Flows that differ only in
        # links that bind nobody get the same rate: they are solved as one.
        while joining:
            for kind, flows in _alike(joining).items():
                alike.setdefault(kind, []).extend(flows)
                left.update(dict.fromkeys(kind[2], inf))
            for index, room in left.items():
                if room == inf:
                    left[index] = self._links[index].left_by_others(self._solution)
            rates = shares({kind: len(flows) for kind, flows in alike.items()}, left)
            joining = self._wronged(alike, rates, left)
        return [(flows, *rates[kind]) for kind, flows in alike.items()]

    def _first_reached(self, dirty: Iterable[Flow]) -> list[Flow]:
        """Dirty flows, and those that a link holds back which a new flow crosses."""
        now = self._solution
        reached = list(dict.fromkeys(dirty))
        for flow in reached:
            flow.seen = now

        # A new one (it has no rate yet) takes from whom its links hold back.
        for flow in reached.copy():
            for link in flow.path if not flow.rate else ():
                if link.seen != now and link.tight:
                    link.seen = now
                    for other in link.held():
                        if other.seen != now:
                            other.seen = now
                            reached.append(other)
        return reached

    def _wronged(
        self,
        alike: Mapping[Kind, Sequence[Flow]],
        rates: Mapping[Kind, tuple[float, int]],
        left: Mapping[int, float],
    ) -> list[Flow]:
        """Flows that were left alone, but are too fast or too slow beside the new rates of the
        others. ``left`` is what they leave of each link that those cross."""
        now = self._solution

        # What the new rates use of each link, their highest level, and that which it holds them to.
        used = dict.fromkeys(left, 0.0)
        most = dict.fromkeys(left, 0.0)
        hold: dict[int, float] = {}
        for kind, (rate, holder) in rates.items():
            weight, _, tight_links = kind
            level = rate / weight
            total = rate * len(alike[kind])
            for index in tight_links:
                used[index] += total
                if level > most[index]:
                    most[index] = level
            if holder >= 0:
                hold[holder] = level

        # Nobody is faster than what a full link holds others to; and whom a link holds back, that
        # link is full, and nobody is faster there.
        wronged = []
        for index, room in left.items():
            link = self._links[index]
            full = index in hold or used[index] >= room - SAME * link.capacity
            highest = hold.get(index, inf) * (1 + SAME)
            least = most[index] / (1 + SAME) if full else inf
            for flow in link.flows:
                if flow.seen != now:
                    level = flow.rate / flow.weight
                    if level > highest or (level < least and flow.held_by == index):
                        flow.seen = now
                        wronged.append(flow)
            link.now_full(full)
        return wronged
