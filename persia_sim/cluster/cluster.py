"""What a cluster is made of: machines in roles, and the link between them.

Plain descriptions in SI units; every record says in ``source`` where its constants come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Annotated, Any, Self

import numpy as np

from persia_sim.base.rules import COUNT, RATE, Usual, require, require_within
from persia_sim.base.schema import require_possible
from persia_sim.cluster.machine import Gpu, Host, System

MOST_PROCESSES = int(COUNT[1])
"""The most processes of a role, and hosts of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A number of hosts of a type, each running so many processes of one kind; these are numbered
    host by host."""

    host: Host
    """The machine type."""
    hosts: int
    """Number of hosts, >= 1."""
    processes_per_host: int
    """Processes that share a host's NIC, >= 1. Left out of a file: one a GPU, or one."""
    cores_per_process: int
    """Cores a process may use at once, >= 1; requests beyond them queue. Left out: its part of all
    that the host has."""
    ram_bytes_per_process: Annotated[float, Usual.MEMORY]
    """Memory limit of a process, > 0; for servers it bounds the resident rows. Left out: its part
    of all that the host has."""

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a file, and what it leaves out: the processes share the whole host."""
        if "host" not in values:
            return values
        host: Host = values["host"]
        processes = values.get("processes_per_host", host.gpus or 1)
        parts = {
            "processes_per_host": processes,
            "cores_per_process": host.cores // max(1, processes),
            "ram_bytes_per_process": host.ram_bytes / max(1, processes),
        }
        return parts | values

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

    @property
    def processes(self) -> int:
        """All processes of the role."""
        return self.hosts * self.processes_per_host

    @property
    def near(self) -> int:
        """GPUs of GPU hosts that reach each other without a NIC."""
        domain = self.host.nvlink_domain or self.host.gpus
        return domain * self.processes_per_host // self.host.gpus

    @property
    def host_of(self) -> np.ndarray:
        """The number of each process's host, int [processes]."""
        return np.repeat(np.arange(self.hosts), self.processes_per_host)

    def with_hosts(self, hosts: int, what: str) -> Self:
        """The role with another number of hosts; raises ValueError naming it as ``what``."""
        require(hosts >= 1, what, hosts, "must be >= 1")
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


IN_ONE_ZONE = Link(latency_s=50e-6, source="assumed: TCP inside one zone")
LOADERS_A_RANK = 8
"""Where nobody says how many: as many as the cluster of the paper is taken to have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Everything that is bought or rented.

    >>> from persia_sim.presets.catalogue import gcp_100t
    >>> whole = gcp_100t()
    >>> half = whole.resized(ranks=32, servers=15)
    >>> whole.ranks, half.ranks, half.servers.processes
    (64, 32, 60)
    >>> half.usd_per_hour < whole.usd_per_hour
    True
    """

    name: str
    """What tables and screens call it."""
    ranks: int
    """Ranks, one GPU each, >= 1. Left out of a file: all that the GPU hosts have."""
    nn: Role
    """GPU hosts; ``processes_per_host`` is the number of GPUs that are used in one."""
    embedding_workers: Role
    """Hosts of the embedding workers."""
    servers: Role
    """Hosts of the embedding servers."""
    loaders: int
    """Data loader processes, >= 1; they run beside the other roles, on no hosts of their own. Left
    out: eight a rank."""
    link: Link = IN_ONE_ZONE
    """The network between any two hosts; how fast a NIC is stands at its machine."""
    source: str
    """Where the counts come from."""

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a file, and what it leaves out: ranks fill the GPU hosts."""
        if "nn" not in values:
            return values
        ranks = values.get("ranks", values["nn"].processes)
        return {"ranks": ranks, "loaders": LOADERS_A_RANK * ranks} | values

    def __post_init__(self) -> None:
        # Every rank has a GPU.
        nn = self.nn
        _ = nn.host.chip
        used = nn.processes_per_host
        rule = f"a {nn.host.name} has {nn.host.gpus}"
        require(used <= nn.host.gpus, "processes_per_host of GPU hosts", used, rule, "a GPU each")
        require_within(self, ranks=COUNT, loaders=COUNT)

        # The ranks fill the hosts.
        filled = nn.processes - used < self.ranks <= nn.processes
        rule = f"{nn.hosts} hosts of {used} GPUs must hold them and none may be empty"
        remedy = "change ranks or those hosts"
        require(filled, "ranks", self.ranks, rule, remedy)

    def with_ranks(self, ranks: int) -> Self:
        """The cluster with as many GPU hosts as these ranks fill."""
        require(ranks >= 1, "ranks", ranks, "must be >= 1")
        if ranks == self.ranks:
            return self
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
        return 0.0 if self.unpriced else sum(r.hosts * r.host.usd_per_hour for r in self._roles)

    @property
    def _roles(self) -> tuple[Role, ...]:
        return self.nn, self.embedding_workers, self.servers

    @property
    def unpriced(self) -> list[str]:
        """Hosts without a price, where others have one."""
        usd = {role.host.name: role.host.usd_per_hour for role in self._roles}
        return [name for name in usd if not usd[name] and any(usd.values())]

    @property
    def gpu(self) -> Gpu:
        """The accelerator of the GPU hosts."""
        return self.nn.host.chip

    def with_gpu(self, **changes: Any) -> Self:
        """The cluster with other figures of its accelerator."""
        return replace(self, nn=replace(self.nn, host=self.nn.host.with_gpu(**changes)))

    @property
    def system(self) -> System:
        """The cluster's GPUs alone, as tables on them see them."""
        remedy = "name a machine with GPUs"
        require(not self.gpu.is_host_core, "GPU", self.gpu.name, "a core holds no tables", remedy)
        host = replace(self.nn.host, gpus=self.nn.processes_per_host, nvlink_domain=self.nn.near)
        return System(host=host, gpus=self.ranks)

    def nic_rate(self, role: Role) -> float:
        """Payload rate of the NIC of each host of a role."""
        return role.host.nic_bytes_per_s * self.link.header_efficiency
