"""One machine: its cores and memory, its GPUs and how they reach each other, its NICs, its price.

Both kinds of training are asked about the same machines: GPUs beside embedding servers, and tables
that live on the GPUs. Plain data sheet figures in SI units; what software gets out of them is in
`Reach`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, inf
from typing import Annotated, Any, Self

from persia_sim.base.rules import AMOUNT, COUNT, NUMBERS, SHARE, Usual, require, require_within
from persia_sim.base.schema import hold_choices, require_possible

_FASTEST = 2.5
_FASTEST_NIC = 75e9
_SLOWEST_FLOPS = 1e12
_LEAST_HBM = 1e9
"""Beyond these a screen asks what was meant: a core that many times as fast as the measured one,
NICs of a machine without GPUs, a GPU's peak rate and memory."""
_LINKED = 4  # of the hybrid cube mesh: all pairs of so many have NVLinks
_TO_A_SOCKET = 4


class Precision(StrEnum):
    """Arithmetic of the dense network."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    """Mixed precision: activations and what travels have 2 bytes."""

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation, and of a dense gradient that travels."""
        return 2 if self is Precision.FP16 else 4


class Fabric(StrEnum):
    """How the GPUs of a machine reach each other."""

    SWITCH = "switch"
    """Every pair at the full rate of a GPU's NVLinks."""
    MESH = "mesh"
    """NVLinks between some pairs (hybrid cube mesh); beyond four GPUs some pairs have none."""
    PCIE = "pcie"
    """The bus to the host, shared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator: nominal figures, without sparsity."""

    name: str
    """The name that its vendor gives it."""
    fp32_flops: Annotated[float, Usual.FLOPS]
    """Peak rate in float32, > 0."""
    tf32_flops: Annotated[float | None, Usual.FLOPS] = None
    """Peak rate of tensor cores on float32 operands, > 0; None where there is none."""
    fp16_flops: Annotated[float | None, Usual.FLOPS] = None
    """Peak rate of tensor cores on 2-byte operands, > 0; None where there is none."""
    hbm_bytes_per_s: Annotated[float, Usual.BUS] = inf
    """Peak bandwidth of its memory, > 0."""
    hbm_bytes: Annotated[float, Usual.MEMORY] = inf
    """Bytes of its memory, > 0; bounds tables that live on it."""
    pcie_bytes_per_s: Annotated[float, Usual.BUS]
    """Nominal rate of the bus between the host's memory and the GPU, each way, > 0."""
    is_host_core: bool = False
    """No GPU but a core of the host: its peak is what a profile measures."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_possible(self, f" of GPU {self.name}")

    def arithmetic(self, wanted: Precision) -> Precision:
        """What it computes in: a GPU without tensor cores for it takes float32 instead."""
        has = {Precision.TF32: self.tf32_flops, Precision.FP16: self.fp16_flops}
        return Precision.FP32 if has.get(wanted) is None else wanted

    def peak_flops(self, precision: Precision) -> float:
        """Peak rate in this arithmetic."""
        rates = {Precision.FP16: self.fp16_flops, Precision.TF32: self.tf32_flops}
        return rates.get(precision) or self.fp32_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine type, with or without GPUs."""

    name: str
    """The name that its vendor gives it."""
    cores: int
    """Hardware threads, >= 1; the roles on it may not ask for more."""
    ram_bytes: Annotated[float, Usual.MEMORY]
    """Installed memory, > 0; a role that needs more is refused."""
    core_speed: Annotated[float, Usual.SPEED]
    """Speed of a core relative to the machine on which the cost laws were measured, > 0."""
    memory_bytes_per_s: Annotated[float, Usual.BUS] = inf
    """Bandwidth of the memory of the whole host, > 0; bounds the servers on it together."""
    nic_bytes_per_s: Annotated[float, Usual.NIC]
    """Nominal rate of its NICs together, each way, >= 0; 0 has none: it is alone."""
    rdma: bool = False
    """NICs read and write GPU memory; else what GPUs send passes the host and TCP."""
    gpu: Gpu | None = None
    """Each of its GPUs."""
    gpus: int = 0
    """GPUs in one machine, >= 0."""
    fabric: Fabric = Fabric.PCIE
    """How its GPUs reach each other."""
    intra_bytes_per_s: Annotated[float | None, Usual.BUS] = None
    """Nominal rate of a GPU to the others of its machine, each way, > 0; None: its bus's."""
    gpus_per_switch: int = 2
    """GPUs behind one PCIe switch, which share its way to the host and to the others, >= 1; usual
    servers of eight have four switches."""
    peer_to_peer: bool = True
    """GPUs without NVLinks write to each other's memory; else all passes the host's, twice."""
    bridge_bytes_per_s: Annotated[float | None, Usual.BUS] = None
    """Nominal rate of an NVLink bridge between two neighbours of a machine without other NVLinks,
    each way, > 0; None: there is none."""
    nvlink_domain: int | None = None
    """GPUs that share one NVLink fabric where that is more than a machine (NVL72)."""
    usd_per_hour: Annotated[float, Usual.PRICE] = 0.0
    """List price, >= 0; enters the cost figures only. 0: not known."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        hold_choices(self)
        of = f" of host {self.name}"
        require_possible(self, of, but="" if self.nic_bytes_per_s else "nic_bytes_per_s")
        require_within(
            self, of, cores=NUMBERS, gpus=(0, COUNT[1]), nvlink_domain=COUNT, gpus_per_switch=COUNT
        )
        domain = self.nvlink_domain
        ok = (self.nvlink_domain or self.gpus) >= self.gpus
        require(ok, f"nvlink_domain of {self.name}", domain, f"must be >= its {self.gpus} GPUs")

    @property
    def chip(self) -> Gpu:
        """The machine's kind of GPU; raises ValueError where it has none."""
        if self.gpu is None:
            remedy = "give it one (a core: is_host_core = true), or name a machine that has one"
            raise ValueError(f"host {self.name} has no gpu: {remedy}")
        return self.gpu

    @property
    def peer_bytes_per_s(self) -> float:
        """Nominal rate between two GPUs of the machine."""
        return self.intra_bytes_per_s or self.chip.pcie_bytes_per_s

    @property
    def doubts(self) -> dict[str, str]:
        """Figures that a machine can have and hardly has: line of a screen that they enter -> what
        was probably meant. A screen asks; nothing is refused."""
        by_line: dict[str, list[str]] = {"memory": [], "step": []}

        def ask(line: str, field: str, meant: float, meaning: str) -> None:
            name = f"{field} of {self.name}"
            value = getattr(self.gpu, field, None)
            value = getattr(self, field) if value is None else value
            by_line[line].append(f"{name} is {value:g}: did you mean {meant:g} ({meaning})?")

        if self.core_speed > _FASTEST:
            ask("step", "core_speed", 1.0, "1 is the measured core; this is no clock in GHz")
        gpu = self.gpu if self.gpu is not None and not self.gpu.is_host_core else None
        # What leaves a machine of GPUs has passed their buses.
        most = self.gpus * gpu.pcie_bytes_per_s if gpu and self.gpus else _FASTEST_NIC
        if most < self.nic_bytes_per_s < inf:
            meant = self.nic_bytes_per_s / 8
            ask("step", "nic_bytes_per_s", meant, f"{self.nic_bytes_per_s / 1e9:g} Gbit/s")
        for name in ("fp32_flops", "tf32_flops", "fp16_flops") if gpu else ():
            rate = getattr(gpu, name)
            if rate is not None and rate < _SLOWEST_FLOPS:
                ask("step", name, rate * 1e3, f"{rate / 1e9:g} TFLOPS")
        if gpu and gpu.hbm_bytes < _LEAST_HBM:
            ask("memory", "hbm_bytes", gpu.hbm_bytes * 1e3, f"{gpu.hbm_bytes / 1e6:g} GB")
        return {line: "; ".join(each) for line, each in by_line.items() if each}

    def with_gpu(self, **changes: Any) -> Self:
        """The machine with other figures of its GPU."""
        return replace(self, gpu=replace(self.chip, **changes))


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A number of GPUs in machines of one type."""

    host: Host
    """The machine; all of its GPUs are used, but for the last one's."""
    gpus: int
    """All of them, >= 1."""

    def __post_init__(self) -> None:
        require_within(self, gpus=COUNT)
        require_within(
            self.host.chip, f" of {self.host.chip.name}", hbm_bytes=AMOUNT, hbm_bytes_per_s=AMOUNT
        )
        require_within(self.host, f" of host {self.host.name}", gpus=COUNT)
        rule = f"a {self.host.name} has {self.host.gpus} and no NIC is described"
        alone = self.nodes > 1 and not self.host.nic_bytes_per_s
        require(not alone, "gpus", self.gpus, rule, "give nic_bytes_per_s")

    @property
    def local(self) -> int:
        """GPUs that reach each other without a NIC."""
        return min(self.gpus, self.host.nvlink_domain or self.host.gpus)

    @property
    def nodes(self) -> int:
        """Groups of GPUs that reach each other by NIC only."""
        return ceil(self.gpus / self.local)

    @property
    def usd_per_hour(self) -> float:
        """List price of all machines."""
        return ceil(self.gpus / self.host.gpus) * self.host.usd_per_hour


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What software gets out of a machine: shares of nominal rates, and seconds a message waits.

    The same on any machine, so whatever is made faster there is faster here.
    """

    fp32: float
    """Share of the peak rate, large matrix products, in (0, 1]; and so in tf32 and fp16."""
    tf32: float
    fp16: float
    hbm: float
    """Share of the GPU memory's bandwidth, in (0, 1]."""
    switch: float
    """Share of NVLink through a switch, all at once, in (0, 1]."""
    mesh: float
    """Share of a GPU's NVLinks in a cube mesh, round a ring, in (0, 1]."""
    pairs: float = 0.2
    """Share of a GPU's NVLinks where each of more than four sends to every other: some pairs have
    no link."""
    pcie: float
    """Share of the bus between GPUs, all at once, in (0, 1]."""
    sockets_bytes_per_s: Annotated[float, Usual.BUS] = 20e9
    """Between the two halves of a machine without NVLink, each way, where it has more GPUs than a
    socket, > 0: NCCL's own table has 10 (Skylake), 16 to 24 (AMD) and 22 (Sapphire Rapids) GB/s."""
    nic: float
    """Share of the NICs with RDMA, in (0, 1]; TCP gets `tcp` of that."""
    tcp: float
    host: float
    """Share of the bus to the host's memory, in (0, 1]."""
    uvm: float = 0.1
    """Share of that bus where single rows are read over it, in (0, 1]."""
    activation_passes: float = 0.0
    """How often activations cross the GPU's memory in a step, >= 0."""
    intra_latency_s: Annotated[float, Usual.LATENCY] = 0.0
    """A hop of a collective between two GPUs of a machine, >= 0."""
    inter_latency_s: Annotated[float, Usual.LATENCY] = 0.0
    """A hop between two machines, >= 0."""
    source: str
    """Where these constants come from, and which were fitted."""

    def __post_init__(self) -> None:
        # All of them are shares of what the datasheet says, but for one count.
        require_within(
            self,
            prefix="reach.",
            fp32=SHARE,
            tf32=SHARE,
            fp16=SHARE,
            hbm=SHARE,
            switch=SHARE,
            mesh=SHARE,
            pairs=SHARE,
            pcie=SHARE,
            nic=SHARE,
            tcp=SHARE,
            host=SHARE,
            uvm=SHARE,
            activation_passes=(0, 1e6),
        )
        require_possible(self, prefix="reach.")

    def gemm(self, precision: Precision) -> float:
        """Share of the peak rate in this arithmetic."""
        share: float = getattr(self, precision)
        return share

    def inside(self, host: Host, gpus: int) -> float:
        """What each of so many GPUs of a machine gets round a ring of them, bytes per second."""
        if host.fabric is not Fabric.PCIE:
            share = self.switch if host.fabric is Fabric.SWITCH else self.mesh
            return host.peer_bytes_per_s * share
        if gpus <= 2 and host.bridge_bytes_per_s:
            return host.bridge_bytes_per_s * self.mesh
        rate = self._bus_between(host)
        return min(rate, self.sockets_bytes_per_s) if gpus > _TO_A_SOCKET else rate

    def across(self, host: Host, gpus: int) -> float:
        """Bytes a second of a GPU where every one sends to every other."""
        if host.fabric is Fabric.MESH and gpus > _LINKED:
            return host.peer_bytes_per_s * self.pairs
        near = host.gpus_per_switch
        if host.fabric is not Fabric.PCIE or gpus <= max(2, near):
            return self.inside(host, gpus)
        # The GPUs of a switch share its way out, those of a socket the way to the other. What goes
        # to a neighbour, of the switch or over a bridge, takes neither.
        beside = max(near, 2 if host.bridge_bytes_per_s else 1) if host.peer_to_peer else 1
        out = self._bus_between(host) / near * (gpus - 1) / (gpus - beside)
        far = self.sockets_bytes_per_s * (gpus - 1) / (gpus / 2) ** 2
        return out if gpus <= _TO_A_SOCKET else min(out, far)

    def from_one(self, host: Host, gpus: int) -> float:
        """Bytes a second in which one GPU sends all others the same, together: in a mesh those that
        it has no link to wait for its bus."""
        if host.fabric is Fabric.MESH and gpus > _LINKED:
            return self.bus(host.chip) * (gpus - 1) / (gpus - 1 - _LINKED)
        return self.across(host, gpus)

    def _bus_between(self, host: Host) -> float:
        """What the bus gives a GPU to others; half where one writes and then the other reads."""
        return host.peer_bytes_per_s * self.pcie * (1.0 if host.peer_to_peer else 0.5)

    def outside(self, host: Host) -> float:
        """What the GPUs of a machine get to other machines, together, bytes per second."""
        return host.nic_bytes_per_s * self.nic * (1.0 if host.rdma else self.tcp)

    def bus(self, gpu: Gpu) -> float:
        """What a copy between the host's memory and the GPU gets, bytes per second."""
        return gpu.pcie_bytes_per_s * self.host

    def copies(self, host: Host, gpus: int) -> float:
        """What a copy gets, bytes per second, where so many GPUs of a machine copy at once: those
        of a switch share its way to the host."""
        return self.bus(host.chip) / min(gpus, host.gpus_per_switch)
