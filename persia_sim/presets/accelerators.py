"""GPUs and the machines that hold them, with list prices and the dates of those."""

from __future__ import annotations

from persia_sim.model.cluster import Gpu
from persia_sim.sharded.system import Accelerator, Fabric, Node, Precision

_SHEET = "vendor's data sheet, without sparsity"
_BUS = {3: 16e9, 4: 32e9, 5: 64e9}
"""PCIe generation -> nominal bytes per second of 16 lanes, each way."""
_GBIT = 1e9 / 8
_PRICE = "on-demand list price in US regions, {}; from memory, check before you spend"


def _gpu(
    name: str, fp32: float, tf32: float | None, fp16: float, hbm: float, size: float,
    source: str = _SHEET,
) -> Accelerator:  # fmt: skip
    return Accelerator(
        name=name, fp32_flops=fp32 * 1e12, tf32_flops=tf32 and tf32 * 1e12,
        fp16_flops=fp16 * 1e12, hbm_bytes_per_s=hbm * 1e9, hbm_bytes=size * 1e9, source=source,
    )  # fmt: skip


ACCELERATORS = {
    "v100": _gpu("V100-SXM2-32GB", 15.7, None, 125, 900, 32),
    "a100-40": _gpu("A100-SXM4-40GB", 19.5, 156, 312, 1555, 40),
    "a100-80": _gpu("A100-SXM4-80GB", 19.5, 156, 312, 2039, 80),
    "h100": _gpu("H100-SXM5-80GB", 67, 495, 989, 3350, 80),
    "h200": _gpu("H200-SXM5-141GB", 67, 495, 989, 4800, 141),
    "b200": _gpu("B200-SXM-180GB", 80, 1100, 2250, 8000, 180),
    "l4": _gpu("L4-24GB", 30.3, 60, 121, 300, 24),
}
"""By name."""


def _node(
    name: str, gpu: str, gpus: int, fabric: Fabric, intra: float, nic_gbit: float, bus: int,
    usd: float = 0.0, date: str = "", rdma: bool = True,
) -> Node:  # fmt: skip
    price = f"; {_PRICE.format(date)}" if usd else "; no list price"
    return Node(
        name=name, accelerator=ACCELERATORS[gpu], gpus=gpus, fabric=fabric,
        intra_bytes_per_s=intra * 1e9, inter_bytes_per_s=nic_gbit * _GBIT / gpus, rdma=rdma,
        host_bytes_per_s=_BUS[bus], usd_per_hour=usd,
        source=f"{_SHEET}; NICs {nic_gbit:g} Gbit/s a machine{price}",
    )  # fmt: skip


_MACHINES = (
    _node("dgx1-v100", "v100", 8, Fabric.MESH, 150, 400, 3),
    _node("dgx-a100", "a100-80", 8, Fabric.SWITCH, 300, 1600, 4),
    _node("dgx-h100", "h100", 8, Fabric.SWITCH, 450, 3200, 5),
    _node("dgx-b200", "b200", 8, Fabric.SWITCH, 900, 3200, 5),
    _node("v100-10gbit", "v100", 8, Fabric.MESH, 150, 10, 3, rdma=False),
    _node("v100-100gbit", "v100", 8, Fabric.MESH, 150, 100, 3, rdma=False),
    _node("p3.16xlarge", "v100", 8, Fabric.MESH, 150, 25, 3, 24.48, "2020-06", rdma=False),
    _node("a2-highgpu-8g", "a100-40", 8, Fabric.SWITCH, 300, 100, 4, 29.39, "2021-11", rdma=False),
    _node("p4d.24xlarge", "a100-40", 8, Fabric.SWITCH, 300, 400, 3, 32.77, "2021-11"),
    _node("nd96amsr-a100-v4", "a100-80", 8, Fabric.SWITCH, 300, 1600, 4, 32.77, "2022-06"),
    _node("p5.48xlarge", "h100", 8, Fabric.SWITCH, 450, 3200, 5, 98.32, "2023-08"),
    _node("p5e.48xlarge", "h200", 8, Fabric.SWITCH, 450, 3200, 5),
    _node("p6-b200.48xlarge", "b200", 8, Fabric.SWITCH, 900, 3200, 5),
    _node("g6.48xlarge", "l4", 8, Fabric.PCIE, 32, 100, 4, 13.35, "2024-06", rdma=False),
)

NODES = {node.name: node for node in _MACHINES}
"""By name. Where NICs have RDMA, or only TCP, is what the machine's network offers."""

GPUS = {
    name: Gpu(
        name=gpu.name,
        peak_flops=gpu.peak_flops(Precision.FP32),
        pcie_bytes_per_s=0.75 * _BUS[3 if name == "v100" else 5 if name in ("h100", "h200", "b200")
                                    else 4],
        source=f"{_SHEET}, float32; PCIe x16 at three quarters of nominal, as commonly achieved",
    )
    for name, gpu in ACCELERATORS.items()
}  # fmt: skip
"""The same GPUs for clusters of embedding servers."""
