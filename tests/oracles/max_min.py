"""The fluid network without memory: at every change all flows are filled anew, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf

import simpy

from persia_sim.network.flows import Network, Role


def max_min(
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    bounds: Sequence[float],
    capacities: Mapping[int, float],
) -> tuple[list[float], list[int]]:
    """Rate of each flow, and the link that holds it there; -1 for its own bound. ``paths[i]`` names
    links of ``capacities``."""
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


class Filled(Network):
    """Max-min fair sharing among messages."""

    in_order = False

    def __init__(self, env: simpy.Environment, capacities: Sequence[float], stream: float) -> None:
        super().__init__(env, capacities, stream)
        self._left: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._of: dict[int, tuple[tuple[int, ...], float, simpy.Event, object]] = {}
        self._behind: dict[object, deque[tuple[float, float, simpy.Event]]] = {}
        self._since = 0.0
        self._number = 0
        self._changes = 0
        self._due = False

    def send(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """Fires when it has drained, behind those before it on its connection."""
        done = simpy.Event(self._env)
        connection = (path, role) if self.in_order and role is not None else None
        if connection in self._behind:
            self._behind[connection].append((size_bytes, streams, done))
            return done
        if connection is not None:
            self._behind[connection] = deque()
        self._begin(path, size_bytes, streams, done, connection)
        return done

    def _begin(
        self,
        path: tuple[int, ...],
        size_bytes: float,
        streams: float,
        done: simpy.Event,
        connection: object,
    ) -> None:
        for link in path:
            self.link_bytes[link] += size_bytes
        self._number += 1
        self._left[self._number] = size_bytes
        self._rates[self._number] = 0.0
        self._of[self._number] = path, streams, done, connection
        if not self._due:
            self._due = True
            self._env.timeout(0).callbacks.append(self._fill)

    def _drain(self) -> None:
        took_s = self._env.now - self._since
        self._since = self._env.now
        for number, rate in self._rates.items() if took_s else ():
            self._left[number] -= rate * took_s

    def _fill(self, _: object) -> None:
        self._due = False
        self._drain()
        paths = [path for path, *_ in self._of.values()]
        weights = [streams for _, streams, *_ in self._of.values()]
        room = {link: rate for link, rate in enumerate(self._capacities) if rate < inf}
        bounds = [
            min(self._stream * streams, *[self._capacities[link] for link in path])
            for path, streams, *_ in self._of.values()
        ]
        rates, _ = max_min(paths, weights, bounds, room)
        self._rates = dict(zip(self._of, rates, strict=True))
        self._changes += 1
        if rates:
            first_s = min(self._left[number] / rate for number, rate in self._rates.items())
            timer = self._env.timeout(max(0.0, first_s), self._changes)
            timer.callbacks.append(self._finish)

    def _finish(self, timer: simpy.Event) -> None:
        if timer.value != self._changes:
            return
        self._drain()
        within_s = self._env.now * 1e-14 + 1e-15
        for number in [n for n, rate in self._rates.items() if self._left[n] <= rate * within_s]:
            path, _, done, connection = self._of.pop(number)
            del self._left[number], self._rates[number]
            done.succeed()
            if connection is not None and self._behind[connection]:
                self._begin(path, *self._behind[connection].popleft(), connection)
            elif connection is not None:
                del self._behind[connection]
        if not self._due:
            self._fill(timer)


class FilledInOrder(Filled):
    """The same among connections, each of which carries its messages in order."""

    in_order = True
