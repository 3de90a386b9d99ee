"""Where the processes of a cluster are: hosts, the links between them, who serves whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.scenario import DenseHome, Scenario


@dataclass(frozen=True, slots=True)
class FanOut:
    """The NICs of all servers as one link, for messages to all of them.

    Every fan-out spreads over the servers in the same shares, so the busiest NIC binds first and
    the others follow it: a link of (rate of the NIC / its share) is exact under fair sharing.
    """

    bytes_per_s: float
    """Payload rate at which the servers take or give a fan-out."""
    streams: float
    """What a fan-out weighs: its streams, the hottest of which holds the others back."""


def fan_out_of(cluster: Cluster, shares: np.ndarray) -> FanOut:
    """The link to all servers. ``shares`` float64 [servers], sum 1."""
    # Its rate is that of the host which has most of it.
    loads = np.bincount(cluster.servers.host_of, weights=shares)
    count = len(shares)
    rate = cluster.nic_rate(cluster.servers) * (1.0 / float(loads.max()))
    return FanOut(rate, float(count) * (1.0 / (float(shares.max()) * count)))


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
        self.fan_out = fan_out_of(cluster, shares)
        self.gpu_hosts = self._nics("GPU host", [cluster.nic_rate(nn)] * nn.hosts)
        self.of_rank: list[int] = [self.gpu_hosts[host] for host in nn.host_of.tolist()]
        worker_hosts = self._nics("worker host", [cluster.nic_rate(workers)] * workers.hosts)
        self.of_worker: list[int] = [worker_hosts[host] for host in workers.host_of.tolist()]
        (self.of_servers,) = self._nics("server hosts", [self.fan_out.bytes_per_s])
        # Whether copies of dense weights meet the servers' NICs, which keep them beside the rows.
        self.has_dense = home is DenseHome.SERVERS

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
