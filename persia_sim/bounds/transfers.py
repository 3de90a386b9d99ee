"""How long each message of a batch takes when it meets nobody, by the hosts that it joins."""

from __future__ import annotations

from collections.abc import Sequence

from persia_sim.cluster.demand import Demand
from persia_sim.cluster.placement import Wiring
from persia_sim.cluster.scenario import DenseHome, Scenario
from persia_sim.network.flows import transfer_s


class Transfers:
    """Seconds of the messages of any rank and of the embedding worker that serves it."""

    def __init__(self, scenario: Scenario, need: Demand) -> None:
        cluster = scenario.cluster
        self._need = need
        self._home = scenario.home
        self._wiring = wiring = Wiring(cluster, need.server_shares, scenario.home)
        self._stream_bytes_per_s = cluster.link.stream_bytes_per_s
        self._rank = wiring.of_rank[0]
        self._worker = wiring.of_worker[0]

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

    def fan_s(self, size_bytes: float) -> float:
        """Worker to all servers or back: so many bytes for all of them."""
        servers = self._wiring.of_servers
        return self._between_s(size_bytes, self._worker, servers, self._wiring.fan_out.streams)

    def worker_s(self, size_bytes: float) -> float:
        """Worker to worker."""
        return self._between_s(size_bytes, self._worker, self._worker)

    def dense_s(self) -> float:
        """A copy of the dense weights between their home and a rank (async)."""
        if not self._wiring.has_dense:
            return 0.0
        servers = self._wiring.of_servers
        streams = self._wiring.fan_out.streams
        return self._between_s(self._need.dense_bytes, servers, self._rank, streams)

    def dense_served_s(self) -> float:
        """A copy of the dense weights at their home (async)."""
        if self._home is DenseHome.SERVERS:
            return float(self._need.dense_part_s.max())
        return self._need.dense_copy_s

    def rank_s(self, size_bytes: float) -> float:
        """Worker to rank or back."""
        return self._between_s(size_bytes, self._worker, self._rank)


LOADER = "loader"
GPUS = "GPU host"
WORKERS = "worker host"
SERVERS = "servers"
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
    if scenario.home is DenseHome.SERVERS:
        sent += [(SERVERS, GPUS, need.dense_bytes), (GPUS, SERVERS, need.dense_bytes)]
    return sent
