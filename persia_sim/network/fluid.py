"""Max-min fair sharing over time: flows drain at levels that change when flows come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop
from itertools import count
from math import inf, nan
from operator import attrgetter

import simpy

from persia_sim.network.fair_shares import FairShares
from persia_sim.network.flows import Network, Role
from persia_sim.network.links import Agenda, Bound, Connection, Flow, Link


class Fluid(Network):
    """Weighted max-min fair sharing, recomputed only where a change can reach.

    A link whose flows cannot fill it constrains nobody, so a change spreads only over links that
    flows could fill; with idle NICs a message starts at once at its own bound.
    """

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        super().__init__(env, capacities, stream)
        self._links = [Link(number, rate) for number, rate in enumerate(capacities)]
        self._bounds: dict[float, Bound] = {}
        self._shares = FairShares()
        self._numbers = count()
        self._ends: Agenda[Link] = Agenda()
        """Links by the second before which none of the flows that they hold back ends."""
        self._flush_due = False
        self._wake_at = inf

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
        links = [self._links[index] for index in path]
        rate = min(self._stream * streams, *[link.capacity for link in links])
        level = rate / streams
        bound = self._bounds.get(level)
        if bound is None:
            bound = self._bounds[level] = Bound(-1 - len(self._bounds), level)

        # Until shares are found it is held back where it gets least at present.
        bottleneck: Link | Bound = bound
        shares = self._shares
        free = True
        for link in links:
            self.link_bytes[link.number] += size_bytes
            link.weight += streams
            link.ask(link.demand + rate)
            if link.level < inf:
                share = link.level_now()
            elif link.tight:
                share = link.mean_share()
            else:
                continue
            free = False
            shares.look_at(link)
            if share < level:
                level = share
                bottleneck = link
        if isinstance(bottleneck, Link) and bottleneck.level == inf:
            bottleneck.level = level
        flow = Flow(next(self._numbers), links, streams, rate, bound, done, connection, bottleneck)
        shares.join(flow, bottleneck, size_bytes, self._env.now)

        # It is free where no link of its path would be asked for more than it has; then nobody
        # else's level changes.
        if free:
            self._wake(flow.end)
        elif not self._flush_due:
            # Messages sent at one instant are shared out together, after the last of them.
            self._flush_due = True
            self._env.timeout(0).callbacks.append(self._flush)

    def _flush(self, _: simpy.Event) -> None:
        self._flush_due = False
        self._share_out()

    def _share_out(self) -> None:
        """Find the levels that the changes reach, and when the first flow ends at them."""
        now = self._env.now
        for link in self._shares.settle(now):
            self._expect(link)
        self._wake(self._first_end_s())

    def _expect(self, link: Link) -> None:
        """Have the queue of ends look at a link, whose clock shows the present, in time."""
        if link.level < inf:
            end = link.first_end()
            in_s = max(0.0, end - link.clock) / link.highest_level()
            self._ends.put(self._env.now + in_s, link)
        else:
            self._ends.drop(link)

    def _first_end_s(self) -> float:
        """When the first flow ends if nothing changes."""
        now = self._env.now

        # At their own bounds.
        at_bound = self._shares.at_bound
        while at_bound:
            end_s, _, flow = at_bound[0]
            if flow.bottleneck is flow.bound and flow.end == end_s:
                break
            heappop(at_bound)
        first_s = at_bound[0][0] if at_bound else inf

        # Behind a link; where it has a leader only its present level tells.
        led: list[tuple[float, Link]] = []
        ends = self._ends
        end_s, link = ends.head()
        while link is not None and end_s < first_s:
            if link.leader is None:
                first_s = end_s
                break
            ends.drop(link)
            link.advance(now)
            left = max(0.0, link.first_end() - link.clock)
            first_s = min(first_s, now + left / link.level_now())
            led.append((now + left / link.highest_level(), link))
            end_s, link = ends.head()
        for end_s, link in led:
            ends.put(end_s, link)
        return first_s

    def _wake(self, end_s: float) -> None:
        """Have a timer at this end, if none is earlier."""
        if end_s < self._wake_at:
            self._wake_at = end_s
            timer = self._env.timeout(max(0.0, end_s - self._env.now))
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        now = self._env.now
        horizon = now * (1 + 1e-14) + 1e-15
        if self._wake_at <= horizon:
            self._wake_at = inf
        ended: list[Flow] = []

        # Flows at their own bounds.
        at_bound = self._shares.at_bound
        while at_bound and at_bound[0][0] <= horizon:
            end_s, _, flow = heappop(at_bound)
            if flow.bottleneck is flow.bound and flow.end == end_s:
                flow.end = nan  # it may be in a queue twice
                ended.append(flow)

        # Flows that a link holds back.
        for link in self._ends.take_below(horizon):
            link.advance(now)
            until = link.clock + link.level_now() * (horizon - now)
            while link.first_end() <= until:
                flow = heappop(link.queue)[2]
                flow.end = nan
                ended.append(flow)
            self._expect(link)

        # What they leave is shared out anew.
        ended.sort(key=attrgetter("number"))
        for flow in ended:
            self._end(flow)
        if not self._flush_due:
            self._share_out()

    def _end(self, flow: Flow) -> None:
        self._shares.leave(flow)
        for link in flow.path:
            empty = not link.crossings
            link.weight = 0.0 if empty else link.weight - flow.weight
            link.ask(0.0 if empty else link.demand - flow.rate)
            if link.level < inf:
                self._shares.look_at(link)
        flow.done.succeed()


class InOrder(Fluid):
    """Max-min fair sharing among connections, each of which carries its messages in order."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        super().__init__(env, capacities, stream)
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

    def _end(self, flow: Flow) -> None:
        super()._end(flow)
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
