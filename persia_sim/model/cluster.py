"""What a cluster is made of: hosts, roles, GPUs, links and their prices.

Plain descriptions in SI units; every record says in ``source`` where its constants come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Self, TypeVar

import numpy as np

from persia_sim.model.racks import Rack, check_racks
from persia_sim.words.rules import COUNT, NUMBERS, RATE, USD, require, require_within

T = TypeVar("T")

MOST_PROCESSES = int(COUNT[1])
"""Of a role, and hosts of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine type."""

    name: str
    """As its vendor calls it."""
    cores: int
    """Hardware threads, >= 1; the roles on it may not ask for more."""
    ram_bytes: float
    """Installed memory, > 0; a role that needs more is refused."""
    nic_bytes_per_s: float
    """Nominal rate of the NIC, each way, > 0."""
    core_speed: float
    """Speed of a core relative to the machine on which the cost laws were measured, > 0."""
    memory_bytes_per_s: float = inf
    """Bandwidth of the memory of the whole host, > 0; bounds the servers on it together."""
    usd_per_hour: float = 0.0
    """List price, >= 0; enters the cost figures only."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_within(
            self, f" of host {self.name}", cores=NUMBERS, ram_bytes=RATE, nic_bytes_per_s=RATE,
            memory_bytes_per_s=RATE, core_speed=(1e-4, 1e4), usd_per_hour=USD,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator."""

    name: str
    """As its vendor calls it."""
    peak_flops: float
    """Peak rate in the arithmetic that the MLP uses (float32 unless `source` says else), > 0."""
    pcie_bytes_per_s: float
    """Rate of the bus between the host's memory and the GPU, each way, > 0."""
    is_host_core: bool = False
    """No GPU but a core of the host: its peak is what a profile measures."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_within(self, f" of GPU {self.name}", peak_flops=RATE, pcie_bytes_per_s=RATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """So many hosts of a type, each running so many processes of one kind; and of further types.

    Processes are numbered kind by kind, host by host.
    """

    host: Host
    """The machine type."""
    hosts: int
    """Number of hosts, >= 1."""
    processes_per_host: int
    """Processes that share a host's NIC, >= 1."""
    cores_per_process: int
    """Cores a process may use at once, >= 1; requests beyond them queue."""
    ram_bytes_per_process: float
    """Memory limit of a process, > 0; for servers it bounds the resident rows."""
    gpu: Gpu | None = None
    """Of a further kind of GPU host: its accelerator; not given, the cluster's."""
    also: tuple[Role, ...] = ()
    """Further kinds of host in this role. Ids are spread evenly over all servers and batches over
    all workers, whatever their kind, and each rank has its batch: the slowest kind is waited for.
    """

    def __post_init__(self) -> None:
        name = self.host.name
        of = f" (of type {name})"
        require_within(self, of, hosts=COUNT, processes_per_host=COUNT, cores_per_process=COUNT)
        count = self.hosts * self.processes_per_host
        rule = f"must be <= {MOST_PROCESSES:,}"
        require(count <= MOST_PROCESSES, f"hosts x processes_per_host{of}", f"{count:,}", rule)
        asked = self.processes_per_host * self.cores_per_process
        require(
            asked <= self.host.cores,
            f"cores asked of a {name}",
            asked,
            f"it has {self.host.cores}",
            "lower cores_per_process or processes_per_host",
        )
        ram = self.processes_per_host * self.ram_bytes_per_process
        require(
            0 < ram <= self.host.ram_bytes,
            f"memory asked of a {name} (bytes)",
            f"{ram:.4g}",
            f"it has {self.host.ram_bytes:.4g}",
            "lower ram_bytes_per_process",
        )

        require(
            not any(kind.also for kind in self.also),
            f"also of {name}",
            "nested",
            "a further kind has no further kinds",
            "write all of them beside each other",
        )

    @property
    def kinds(self) -> tuple[Role, ...]:
        """This kind of host and the further ones."""
        return (self, *self.also)

    @property
    def all_hosts(self) -> int:
        """Hosts of all kinds."""
        return sum(kind.hosts for kind in self.kinds)

    @property
    def processes(self) -> int:
        """All processes of the role."""
        return sum(kind.hosts * kind.processes_per_host for kind in self.kinds)

    @property
    def cores(self) -> int:
        """That all processes of the role may use."""
        return self.sum_of_processes(lambda kind: kind.cores_per_process)

    def of_hosts(self, value: Callable[[Role], T]) -> list[T]:
        """What is said of each host's kind, one a host."""
        return [found for kind in self.kinds for found in [value(kind)] * kind.hosts]

    def of_processes(self, value: Callable[[Role], T]) -> list[T]:
        """What is said of each process's kind, one a process."""
        return [
            found
            for kind in self.kinds
            for found in [value(kind)] * (kind.hosts * kind.processes_per_host)
        ]

    def sum_of_processes(self, value: Callable[[Role], int]) -> int:
        """The same, added up."""
        return sum(kind.hosts * kind.processes_per_host * value(kind) for kind in self.kinds)

    @property
    def host_of(self) -> np.ndarray:
        """The number of each process's host, int [processes]."""
        return np.repeat(np.arange(self.all_hosts), self.of_hosts(_processes))

    def with_hosts(self, hosts: int, what: str) -> Self:
        """The same with another number of hosts; raises ValueError where there are several kinds
        of them, naming the role as ``what``."""
        if hosts == self.all_hosts:
            return self
        require(
            not self.also,
            what,
            hosts,
            f"the cluster has {self.all_hosts} of several kinds, and which of them is not said",
            "say the hosts of each kind in its file",
        )
        return replace(self, hosts=hosts)


def _processes(kind: Role) -> int:
    return kind.processes_per_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a message meets between two NICs."""

    latency_s: float
    """One way, charged before the first byte, >= 0."""
    header_efficiency: float = 0.97
    """Share of the nominal rate left for payload, in (0, 1]."""
    stream_bytes_per_s: float = inf
    """Limit of one TCP stream, > 0; a fan-out to n processes has n streams."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        of = " of the link"
        require_within(self, of, latency_s=(0, 1e6), stream_bytes_per_s=RATE)
        require_within(self, of, header_efficiency=(1e-6, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Everything that is bought or rented."""

    name: str
    """The preset's name."""
    ranks: int
    """NN workers, one GPU each, >= 1."""
    gpu: Gpu
    """The accelerator of every rank."""
    nn: Role
    """GPU hosts; ``processes_per_host`` is the number of GPUs in one."""
    embedding_workers: Role
    """Hosts of the embedding workers."""
    servers: Role
    """Hosts of the embedding servers."""
    loaders: int
    """Data loader processes, >= 1; they run beside the other roles, on no hosts of their own."""
    link: Link
    """The network between any two hosts."""
    racks: tuple[Rack, ...] = ()
    """Where the hosts are; none: all behind one switch. Loaders have no place, and an all-reduce
    only where it is on the NICs (`dense_on_nics`): else they cross no uplink."""
    source: str
    """Where the counts come from."""

    def __post_init__(self) -> None:
        roles = self.nn, self.embedding_workers, self.servers
        if self.racks:
            check_racks(self.racks, *(role.all_hosts for role in roles))
        for role in (self.nn, *self.embedding_workers.kinds, *self.servers.kinds):
            got = role.gpu and role.gpu.name
            rule = f"only a further kind of GPU host has one, not a {role.host.name} of this role"
            require(role.gpu is None, "gpu", got, rule, "give it as the cluster's gpu, or drop it")
        require_within(self, ranks=COUNT, loaders=COUNT)
        last = self.nn.kinds[-1].processes_per_host
        gpus = " and ".join(
            f"{k.hosts} hosts of {k.processes_per_host} GPUs" for k in self.nn.kinds
        )
        require(
            self.nn.processes - last < self.ranks <= self.nn.processes,
            "ranks",
            self.ranks,
            f"{gpus} must hold them and none may be empty",
            "use with_ranks",
        )

    def with_ranks(self, ranks: int) -> Self:
        """The same cluster with as many GPU hosts as these ranks fill."""
        require(ranks >= 1, "ranks", ranks, "must be >= 1")
        if ranks == self.ranks:
            return self
        require(
            not self.nn.also,
            "ranks",
            ranks,
            f"the cluster has {self.ranks} on several kinds of host, and which of them is not said",
            "say the hosts of each kind in its file",
        )
        hosts = ceil(ranks / self.nn.processes_per_host)
        return replace(self, ranks=ranks, nn=replace(self.nn, hosts=hosts))

    def with_servers(self, hosts: int) -> Self:
        """The same cluster with another number of server hosts."""
        return replace(self, servers=self.servers.with_hosts(hosts, "server hosts"))

    def with_workers(self, hosts: int) -> Self:
        """The same cluster with another number of embedding-worker hosts."""
        workers = self.embedding_workers.with_hosts(hosts, "worker hosts")
        return replace(self, embedding_workers=workers)

    def resized(
        self,
        ranks: int | None = None,
        workers: int | None = None,
        servers: int | None = None,
        loaders: int | None = None,
    ) -> Self:
        """The same with other counts (None: as they are). Loaders go with the ranks, rounded,
        unless their number is given: a rank then has as many as before."""
        if loaders is None:
            loaders = max(1, round(self.loaders * (ranks or self.ranks) / self.ranks))
        cluster = self if ranks is None else self.with_ranks(ranks)
        cluster = cluster if workers is None else cluster.with_workers(workers)
        cluster = cluster if servers is None else cluster.with_servers(servers)
        return replace(cluster, loaders=loaders)

    @property
    def usd_per_hour(self) -> float:
        """List price of all hosts."""
        roles = (self.nn, self.embedding_workers, self.servers)
        return sum(kind.hosts * kind.host.usd_per_hour for role in roles for kind in role.kinds)

    @property
    def gpus(self) -> list[tuple[int, Gpu]]:
        """How many ranks have which accelerator, kind by kind."""
        found, left = [], self.ranks
        for kind in self.nn.kinds:
            ranks = min(left, kind.hosts * kind.processes_per_host)
            found.append((ranks, kind.gpu or self.gpu))
            left -= ranks
        return found

    def nic_rates(self, role: Role) -> list[float]:
        """Payload rate of the NIC of each host of a role."""
        efficiency = self.link.header_efficiency
        return role.of_hosts(lambda kind: kind.host.nic_bytes_per_s * efficiency)

    @property
    def nic_payload_bytes_per_s(self) -> tuple[float, float, float]:
        """Payload rate of one NIC of a GPU host, a worker host and a server host, of the first kind
        of each."""
        rates = [r.host.nic_bytes_per_s for r in (self.nn, self.embedding_workers, self.servers)]
        nn, worker, server = (rate * self.link.header_efficiency for rate in rates)
        return nn, worker, server
