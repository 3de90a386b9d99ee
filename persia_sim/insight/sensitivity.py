"""What would help: the same run with one resource ten per cent faster.

Pairs share all random draws, so their difference is the resource's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.model.cluster import Cluster, Gpu, Role
from persia_sim.model.costs import Law
from persia_sim.model.demand import demand
from persia_sim.model.scenario import Scenario

FASTER = 1.1


def _hosts(role: str, field: str) -> Callable[[Scenario], Scenario]:
    """This figure of every kind of host of a role."""

    def quicker(kind: Role) -> Role:
        host: Any = replace(kind.host, **{field: getattr(kind.host, field) * FASTER})
        return replace(kind, host=host, also=tuple(map(quicker, kind.also)))

    def change(scenario: Scenario) -> Scenario:
        parts: dict[str, Any] = {role: quicker(getattr(scenario.cluster, role))}
        return replace(scenario, cluster=replace(scenario.cluster, **parts))

    return change


def _gpus(cluster: Cluster, field: str) -> Cluster:
    """This figure of every kind of GPU."""

    def quicker(gpu: Gpu) -> Gpu:
        changed: Any = {field: getattr(gpu, field) * FASTER}
        return replace(gpu, **changed)

    also = tuple(replace(kind, gpu=kind.gpu and quicker(kind.gpu)) for kind in cluster.nn.also)
    return replace(cluster, gpu=quicker(cluster.gpu), nn=replace(cluster.nn, also=also))


def _laws(*names: str) -> Callable[[Scenario], Scenario]:
    def quicker(law: Law) -> Law:
        return replace(
            law,
            fixed_s=law.fixed_s / FASTER,
            per_item_s=law.per_item_s / FASTER,
            per_byte_s=law.per_byte_s / FASTER,
        )

    def change(scenario: Scenario) -> Scenario:
        laws: dict[str, Any] = {name: quicker(getattr(scenario.costs, name)) for name in names}
        return replace(scenario, costs=replace(scenario.costs, **laws))

    return change


def _gpu(scenario: Scenario) -> Scenario:
    costs = replace(scenario.costs, gpu_fixed_s=scenario.costs.gpu_fixed_s / FASTER)
    return replace(scenario, cluster=_gpus(scenario.cluster, "peak_flops"), costs=costs)


def _copies(scenario: Scenario) -> Scenario:
    scenario = replace(scenario, cluster=_gpus(scenario.cluster, "pcie_bytes_per_s"))
    return _laws("copy_in", "copy_out")(scenario)


def _dense_server(scenario: Scenario) -> Scenario:
    rate = scenario.costs.dense_server_bytes_per_s * FASTER
    return replace(scenario, costs=replace(scenario.costs, dense_server_bytes_per_s=rate))


def _all_reduce(scenario: Scenario) -> Scenario:
    sync = scenario.costs.dense_sync
    sync = replace(
        sync,
        intra_bytes_per_s=sync.intra_bytes_per_s * FASTER,
        inter_bytes_per_s=sync.inter_bytes_per_s * FASTER,
        latency_s=sync.latency_s / FASTER,
        overhead_s=sync.overhead_s / FASTER,
    )
    return replace(scenario, costs=replace(scenario.costs, dense_sync=sync))


def _uplinks(scenario: Scenario) -> Scenario:
    racks = tuple(
        replace(rack, uplink_bytes_per_s=rack.uplink_bytes_per_s * FASTER)
        for rack in scenario.cluster.racks
    )
    return replace(scenario, cluster=replace(scenario.cluster, racks=racks))


def _latency(scenario: Scenario) -> Scenario:
    link = scenario.cluster.link
    link = replace(link, latency_s=link.latency_s / FASTER)
    return replace(scenario, cluster=replace(scenario.cluster, link=link))


RESOURCES: dict[str, Callable[[Scenario], Scenario]] = {
    "GPU": _gpu,
    "all-reduce": _all_reduce,
    "loaders": _laws("load"),
    "embedding workers' cores": _laws(
        "worker_forward", "worker_rpc", "worker_pool", "worker_scatter"
    ),
    "servers' cores": _laws("server_lookup", "server_update", "server_create"),
    "servers' memory": _hosts("servers", "memory_bytes_per_s"),
    "dense server": _dense_server,
    "rank's copies": _copies,
    "GPU hosts' NICs": _hosts("nn", "nic_bytes_per_s"),
    "worker hosts' NICs": _hosts("embedding_workers", "nic_bytes_per_s"),
    "server hosts' NICs": _hosts("servers", "nic_bytes_per_s"),
    "latency": _latency,
}


def sensitivity(scenario: Scenario, miss_rate: float = 0.0) -> dict[str, float]:
    """Relative gain in throughput from each resource alone ten per cent faster; of racks' uplinks
    where there are racks.

    ``miss_rate`` is the share of looked-up rows that a server has to create, as in `demand`.
    """

    def rate(changed: Scenario) -> float:
        return throughput(simulate(changed, need=demand(changed, miss_rate))).mean

    before = rate(scenario)
    there = RESOURCES | ({"uplinks": _uplinks} if scenario.cluster.racks else {})
    return {name: rate(change(scenario)) / before - 1 for name, change in there.items()}
