"""Room on a Ray cluster: what a run asks for, where it gets it, what the cluster is short of."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from persia_sim.base.rules import counted
from runtime.config import TrainConfig
from runtime.stop import PeerError

_CONNECT_S = 10.0
_SETTLED_S = 5.0
"""When no more room has come for so long, a run begins with the ranks that have some."""
_OBJECT_STORE_BYTES = 80_000_000  # Ray's least is 75 MiB; a run puts nothing into it

OFFERED = {"servers": "embedding_server", "workers": "embedding_worker", "loaders": "loader"}
"""Resources that nodes may offer: where any does, those processes go there and nowhere else."""
Placement = tuple[PlacementGroup, int]
"""A placement group and the number of its bundle."""


class RunPlaces(NamedTuple):
    """Where the processes of a run are to start."""

    ranks: list[Placement]
    servers: list[Placement]
    others: list[Placement]
    """By worker, then by loader."""


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """What a run asks of a cluster."""

    ranks: list[dict[str, float]]
    """The resources of each rank: cores of its dense operations, or a GPU, too."""
    servers: list[dict[str, float]]
    workers: list[dict[str, float]]
    loaders: list[dict[str, float]]
    least: int
    """Ranks without which it does not train."""
    least_servers: int
    """So of servers."""

    @classmethod
    def of(cls, config: TrainConfig, least: int, least_servers: int) -> ResourcePlan:
        """The plan of a run."""
        engine = config.engine
        rank = {"CPU": float(engine.threads)}
        if engine.device != "cpu":
            rank["GPU"] = 1.0
        core = {"CPU": 1.0}
        server = {"CPU": float(engine.threads)}
        workers = [core] * engine.workers
        loaders = [core] * engine.loaders
        ranks = [rank] * config.sync.ranks
        servers = [server] * engine.servers
        return cls(ranks, servers, workers, loaders, least, least_servers)

    @property
    def others(self) -> list[dict[str, float]]:
        """The resources of workers, then of loaders."""
        return [*self.workers, *self.loaders]

    @property
    def processes(self) -> list[dict[str, float]]:
        """The resources of all processes."""
        return [*self.ranks, *self.servers, *self.others]

    def asks(self, resource: str) -> tuple[float, float]:
        """How much in all, and of one process at most."""
        amounts = [process.get(resource, 0.0) for process in self.processes]
        return sum(amounts), max(amounts)

    def shortage(self, waited_s: float) -> str:
        """Which resource is short, and what the cluster has."""
        # Of each resource that is asked for: how much, how much there is, how much is free.
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources()
        lines = []
        for resource in dict.fromkeys(what for one in self.processes for what in one):
            asked, most = self.asks(resource)
            has = [host.get(resource, 0.0) for host in hosts]
            lines.append(
                f"{asked:g} {resource} are asked for ({most:g} of one process), {sum(has):g} are"
                f" there ({max(has):g} on a host), {free.get(resource, 0.0):g} are free"
            )

        # A person must see at once what to add.
        some = f"{self.least} of " if self.least < len(self.ranks) else ""
        some_servers = f"{self.least_servers} of " if self.least_servers < len(self.servers) else ""
        return (
            f"the cluster of {counted(len(hosts), 'host')} has had no room for"
            f" {some}{counted(len(self.ranks), 'rank')},"
            f" {some_servers}{counted(len(self.servers), 'server')},"
            f" {counted(len(self.workers), 'worker')} and {counted(len(self.loaders), 'loader')}"
            f" for {waited_s:g} s: {'; '.join(lines)}; add hosts, or use fewer --ranks, --threads,"
            " --servers, --workers or --loaders"
        )


@contextmanager
def connected(where: str, plan: ResourcePlan) -> Iterator[None]:
    """This process as a driver of the cluster, which ends with the context where it is local.

    Raises ValueError where no cluster is.
    """
    with ExitStack() as ends:
        # `local:N` starts nodes of its own, which end with this context.
        nodes = where.partition("local:")[2]
        if nodes:
            asked = *plan.asks("CPU"), plan.asks("GPU")[0]
            where = ends.enter_context(local_nodes(int(nodes), *asked)).address
        try:
            # Anything else must be there already.
            if ":" in where:  # Ray itself tries an address where nobody listens for minutes
                host, port = where.rsplit(":", 1)
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            ray.init(where, logging_level="ERROR")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--ray {where}: no Ray cluster is there ({str(error).splitlines()[0]}); start"
                " one, or use local:2"
            ) from None
        ends.callback(ray.shutdown)
        yield


@contextmanager
def local_nodes(
    count: int, cores: float, least: float = 1.0, gpus: float = 0.0
) -> Iterator[Cluster]:
    """Ray nodes on this machine, whose ``cores`` are claims and may be more than there are; each
    has the ``least``. Raises PeerError."""
    common = {
        "num_cpus": int(max(-(-cores // count) + 1, least)),
        "num_gpus": int(-(-gpus // count)),
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    cluster = _started(count, common)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _started(count: int, node: Mapping[str, Any]) -> Cluster:
    """Ray gives the agents of a node 15 s to load Python, which a busy machine may exceed; and it
    runs actors at nice 15, where ranks starve beside anything else."""
    # A busy machine fails once or twice; a third time it is at fault.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for again in (True, True, False):
        cluster = Cluster()
        try:
            cluster.add_node(include_dashboard=False, **node)
            for _ in range(count - 1):
                cluster.add_node(**node)
            return cluster
        except Exception as error:
            cluster.shutdown()
            if not again:
                raise PeerError(
                    f"Ray could not start {counted(count, 'node')} on this machine, which may be"
                    f" too busy ({error}); start again"
                ) from error
    raise AssertionError


class Room:
    """Where Ray lets a run's processes start: servers apart, and so workers and loaders, ranks
    close together; all of a kind at once, or each for itself, where the run may have fewer."""

    def __init__(self, plan: ResourcePlan) -> None:
        """Nothing is asked for yet."""
        self._plan = plan
        self._servers = list[PlacementGroup]()
        self._others = list[PlacementGroup]()
        self._ranks = list[PlacementGroup]()

    def ask_for_least(self) -> None:
        """Room for the servers without which no rank can train, and for workers and loaders."""
        plan = self._plan
        if plan.least_servers == len(plan.servers):
            self._servers = [placement_group(plan.servers, strategy="SPREAD")]
        else:
            self.ask_for_servers(plan.least_servers)
        self._others = [placement_group(plan.others, strategy="SPREAD")] if plan.others else []

    def ask_for_ranks(self) -> None:
        """Room for all ranks."""
        plan = self._plan
        alone = [[one] for one in plan.ranks] if plan.least < len(plan.ranks) else [plan.ranks]
        self._ranks = [placement_group(ranks, strategy="PACK") for ranks in alone]

    def ask_for_servers(self, count: int) -> None:
        """Room for so many servers, where the run may have fewer; the room of more is given back,
        first that which has not come."""
        there = {group for group, _ in self._places(self._servers)}
        self._servers.sort(key=lambda group: group not in there)
        for group in self._servers[count:]:
            remove_placement_group(group)
        more = count - len(self._servers)
        one = self._plan.servers[:1]
        self._servers = [
            *self._servers[:count],
            *(placement_group(one, strategy="SPREAD") for _ in range(more)),
        ]

    def _places(self, groups: Sequence[PlacementGroup]) -> list[Placement]:
        """The places in groups of which no part is missing now."""
        states = placement_group_table()
        there = [g for g in groups if states.get(g.id.hex(), {}).get("state") == "CREATED"]
        return [(group, n) for group in there for n in range(group.bundle_count)]

    def servers(self) -> list[Placement]:
        """Places for as many servers as find room now."""
        return self._places(self._servers)

    def others(self) -> list[Placement]:
        """By worker, then by loader; none where the cluster has no room for all."""
        return self._places(self._others)

    def ranks(self) -> list[Placement]:
        """Places for as many ranks as find room now."""
        return self._places(self._ranks)

    def places(self) -> RunPlaces | None:
        """All places that there are now; None while fewer find room than the run needs."""
        plan = self._plan
        places = RunPlaces(self.ranks(), self.servers(), self.others())
        few = len(places.ranks) < plan.least or len(places.servers) < plan.least_servers
        return None if few or len(places.others) < len(plan.others) else places

    def describe(self) -> str:
        """A line for each process: where Ray has made room for it."""
        # Ray numbers nodes; a person knows hosts by their address.
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        lines = []
        plan = self._plan

        # In the order in which the plan asked for them.
        others = self.others()
        workers = len(plan.workers)
        for role, places in (
            ("rank", self.ranks()),
            ("embedding server", self.servers()),
            ("embedding worker", others[:workers]),
            ("loader", others[workers:]),
        ):
            for number, (group, bundle) in enumerate(places):
                node = placement_group_table(group)["bundles_to_node_id"][bundle]
                asked = group.bundle_specs[bundle].items()
                room = ", ".join(f"{amount:g} {what}" for what, amount in asked)
                lines.append(f"{role} {number}: {room} on {hosts[node]} (node {node[:8]})")
        return "\n".join(lines)

    def leave(self) -> None:
        """Give it back."""
        for group in (*self._servers, *self._others, *self._ranks):
            remove_placement_group(group)


@contextmanager
def reserved(plan: ResourcePlan, wait_s: float) -> Iterator[Room]:
    """Room for all servers and ranks; where none comes for more of these, for fewer.

    Raises ValueError where there is not even room for the least within ``wait_s``.
    """
    # Where nodes offer a resource of a role, its processes go there only.
    ends_s = time.monotonic() + wait_s
    offered: dict[str, Any] = {
        role: [one | {offer: 1.0} for one in getattr(plan, role)]
        for role, offer in OFFERED.items()
        if offer in ray.cluster_resources()
    }
    plan = replace(plan, **offered)
    room = Room(plan)

    def has_come(places: Callable[[], Sequence[Placement]], least: int, most: int) -> None:
        """Until all have a place, or no more come, or the time is over."""
        count = 0
        changed_s = time.monotonic()
        while count < most:
            now_s = time.monotonic()
            if len(places()) != count:
                count = len(places())
                changed_s = now_s
            elif count >= least and now_s > min(ends_s, changed_s + _SETTLED_S):
                break
            elif now_s > ends_s:
                raise ValueError(plan.shortage(wait_s))
            time.sleep(0.1)

    # Servers come first, without which no rank can train; more of them take what ranks leave.
    try:
        room.ask_for_least()
        has_come(room.servers, plan.least_servers, plan.least_servers)
        has_come(room.others, len(plan.others), len(plan.others))
        room.ask_for_ranks()
        has_come(room.ranks, plan.least, len(plan.ranks))
        if plan.least_servers < len(plan.servers):
            room.ask_for_servers(len(plan.servers))
            has_come(room.servers, plan.least_servers, len(plan.servers))
        yield room
    finally:
        room.leave()
