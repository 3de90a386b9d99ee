"""Max-min fair sharing over time: flows drain at rates that change when flows come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf

import simpy

from persia_sim.network.fair_shares import SAME, FairShares, Share
from persia_sim.network.flows import Connection, Flow, Hub, LinkState, Network, Role

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
        self._shares = FairShares(self._links)

    def send(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """Fires when the flow has drained."""
        done = simpy.Event(self._env)
        self._begin(path, size_bytes, streams, done)
        return done

    def _begin(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float,
        done: simpy.Event,
        connection: Connection | None = None,
    ) -> None:
        """Let a message become a flow."""
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
        flow = Flow(links, size_bytes, streams, bound, done, self._env.now, connection=connection)
        free = True
        for link in links:
            link.flows[flow] = None
            link.weight += streams
            link.ask(link.demand + bound)
            if link.tight:
                free = False
            if link.hub is not None:
                link.hub.loaded(link)

        # Then nobody else's rate changes; else all that it touches are shared out anew.
        if free:
            self._set_rates([([flow], bound, -1)])
            self._wake()
        else:
            self._dirty[flow] = None
            if not self._flush_due:
                # Messages sent at one instant are shared out together, after the last of them.
                self._flush_due = True
                self._env.timeout(0).callbacks.append(self._flush)

    def _set_rates(self, shares: Iterable[Share]) -> None:
        """Let flows be so fast from now on."""
        # Only changed rates are set, since each costs an event.
        now = self._env.now
        finishes = self._finishes
        order = self._sequence
        for flows, rate, holder in shares:
            least = SAME * rate if rate < inf else 0.0  # on links without a limit
            for flow in flows:
                flow.held_by = holder
                before = flow.rate
                if abs(rate - before) > least:
                    flow.left = left = flow.left - before * (now - flow.since)
                    flow.since = now
                    flow.rate = rate
                    order += 1
                    flow.order = order
                    flow.end_s = end_s = now + left / rate if left > 0.0 else now

                    # The queue of ends has it already where it looks at this flow before.
                    if end_s < flow.queued_s:
                        flow.queued_s = end_s
                        heappush(finishes, (end_s, order, flow))
        self._sequence = order

    def _flush(self, _: simpy.Event) -> None:
        self._flush_due = False
        self._share_out()
        self._wake()

    def _share_out(self) -> None:
        """Share out anew what the changes reach, and nothing else."""
        felt = self._gather_hubs()
        self._set_rates(self._shares.after(self._dirty, felt))
        self._dirty.clear()

    def _gather_hubs(self) -> list[LinkState]:
        """Hand crowded links' flows to a hub, set levels anew, and dissolve hubs that are none.
        Returns the links whose other flows feel it."""
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
        felt = []
        for hub in list(self._touched):
            hub.advance(now)
            if hub.holds(least // 4):
                felt += hub.felt_by()
            else:
                self._dissolve(hub)
        self._touched.clear()

        # Flows in a hub are not solved one by one.
        for flow in [flow for flow in self._dirty if flow.hub is not None]:
            del self._dirty[flow]
        return felt

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
            if link.tight:
                freed[link] = None
            link.flows.pop(flow, None)
            empty = not link.flows and not link.hub_weight and link.is_hub is None
            link.ask(0.0 if empty else link.demand - flow.bound)
            link.weight = 0.0 if empty else link.weight - flow.weight
            if link.hub is not None:
                link.hub.loaded(link)
        flow.done.succeed()


class InOrder(Fluid):
    """Max-min fair sharing among connections, each of which carries its messages in order."""

    def __init__(
        self,
        env: simpy.Environment,
        capacities: Sequence[float],
        stream: float,
        hub_flows: int = HUB_FLOWS,
    ) -> None:
        super().__init__(env, capacities, stream, hub_flows)
        self._waiting: dict[Connection, deque[tuple[float, float, simpy.Event]]] = {}
        """Bytes, streams and end of those behind the one that a connection carries now."""

    def send(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """Fires when the messages before it on its connection have drained, and it has."""
        if role is None:
            return super().send(path, size_bytes, streams)
        connection = (path, role)
        done = simpy.Event(self._env)
        waiting = self._waiting.get(connection)
        if waiting is None:
            self._waiting[connection] = deque()
            self._begin(path, size_bytes, streams, done, connection)
        else:
            waiting.append((size_bytes, streams, done))
        return done

    def _end(self, flow: Flow, freed: dict[LinkState, None]) -> None:
        super()._end(flow, freed)
        connection = flow.connection
        if connection is None:
            return

        # The next one begins at this instant, so that both changes are shared out together.
        waiting = self._waiting[connection]
        if waiting:
            size_bytes, streams, done = waiting.popleft()
            self._begin(connection[0], size_bytes, streams, done, connection)
        else:
            del self._waiting[connection]
