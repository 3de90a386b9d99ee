"""What a training system's own code costs, and what any code gets out of the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from persia_sim.sharded.plan import Strategy
from persia_sim.sharded.system import Fabric, Node, Precision
from persia_sim.words.rules import AMOUNT, SECONDS, SHARE, require_within

PEER_BYTES_PER_S = 32e9
"""Nominal rate of the bus above which GPUs without NVLink exchange no faster: host bridges bind
(PCIe 5.0 boxes show no more than those with 4.0)."""


class Pipeline(StrEnum):
    """What of one batch may run beside another."""

    BASE = "base"
    """Nothing: keys are exchanged and waited for, then everything else."""
    SPARSE_DIST = "sparse_dist"
    """The next batch is copied and its keys exchanged behind this one."""
    PREFETCH = "prefetch"
    """As sparse_dist; rows that a cache misses are fetched behind this batch, too."""
    SEMI_SYNC = "semi_sync"
    """As sparse_dist; the next lookup and its exchange run before this batch's update: rows are
    read one step late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Shares of nominal rates that good kernels and collectives reach, on any GPU."""

    fp32: float
    """Of the peak rate, large matrix products, in (0, 1]."""
    tf32: float
    fp16: float
    hbm: float
    """Of the memory's bandwidth, in (0, 1]."""
    switch: float
    """Of NVLink through a switch, all-to-all, in (0, 1]."""
    mesh: float
    """Of a GPU's NVLinks in a cube mesh, all-to-all, in (0, 1]."""
    pcie: float
    """Of the bus between GPUs, all at once, in (0, 1]; beyond PEER_BYTES_PER_S a faster bus gains
    nothing."""
    nic: float
    """Of the NICs with RDMA, in (0, 1]; TCP gets `tcp` of that."""
    tcp: float
    host: float
    """Of the bus to the host's memory, in (0, 1]."""
    uvm: float
    """Of the same, where single rows are read over it, in (0, 1]."""
    activation_passes: float
    """How often activations cross the memory in a step, >= 0."""
    source: str
    """Where these constants come from, and which were fitted."""

    def __post_init__(self) -> None:
        require_within(
            self, prefix="reach.", fp32=SHARE, tf32=SHARE, fp16=SHARE, hbm=SHARE, switch=SHARE,
            mesh=SHARE, pcie=SHARE, nic=SHARE, tcp=SHARE, host=SHARE, uvm=SHARE,
            activation_passes=(0, 1e6),
        )  # fmt: skip

    def gemm(self, precision: Precision) -> float:
        """Of the peak rate in this arithmetic."""
        share: float = getattr(self, precision)
        return share

    def inside(self, node: Node) -> float:
        """What a GPU gets to the others of its node, all at once, bytes per second."""
        nominal = node.intra_bytes_per_s
        if node.fabric is Fabric.PCIE:
            return self.pcie * min(nominal, PEER_BYTES_PER_S)
        return nominal * (self.mesh if node.fabric is Fabric.MESH else self.switch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """One training system: what it pays a step beside bytes and multiplications."""

    name: str
    """The preset's name."""
    host_s: float
    """Launching a step's kernels, >= 0."""
    host_reading_s: float = 0.0
    """The same, where batches are read from files and not already on the GPU, >= 0."""
    host_per_table_s: float = 0.0
    """The same, for each table, >= 0."""
    host_multi_s: float = 0.0
    """The same, where there is more than one GPU: collectives and their synchronisation, >= 0."""
    gpu_s: float = 0.0
    """Of a step on the GPU, whatever its size: the chain of small kernels, >= 0."""
    id_bytes: float
    """What an id costs beside its row (hash, sort, scattered access), as bytes of HBM, >= 0."""
    exposed: float = 1.0
    """Share of the exchange of pooled rows that nothing hides, in [0, 1]."""
    strategy: Strategy = Strategy.PLANNED
    """How tables are split."""
    replicate_rows: float = 0.0
    """Tables with at most so many rows are copied to every GPU, >= 0."""
    hot_rows: float = 0.0
    """Most frequent rows of a larger table that are copied, too, >= 0."""
    pipeline: Pipeline = Pipeline.SPARSE_DIST
    """What runs beside another batch."""
    graphs: bool = False
    """Steps are replayed graphs: the host launches ahead and is never waited for."""
    source: str
    """Where these constants come from, and which were fitted."""

    def __post_init__(self) -> None:
        rows = (0, AMOUNT[1])
        require_within(
            self, host_s=SECONDS, host_reading_s=SECONDS, host_per_table_s=SECONDS,
            host_multi_s=SECONDS, gpu_s=SECONDS, id_bytes=(0, 1e9), exposed=(0, 1),
            replicate_rows=rows, hot_rows=rows,
        )  # fmt: skip
