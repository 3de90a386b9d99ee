"""Where the processes of a cluster are: their hosts, their racks, and who serves whom."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from persia_sim.model.cluster import Cluster
from persia_sim.model.incidents import Purpose, stream
from persia_sim.model.scenario import Scenario, WorkerChoice


@dataclass(frozen=True, slots=True)
class Placement:
    """The rack of every host, and the uplinks. Where no uplink can bind there is one rack."""

    gpu_hosts: np.ndarray
    """int [GPU hosts]: number of its rack; and so on for the other roles."""
    worker_hosts: np.ndarray
    server_hosts: np.ndarray
    uplinks: tuple[float, ...]
    """Payload bytes a second of each rack's uplink, each way; none where there is one rack."""
    of_rank: np.ndarray
    """int [ranks]: the rack of its host."""
    of_worker: np.ndarray
    """int [embedding workers]"""

    def between(self, here: int, there: int) -> tuple[float, ...]:
        """Rates of the uplinks on the way from a rack to another, or to itself."""
        return () if here == there else (self.uplinks[here], self.uplinks[there])


def placement(cluster: Cluster) -> Placement:
    """Hosts are dealt to the racks in order."""
    roles = cluster.nn, cluster.embedding_workers, cluster.servers
    racks = cluster.racks
    efficiency = cluster.link.header_efficiency
    uplinks = tuple(rack.uplink_bytes_per_s * efficiency for rack in racks)
    if len(racks) < 2 or min(uplinks) == np.inf:
        gpu, worker, server = (np.zeros(role.all_hosts, int) for role in roles)
        uplinks = ()
    else:
        numbers = np.arange(len(racks))
        gpu, worker, server = (
            np.repeat(numbers, [getattr(rack, field) for rack in racks])
            for field in ("gpu_hosts", "worker_hosts", "server_hosts")
        )
    return Placement(
        gpu_hosts=gpu,
        worker_hosts=worker,
        server_hosts=server,
        uplinks=uplinks,
        of_rank=gpu[cluster.nn.host_of[: cluster.ranks]],
        of_worker=worker[cluster.embedding_workers.host_of],
    )


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """The servers of one rack, whose NICs are one link for fan-outs.

    Every fan-out spreads over the servers in the same shares, so the busiest NIC binds first and
    the others follow it: a link of (rate of the NIC / its share) is exact under fair sharing.
    """

    rack: int
    first: int
    end: int
    """Its processes are those from ``first`` until ``end``."""
    share: float
    """Of every fan-out, by bytes; all groups together 1."""
    bytes_per_s: float
    """Payload rate at which it takes or gives its share of a fan-out."""
    streams: float
    """What a fan-out to it weighs: its streams, the hottest of which holds the others back."""

    @property
    def processes(self) -> slice:
        """Of arrays over all servers."""
        return slice(self.first, self.end)


def server_groups(
    cluster: Cluster, places: Placement, shares: np.ndarray
) -> tuple[ServerGroup, ...]:
    """The servers of each rack that has any. ``shares`` float64 [servers], sum 1."""
    host_of, rates = cluster.servers.host_of, np.array(cluster.nic_rates(cluster.servers))
    rack_of = places.server_hosts[host_of]
    found = []
    for rack in np.unique(rack_of):
        own = np.flatnonzero(rack_of == rack)
        first, end = int(own[0]), int(own[-1]) + 1
        part, count = shares[first:end], end - first
        share = 1.0 if count == len(shares) else float(part.sum())
        hosts = slice(host_of[first], host_of[end - 1] + 1)
        loads = np.bincount(host_of[first:end], weights=part)[hosts.start :]
        slowest = int(np.lexsort((loads, loads / rates[hosts]))[-1])
        rate, busiest = float(rates[hosts][slowest]), float(loads[slowest])
        streams = float(count) * (share / (float(part.max()) * count))
        found.append(ServerGroup(int(rack), first, end, share, rate * share / busiest, streams))
    return tuple(found)


def workers_of(scenario: Scenario, r: int) -> list[int]:
    """The embedding workers that serve a rank's batches, one a step."""
    cluster, choice = scenario.cluster, scenario.worker_choice
    workers, steps = cluster.embedding_workers.processes, scenario.steps
    if choice is WorkerChoice.RANDOM:
        draws = stream(scenario.seed, Purpose.WORKER_CHOICE, r)
        return list(map(int, draws.integers(0, workers, steps)))
    batches = np.arange(steps) * cluster.ranks + r
    if choice is WorkerChoice.PER_LOADER:
        batches //= cluster.loaders
    return list(map(int, batches % workers))
