"""Room on a Ray cluster: what a run asks for, where it gets it, what the cluster is short of."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group, placement_group_table, remove_placement_group

from persia_sim.words.rules import counted
from runtime.config import TrainConfig
from runtime.stop import PeerError

RANK, SERVER = "rank", "embedding server"
_CONNECT_S = 10.0
_OBJECT_STORE_BYTES = 80_000_000  # Ray's least is 75 MiB; a run puts nothing into it


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run asks of a cluster."""

    ranks: list[dict[str, float]]
    """The resources of each rank: cores of its dense operations and loaders, or a GPU, too."""
    servers: list[dict[str, float]]

    @classmethod
    def of(cls, config: TrainConfig) -> Plan:
        """Of a run."""
        rank = {"CPU": float(config.engine.threads + config.engine.loaders)}
        if config.engine.device != "cpu":
            rank["GPU"] = 1.0
        return cls([rank] * config.sync.ranks, [{"CPU": 1.0}] * config.engine.servers)

    def asks(self, resource: str) -> tuple[float, float]:
        """How much in all, and of one process at most."""
        found = [one.get(resource, 0.0) for one in (*self.ranks, *self.servers)]
        return sum(found), max(found)

    def shortage(self, waited_s: float) -> str:
        """Which resource is short, and what the cluster has."""
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free, told = ray.available_resources(), []
        for resource in ("CPU", "GPU"):
            asked, most = self.asks(resource)
            has = [host.get(resource, 0.0) for host in hosts]
            told.append(
                f"{asked:g} {resource} are asked for ({most:g} of one process), {sum(has):g} are"
                f" there ({max(has):g} on a host), {free.get(resource, 0.0):g} are free"
            )
        return (
            f"the cluster of {counted(len(hosts), 'host')} has had no room for"
            f" {counted(len(self.ranks), 'rank')} and {counted(len(self.servers), 'server')} for"
            f" {waited_s:g} s: {'; '.join(told)}; add hosts, or use fewer --ranks, --threads,"
            " --loaders or --servers"
        )


@contextmanager
def connected(where: str, plan: Plan) -> Iterator[None]:
    """This process as a driver of the cluster, which ends with the context where it is local.

    Raises ValueError where no cluster is.
    """
    with ExitStack() as ends:
        nodes = where.partition("local:")[2]
        if nodes:
            where = ends.enter_context(
                local_nodes(int(nodes), *plan.asks("CPU"), plan.asks("GPU")[0])
            )
        try:
            if ":" in where:  # Ray itself tries an address where nobody listens for minutes
                host, port = where.rsplit(":", 1)
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            ray.init(where, logging_level="ERROR")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--cluster {where}: no Ray cluster is there ({str(error).splitlines()[0]}); start"
                " one, or use local:2"
            ) from None
        ends.callback(ray.shutdown)
        yield


@contextmanager
def local_nodes(count: int, cores: float, least: float = 1.0, gpus: float = 0.0) -> Iterator[str]:
    """Ray nodes on this machine, whose ``cores`` are claims and may be more than there are; each
    has the ``least``. Gives their address. Raises PeerError."""
    common = {
        "num_cpus": int(max(-(-cores // count) + 1, least)),
        "num_gpus": int(-(-gpus // count)),
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    cluster = _started(count, common)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def _started(count: int, node: Mapping[str, Any]) -> Cluster:
    """Ray gives the agents of a node 15 s to load Python, which a busy machine may exceed; and it
    runs actors at nice 15, where ranks starve beside anything else."""
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


@contextmanager
def reserved(plan: Plan, wait_s: float) -> Iterator[Mapping[str, Any]]:
    """Room for all ranks, close together, and for all servers, apart, or for nobody.

    Raises ValueError where there is none within ``wait_s``.
    """
    groups = {
        RANK: placement_group(plan.ranks, strategy="PACK"),
        SERVER: placement_group(plan.servers, strategy="SPREAD"),
    }
    ends_s = time.monotonic() + wait_s
    try:
        for group in groups.values():
            if not group.wait(max(1.0, ends_s - time.monotonic())):
                raise ValueError(plan.shortage(wait_s))
        yield groups
    finally:
        for group in groups.values():
            remove_placement_group(group)


def placed(groups: Mapping[str, Any]) -> str:
    """A line for each process: where Ray has made room for it."""
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    lines = []
    for role, group in groups.items():
        table = placement_group_table(group)
        for number, node in sorted(table["bundles_to_node_id"].items()):
            room = ", ".join(f"{n:g} {what}" for what, n in table["bundles"][number].items())
            lines.append(f"{role} {number}: {room} on {hosts[node]} (node {node[:8]})")
    return "\n".join(lines)
