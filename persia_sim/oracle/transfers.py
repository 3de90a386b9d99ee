"""How long each message of a batch takes when it meets nobody, by the hosts that it joins."""

from __future__ import annotations

from dataclasses import dataclass, field

from persia_sim.model.demand import Demand
from persia_sim.model.placement import Placement, ServerGroup, placement, server_groups
from persia_sim.model.scenario import DenseHome, Scenario
from persia_sim.network.disciplines import transfer_s


@dataclass(frozen=True, slots=True)
class Transfers:
    """Of a rank and of the embedding worker that serves it."""

    scenario: Scenario
    need: Demand
    rank: int = 0
    worker: int = 0
    rank_rack: int = field(init=False)
    worker_rack: int = field(init=False)
    slower: float = field(init=False)
    """How much longer the worker's cores take than those of the first kind of its role."""
    places: Placement = field(init=False)
    groups: tuple[ServerGroup, ...] = field(init=False)
    _rates: tuple[float, float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        cluster = self.scenario.cluster
        places = placement(cluster)
        object.__setattr__(self, "places", places)
        groups = server_groups(cluster, places, self.need.server_shares)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "rank_rack", int(places.of_rank[self.rank]))
        object.__setattr__(self, "worker_rack", int(places.of_worker[self.worker]))
        nn, workers = cluster.nn, cluster.embedding_workers
        rates = (
            cluster.nic_rates(nn)[int(nn.host_of[self.rank])],
            cluster.nic_rates(workers)[int(workers.host_of[self.worker])],
            cluster.nic_rates(cluster.servers)[0],
            cluster.link.stream_bytes_per_s,
        )
        object.__setattr__(self, "_rates", rates)
        speeds = workers.of_processes(lambda kind: kind.host.core_speed)
        object.__setattr__(self, "slower", speeds[0] / speeds[self.worker])

    def _between(self, here: int, there: int) -> tuple[float, ...]:
        return self.places.between(here, there)

    def load_s(self) -> float:
        """Loader to worker."""
        _, worker, _, stream = self._rates
        return transfer_s(self.need.loader_bytes, [worker], stream)

    def input_s(self) -> float:
        """Loader to rank."""
        rank, _, _, stream = self._rates
        return transfer_s(self.need.input_bytes, [rank], stream)

    def fan_s(self, size_bytes: float, group: ServerGroup) -> float:
        """Worker to a rack's servers or back: their share of so many bytes for all servers."""
        _, worker, _, stream = self._rates
        rates = worker, group.bytes_per_s, *self._between(self.worker_rack, group.rack)
        return transfer_s(size_bytes * group.share, rates, stream * group.streams)

    def worker_s(self, size_bytes: float, other: Transfers | None = None) -> float:
        """Worker to the worker of others; by default to one of its kind inside the rack."""
        _, worker, _, stream = self._rates
        _, there, _, _ = (other or self)._rates
        rack = (other or self).worker_rack
        rates = worker, there, *self._between(self.worker_rack, rack)
        return transfer_s(size_bytes, rates, stream)

    def dense_s(self) -> float:
        """A copy of the dense weights between their home and a rank (async)."""
        rank, _, server, stream = self._rates
        size_bytes, home = self.need.dense_bytes, self.scenario.home
        if home is DenseHome.SERVERS:
            return max(
                transfer_s(
                    size_bytes * group.share,
                    [group.bytes_per_s, rank, *self._between(group.rack, self.rank_rack)],
                    stream * group.streams,
                )
                for group in self.groups
            )
        if home is DenseHome.ONE:
            rack = int(self.places.server_hosts[0])
            rates = server, rank, *self._between(rack, self.rank_rack)
            return transfer_s(size_bytes, rates, stream)
        return 0.0

    def dense_served_s(self) -> float:
        """A copy of the dense weights at their home (async)."""
        if self.scenario.home is DenseHome.SERVERS:
            return float(self.need.dense_part_s.max())
        return self.need.dense_copy_s

    def rank_s(self, size_bytes: float) -> float:
        """Worker to rank or back."""
        rank, worker, _, stream = self._rates
        rates = worker, rank, *self._between(self.worker_rack, self.rank_rack)
        return transfer_s(size_bytes, rates, stream)
