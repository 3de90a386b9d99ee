"""How long each message of a batch takes when it meets nobody, by the hosts that it joins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from persia_sim.model.demand import Demand
from persia_sim.model.placement import Placement, ServerGroup, placement, server_groups, workers_of
from persia_sim.model.scenario import DenseHome, Scenario
from persia_sim.network.flows import transfer_s


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


def serving_racks(scenario: Scenario) -> np.ndarray:
    """The rack of the embedding worker of each batch, int [ranks, steps]."""
    places, ranks = placement(scenario.cluster), range(scenario.cluster.ranks)
    if not places.uplinks:
        return np.zeros((len(ranks), scenario.steps), int)
    of_worker = places.of_worker
    found: np.ndarray = of_worker[np.array([workers_of(scenario, r) for r in ranks])]
    return found


def alike(scenario: Scenario) -> tuple[list[int], list[int]]:
    """For every rank, and for every worker, the first one that has its kind of host and rack."""
    places, cluster = placement(scenario.cluster), scenario.cluster
    found = []
    for role, racks in (
        (cluster.nn, places.of_rank),
        (cluster.embedding_workers, places.of_worker),
    ):
        counts = [kind.hosts * kind.processes_per_host for kind in role.kinds]
        kinds = np.repeat(np.arange(len(counts)), counts).tolist()
        first: dict[tuple[int, int], int] = {}
        of_each = zip(kinds, racks.tolist(), strict=False)
        found.append([first.setdefault(key, number) for number, key in enumerate(of_each)])
    return found[0], found[1]


def serving(scenario: Scenario) -> np.ndarray:
    """The first worker like the one that serves each batch, int [ranks, steps]."""
    _, first = alike(scenario)
    ranks, steps = scenario.cluster.ranks, scenario.steps
    if max(first) == 0:
        return np.zeros((ranks, steps), int)
    served: np.ndarray = np.array(first)[np.array([workers_of(scenario, r) for r in range(ranks)])]
    return served


def pairs(scenario: Scenario) -> dict[tuple[int, tuple[int, ...]], int]:
    """How many ranks are like this one and served by workers like these."""
    ranks, _ = alike(scenario)
    served = serving(scenario)
    if not served.any():
        return {(rank, (0,)): count for rank, count in Counter(ranks).items()}
    by = [tuple(np.unique(workers).tolist()) for workers in served]
    return dict(Counter(zip(ranks, by, strict=True)))


LOADER, GPUS, WORKERS, SERVERS, DENSE = "loader", "GPU host", "worker host", "servers", "dense"
Message = tuple[str, str, float]
"""Sender, receiver and bytes."""


def messages(scenario: Scenario, need: Demand) -> list[Message]:
    """All that one batch of one rank puts on NICs, by roles, but for the all-reduce."""
    found: list[Message] = [
        (LOADER, WORKERS, need.loader_bytes),
        (LOADER, GPUS, need.input_bytes),
        (GPUS, WORKERS, need.gradient_bytes),
        (WORKERS, SERVERS, need.push_bytes),
    ]
    for part in need.fetches:
        found += [
            (WORKERS, SERVERS, part.request_bytes),
            (SERVERS, WORKERS, part.rows_bytes),
            (WORKERS, GPUS, part.activation_bytes),
        ]
    if need.forward is not None:
        found.append((WORKERS, WORKERS, need.forward.exchange_bytes))
        found.append((WORKERS, GPUS, need.forward.activation_bytes))
    home = {DenseHome.SERVERS: SERVERS, DenseHome.ONE: DENSE}.get(scenario.home)  # type: ignore[arg-type]
    if home is not None:
        found += [(home, GPUS, need.dense_bytes), (GPUS, home, need.dense_bytes)]
    return found


def uplink_bytes(scenario: Scenario, need: Demand) -> dict[str, float]:
    """Bytes of each direction of each uplink over the whole run, by the engine's names of links.

    Without the rounds of async_averaging, whose number the run decides, and without pushes that a
    crash has lost.
    """
    places, worker = placement(scenario.cluster), serving_racks(scenario)
    racks = len(places.uplinks)
    sent = np.zeros((racks, racks))  # from a rack to a rack
    groups = server_groups(scenario.cluster, places, need.server_shares)
    # Racks of a role for each batch, int [ranks, steps], and the share of the bytes that is there.
    where: dict[str, list[tuple[np.ndarray, float]]] = {
        WORKERS: [(worker, 1.0)],
        GPUS: [(np.broadcast_to(places.of_rank[:, None], worker.shape), 1.0)],
        SERVERS: [(np.full(worker.shape, group.rack), group.share) for group in groups],
        DENSE: [(np.full(worker.shape, places.server_hosts[0]), 1.0)],
    }
    for sender, receiver, size in messages(scenario, need):
        for (here, one), (there, other) in product(where.get(sender, ()), where[receiver]):
            if sender == receiver:  # gradients go to the worker of the next batch
                there = np.roll(here, -1, axis=1)
            np.add.at(sent, (here, there), size * one * other)
    if scenario.dense_on_nics:
        following = np.roll(places.gpu_hosts, -1)
        passed = scenario.steps * sum(bucket.nic_bytes for bucket in need.buckets)
        np.add.at(sent, (places.gpu_hosts, following), passed)
    np.fill_diagonal(sent, 0.0)
    out, back = sent.sum(1), sent.sum(0)
    names = {f"uplink {rack} out": float(out[rack]) for rack in range(racks)}
    return names | {f"uplink {rack} in": float(back[rack]) for rack in range(racks)}
