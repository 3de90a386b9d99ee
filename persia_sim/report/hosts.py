"""How many hosts a cluster has: the fewest for a rate or for all rows, the cheapest, and what they
may be where nobody has published it; by the closed form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil

from persia_sim.base.rules import require
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster, Role
from persia_sim.cluster.memory import FORMATS
from persia_sim.cluster.scenario import Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.presets.catalogue import SIZED_FOR, SPLIT_ASSUMED, rows_of

MOST_HOSTS = 1024
"""CPU hosts of each role, at most."""


def hosts_for_rows(workload: Workload, servers: Role, rows: str) -> int:
    """The fewest hosts of a role that hold all rows, kept as a name of `FORMATS` says."""
    row_bytes = FORMATS[rows].row_bytes(workload.kept_dim)
    of_host = servers.processes_per_host * (servers.ram_bytes_per_process // row_bytes)
    return ceil(workload.rows / of_host) if of_host else MOST_HOSTS + 1


def fewest(least: int, most: int, enough: Callable[[int], bool]) -> int | None:
    """The fewest from ``least`` to ``most`` that are enough, where more are never too few.

    >>> fewest(3, 1000, lambda n: n >= 17), fewest(3, 10, lambda n: n >= 17)
    (17, None)
    """
    high = least
    while high < most and not enough(high):
        high *= 2
    left = range(max(least, high // 2), min(high, most) + 1)
    place = bisect_left(left, True, key=enough)
    return left[place] if place < len(left) else None


def sized(scenario: Scenario, samples_per_s: float, rows: str) -> Scenario:
    """The scenario on its own GPU hosts with the fewest hosts of servers, and then of workers, that
    reach a rate by the closed form; with those behind which more are of no use where none do."""
    least = hosts_for_rows(scenario.workload, scenario.cluster.servers, rows)
    plenty = max(least, MOST_HOSTS // 4)

    def rate(workers: int, servers: int) -> float:
        return answer(with_hosts(scenario, workers, servers)).samples_per_s

    most = max(rate(plenty, servers) for servers in (least, 2 * least, 4 * least, plenty))
    wanted = min(samples_per_s, 0.99 * most)
    servers = fewest(least, plenty, lambda n: rate(plenty, n) >= wanted) or plenty
    workers = fewest(1, plenty, lambda n: rate(n, servers) >= wanted) or plenty
    return with_hosts(scenario, workers, servers)


def unknown_hosts(preset: str, scenario: Scenario) -> Callable[[float], Cluster] | None:
    """The scenario's cluster with the numbers of worker and server hosts of a draw, where those of
    the named preset are not known: as many as so many times the rate takes for which it was sized,
    or so many times as many workers a server, of as many hosts. None where they are known."""
    workers = scenario.cluster.embedding_workers.hosts
    servers = scenario.cluster.servers.hosts
    if preset in SIZED_FOR:
        rate = SIZED_FOR[preset]
        kept = rows_of(scenario.workload.name)
        # Every mode and both sides of a ratio have the same draws.
        return cache(lambda times: sized(scenario, times * rate, kept).cluster)

    def split(times: float) -> Cluster:
        more = round((workers + servers) * times / (times + servers / workers))
        return with_hosts(scenario, more, workers + servers - more).cluster

    return split if preset in SPLIT_ASSUMED else None


def cheapest(scenario: Scenario, rows: str) -> Scenario:
    """The scenario on its own GPU hosts with the hosts of workers and servers with which a sample
    costs least, by the closed form. Raises ValueError where a host has no price."""
    unpriced = scenario.cluster.unpriced
    remedy = "write usd_per_hour into the file of the cluster"
    require(not unpriced, "price of", ", ".join(unpriced), "it is needed", remedy)
    least = hosts_for_rows(scenario.workload, scenario.cluster.servers, rows)

    def usd(workers: int, servers: int) -> float:
        tried = with_hosts(scenario, workers, servers)
        return tried.cluster.usd_per_hour / answer(tried).samples_per_s

    # One role after the other, a host more or fewer, until neither is cheaper.
    here = 1, least
    while True:
        workers, servers = here
        near = [(w, s) for w in _near(workers, 1) for s in _near(servers, least)]
        best = min(near, key=lambda counts: usd(*counts))
        if usd(*best) >= usd(*here):
            return with_hosts(scenario, *here)
        here = best


def _near(count: int, least: int) -> list[int]:
    """Counts to go on to: one more and one fewer, twice and half."""
    return sorted({max(least, n) for n in (count // 2, count - 1, count, count + 1, 2 * count)})


def with_hosts(scenario: Scenario, workers: int, servers: int) -> Scenario:
    """The scenario with so many hosts of workers and of servers."""
    return replace(scenario, cluster=scenario.cluster.resized(workers=workers, servers=servers))
