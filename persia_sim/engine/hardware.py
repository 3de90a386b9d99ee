"""The hardware of a run: links, worker processes, the bank of servers, the dense server.

Servers are busy until some time, first come, first served, in one event a visit: each core keeps
the time at which it falls free. A visit costs one timeout instead of the request, the hold and the
release of a resource; completion times of a single server are the same bits.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

import numpy as np
import simpy

from persia_sim.base.trace import Kind
from persia_sim.cluster.demand import Demand
from persia_sim.cluster.placement import Wiring
from persia_sim.cluster.scenario import DenseHome, Discipline, Scenario
from persia_sim.engine.clock import Clock, Process
from persia_sim.network.flows import Fifo, Network, Role, Unshared
from persia_sim.network.fluid import Fluid, InOrder


class FifoServer:
    """One process with some cores, or with any number of them; a request takes one core."""

    def __init__(self, cores: float = inf) -> None:
        self._cores = cores
        self._busy: list[float] = []
        self.busy_s = 0.0

    def visit(self, now_s: float, service_s: float) -> float:
        """Delay from now until the request is done."""
        busy = self._busy
        while busy and busy[0] <= now_s:
            heappop(busy)
        free_s = heappop(busy) if len(busy) >= self._cores else now_s
        delay = max(free_s, now_s) - now_s + service_s
        heappush(busy, now_s + delay)
        self.busy_s += service_s
        return delay


class HostMemory:
    """The memory of a host, which serves one access after the other at its bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self.busy_s = 0.0

    def visit(self, now_s: float, size_bytes: float) -> float:
        """Delay from now until so many bytes have been read or written."""
        took_s = size_bytes / self._bytes_per_s
        if not took_s:
            return 0.0
        self.busy_s += took_s
        self._free_s = max(self._free_s, now_s) + took_s
        return self._free_s - now_s


class Bank:
    """All server processes at once: a fork-join visits every one of them.

    While fewer visits are open than a server has cores, nobody waits for one: then the open visits
    are all that is kept. When cores run short, each one's time is written out in a table.
    """

    def __init__(
        self,
        processes: int,
        cores: int | None,
        hosts: int,
        memory_rate: float,
        host_shares: np.ndarray | None = None,
    ) -> None:
        """``cores`` of every process, None for any number; ``memory_rate`` of every host."""
        self._processes = processes
        self._cores = cores
        self._open: list[tuple[float, int, float, np.ndarray]] = []  # end, visit, start, service
        self._table: np.ndarray | None = None  # [processes, cores]: when each falls free
        self._back = np.zeros(processes)  # without a limit of cores: when an outage is over
        self._rows = np.arange(processes)
        self._memory_free = np.zeros(hosts)
        self._memory_rate = memory_rate if cores is not None else inf
        self._memory_binds = self._memory_rate < inf
        self._host_of = np.arange(processes) // -(-processes // hosts)
        self._shares = np.full(hosts, 1.0 / hosts) if host_shares is None else host_shares
        self._took: dict[float, np.ndarray] = {}  # bytes of a visit -> seconds at each host
        self.busy_s = np.zeros(processes)
        self.memory_busy_s = np.zeros(hosts)
        self.visits = 0

    def visit_each(self, now_s: float, service_s: np.ndarray) -> np.ndarray:
        """Delay of a request to every server, float64 [processes]; not to be written to."""
        if self._cores is None:
            self.busy_s += service_s
            delayed: np.ndarray = np.maximum(self._back - now_s, 0.0) + service_s
            return delayed
        if self._starts_at_once(now_s, service_s) is not None:
            return service_s
        return self._queue(now_s, service_s)

    def _queue(self, now_s: float, service_s: np.ndarray) -> np.ndarray:
        """Delays of a request to every server, by the table of cores."""
        table = self._written_out()
        core = table.argmin(1)
        wait = np.maximum(table[self._rows, core] - now_s, 0.0)
        delays: np.ndarray = wait + service_s
        table[self._rows, core] = now_s + delays
        return delays

    def visit(self, now_s: float, service_s: np.ndarray, memory_bytes: float) -> np.ndarray:
        """Delay until each server has answered; ``memory_bytes`` is of all hosts together, and the
        wait for memory is each host's own."""
        delays = self.visit_each(now_s, service_s)
        if self._memory_binds:
            delays = np.maximum(delays, self._in_memory(now_s, memory_bytes)[self._host_of] - now_s)
        return delays

    def longest(self, now_s: float, service_s: np.ndarray, memory_bytes: float) -> float:
        """The longest of the delays of `visit`."""
        if self._cores is None or self._table is not None:
            return float(self.visit(now_s, service_s, memory_bytes).max())
        delay = self._starts_at_once(now_s, service_s)
        if delay is None:
            delay = float(self._queue(now_s, service_s).max())
        if self._memory_binds:
            ends = self._in_memory(now_s, memory_bytes)
            delay = max(delay, float(np.maximum.reduce(ends)) - now_s)
        return delay

    def _starts_at_once(self, now_s: float, service_s: np.ndarray) -> float | None:
        """The longest service where every server has a free core; None where one may have none."""
        self.visits += 1
        self.busy_s += service_s
        if self._table is not None:
            return None
        visits = self._open
        while visits and visits[0][0] <= now_s:
            heappop(visits)
        if len(visits) == self._cores:
            return None
        longest_s = float(np.maximum.reduce(service_s))
        heappush(visits, (now_s + longest_s, self.visits, now_s, service_s))
        return longest_s

    def _written_out(self) -> np.ndarray:
        """The table of cores, from now on kept."""
        if self._table is None:
            self._table = np.zeros((self._processes, self._cores or 1))
            for core, (_, _, start_s, service_s) in enumerate(self._open):
                self._table[:, core] = start_s + service_s
            self._open.clear()
        return self._table

    def _in_memory(self, now_s: float, memory_bytes: float) -> np.ndarray:
        """When each host's memory has moved its part of so many bytes, behind those before."""
        took_s = self._took.get(memory_bytes)
        if took_s is None:
            took_s = self._took[memory_bytes] = memory_bytes * self._shares / self._memory_rate
        self.memory_busy_s += took_s
        ends: np.ndarray = np.maximum(self._memory_free, now_s)
        ends += took_s
        self._memory_free = ends
        return ends

    def close_until(self, process: int, time_s: float) -> None:
        """No request of this server starts before this time (an outage)."""
        held = self._back if self._cores is None else self._written_out()
        held[process] = np.maximum(held[process], time_s)


_DISCIPLINES: dict[Discipline, type[Network]] = {
    Discipline.FLUID: InOrder,
    Discipline.FLUID_EACH: Fluid,
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
        self.host_shares = np.bincount(cluster.servers.host_of, weights=shares)
        self.wiring = wiring = Wiring(cluster, shares, scenario.home)
        self.path = wiring.path
        self.of_rank = wiring.of_rank
        self.of_worker = wiring.of_worker
        self.host_of_worker: list[int] = workers.host_of.tolist()
        self._home = scenario.home
        discipline = _DISCIPLINES[scenario.discipline]
        self.network = discipline(env, wiring.capacities, cluster.link.stream_bytes_per_s)
        unlimited = scenario.infinite_cpus
        self.workers = [
            FifoServer(inf if unlimited else workers.cores_per_process)
            for _ in range(workers.processes)
        ]
        self.worker_memory = [
            HostMemory(inf if unlimited else workers.host.memory_bytes_per_s)
            for _ in range(workers.hosts)
        ]
        servers = cluster.servers
        self.bank = Bank(
            servers.processes,
            None if unlimited else servers.cores_per_process,
            servers.hosts,
            servers.host.memory_bytes_per_s,
            self.host_shares,
        )
        self.dense_server = FifoServer(inf if unlimited else 1)

    def travel(self, after_s: float = 0.0, messages: int = 1) -> float:
        """Seconds until a message is there that leaves after so much service, or several of which
        each answers the one before. Nothing else in the engine charges a latency."""
        return after_s + messages * self.latency_s

    def receive(self, nic: int, size_bytes: float) -> simpy.Event:
        """A message from a loader; loaders have no NIC of their own in the model, and their latency
        is part of what a batch costs them."""
        return self.network.send((nic + 1,), size_bytes)

    def send(
        self,
        sender: int,
        receiver: int,
        size_bytes: float,
        streams: float = 1.0,
        role: Role | None = None,
    ) -> simpy.Event:
        """A message from a NIC to another (`travel` has charged the latency), on the connection of
        its ``role``."""
        return self.network.send(self.path(sender, receiver), size_bytes, streams, role)

    def dense_served(self) -> float:
        """Seconds until the home of the dense weights has handed out a copy or taken in a
        gradient."""
        now = self.env.now
        need = self.need
        if self._home is not DenseHome.SERVERS:
            return self.dense_server.visit(now, need.dense_copy_s)
        size_bytes = 2 * need.dense_bytes  # read and written
        return self.bank.longest(now, self._dense_part_s, size_bytes)

    def close_server_until(self, process: int, time_s: float) -> None:
        """No request of this server starts before this time (an outage)."""
        self.bank.close_until(process, time_s)

    def dense_copy(self, r: int, to_rank: bool) -> Process:
        """The bytes of the dense weights between their home and a rank, one way (`travel` has
        charged the latency)."""
        if self.wiring.has_dense:
            home = self.wiring.of_servers
            ends = (home, self.of_rank[r]) if to_rank else (self.of_rank[r], home)
            role = (r, Kind.DENSE_PULL if to_rank else Kind.DENSE_PUSH)
            streams = self.wiring.fan_out.streams
            yield self.send(*ends, self.need.dense_bytes, streams, role)
