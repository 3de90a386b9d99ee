"""Max-min fair sharing over time: flows drain at rates that change when flows come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

import simpy

from persia_sim.network.flows import Flow, Hub, LinkState, Network


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
    alike: Mapping[tuple[Any, ...], int], capacities: Mapping[int, float]
) -> dict[tuple[Any, ...], tuple[float, int]]:
    """Rate of one flow of each class, and the link that holds it there (-1: its own bound); a class
    is (weight, bound, links crossed), with how many flows have it."""
    weights, bounds = ([key[k] * count for key, count in alike.items()] for k in (0, 1))
    totals, held_by = max_min([key[2:] for key in alike], weights, bounds, capacities)
    return {
        key: (total / count, holder)
        for (key, count), total, holder in zip(alike.items(), totals, held_by, strict=True)
    }


SAME = 1e-12
"""Relative difference below which two rates are one."""
HUB_FLOWS = 30
"""Flows on one link from which on it may become a hub: with 1,000, a run of 1,024 GPUs takes 2.3
times as long; with 8, hubs come and go more often than they save."""


class Fluid(Network):
    """Weighted max-min fair sharing, recomputed only where a change can reach.

    A link whose flows cannot fill it constrains nobody, so a change spreads only over links that
    flows could fill; with idle NICs a message starts at once at its own bound.
    """

    def __init__(
        self,
        env: simpy.Environment,
        capacities: Sequence[float],
        stream: float,
        hub_flows: int = HUB_FLOWS,
    ) -> None:
        super().__init__(env, capacities, stream)
        self._links = [LinkState(i, rate, rate * (1 + 1e-9)) for i, rate in enumerate(capacities)]
        self._finishes: list[tuple[float, int, Flow]] = []  # some out of date: `_look_again`
        self._sequence = 0
        self._dirty: dict[Flow, None] = {}
        self._flush_due = False
        self._wake_at = inf
        self._hub_flows = hub_flows
        self._hubs: dict[LinkState, Hub] = {}
        self._touched: dict[Hub, None] = {}
        self._solutions = 0

    def send(self, path: Sequence[int], size_bytes: float, streams: float = 1.0) -> simpy.Event:
        """Fires when the flow has drained."""
        # A flow is never faster than its streams, nor than its slowest link.
        bound = self._stream * streams
        links = []
        for index in path:
            self.link_bytes[index] += size_bytes
            link = self._links[index]
            links.append(link)
            if link.capacity < bound:
                bound = link.capacity

        # It is free where no link of its path would be asked for more than it has.
        done = simpy.Event(self._env)
        flow = Flow(links, size_bytes, streams, bound, done, self._env.now)
        free = True
        for link in links:
            link.flows[flow] = None
            link.weight += streams
            link.demand += bound
            if link.demand > link.limit:
                free = False
            if link.hub is not None:
                link.hub.loaded(link)

        # Then nobody else's rate changes; else all that it touches are shared out anew.
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

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self._env.now
        flow.left -= flow.rate * (now - flow.since)
        flow.since = now
        flow.rate = rate
        self._sequence += 1
        flow.order = self._sequence
        flow.end_s = now + max(flow.left, 0.0) / rate
        if flow.end_s < flow.queued_s:
            flow.queued_s = flow.end_s
            heappush(self._finishes, (flow.end_s, flow.order, flow))

    def _flush(self, _: simpy.Event) -> None:
        self._flush_due = False
        self._share_out()
        self._wake()

    def _share_out(self) -> None:
        """Share out anew what the changes reach, and nothing else.

        First among the dirty flows, which get what all others leave; then also among those whose
        shares are not fair beside the new ones, until there are none. Each flow is at its own bound
        then, or as fast for its weight as any other on a link that has nothing left: max-min fair
        shares are like that, and no others.
        """
        self._gather_hubs()
        self._solutions += 1
        joining = self._first_reached()
        alike: dict[tuple[Any, ...], list[Flow]] = {}
        rates: dict[tuple[Any, ...], tuple[float, int]] = {}
        left: dict[int, float] = {}

        # More flows join until all others have what is fair beside these. Flows that differ only in
        # links that bind nobody get the same rate: they are solved as one.
        while joining:
            for flow in joining:
                crossed = [link.index for link in flow.path if link.demand > link.limit]
                left.update(dict.fromkeys(crossed, inf))
                key: tuple[Any, ...] = (flow.weight, flow.bound, *crossed)
                flows = alike.get(key)
                if flows is None:
                    alike[key] = [flow]
                else:
                    flows.append(flow)
            for index, room in left.items():
                if room == inf:
                    left[index] = self._links[index].left_by_others(self._solutions)
            rates = shares({key: len(flows) for key, flows in alike.items()}, left)
            joining = self._wronged(alike, rates, left)

        # Only changed rates are set, since each costs an event.
        for key, flows in alike.items():
            rate, holder = rates[key]
            for flow in flows:
                flow.held_by = holder
                if abs(rate - flow.rate) > SAME * rate:
                    self._set_rate(flow, rate)

    def _first_reached(self) -> list[Flow]:
        """Dirty flows, and those that a link holds back which a new flow crosses."""
        # Those that are dirty and not over.
        now = self._solutions
        reached = []
        for flow in self._dirty:
            if not flow.done.triggered:
                flow.seen = now
                reached.append(flow)
        self._dirty.clear()

        # A new one (it has no rate yet) takes from whom its links hold back.
        for flow in reached.copy():
            for link in flow.path if not flow.rate else ():
                if link.seen != now and link.demand > link.limit:
                    link.seen = now
                    for other in link.held():
                        if other.seen != now:
                            other.seen = now
                            reached.append(other)
        return reached

    def _wronged(
        self,
        alike: Mapping[tuple[Any, ...], Sequence[Flow]],
        rates: Mapping[tuple[Any, ...], tuple[float, int]],
        left: Mapping[int, float],
    ) -> list[Flow]:
        """Flows that were left alone, but are too fast or too slow beside the new rates of the
        others. ``left`` is what they leave of each link that those cross."""
        now = self._solutions

        # What the new rates use of each link, their highest level, and that which it holds them to.
        used = dict.fromkeys(left, 0.0)
        most = dict.fromkeys(left, 0.0)
        hold: dict[int, float] = {}
        for key, (rate, holder) in rates.items():
            level = rate / key[0]
            total = rate * len(alike[key])
            for index in key[2:]:
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
            link.full = full
            if link.hub is not None:
                link.hub.changed[link] = None
        return wronged

    def _gather_hubs(self) -> None:
        """Hand crowded links' flows to a hub, set levels anew, and dissolve hubs that are none."""
        now = self._env.now
        least = self._hub_flows

        # A link with many flows becomes a hub: they share one level, and drain without being
        # touched.
        for flow in list(self._dirty):
            for link in flow.path:
                hub = link.is_hub
                if link.hub is not None:
                    self._touched[link.hub] = None
                if hub is None:
                    if len(link.flows) < least or link.hub is not None:
                        continue
                    flows = list(link.flows)
                    if all(self._may_join(f, link, None) for f in flows):
                        hub = self._hubs[link] = link.is_hub = Hub(link, now)
                        self._hand_over(hub, flows)
                elif flow.hub is None and not flow.done.triggered:
                    if self._may_join(flow, link, hub):
                        self._hand_over(hub, [flow])
                    else:
                        hub.advance(now)
                        self._dissolve(hub)

        # Hubs that changed get a new level; those with few flows left are taken apart.
        for hub in list(self._touched):
            hub.advance(now)
            if hub.holds(least // 4):
                for link in hub.felt_by():
                    self._dirty.update(dict.fromkeys(link.held() or link.flows))
            else:
                self._dissolve(hub)
        self._touched.clear()

        # Flows in a hub are not solved one by one.
        for flow in [flow for flow in self._dirty if flow.hub is not None]:
            del self._dirty[flow]

    def _dissolve(self, hub: Hub) -> None:
        """Take a hub apart: its flows are solved one by one again."""
        del self._hubs[hub.link]
        hub.link.is_hub = None
        self._touched.pop(hub, None)
        self._dirty.update(dict.fromkeys(hub.dissolve()))

    def _may_join(self, flow: Flow, link: LinkState, hub: Hub | None) -> bool:
        """A flow, and every link, belongs to one hub at most."""
        others = [other for other in flow.path if other is not link]
        return all(o.hub in (None, hub) and o.is_hub is None for o in others)

    def _hand_over(self, hub: Hub, flows: list[Flow]) -> None:
        now = self._env.now
        hub.advance(now)
        self._touched[hub] = None
        for flow in flows:
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            for link in flow.path:
                del link.flows[flow]
            hub.add(flow)

    def _look_again(self) -> None:
        """Take what heads the queue of ends out of it; a flow that has slowed down since has its
        turn later."""
        queued_s, _, flow = heappop(self._finishes)
        if queued_s == flow.queued_s:
            flow.queued_s = flow.end_s
            heappush(self._finishes, (flow.end_s, flow.order, flow))

    def _wake(self) -> None:
        """Have one timer at the earliest finish."""
        finishes = self._finishes
        while finishes and finishes[0][1] != finishes[0][2].order:
            self._look_again()
        earliest = finishes[0][0] if finishes else inf
        for hub in self._hubs.values():
            earliest = min(earliest, hub.next_end_s(self._env.now))
        if earliest < self._wake_at:
            self._wake_at = earliest
            timer = self._env.timeout(max(0.0, self._wake_at - self._env.now))
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        now = self._env.now
        horizon = now * (1 + 1e-14) + 1e-15
        finishes = self._finishes
        if self._wake_at <= horizon:
            self._wake_at = inf

        # Flows with a rate of their own that end now.
        freed: dict[LinkState, None] = {}
        while finishes and finishes[0][0] <= horizon:
            _, order, flow = finishes[0]
            if order != flow.order:
                self._look_again()
                continue
            heappop(finishes)
            flow.forget_end()
            self._end(flow, freed)

        # Flows that a hub drains.
        for hub in self._hubs.values():
            hub.advance(now)
            while hub.next_end_s(now) <= horizon:
                flow = heappop(hub.queue)[2]
                hub.drop(flow)
                self._touched[hub] = None
                self._end(flow, freed)

        # What they leave is shared out anew.
        for link in freed:
            self._dirty.update(dict.fromkeys(link.held()))
        if (self._dirty or self._touched) and not self._flush_due:
            self._share_out()
        self._wake()

    def _end(self, flow: Flow, freed: dict[LinkState, None]) -> None:
        for link in flow.path:
            if link.demand > link.limit:
                freed[link] = None
            link.flows.pop(flow, None)
            empty = not link.flows and not link.hub_weight and link.is_hub is None
            link.demand = 0.0 if empty else link.demand - flow.bound
            link.weight = 0.0 if empty else link.weight - flow.weight
            if link.hub is not None:
                link.hub.loaded(link)
        flow.done.succeed()
