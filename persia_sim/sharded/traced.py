"""A training program from its own steps: constants of its software, its model, and on a CPU the
machine, each as a file says it.

The laws of `sharded` then take as long as the steps did: each constant is what the law leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import hypot, log
from typing import Any

from persia_sim.base.rules import Quantity, Usual, require
from persia_sim.cluster.machine import Gpu, Host, Precision, System
from persia_sim.cluster.tables import RowUpdate, Table
from persia_sim.cluster.workload import Workload
from persia_sim.presets.fitted import REACH
from persia_sim.sharded.plan import HostTime, Software, Traced
from persia_sim.sharded.presets import ranker_of
from persia_sim.sharded.ranker import Ranker
from persia_sim.sharded.stages import Job, launched_s, stages, step_s
from persia_sim.sharded.step_trace import Steps

_LEAST_S = 1e-9
_MEMORY_BYTES = 64e9
_RANKS = 64
_BETWEEN_BYTES_PER_S = 2e9
"""Of a machine of which a trace says nothing: its memory, its ranks, and what these send each
other through it. Assumed."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a trace says."""

    software: Software
    host: Host
    """The machine that it ran on."""
    job: Job
    """The steps of the trace, as the laws have them."""


def workload_of(steps: Steps, name: str, source: str, precision: Precision) -> Workload:
    """The model that the shapes in a trace describe. Raises ValueError where there are none."""
    missing = [] if steps.layers else ["fully connected layers"]
    missing += [] if steps.lookups else ["lookups in tables"]
    rule = f"no shapes of {' and '.join(missing)} are in it"
    remedy = "record it with record_shapes=True, or name the model: --model and --batch"
    require(not missing, "model of the trace", "unknown", rule, remedy)

    # Tables that are alike are one entry.
    counts: dict[tuple[int, int, tuple[float, ...]], int] = {}
    for each in steps.lookups:
        ids = each.ids / steps.batch
        pooled = each.is_pooled or ids < 2
        alike = each.rows, each.dim, (ids,) if pooled else (1.0,) * round(ids)
        counts[alike] = counts.get(alike, 0) + 1
    tables = tuple(
        Table(rows=rows, dim=dim, ids_per_sample=ids, count=count)
        for (rows, dim, ids), count in counts.items()
    )
    return Workload(
        name=name,
        tables=tables,
        update=RowUpdate.SGD,
        mlp=tuple(layer.outputs for layer in steps.layers),
        dense_params=sum((layer.inputs + 1) * layer.outputs for layer in steps.layers),
        dense_flops=2.0 * steps.multiplications / steps.batch,
        batch_per_rank=steps.batch,
        precision=precision,
        source=f"{source}; popularity of ids, dense features and the rows' optimiser are not in it:"
        " assumed",
    )


def program_of(
    steps: Steps,
    model: Ranker | Workload,
    batch: int,
    *,
    name: str,
    source: str,
    precision: Precision,
    host: Host | None = None,
) -> Program:
    """Constants with which the laws give the steps back. ``host``: the machine, with one GPU used;
    None: one whose CPU did it, which is made so that it takes as long."""
    ranker = ranker_of(model) if isinstance(model, Workload) else model
    host = host or _cpu(steps, ranker, batch, source)
    speed = host.core_speed
    worked = steps.work_s

    # What the host launches, and what it does once. What no sample is in takes as long in any
    # batch, as it does.
    tables = ranker.table_count
    fused = steps.table_kernels < tables
    by_rule = {each: launched_s(steps.busy_s, steps.host_s, each) for each in HostTime}
    nearest = min(by_rule, key=lambda each: abs(by_rule[each] - steps.step_s))
    host_time = nearest if steps.on_gpu else HostTime.EXPOSED
    launch_s = min(steps.launch_s, steps.host_s / steps.kernels)
    once_s = steps.host_s + worked["constant"]
    once_s -= launch_s * steps.kernels * (host_time is not HostTime.HIDDEN)
    software = Software(
        name=name,
        launch_s=launch_s * speed,
        host_s=once_s * speed,
        layer_kernels=(steps.kernels - steps.table_kernels) / ranker.layers,
        table_kernels=steps.table_kernels / (ranker.table_widths if fused else tables),
        fused_tables=fused,
        host_time=host_time,
        id_s=0.0,
        source=source,
    )
    job = Job(
        ranker=ranker,
        system=System(host=host, gpus=1),
        software=software,
        reach=REACH,
        batch=batch,
        precision=precision,
        reads_files=steps.on_gpu,
    )

    # What its kernels reach, in place of what those of others do.
    job = replace(job, software=replace(software, **_rates(job, worked)))
    if steps.ranks > 1:
        system = System(host=host, gpus=steps.ranks)
        job = replace(job, system=system, batch=batch * steps.ranks)
        # The host's time has waiting for other ranks in it, some of which laws of exchanges say.
        more_s = (steps.step_s - step_s(job)) * speed
        once_s = max(0.0, job.software.host_s + min(0.0, more_s))
        software = replace(job.software, host_s=once_s, host_multi_s=max(0.0, more_s))
        job = replace(job, software=software)
    off_ln = log(step_s(job) / steps.step_s)
    seen = Traced(
        machine=host.name,
        gpus=steps.ranks,
        batch_per_gpu=batch,
        dense_macs=ranker.dense_macs,
        ids=ranker.ids,
        spread=hypot(steps.spread_ln, off_ln),
    )
    software = replace(job.software, traced=seen)
    return Program(software, host, replace(job, software=software))


def _rates(job: Job, worked: Mapping[str, float]) -> dict[str, Any]:
    """Fields of the software with which its stages take as long as they did."""
    parts = stages(job)
    hbm = job.system.host.chip.hbm_bytes_per_s * job.reach.hbm
    passes_s = job.precision.value_bytes * job.reach.activation_passes
    passes_s *= job.per_gpu * job.ranker.widths / hbm
    products_s = parts.dense_s - passes_s
    tuned = products_s / worked["products"] if worked["products"] else 2.0
    a_pass_s = 4.0 * job.per_gpu * job.ranker.widths / hbm
    rows_s = parts.lookup_s + parts.update_s
    ids = job.per_gpu * job.ranker.ids * 2.0  # in a lookup, and again in an update
    return {
        "tuned": min(2.0, max(1e-9, tuned)),
        "unfused_passes": min(1e6, max(0.0, (worked["others"] - passes_s) / a_pass_s)),
        "id_s": max(0.0, (worked["tables"] - rows_s) / ids),
    }


def _cpu(steps: Steps, ranker: Ranker, batch: int, source: str) -> Host:
    """A machine on which products, passes over activations and rows take about what they did; its
    software has the rest."""
    worked = steps.work_s
    flops = 6.0 * ranker.dense_macs * batch / max(worked["products"], _LEAST_S)
    passed = REACH.activation_passes * 4.0 * batch * ranker.widths
    elements = sum(table.count * table.ids * table.dim for table in ranker.tables)
    rows = batch * (3.0 * 4.0 * elements + 8.0 * ranker.pooled)  # read; read and written; pooled
    rate = max(passed / max(worked["others"], _LEAST_S), rows / max(worked["tables"], _LEAST_S))
    core = Gpu(
        name="cores of a rank",
        fp32_flops=_usual(flops / REACH.fp32, Usual.FLOPS),
        hbm_bytes_per_s=_usual(rate / REACH.hbm, Usual.BUS),
        hbm_bytes=_MEMORY_BYTES,
        pcie_bytes_per_s=Usual.BUS.most,
        is_host_core=True,
        source=source,
    )
    return Host(
        name=f"CPU of {source}",
        cores=_RANKS,
        ram_bytes=_RANKS * _MEMORY_BYTES,
        core_speed=1.0,
        nic_bytes_per_s=0.0,
        gpu=core,
        gpus=_RANKS,
        intra_bytes_per_s=_BETWEEN_BYTES_PER_S,
        source=f"{source}; memory, ranks and what these send each other assumed",
    )


def _usual(value: float, quantity: Quantity) -> float:
    """The nearest that a file may say."""
    return min(quantity.most, max(quantity.least, value))
