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
from persia_sim.words.rules import require

T = TypeVar("T")

MOST_PROCESSES = 100_000
"""Of a role, and hosts of it: more need arrays that no host has the memory for."""
MOST_LATENCY_S = 1e6
LEAST_RATE = 1e-6
"""Of any unit a second; far below what there is, far above where times are no numbers."""
MOST_USD = 1e9


def _check_rates(record: Host | Gpu | Link, what: str, *fields: str) -> None:
    """Far below one of its unit a rate is a slip, and times come out that no float tells apart; inf
    is a limit that is not there."""
    for field in fields:
        value = getattr(record, field)
        rule = f"must be >= {LEAST_RATE:g} (inf: without limit)"
        require(value >= LEAST_RATE, f"{field}{what}", value, rule)


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
        require(self.cores >= 1, f"cores of host {self.name}", self.cores, "must be >= 1")
        of = f" of host {self.name}"
        _check_rates(self, of, "ram_bytes", "nic_bytes_per_s", "memory_bytes_per_s")
        ok = 1e-4 <= self.core_speed <= 1e4
        require(ok, f"core_speed{of}", self.core_speed, "must lie in [1e-4, 1e4]")
        ok = 0 <= self.usd_per_hour <= MOST_USD
        require(ok, f"usd_per_hour{of}", self.usd_per_hour, f"must lie in [0, {MOST_USD:g}]")


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
        _check_rates(self, f" of GPU {self.name}", "peak_flops", "pcie_bytes_per_s")


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
        for field in ("hosts", "processes_per_host", "cores_per_process"):
            require(getattr(self, field) >= 1, f"{field} (of type {name})", getattr(self, field),
                    "must be >= 1")  # fmt: skip
        for field, count in (
            ("hosts", self.hosts),
            ("hosts x processes_per_host", self.hosts * self.processes_per_host),
        ):
            ok = count <= MOST_PROCESSES
            require(ok, f"{field} (of type {name})", f"{count:,}", f"must be <= {MOST_PROCESSES:,}")
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
        ok = 0 <= self.latency_s <= MOST_LATENCY_S
        require(ok, "latency_s of the link", self.latency_s, f"must lie in [0, {MOST_LATENCY_S:g}]")
        ok = 0 < self.header_efficiency <= 1
        require(ok, "header_efficiency", self.header_efficiency, "must lie in (0, 1]")
        _check_rates(self, " of the link", "stream_bytes_per_s")


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
        require(self.ranks >= 1, "ranks", self.ranks, "must be >= 1")
        ok = 1 <= self.loaders <= MOST_PROCESSES
        require(ok, "loaders", self.loaders, f"must lie in [1, {MOST_PROCESSES:,}]")
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
