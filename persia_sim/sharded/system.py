"""GPUs, the fabric inside a node and the NICs between nodes, for tables that live on the GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from persia_sim.words.rules import AMOUNT, COUNT, USD, require, require_within

_FLOPS = (1.0, 1e21)


class Precision(StrEnum):
    """Arithmetic of the dense network."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    """Mixed precision: activations and what travels have 2 bytes."""

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation."""
        return 2 if self is Precision.FP16 else 4


class Fabric(StrEnum):
    """How the GPUs of a node reach each other."""

    SWITCH = "switch"
    """Every pair at the full rate of a GPU's NVLinks."""
    MESH = "mesh"
    """NVLinks between some pairs (hybrid cube mesh); beyond four GPUs some pairs have none."""
    PCIE = "pcie"
    """The bus to the host, shared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One GPU: data sheet figures without sparsity."""

    name: str
    """As its vendor calls it."""
    fp32_flops: float
    """Peak rate in float32, > 0."""
    tf32_flops: float | None = None
    """Peak rate of tensor cores on float32 operands, > 0; None where there is none."""
    fp16_flops: float
    """Peak rate of tensor cores on 2-byte operands, > 0."""
    hbm_bytes_per_s: float
    """Peak bandwidth of its memory, > 0."""
    hbm_bytes: float
    """Its memory, > 0."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_within(
            self, f" of {self.name}", fp32_flops=_FLOPS, tf32_flops=_FLOPS, fp16_flops=_FLOPS,
            hbm_bytes_per_s=AMOUNT, hbm_bytes=AMOUNT,
        )  # fmt: skip

    def arithmetic(self, asked: Precision) -> Precision:
        """What it computes in: a GPU without TF32 takes float32 instead."""
        lacks = asked is Precision.TF32 and self.tf32_flops is None
        return Precision.FP32 if lacks else asked

    def peak_flops(self, precision: Precision) -> float:
        """Peak rate in this arithmetic."""
        rates = {Precision.FP16: self.fp16_flops, Precision.TF32: self.tf32_flops}
        return rates.get(precision) or self.fp32_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine with GPUs."""

    name: str
    """As its vendor calls it."""
    accelerator: Accelerator
    """Each of its GPUs."""
    gpus: int
    """In one machine, >= 1."""
    fabric: Fabric
    """How they reach each other."""
    intra_bytes_per_s: float
    """Nominal rate of a GPU to the others of its node, each way, > 0."""
    inter_bytes_per_s: float | None = None
    """Nominal rate of the NICs for one GPU, each way, > 0; None: never more than one node."""
    rdma: bool = True
    """NICs read and write GPU memory; else data pass the host and TCP."""
    host_bytes_per_s: float
    """Nominal rate between a GPU and the host's memory, each way, > 0."""
    nvlink_domain: int | None = None
    """GPUs that share one NVLink fabric where that is more than a node (NVL72)."""
    usd_per_hour: float = 0.0
    """List price of the machine, >= 0, with its date in `source`."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_within(
            self, f" of {self.name}", gpus=COUNT, intra_bytes_per_s=AMOUNT, usd_per_hour=USD,
            inter_bytes_per_s=AMOUNT, host_bytes_per_s=AMOUNT, nvlink_domain=COUNT,
        )  # fmt: skip
        domain = self.nvlink_domain
        ok = domain is None or domain >= self.gpus
        require(ok, f"nvlink_domain of {self.name}", domain, f"must be >= its {self.gpus} GPUs")


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """So many GPUs in machines of one type."""

    node: Node
    """The machine."""
    gpus: int
    """All of them, >= 1."""

    def __post_init__(self) -> None:
        require_within(self, gpus=COUNT)
        require(
            self.nodes == 1 or self.node.inter_bytes_per_s is not None,
            "gpus",
            self.gpus,
            f"a {self.node.name} has {self.node.gpus} and no NIC is described",
            "give inter_bytes_per_s",
        )

    @property
    def local(self) -> int:
        """GPUs that reach each other without a NIC."""
        return min(self.gpus, self.node.nvlink_domain or self.node.gpus)

    @property
    def nodes(self) -> int:
        """Groups of GPUs that reach each other by NIC only."""
        return ceil(self.gpus / self.local)

    @property
    def usd_per_hour(self) -> float:
        """List price of all machines."""
        return ceil(self.gpus / self.node.gpus) * self.node.usd_per_hour
