"""How long each message of a batch takes when it meets nobody, by the hosts that it joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from persia_sim.cluster.demand import Demand
from persia_sim.cluster.placement import ServerGroup, Wiring, workers_of
from persia_sim.cluster.scenario import DenseHome, Scenario
from persia_sim.network.flows import transfer_s


class Transfers:
    """Seconds of the messages of a rank and of the embedding worker that serves it."""

    def __init__(self, scenario: Scenario, need: Demand, rank: int = 0, worker: int = 0) -> None:
        cluster = scenario.cluster
        self._need = need
        self._home = scenario.home
        self._wiring = wiring = Wiring(cluster, need.server_shares, scenario.home)
        self.groups = wiring.groups
        self._stream_bytes_per_s = cluster.link.stream_bytes_per_s
        self._rank = wiring.of_rank[rank]
        self._worker = wiring.of_worker[worker]
        speeds = cluster.embedding_workers.of_processes(lambda kind: kind.host.core_speed)
        self.slower = speeds[0] / speeds[worker]
        """How much longer the worker's cores take than those of the first kind of its role."""

    def _alone_s(self, size_bytes: float, path: Sequence[int], streams: float = 1.0) -> float:
        rates = [self._wiring.capacities[link] for link in path]
        return transfer_s(size_bytes, rates, self._stream_bytes_per_s * streams)

    def _between_s(self, size_bytes: float, one: int, other: int, streams: float = 1.0) -> float:
        """Seconds from a NIC to another; it takes as long back."""
        return self._alone_s(size_bytes, self._wiring.path(one, other), streams)

    def load_s(self) -> float:
        """Loader to worker."""
        return self._alone_s(self._need.loader_bytes, [self._worker + 1])

    def input_s(self) -> float:
        """Loader to rank."""
        return self._alone_s(self._need.input_bytes, [self._rank + 1])

    def fan_s(self, size_bytes: float, group: ServerGroup) -> float:
        """Worker to a group of servers or back: their share of so many bytes for all servers."""
        nic = self._wiring.of_group[self.groups.index(group)]
        return self._between_s(size_bytes * group.share, self._worker, nic, group.streams)

    def worker_s(self, size_bytes: float, other: Transfers | None = None) -> float:
        """Worker to the worker of others; by default to one of its kind."""
        return self._between_s(size_bytes, self._worker, (other or self)._worker)

    def dense_s(self) -> float:
        """A copy of the dense weights between their home and a rank (async)."""
        size_bytes = self._need.dense_bytes
        rank = self._rank
        parts = self._wiring.of_dense
        return max(
            (self._between_s(size_bytes * share, nic, rank, n) for nic, share, n in parts),
            default=0.0,
        )

    def dense_served_s(self) -> float:
        """A copy of the dense weights at their home (async)."""
        if self._home is DenseHome.SERVERS:
            return float(self._need.dense_part_s.max())
        return self._need.dense_copy_s

    def rank_s(self, size_bytes: float) -> float:
        """Worker to rank or back."""
        return self._between_s(size_bytes, self._worker, self._rank)


def alike(scenario: Scenario) -> tuple[list[int], list[int]]:
    """For every rank, and for every worker, the first one that has its kind of host."""
    cluster = scenario.cluster
    first_alike = []
    for role, processes in (
        (cluster.nn, cluster.ranks),
        (cluster.embedding_workers, cluster.embedding_workers.processes),
    ):
        counts = [kind.hosts * kind.processes_per_host for kind in role.kinds]
        kinds = np.repeat(np.arange(len(counts)), counts)[:processes].tolist()
        first: dict[int, int] = {}
        first_alike.append([first.setdefault(kind, number) for number, kind in enumerate(kinds)])
    return first_alike[0], first_alike[1]


def serving(scenario: Scenario) -> np.ndarray:
    """The first worker like the one that serves each batch, int [ranks, steps]."""
    _, first = alike(scenario)
    ranks = scenario.cluster.ranks
    steps = scenario.steps
    if max(first) == 0:
        return np.zeros((ranks, steps), int)
    served: np.ndarray = np.array(first)[np.array([workers_of(scenario, r) for r in range(ranks)])]
    return served


Alike = tuple[int, tuple[int, ...]]
"""A rank by its kind of host, and workers by theirs: the first ones that are like these."""


def served_alike(scenario: Scenario) -> list[Alike]:
    """Of each rank, what it has in common with those that are like it and served alike."""
    ranks, _ = alike(scenario)
    served = serving(scenario)
    if not served.any():
        return [(rank, (0,)) for rank in ranks]
    by = [tuple(np.unique(workers).tolist()) for workers in served]
    return list(zip(ranks, by, strict=True))


def pairs(scenario: Scenario) -> dict[Alike, int]:
    """How many ranks are like this one and served by workers like these."""
    return dict(Counter(served_alike(scenario)))


LOADER = "loader"
GPUS = "GPU host"
WORKERS = "worker host"
SERVERS = "servers"
DENSE = "dense"
Message = tuple[str, str, float]
"""Sender, receiver and bytes."""


def messages(scenario: Scenario, need: Demand) -> list[Message]:
    """All that one batch of one rank puts on NICs, by roles, but for the all-reduce."""
    sent: list[Message] = [
        (LOADER, WORKERS, need.loader_bytes),
        (LOADER, GPUS, need.input_bytes),
    ]
    for push in need.pushes:
        sent += [(GPUS, WORKERS, push.gradient_bytes), (WORKERS, SERVERS, push.push_bytes)]

    # Lookups: once, and again where rows are brought up to date.
    for part in need.fetches:
        sent += [
            (WORKERS, SERVERS, part.request_bytes),
            (SERVERS, WORKERS, part.rows_bytes),
            (WORKERS, GPUS, part.activation_bytes),
        ]

    # Gradients of rows that another worker holds on lease.
    if need.forward is not None:
        sent.append((WORKERS, WORKERS, need.forward.exchange_bytes))
        sent.append((WORKERS, GPUS, need.forward.activation_bytes))

    # Copies of dense weights in async.
    home = {DenseHome.SERVERS: SERVERS, DenseHome.ONE: DENSE}.get(scenario.home)  # type: ignore[arg-type]
    if home is not None:
        sent += [(home, GPUS, need.dense_bytes), (GPUS, home, need.dense_bytes)]
    return sent
