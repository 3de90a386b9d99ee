"""How long each message of a batch takes when it meets nobody, by the racks that it joins."""

from __future__ import annotations

from dataclasses import dataclass, field

from persia_sim.model.demand import Demand
from persia_sim.model.placement import Placement, ServerGroup, placement, server_groups
from persia_sim.model.scenario import DenseHome, Scenario
from persia_sim.network.disciplines import transfer_s


@dataclass(frozen=True, slots=True)
class Transfers:
    """Of a rank in one rack and an embedding worker in another, or in the same."""

    scenario: Scenario
    need: Demand
    rank_rack: int = 0
    worker_rack: int = 0
    places: Placement = field(init=False)
    groups: tuple[ServerGroup, ...] = field(init=False)
    _rates: tuple[float, float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        cluster = self.scenario.cluster
        places = placement(cluster)
        object.__setattr__(self, "places", places)
        groups = server_groups(cluster, places, self.need.server_shares)
        object.__setattr__(self, "groups", groups)
        rates = *cluster.nic_payload_bytes_per_s, cluster.link.stream_bytes_per_s
        object.__setattr__(self, "_rates", rates)

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

    def worker_s(self, size_bytes: float, other_rack: int | None = None) -> float:
        """Worker to worker; by default inside the rack."""
        _, worker, _, stream = self._rates
        there = self.worker_rack if other_rack is None else other_rack
        rates = worker, worker, *self._between(self.worker_rack, there)
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
