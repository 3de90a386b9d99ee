"""What would help: the same run with one resource ten per cent faster.

Pairs share all random draws, so their difference is the resource's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.model.costs import Law
from persia_sim.model.demand import demand
from persia_sim.model.scenario import Scenario

FASTER = 1.1


def _nics(role: str) -> Callable[[Scenario], Scenario]:
    def change(scenario: Scenario) -> Scenario:
        part = getattr(scenario.cluster, role)
        host = replace(part.host, nic_bytes_per_s=part.host.nic_bytes_per_s * FASTER)
        cluster = replace(scenario.cluster, **{role: replace(part, host=host)})
        return replace(scenario, cluster=cluster)

    return change


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
    gpu = replace(scenario.cluster.gpu, peak_flops=scenario.cluster.gpu.peak_flops * FASTER)
    costs = replace(scenario.costs, gpu_fixed_s=scenario.costs.gpu_fixed_s / FASTER)
    return replace(scenario, cluster=replace(scenario.cluster, gpu=gpu), costs=costs)


def _copies(scenario: Scenario) -> Scenario:
    gpu = scenario.cluster.gpu
    gpu = replace(gpu, pcie_bytes_per_s=gpu.pcie_bytes_per_s * FASTER)
    scenario = replace(scenario, cluster=replace(scenario.cluster, gpu=gpu))
    return _laws("copy_in", "copy_out")(scenario)


def _memory(scenario: Scenario) -> Scenario:
    servers = scenario.cluster.servers
    rate = servers.host.memory_bytes_per_s * FASTER
    servers = replace(servers, host=replace(servers.host, memory_bytes_per_s=rate))
    return replace(scenario, cluster=replace(scenario.cluster, servers=servers))


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
    "servers' memory": _memory,
    "dense server": _dense_server,
    "rank's copies": _copies,
    "GPU hosts' NICs": _nics("nn"),
    "worker hosts' NICs": _nics("embedding_workers"),
    "server hosts' NICs": _nics("servers"),
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
