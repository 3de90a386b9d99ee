"""Weighted max-min fair sharing by progressive filling.

Rates grow together in proportion to weights until a link is full or a flow meets its own bound;
those flows freeze and the others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush


def max_min(
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    bounds: Sequence[float],
    capacities: Mapping[int, float],
) -> list[float]:
    """Rate of each flow. ``paths[i]`` names links of ``capacities``; links not named are ignored.

    >>> max_min([[0], [0, 1], [1]], [1, 1, 1], [9, 9, 9], {0: 1.0, 1: 2.0})
    [0.5, 0.5, 1.5]
    """
    rates = [0.0] * len(paths)
    active = dict.fromkeys(range(len(paths)))
    left: dict[int, float] = {}
    load: dict[int, float] = {}
    flows_of: dict[int, list[int]] = {}
    crossed = [[link for link in path if link in capacities] for path in paths]
    for flow, path in enumerate(crossed):
        for link in path:
            left.setdefault(link, capacities[link])
            load[link] = load.get(link, 0.0) + weights[flow]
            flows_of.setdefault(link, []).append(flow)
    growing = {link: len(flows) for link, flows in flows_of.items()}
    share = {link: max(left[link], 0.0) / load[link] for link in load}
    by_share = [(level, link) for link, level in share.items()]  # stale entries are skipped
    heapify(by_share)
    by_bound = sorted(active, key=lambda flow: -bounds[flow] / weights[flow])

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

    while active:
        while by_bound and by_bound[-1] not in active:
            by_bound.pop()
        own_level = bounds[by_bound[-1]] / weights[by_bound[-1]]
        while by_share and share.get(by_share[0][1]) != by_share[0][0]:
            heappop(by_share)
        level, full = by_share[0] if by_share else (own_level, -1)
        if own_level <= level:
            flow = by_bound.pop()
            freeze(flow, bounds[flow])
        else:
            for flow in flows_of[full]:
                if flow in active:
                    freeze(flow, weights[flow] * level)
    return rates


def alone(weight: float, bound: float, rooms: Sequence[float]) -> float:
    """The same of one flow alone, by what its links have to give.

    >>> alone(2.0, 9.0, [8.0, 4.0]), alone(2.0, 3.0, [8.0, 4.0])
    (4.0, 3.0)
    """
    if not rooms:
        return bound
    level = max(min(rooms), 0.0) / weight
    return bound if bound / weight <= level else weight * level
