"""Where the processes of a cluster are: hosts, the links between them, who serves whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.scenario import DenseHome, Scenario


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """Servers whose NICs are one link for fan-outs.

    Every fan-out spreads over the servers in the same shares, so the busiest NIC binds first and
    the others follow it: a link of (rate of the NIC / its share) is exact under fair sharing.
    """

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


def server_groups(cluster: Cluster, shares: np.ndarray) -> tuple[ServerGroup, ...]:
    """All servers as one group. ``shares`` float64 [servers], sum 1."""
    # The group's rate is that of the host which is done last.
    host_of = cluster.servers.host_of
    rates = np.array(cluster.nic_rates(cluster.servers))
    loads = np.bincount(host_of, weights=shares)
    slowest = int(np.lexsort((loads, loads / rates))[-1])
    count = len(shares)
    rate = float(rates[slowest]) * (1.0 / float(loads[slowest]))
    streams = float(count) * (1.0 / (float(shares.max()) * count))
    return (ServerGroup(0, count, 1.0, rate, streams),)


class Wiring:
    """Every NIC of a cluster, and which of them a message crosses.

    A NIC is the number of its way out; its way in has the number after it.
    """

    def __init__(self, cluster: Cluster, shares: np.ndarray, home: DenseHome | None) -> None:
        """``shares``: of each server in the ids of a batch; ``home``: of async's dense weights."""
        self.names: list[str] = []
        self.capacities: list[float] = []
        nn = cluster.nn
        workers = cluster.embedding_workers
        rates = cluster.nic_rates
        self.groups = server_groups(cluster, shares)
        self.gpu_hosts = self._nics("GPU host", rates(nn))
        self.of_rank: list[int] = [self.gpu_hosts[host] for host in nn.host_of.tolist()]
        worker_hosts = self._nics("worker host", rates(workers))
        self.of_worker: list[int] = [worker_hosts[host] for host in workers.host_of.tolist()]
        self.of_group = self._nics("server hosts", [group.bytes_per_s for group in self.groups])
        apart = int(home is DenseHome.ONE)
        of_home = self._nics("dense server", rates(cluster.servers)[:apart])
        # What asks for dense weights meets: NIC, share of the bytes, streams.
        self.of_dense = [(nic, 1.0, 1.0) for nic in of_home]
        if home is DenseHome.SERVERS:
            groups = zip(self.of_group, self.groups, strict=True)
            self.of_dense = [(nic, group.share, group.streams) for nic, group in groups]

    def _nics(self, role: str, rates: Sequence[float]) -> list[int]:
        """New NICs of a role."""
        first = len(self.names)
        for number, rate in enumerate(rates):
            self.names += [f"{role} {number} out", f"{role} {number} in"]
            self.capacities += [rate, rate]
        return list(range(first, len(self.names), 2))

    def path(self, sender: int, receiver: int) -> tuple[int, ...]:
        """The links from one NIC to another: out, and in."""
        return sender, receiver + 1


def workers_of(scenario: Scenario, r: int) -> list[int]:
    """The embedding workers that serve a rank's batches, one a step: batches go to them in turn, so
    that no two of a step meet if there are enough."""
    cluster = scenario.cluster
    batches = np.arange(scenario.steps) * cluster.ranks + r
    return list(map(int, batches % cluster.embedding_workers.processes))
