"""`persia-sim machines list` and its like: names that files and options accept, and their sources.

A line of the table is a name; the source stands last, since it is as long as it has to be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from persia_sim.base.command_line import Unset
from persia_sim.base.facts import aligned
from persia_sim.cluster.machine import Fabric, Host
from persia_sim.presets.catalogue import CLUSTERS, GPUS, MACHINES, workloads


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOptions:
    """List the machines that `host =` of a cluster's file, --system and --machines accept."""

    gpu: Annotated[str | None, Unset("all machines")] = None
    """Only machines with this GPU (v100, a100, h100 and so on); cpu: those without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """List the clusters that --cluster and `base =` of a cluster's file accept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """List the workloads that --workload and `base =` of a workload's file accept, and the models
    beside them that `persia-sim sharded --model` knows."""


def listed_machines(options: MachineOptions) -> str:
    """A line for each machine with its GPUs, rates, price and source."""
    header = ["machine", "GPUs", "linked by", "NICs", "cores", "memory", "$/hour", "source"]
    lines = []
    for name, host in MACHINES.items():
        if not _has_gpu(host, options.gpu):
            continue
        rdma = " RDMA" if host.rdma else ""
        nics = f"{host.nic_bytes_per_s * 8e-9:,.0f} Gbit/s{rdma}"
        usd = f"{host.usd_per_hour:,.2f}" if host.usd_per_hour else "unknown"
        gpus, linked = _gpus_of(host)
        memory = f"{host.ram_bytes / 2**30:,.0f} GiB"
        lines.append([name, gpus, linked, nics, f"{host.cores}", memory, usd, host.source])
    if not lines:
        known = ", ".join([*GPUS, _NO_GPU])
        raise ValueError(f"--gpu is {options.gpu!r}: no machine has it; name one of {known}")
    return aligned(header, lines)


def _has_gpu(host: Host, asked: str | None) -> bool:
    """Whether a machine is meant by a GPU's name, by a part of it, or by having none; an A100 is
    not meant by ``a10``."""
    if asked is None:
        return True
    if asked.lower() == _NO_GPU:
        return host.gpu is None
    if host.gpu is None:
        return False
    names = [key for key, gpu in GPUS.items() if gpu.name == host.gpu.name]
    part = re.compile(re.escape(asked) + r"(?!(?<=\d)\d)", re.IGNORECASE)
    return any(part.search(name) for name in (*names, host.gpu.name))


_NO_GPU = "cpu"
_LINKS = {Fabric.SWITCH: "NVSwitch", Fabric.MESH: "NVLinks", Fabric.PCIE: "PCIe"}


def _gpus_of(host: Host) -> tuple[str, str]:
    """What its GPUs are, and how they reach each other."""
    if host.gpu is None:
        return "", ""
    rate = host.peer_bytes_per_s * 1e-9
    return f"{host.gpus} x {host.gpu.name}", f"{_LINKS[host.fabric]} {rate:,.0f} GB/s"


def listed_clusters(options: ClusterOptions) -> str:
    """A line for each cluster with the hosts of its roles, price and source."""
    del options  # there are none
    header = ["cluster", "GPUs", "GPU hosts", "worker hosts", "server hosts", "$/hour", "source"]
    lines = []
    for name, make in CLUSTERS.items():
        cluster = make()
        roles = cluster.nn, cluster.embedding_workers, cluster.servers
        hosts = [f"{role.hosts} x {role.host.name}" for role in roles]
        usd = f"{cluster.usd_per_hour:,.2f}" if cluster.usd_per_hour else "unknown"
        lines.append([name, f"{cluster.ranks}", *hosts, usd, cluster.source])
    return aligned(header, lines)


def listed_workloads(options: WorkloadOptions) -> str:
    """A line for each workload and model: fields, ids, rows, weights and source."""
    del options  # there are none

    # Workloads of both systems.
    header = ["workload", "fields", "ids", "rows of", "rows", "weights", "batch a rank", "source"]
    lines = []
    for name, work in workloads().items():
        ids = f"{work.fields * work.ids_per_field:g}"
        rows = f"{work.rows:.3g}"
        weights = f"{work.weights:,}"
        batch = f"{work.batch_per_rank:,}"
        cells = [name, f"{work.fields}", ids, f"{work.dim}", rows, weights, batch]
        lines.append([*cells, work.source])

    # Models that only the sharded side can have: tables of several widths.
    from persia_sim.sharded.presets import rankers

    for name, model in rankers().items():
        count = sum(table.count * table.rows for table in model.tables)
        dims = {f"{table.dim:g}" for table in model.tables}
        cells = [name, f"{model.features:g}", f"{model.ids:g}", ", ".join(sorted(dims))]
        cells += [f"{count:.3g}", f"{model.dense_params:,.0f}", ""]
        lines.append([*cells, f"`sharded --model` only; {model.source}"])
    return aligned(header, lines)
