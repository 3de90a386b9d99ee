"""What a cluster is made of: hosts, roles, GPUs, links and their prices.

Plain descriptions in SI units; every record says in ``source`` where its constants come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Self

from persia_sim.model.racks import Rack, check_racks
from persia_sim.words.rules import require


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
        for field in ("ram_bytes", "nic_bytes_per_s", "core_speed", "memory_bytes_per_s"):
            value = getattr(self, field)
            require(value > 0, f"{field} of host {self.name}", value, "must be > 0")
        require(self.usd_per_hour >= 0, "usd_per_hour", self.usd_per_hour, "must be >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """So many hosts of a type, each running so many processes of one kind."""

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

    def __post_init__(self) -> None:
        name = self.host.name
        for field in ("hosts", "processes_per_host", "cores_per_process"):
            require(getattr(self, field) >= 1, f"{field} on {name}", getattr(self, field), ">= 1")
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

    @property
    def processes(self) -> int:
        """All processes of the role."""
        return self.hosts * self.processes_per_host


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
        for field in ("peak_flops", "pcie_bytes_per_s"):
            value = getattr(self, field)
            require(value > 0, f"{field} of GPU {self.name}", value, "must be > 0")


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
        require(self.latency_s >= 0, "latency_s", self.latency_s, "must be >= 0")
        ok = 0 < self.header_efficiency <= 1
        require(ok, "header_efficiency", self.header_efficiency, "must lie in (0, 1]")
        require(self.stream_bytes_per_s > 0, "stream_bytes_per_s", self.stream_bytes_per_s, "> 0")


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
        if self.racks:
            roles = self.nn, self.embedding_workers, self.servers
            check_racks(self.racks, *(role.hosts for role in roles))
        require(self.ranks >= 1, "ranks", self.ranks, "must be >= 1")
        require(self.loaders >= 1, "loaders", self.loaders, "must be >= 1")
        require(
            (self.nn.hosts - 1) * self.nn.processes_per_host < self.ranks <= self.nn.processes,
            "ranks",
            self.ranks,
            f"{self.nn.hosts} hosts of {self.nn.processes_per_host} GPUs must hold them and none "
            "may be empty",
            "use with_ranks",
        )

    def with_ranks(self, ranks: int) -> Self:
        """The same cluster with as many GPU hosts as these ranks fill."""
        require(ranks >= 1, "ranks", ranks, "must be >= 1")
        hosts = ceil(ranks / self.nn.processes_per_host)
        return replace(self, ranks=ranks, nn=replace(self.nn, hosts=hosts))

    def with_servers(self, hosts: int) -> Self:
        """The same cluster with another number of server hosts."""
        return replace(self, servers=replace(self.servers, hosts=hosts))

    def with_workers(self, hosts: int) -> Self:
        """The same cluster with another number of embedding-worker hosts."""
        return replace(self, embedding_workers=replace(self.embedding_workers, hosts=hosts))

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
        return sum(role.hosts * role.host.usd_per_hour for role in roles)

    @property
    def nic_payload_bytes_per_s(self) -> tuple[float, float, float]:
        """Payload rate of one NIC of a GPU host, a worker host and a server host."""
        rates = [r.host.nic_bytes_per_s for r in (self.nn, self.embedding_workers, self.servers)]
        nn, worker, server = (rate * self.link.header_efficiency for rate in rates)
        return nn, worker, server
