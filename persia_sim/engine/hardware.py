"""The hardware of a run: links, worker processes, the bank of servers, the dense server."""

from __future__ import annotations

from math import inf

import numpy as np
import simpy

from persia_sim.engine.clock import Clock, Process
from persia_sim.engine.servers import Bank, FifoServer, HostMemory
from persia_sim.model.allreduce import Algorithm
from persia_sim.model.demand import Demand
from persia_sim.model.placement import Wiring
from persia_sim.model.scenario import DenseHome, Discipline, Scenario
from persia_sim.network.flows import Fifo, Network, Unshared
from persia_sim.network.fluid import Fluid

_DISCIPLINES: dict[Discipline, type[Network]] = {
    Discipline.FLUID: Fluid,
    Discipline.FIFO: Fifo,
    Discipline.UNSHARED: Unshared,
}


class Platform:
    """Where messages and requests go."""

    def __init__(self, env: Clock, scenario: Scenario, need: Demand) -> None:
        self.env = env
        cluster = scenario.cluster
        self.latency_s = cluster.link.latency_s
        self.need = need
        self._dense_part_s = need.dense_part_s
        # Whether anybody asks when each single server has done its part; else the last one counts.
        self.tells_each = False
        workers = cluster.embedding_workers
        shares = need.server_shares
        self.host_of_server = cluster.servers.host_of
        self.host_shares = np.bincount(self.host_of_server, weights=shares)
        self.wiring = wiring = Wiring(cluster, shares, scenario.home)
        self.path, self.of_rank, self.of_worker = wiring.path, wiring.of_rank, wiring.of_worker
        # Each GPU of a host has a ring of its own with its peers, or all GPUs are in one.
        rings = scenario.costs.dense_sync.algorithm is Algorithm.HIERARCHICAL
        self._ring_streams = cluster.nn.of_hosts(
            lambda kind: float(min(kind.processes_per_host, cluster.ranks)) if rings else 1.0
        )
        self.host_of_worker: list[int] = workers.host_of.tolist()
        self._home = scenario.home
        discipline = _DISCIPLINES[scenario.discipline]
        self.network = discipline(env, wiring.capacities, cluster.link.stream_bytes_per_s)
        unlimited = scenario.infinite_cpus
        # How much longer a worker's cores take than those of the first kind of host.
        first = workers.host.core_speed
        self.slower = workers.of_processes(lambda kind: first / kind.host.core_speed)
        self.workers = [
            FifoServer(inf if unlimited else cores)
            for cores in workers.of_processes(lambda kind: kind.cores_per_process)
        ]
        self.worker_memory = [
            HostMemory(inf if unlimited else rate)
            for rate in workers.of_hosts(lambda kind: kind.host.memory_bytes_per_s)
        ]
        banks = [self._bank_of(scenario, group.first, group.end) for group in wiring.groups]
        self.fan = list(zip(wiring.of_group, wiring.groups, banks, strict=True))
        self.dense_server = FifoServer(inf if unlimited else 1)

    def _bank_of(self, scenario: Scenario, first: int, end: int) -> Bank:
        """The servers of so many processes, which are whole hosts."""
        role = scenario.cluster.servers
        hosts = self.host_of_server[first:end]
        cores = role.of_processes(lambda kind: kind.cores_per_process)[first:end]
        memory = role.of_hosts(lambda kind: kind.host.memory_bytes_per_s)
        shares = self.host_shares[hosts[0] : hosts[-1] + 1]
        return Bank(
            end - first,
            None if scenario.infinite_cpus else cores,
            len(shares),
            memory[hosts[0] : hosts[-1] + 1],
            shares / shares.sum() if len(shares) < role.all_hosts else shares,
            hosts - hosts[0],
        )

    def travel(self, after_s: float = 0.0, messages: int = 1) -> float:
        """Seconds until a message is there that leaves after so much service, or several of which
        each answers the one before. Nothing else in the engine charges a latency."""
        return after_s + messages * self.latency_s

    def receive(self, nic: int, size_bytes: float) -> simpy.Event:
        """A message from a loader; loaders have no NIC of their own in the model, and their latency
        is part of what a batch costs them."""
        return self.network.send((nic + 1,), size_bytes)

    def send(
        self, sender: int, receiver: int, size_bytes: float, streams: float = 1.0
    ) -> simpy.Event:
        """A message from a NIC to another (`travel` has charged the latency)."""
        return self.network.send(self.path(sender, receiver), size_bytes, streams)

    def ring(self, nic_bytes: float, least_s: float) -> simpy.Event:
        """All GPU hosts pass so many bytes to the next; takes at least the closed form's time."""
        nics = self.wiring.gpu_hosts
        hosts = zip(nics, [*nics[1:], nics[0]], self._ring_streams, strict=True)
        passed = [
            self.send(nic, after, nic_bytes, streams) for nic, after, streams in hosts if nic_bytes
        ]
        return simpy.AllOf(self.env, [self.env.timeout(least_s), *passed])

    def dense_served(self) -> float:
        """Seconds until the home of the dense weights has handed out a copy or taken in a
        gradient."""
        now, need = self.env.now, self.need
        if self._home is not DenseHome.SERVERS:
            return self.dense_server.visit(now, need.dense_copy_s)
        size_bytes = 2 * need.dense_bytes  # read and written
        return max(
            bank.longest(now, self._dense_part_s[group.processes], size_bytes * group.share)
            for _, group, bank in self.fan
        )

    def close_server_until(self, process: int, time_s: float) -> None:
        """No request of this server starts before this time (a crash)."""
        for _, group, bank in self.fan:
            if group.first <= process < group.end:
                bank.close_until(process - group.first, time_s)

    def dense_copy(self, r: int, to_rank: bool) -> Process:
        """The bytes of the dense weights between their home and a rank, one way (`travel` has
        charged the latency)."""
        passed = []
        for home, share, streams in self.wiring.of_dense:
            ends = (home, self.of_rank[r]) if to_rank else (self.of_rank[r], home)
            passed.append(self.send(*ends, self.need.dense_bytes * share, streams))
        if passed:
            yield passed[0] if len(passed) == 1 else simpy.AllOf(self.env, passed)
