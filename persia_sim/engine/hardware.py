"""The hardware of a run: links, worker processes, the bank of servers, the dense server."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from persia_sim.engine.servers import Bank, FifoServer, Unlimited
from persia_sim.model.demand import Demand
from persia_sim.model.scenario import Discipline, Scenario
from persia_sim.network.disciplines import Fifo, Network, Unshared
from persia_sim.network.fluid import Fluid
from persia_sim.words.vocabulary import Mode

Process = Generator[simpy.Event, Any, None]

_DISCIPLINES: dict[Discipline, type[Fluid | Fifo | Unshared]] = {
    Discipline.FLUID: Fluid,
    Discipline.FIFO: Fifo,
    Discipline.UNSHARED: Unshared,
}


class Platform:
    """Where messages and requests go."""

    def __init__(self, env: simpy.Environment, scenario: Scenario, need: Demand) -> None:
        self.env = env
        cluster = scenario.cluster
        self._latency_s = cluster.link.latency_s
        self._need = need
        self._resolve = scenario.resolve_messages
        rank_rate, worker_rate, server_rate = cluster.nic_payload_bytes_per_s
        worker_hosts = cluster.embedding_workers.hosts
        server_hosts = cluster.servers.hosts
        shares = need.server_shares
        self.host_of_server = np.arange(len(shares)) // cluster.servers.processes_per_host
        self.host_shares = np.bincount(self.host_of_server, weights=shares)
        busiest = float(self.host_shares.max())
        self._streams = float(len(shares))
        # The hottest server's stream holds back the fan-out when streams are capped.
        self._even = 1.0 / (float(shares.max()) * len(shares))
        self.names: list[str] = []
        self.capacities: list[float] = []

        def nics(role: str, hosts: int, rate: float) -> list[int]:
            first = len(self.names)
            self.names += [f"{role} {h} {way}" for h in range(hosts) for way in ("out", "in")]
            self.capacities += [rate] * (2 * hosts)
            return list(range(first, len(self.names), 2))

        self._rank_nic = nics("GPU host", cluster.nn.hosts, rank_rate)
        self._worker_nic = nics("worker host", worker_hosts, worker_rate)
        self._ranks_per_host = cluster.nn.processes_per_host
        self._workers_per_host = cluster.embedding_workers.processes_per_host
        if self._resolve:
            self._server_nic = nics("server host", server_hosts, server_rate)
        else:
            self._server_nic = nics("server hosts", 1, server_rate / busiest)
        self._dense_nic = -1
        if scenario.dense_on_nics and scenario.mode is Mode.ASYNC:
            [self._dense_nic] = nics("dense server", 1, server_rate)
        discipline = _DISCIPLINES[scenario.discipline]
        self.network: Network = discipline(env, self.capacities, cluster.link.stream_bytes_per_s)
        unlimited = scenario.infinite_cpus
        cores = cluster.embedding_workers.cores_per_process
        self.workers: list[FifoServer | Unlimited] = [
            Unlimited() if unlimited else FifoServer(cores)
            for _ in range(cluster.embedding_workers.processes)
        ]
        self.servers = Bank(
            cluster.servers.processes,
            None if unlimited else cluster.servers.cores_per_process,
            server_hosts,
            cluster.servers.host.memory_bytes_per_s,
        )
        self.dense_server: FifoServer | Unlimited = Unlimited() if unlimited else FifoServer(1)

    def _worker_link(self, worker: int) -> int:
        return self._worker_nic[worker // self._workers_per_host]

    def _rank_link(self, r: int) -> int:
        return self._rank_nic[r // self._ranks_per_host]

    def travel(self, after_s: float = 0.0, messages: int = 1) -> simpy.Event:
        """The latency of a message that leaves after so much service, or of several messages of
        which each answers the one before. Nothing else in the engine charges a latency."""
        return self.env.timeout(after_s + messages * self._latency_s)

    def to_worker_from_loader(self, worker: int) -> simpy.Event:
        """Ids from a loader; loaders have no NIC of their own in the model, and their latency is
        part of what a batch costs them."""
        return self.network.send((self._worker_link(worker) + 1,), self._need.loader_bytes)

    def to_rank(self, worker: int, r: int, size_bytes: float, after_s: float) -> Process:
        """Activations from a worker, which takes so long to pool them, to a rank."""
        yield self.travel(after_s)
        yield self.network.send((self._worker_link(worker), self._rank_link(r) + 1), size_bytes)

    def from_rank(self, worker: int, r: int, size_bytes: float) -> Process:
        """Gradients from a rank to a worker."""
        yield self.travel()
        yield self.network.send((self._rank_link(r), self._worker_link(worker) + 1), size_bytes)

    def ring(self, nic_bytes: float, least_s: float) -> simpy.Event:
        """All GPU hosts pass so many bytes to the next; takes at least the closed form's time."""
        hosts = len(self._rank_nic)
        passed = [
            self.network.send((nic, self._rank_nic[(h + 1) % hosts] + 1), nic_bytes)
            for h, nic in enumerate(self._rank_nic)
            if nic_bytes
        ]
        return simpy.AllOf(self.env, [self.env.timeout(least_s), *passed])

    def dense_to_rank(self, r: int) -> simpy.Event:
        """The bytes of the dense weights, from their server (`travel` has charged the answer)."""
        path = (self._dense_nic, self._rank_link(r) + 1)
        return self.network.send(path, self._need.dense_bytes)

    def dense_from_rank(self, r: int) -> Process:
        """A dense gradient to the server of the weights."""
        path = (self._rank_link(r), self._dense_nic + 1)
        yield self.travel()
        yield self.network.send(path, self._need.dense_bytes)

    def fan_out(
        self,
        worker: int,
        request_bytes: float,
        service_s: np.ndarray,
        memory_bytes: float,
        answer_bytes: float,
        at_servers: Callable[[np.ndarray], None],
    ) -> Process:
        """Ask every server and join; ``at_servers`` runs when the last one has done its work, with
        the instant at which each had. The request's latency is behind it (`travel`): what is lost
        or slow at the servers is known only when it has arrived."""
        nic = self._worker_link(worker)
        if self._resolve:
            yield from self._fan_out_resolved(
                nic, request_bytes, service_s, answer_bytes, at_servers
            )
            return
        env, server = self.env, self._server_nic[0]
        streams = self._streams * self._even
        yield self.network.send((nic, server + 1), request_bytes, streams)
        delays = self.servers.visit(env.now, service_s, memory_bytes * self.host_shares)
        delay, instants = float(delays.max()), env.now + delays
        if delay == np.inf:
            yield env.event()  # a server that never comes back
        yield env.timeout(delay)
        at_servers(instants)
        if answer_bytes:
            yield from self._answer((server, nic + 1), answer_bytes, streams)

    def _answer(self, path: tuple[int, int], size_bytes: float, streams: float = 1.0) -> Process:
        if self._latency_s:
            yield self.travel()
        yield self.network.send(path, size_bytes, streams)

    def _fan_out_resolved(
        self,
        nic: int,
        request_bytes: float,
        service_s: np.ndarray,
        answer_bytes: float,
        at_servers: Callable[[np.ndarray], None],
    ) -> Process:
        env, shares = self.env, self._need.server_shares
        served = 0
        instants = np.zeros(len(shares))

        def ask(process: int) -> Process:
            nonlocal served
            server = self._server_nic[self.host_of_server[process]]
            share = float(shares[process])
            yield self.network.send((nic, server + 1), request_bytes * share)
            service = float(service_s[process])
            yield env.timeout(self.servers.visit_one(env.now, process, service))
            instants[process] = env.now
            served += 1
            if served == len(shares):
                at_servers(instants)
            if answer_bytes:
                yield from self._answer((server, nic + 1), answer_bytes * share)

        yield simpy.AllOf(env, [env.process(ask(p)) for p in range(len(shares))])
