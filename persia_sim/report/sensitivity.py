"""What would help: the same run with one resource ten per cent faster, or with more of something.

Pairs share all random draws, so their difference is the resource's alone; its interval is that of
the paired steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import slow_downs
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import Run, simulate
from persia_sim.report.measure import Estimate, mean_interval, steady_steps, step_durations

FASTER = 1.1
Change = Callable[[Scenario], Scenario]


def scaled(record: Any, path: str, factor: float) -> Any:
    """The record with one figure better by a factor: seconds shorter, all else larger. A path leads
    through fields; what is not given stays."""
    head, _, rest = path.partition(".")
    value = getattr(record, head)
    if value is None:
        return record
    if rest:
        return replace(record, **{head: scaled(value, rest, factor)})
    shorter = head.endswith("_s") and not head.endswith("_per_s")
    return replace(record, **{head: value / factor if shorter else value * factor})


def _faster(*paths: str) -> Change:
    def change(scenario: Scenario) -> Scenario:
        for path in paths:
            scenario = scaled(scenario, path, FASTER)
        return scenario

    return change


def _laws(*names: str) -> Change:
    parts = "fixed_s", "per_item_s", "per_byte_s"
    return _faster(*(f"costs.{name}.{part}" for name in names for part in parts))


def _hosts(role: str, *figures: str) -> list[str]:
    """Paths of some figures of the hosts of a role."""
    return [f"cluster.{role}.host.{figure}" for figure in figures]


def _all_reduce(scenario: Scenario) -> Scenario:
    """Links inside hosts and between them, as if they were the all-reduce's own."""
    hosts = [scenario.cluster.nn.host]
    link_s = scenario.cluster.link.latency_s
    sync = scenario.costs.dense_sync.on(hosts, scenario.costs.reach, link_s)
    rates = "intra_bytes_per_s", "inter_bytes_per_s", "intra_latency_s", "inter_latency_s"
    described = replace(scenario, costs=replace(scenario.costs, dense_sync=sync))
    return _faster(*(f"costs.dense_sync.{name}" for name in (*rates, "overhead_s")))(described)


_PEAKS = "gpu.fp32_flops", "gpu.tf32_flops", "gpu.fp16_flops", "gpu.hbm_bytes_per_s"
_BUS = _hosts("nn", "gpu.pcie_bytes_per_s")
RESOURCES: dict[str, Change] = {
    "GPU": _faster("costs.gpu_fixed_s", *_hosts("nn", *_PEAKS)),
    "all-reduce": _all_reduce,
    "loaders": _laws("load"),
    "embedding workers' cores": _laws(
        "worker_forward", "worker_rpc", "worker_pool", "worker_scatter"
    ),
    "embedding workers' memory": _faster(*_hosts("embedding_workers", "memory_bytes_per_s")),
    "servers' cores": _laws("server_lookup", "server_update", "server_create"),
    "servers' memory": _faster(*_hosts("servers", "memory_bytes_per_s")),
    "dense server": _faster("costs.dense_server_bytes_per_s"),
    "rank's copies": lambda scenario: _faster(*_BUS)(_laws("copy_in", "copy_out")(scenario)),
    "GPU hosts' NICs": _faster(*_hosts("nn", "nic_bytes_per_s")),
    "worker hosts' NICs": _faster(*_hosts("embedding_workers", "nic_bytes_per_s")),
    "server hosts' NICs": _faster(*_hosts("servers", "nic_bytes_per_s")),
    "latency": _faster("cluster.link.latency_s"),
}
"""Name -> the scenario with it ten per cent faster."""


def choices(scenario: Scenario) -> dict[str, Change]:
    """What one may have twice of, where the scenario reads it: no rates but numbers."""
    cluster = scenario.cluster
    changes = dict[str, Change]()
    if scenario.mode.reads_late_rows and scenario.tau is not None:
        changes["tau"] = lambda s: replace(s, tau=max(1, 2 * (s.tau or 0)))
    roles = {"worker hosts": "embedding_workers", "server hosts": "servers"}
    for name, role in roles.items():
        changes[name] = partial(scaled, path=f"cluster.{role}.hosts", factor=2)
    changes["loaders"] = lambda s: replace(
        s, cluster=s.cluster.resized(loaders=2 * cluster.loaders)
    )
    batch = 2 * scenario.workload.batch_per_rank
    if batch <= 65535:
        changes["batch"] = lambda s: replace(s, workload=replace(s.workload, batch_per_rank=batch))
    return changes


def without_slow(scenario: Scenario) -> dict[str, Change]:
    """All slow processes of the scenario as quick as the others; nothing where none is slow."""
    slow = slow_downs(scenario.disturbances)
    left = tuple(event for event in scenario.disturbances if event not in slow)
    name = f"slow {' and '.join(f'{each.target} {each.index}' for each in slow)}"
    return {name: lambda s: replace(s, disturbances=left)} if slow else {}


def gains(
    scenario: Scenario,
    miss_rate: float = 0.0,
    changes: Mapping[str, Change] | None = None,
    watch: Callable[[list[str]], Iterable[str]] = iter,
) -> dict[str, Estimate]:
    """Relative gain in throughput from each change alone, with its 95 % interval; by default each
    of the `RESOURCES`.

    ``miss_rate`` is the share of looked-up rows that a server has to create, as in `demand`;
    ``watch`` passes the names of the changes on, and may count them for a person.
    """

    def run(changed: Scenario) -> Run:
        return simulate(changed, need=demand(changed, miss_rate))

    changes = RESOURCES if changes is None else changes
    before = run(scenario)
    return {name: _gain(before, run(changes[name](scenario))) for name in watch(list(changes))}


def _gain(before: Run, after: Run) -> Estimate:
    """The relative gain of samples per second, over the steps that are steady in both."""
    first = max(steady_steps(before).start, steady_steps(after).start)
    old = step_durations(before, first)
    new = step_durations(after, first)
    more = after.scenario.batch / before.scenario.batch
    ratio = float(old.mean() / new.mean())
    off = mean_interval(old - ratio * new)
    return Estimate(more * ratio - 1, more * off.half_width / float(new.mean()), len(old))
