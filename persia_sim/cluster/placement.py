"""Where the processes of a cluster are: hosts, racks, the links between them, who serves whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.incidents import Purpose, stream
from persia_sim.cluster.scenario import DenseHome, Scenario, WorkerChoice


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


def placement(cluster: Cluster) -> Placement:
    """Hosts are dealt to the racks in order."""
    roles = cluster.nn, cluster.embedding_workers, cluster.servers
    racks = cluster.racks
    efficiency = cluster.link.header_efficiency
    uplinks = tuple(rack.uplink_bytes_per_s * efficiency for rack in racks)

    # Uplinks that never bind are left out.
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
    """The group's processes are those from ``first`` until ``end``."""
    share: float
    """The group's share of every fan-out, by bytes; all groups together 1."""
    bytes_per_s: float
    """Payload rate at which it takes or gives its share of a fan-out."""
    streams: float
    """What a fan-out to it weighs: its streams, the hottest of which holds the others back."""

    @property
    def processes(self) -> slice:
        """The group's part of arrays over all servers."""
        return slice(self.first, self.end)


def server_groups(
    cluster: Cluster, places: Placement, shares: np.ndarray
) -> tuple[ServerGroup, ...]:
    """The servers of each rack that has any. ``shares`` float64 [servers], sum 1."""
    host_of = cluster.servers.host_of
    rates = np.array(cluster.nic_rates(cluster.servers))
    rack_of = places.server_hosts[host_of]
    groups = []

    # Servers of a rack are numbered one after the other.
    for rack in np.unique(rack_of):
        members = np.flatnonzero(rack_of == rack)
        first = int(members[0])
        end = int(members[-1]) + 1
        part = shares[first:end]
        count = end - first
        share = 1.0 if count == len(shares) else float(part.sum())

        # The group's rate is that of the host which is done last.
        hosts = slice(host_of[first], host_of[end - 1] + 1)
        loads = np.bincount(host_of[first:end], weights=part)[hosts.start :]
        slowest = int(np.lexsort((loads, loads / rates[hosts]))[-1])
        rate = float(rates[hosts][slowest])
        streams = float(count)
        if share:  # else these servers have no row of a batch, and nothing of it goes there
            rate *= share / float(loads[slowest])
            streams *= share / (float(part.max()) * count)
        groups.append(ServerGroup(int(rack), first, end, share, rate, streams))
    return tuple(groups)


class Wiring:
    """Every NIC and every uplink of a cluster, and which of them a message crosses.

    A NIC is the number of its way out; its way in has the number after it.
    """

    def __init__(self, cluster: Cluster, shares: np.ndarray, home: DenseHome | None) -> None:
        """``shares``: of each server in the ids of a batch; ``home``: of async's dense weights."""
        self.names: list[str] = []
        self.capacities: list[float] = []
        self._racks: list[int] = []
        nn = cluster.nn
        workers = cluster.embedding_workers
        rates = cluster.nic_rates
        places = placement(cluster)
        self.groups = server_groups(cluster, places, shares)
        self.gpu_hosts = self._nics("GPU host", places.gpu_hosts, rates(nn))
        self.of_rank: list[int] = [self.gpu_hosts[host] for host in nn.host_of.tolist()]
        worker_hosts = self._nics("worker host", places.worker_hosts, rates(workers))
        self.of_worker: list[int] = [worker_hosts[host] for host in workers.host_of.tolist()]
        racks, group_rates = zip(*((g.rack, g.bytes_per_s) for g in self.groups), strict=True)
        self.of_group = self._nics("server hosts", racks, group_rates)
        first = places.server_hosts[: int(home is DenseHome.ONE)]
        of_home = self._nics("dense server", first, rates(cluster.servers)[: len(first)])
        self._uplinks = self._nics("uplink", range(len(places.uplinks)), places.uplinks)
        # What asks for dense weights meets: NIC, share of the bytes, streams.
        self.of_dense = [(nic, 1.0, 1.0) for nic in of_home]
        if home is DenseHome.SERVERS:
            groups = zip(self.of_group, self.groups, strict=True)
            self.of_dense = [(nic, group.share, group.streams) for nic, group in groups]

    def _nics(self, role: str, racks: Iterable[int], rates: Sequence[float]) -> list[int]:
        """New NICs of a role, each in its rack."""
        first = len(self.names)
        for number, (rack, rate) in enumerate(zip(racks, rates, strict=True)):
            self.names += [f"{role} {number} out", f"{role} {number} in"]
            self.capacities += [rate, rate]
            self._racks += [int(rack)] * 2
        return list(range(first, len(self.names), 2))

    def path(self, sender: int, receiver: int) -> tuple[int, ...]:
        """The links from one NIC to another: out, over both racks' uplinks where they differ, and
        in."""
        if self._uplinks:
            here = self._racks[sender]
            there = self._racks[receiver]
            if here != there:
                return sender, self._uplinks[here], self._uplinks[there] + 1, receiver + 1
        return sender, receiver + 1


def workers_of(scenario: Scenario, r: int) -> list[int]:
    """The embedding workers that serve a rank's batches, one a step."""
    cluster = scenario.cluster
    choice = scenario.worker_choice
    workers = cluster.embedding_workers.processes
    steps = scenario.steps
    if choice is WorkerChoice.RANDOM:
        draws = stream(scenario.seed, Purpose.WORKER_CHOICE, r)
        return list(map(int, draws.integers(0, workers, steps)))
    batches = np.arange(steps) * cluster.ranks + r
    if choice is WorkerChoice.PER_LOADER:
        batches //= cluster.loaders
    return list(map(int, batches % workers))
