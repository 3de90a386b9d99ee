"""What a cluster is made of: machines in roles, and the link between them.

Plain descriptions in SI units; every record says in ``source`` where its constants come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Annotated, Any, Self, TypeVar

import numpy as np

from persia_sim.base.rules import COUNT, RATE, Usual, require, require_within
from persia_sim.base.schema import require_possible
from persia_sim.cluster.machine import Gpu, Host, System

T = TypeVar("T")

MOST_PROCESSES = int(COUNT[1])
"""The most processes of a role, and hosts of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A number of hosts of a type, each running so many processes of one kind; and of further
    types.

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
    ram_bytes_per_process: Annotated[float, Usual.MEMORY]
    """Memory limit of a process, > 0; for servers it bounds the resident rows."""
    also: tuple[Role, ...] = ()
    """Further kinds of host in this role. Ids are spread evenly over all servers and batches over
    all workers, whatever their kind, and each rank has its batch: the slowest kind is waited for.
    """

    def __post_init__(self) -> None:
        name = self.host.name
        of = f" (of type {name})"
        require_within(self, of, hosts=COUNT, processes_per_host=COUNT, cores_per_process=COUNT)
        require_within(self.host, f" of host {name}", nic_bytes_per_s=RATE)

        # As many processes as can be simulated.
        count = self.hosts * self.processes_per_host
        rule = f"must be <= {MOST_PROCESSES:,}"
        require(count <= MOST_PROCESSES, f"hosts x processes_per_host{of}", f"{count:,}", rule)

        # The host has the cores and the memory that its processes take.
        wanted_cores = self.processes_per_host * self.cores_per_process
        cores = self.host.cores
        remedy = "lower cores_per_process or processes_per_host"
        require(
            wanted_cores <= cores,
            f"cores asked of a {name}",
            wanted_cores,
            f"it has {cores}",
            remedy,
        )
        ram = self.processes_per_host * self.ram_bytes_per_process
        has = self.host.ram_bytes
        remedy = "lower ram_bytes_per_process"
        field = f"memory asked of a {name} (bytes)"
        require(0 < ram <= has, field, f"{ram:.4g}", f"it has {has:.4g}", remedy)
        rule = "a further kind has no further kinds"
        remedy = "write all of them beside each other"
        require(not any(kind.also for kind in self.also), f"also of {name}", "nested", rule, remedy)

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

    def of_hosts(self, value: Callable[[Role], T]) -> list[T]:
        """What is said of each host's kind, one a host."""
        return [each for kind in self.kinds for each in [value(kind)] * kind.hosts]

    def of_processes(self, value: Callable[[Role], T]) -> list[T]:
        """What is said of each process's kind, one a process."""
        return [
            each
            for kind in self.kinds
            for each in [value(kind)] * (kind.hosts * kind.processes_per_host)
        ]

    @property
    def near(self) -> int:
        """GPUs of a kind of GPU host that reach each other without a NIC."""
        domain = self.host.nvlink_domain or self.host.gpus
        return domain * self.processes_per_host // self.host.gpus

    @property
    def host_of(self) -> np.ndarray:
        """The number of each process's host, int [processes]."""
        return np.repeat(
            np.arange(self.all_hosts), self.of_hosts(lambda kind: kind.processes_per_host)
        )

    def with_hosts(self, hosts: int, what: str) -> Self:
        """The role with another number of hosts; raises ValueError where there are several kinds
        of them, naming the role as ``what``."""
        require(hosts >= 1, what, hosts, "must be >= 1")
        if hosts == self.all_hosts:
            return self
        rule = f"the cluster has {self.all_hosts} of several kinds, and which of them is not said"
        require(not self.also, what, hosts, rule, "say the hosts of each kind in its file")
        return replace(self, hosts=hosts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a message meets between two NICs."""

    latency_s: Annotated[float, Usual.LATENCY]
    """One way, charged before the first byte, >= 0."""
    header_efficiency: float = 0.97
    """Share of the nominal rate left for payload, in (0, 1]."""
    stream_bytes_per_s: Annotated[float, Usual.NIC] = inf
    """Limit of one TCP stream, > 0; a fan-out to n processes has n streams."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_possible(self, " of the link")
        require_within(self, " of the link", header_efficiency=(1e-6, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Everything that is bought or rented.

    >>> from persia_sim.presets.catalogue import gcp_100t
    >>> whole = gcp_100t()
    >>> half = whole.resized(ranks=32, servers=15)
    >>> whole.gpus[0][0], half.gpus[0][0], half.servers.processes
    (64, 32, 60)
    >>> half.usd_per_hour < whole.usd_per_hour
    True
    """

    name: str
    """The preset's name."""
    ranks: int
    """Ranks, one GPU each, >= 1."""
    nn: Role
    """GPU hosts; ``processes_per_host`` is the number of GPUs that are used in one."""
    embedding_workers: Role
    """Hosts of the embedding workers."""
    servers: Role
    """Hosts of the embedding servers."""
    loaders: int
    """Data loader processes, >= 1; they run beside the other roles, on no hosts of their own."""
    link: Link
    """The network between any two hosts."""
    source: str
    """Where the counts come from."""

    def __post_init__(self) -> None:
        # Every rank has a GPU.
        for kind in self.nn.kinds:
            _ = kind.host.chip
            used = kind.processes_per_host
            has = kind.host.gpus
            rule = f"a {kind.host.name} has {has}"
            require(used <= has, "processes_per_host of GPU hosts", used, rule, "a GPU each")
        require_within(self, ranks=COUNT, loaders=COUNT)

        # The ranks fill the hosts.
        last = self.nn.kinds[-1].processes_per_host
        gpus = " and ".join(
            f"{k.hosts} hosts of {k.processes_per_host} GPUs" for k in self.nn.kinds
        )
        filled = self.nn.processes - last < self.ranks <= self.nn.processes
        rule = f"{gpus} must hold them and none may be empty"
        remedy = "change ranks or those hosts"
        require(filled, "ranks", self.ranks, rule, remedy)

    def with_ranks(self, ranks: int) -> Self:
        """The cluster with as many GPU hosts as these ranks fill."""
        require(ranks >= 1, "ranks", ranks, "must be >= 1")
        if ranks == self.ranks:
            return self
        rule = f"the cluster has {self.ranks} on several kinds of host, which of them is not said"
        require(not self.nn.also, "ranks", ranks, rule, "say the hosts of each kind in its file")
        nn = self.nn
        cores = self.nn.host.cores // self.nn.cores_per_process
        if self.gpu.is_host_core and nn.hosts == 1:  # more ranks are more processes of this host
            rule = f"{nn.host.name} has cores for {cores}"
            require(ranks <= cores, "ranks", ranks, rule, "say hosts of [nn] in a cluster's file")
            ram = nn.ram_bytes_per_process * nn.processes_per_host / ranks
            nn = replace(nn, processes_per_host=ranks, ram_bytes_per_process=ram)
        nn = replace(nn, hosts=ceil(ranks / nn.processes_per_host))
        return replace(self, ranks=ranks, nn=nn)

    def with_servers(self, hosts: int) -> Self:
        """The cluster with another number of server hosts."""
        return replace(self, servers=self.servers.with_hosts(hosts, "server hosts"))

    def with_workers(self, hosts: int) -> Self:
        """The cluster with another number of embedding-worker hosts."""
        workers = self.embedding_workers.with_hosts(hosts, "worker hosts")
        return replace(self, embedding_workers=workers)

    def resized(
        self,
        ranks: int | None = None,
        workers: int | None = None,
        servers: int | None = None,
        loaders: int | None = None,
    ) -> Self:
        """The cluster with other counts (None: as they are). Loaders go with the ranks, rounded,
        unless their number is given: a rank then has as many as before.

        >>> from persia_sim.presets.catalogue import gcp_100t
        >>> gcp_100t().resized(ranks=32).loaders
        120
        """
        if loaders is None:
            loaders = max(1, round(self.loaders * (ranks or self.ranks) / self.ranks))
        cluster = self if ranks is None else self.with_ranks(ranks)
        cluster = cluster if workers is None else cluster.with_workers(workers)
        cluster = cluster if servers is None else cluster.with_servers(servers)
        return replace(cluster, loaders=loaders)

    @property
    def usd_per_hour(self) -> float:
        """List price of all hosts; 0 where that of some is not known."""
        return 0.0 if self.unpriced else sum(k.hosts * k.host.usd_per_hour for k in self._kinds)

    @property
    def _kinds(self) -> list[Role]:
        roles = self.nn, self.embedding_workers, self.servers
        return [kind for role in roles for kind in role.kinds]

    @property
    def unpriced(self) -> list[str]:
        """Hosts without a price, where others have one."""
        usd = {kind.host.name: kind.host.usd_per_hour for kind in self._kinds}
        return [name for name in usd if not usd[name] and any(usd.values())]

    @property
    def gpu(self) -> Gpu:
        """The accelerator of the first kind of GPU host."""
        return self.nn.host.chip

    def with_gpu(self, **changes: Any) -> Self:
        """The cluster with other figures of its accelerator."""
        return replace(self, nn=replace(self.nn, host=self.nn.host.with_gpu(**changes)))

    @property
    def system(self) -> System:
        """The cluster's GPUs alone, as tables on them see them; raises ValueError where hosts
        differ."""
        rule = "GPUs with tables on them must be alike"
        remedy = "ask of a cluster with one kind"
        require(not self.nn.also, "kinds of GPU host", len(self.nn.kinds), rule, remedy)
        remedy = "name a machine with GPUs"
        require(not self.gpu.is_host_core, "GPU", self.gpu.name, "a core holds no tables", remedy)
        host = replace(self.nn.host, gpus=self.nn.processes_per_host, nvlink_domain=self.nn.near)
        return System(host=host, gpus=self.ranks)

    @property
    def gpus(self) -> list[tuple[int, Gpu]]:
        """How many ranks have which accelerator, kind by kind."""
        counts = []
        left = self.ranks
        for kind in self.nn.kinds:
            ranks = min(left, kind.hosts * kind.processes_per_host)
            counts.append((ranks, kind.host.chip))
            left -= ranks
        return counts

    def nic_rates(self, role: Role) -> list[float]:
        """Payload rate of the NIC of each host of a role."""
        efficiency = self.link.header_efficiency
        return role.of_hosts(lambda kind: kind.host.nic_bytes_per_s * efficiency)
