"""What a demand rests on that nobody measured or fitted on the cluster's own machines."""

from __future__ import annotations

from collections.abc import Iterable

from persia_sim.cluster.machine import Precision
from persia_sim.cluster.scenario import Scenario

GPU = "GPU"
ALL_REDUCE = "all-reduce"
LOADERS = "loaders"
WORKERS = "worker cores and memory"
SERVERS = "server cores and memory"
"""Resources, as reports call them."""


def extrapolated(scenario: Scenario, message_bytes: Iterable[float]) -> tuple[str, ...]:
    """Laws that are used outside the range in which they were measured or fitted;
    ``message_bytes``: of the all-reduce."""
    work = scenario.workload
    costs = scenario.costs
    met = work.ids_per_batch
    each = work.sent_ids / scenario.cluster.servers.processes

    # How many items each law is asked for, against the range in which it was measured.
    used = {
        "load": work.batch_per_rank * work.columns,
        "worker_forward": met,
        "worker_rpc": each,
        "worker_pool": met,
        "worker_scatter": met,
        "server_lookup": each,
        "server_update": each,
    }
    outside = [name for name, items in used.items() if getattr(costs, name).extrapolates(items)]

    # The all-reduce and the GPU's rate have ranges of their own.
    if any(map(costs.dense_sync.extrapolates, message_bytes)):
        outside.append("dense_sync")
    measured = costs.gpu_efficiency
    fitted_in = Precision.FP32 if costs.machines else work.precision
    inside = measured and measured[0][0] <= work.batch_per_rank <= measured[-1][0]
    if measured and not (inside and work.precision is fitted_in):
        outside.append("gpu_efficiency")
    return tuple(outside)


def strange(scenario: Scenario) -> dict[str, str]:
    """Resource -> hosts of the cluster on which nothing was fitted, where whole runs were."""
    cluster = scenario.cluster
    fitted_hosts = scenario.costs.machines
    roles = {GPU: cluster.nn, WORKERS: cluster.embedding_workers}
    unfitted: dict[str, str] = {}
    for resource, role in roles.items():
        if role.host.name not in fitted_hosts:
            unfitted[resource] = role.host.name
    follow = {each: unfitted[GPU] for each in (ALL_REDUCE, LOADERS) if GPU in unfitted}
    return unfitted | follow


def borrowed(scenario: Scenario) -> tuple[str, ...]:
    """What was fitted on hosts that the cluster does not have, or only assumed."""
    costs = scenario.costs
    fitted_hosts = scenario.costs.machines
    unfitted = strange(scenario)
    parts = {GPU: "GPU, all-reduce and loaders", WORKERS: "workers' cores"}
    foreign = [f"{parts[n]} of {unfitted[n]} as fitted on others" for n in parts if n in unfitted]
    private = costs.network_of not in ("", scenario.workload.name)
    others = (f"GPU's rate as fitted to {costs.network_of}'s private network",) * private
    if not foreign:
        return others
    if not fitted_hosts:  # the catalogue follows machines
        foreign = [f"launching as {costs.launching.source}"] if costs.launching else []
        if costs.reach.source.startswith("fitted"):
            foreign += [f"shares of rates {costs.reach.source.partition(';')[0]}"]
    laws = [n for n in costs.__slots__ if getattr(getattr(costs, n), "source", "")[:7] == "assumed"]
    return (*others, *foreign, *([f"{', '.join(laws)} assumed"] if laws else []))
