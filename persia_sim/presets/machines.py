"""Machines by name, with GPUs and without: data sheet figures, list prices and their dates."""

from __future__ import annotations

from dataclasses import replace

from persia_sim.model.machine import Fabric, Gpu, Host

_SHEET = "vendor's data sheet, without sparsity"
_BUS = {3: 16e9, 4: 32e9, 5: 64e9}
"""PCIe generation -> nominal bytes per second of 16 lanes, each way."""
_GBIT = 1e9 / 8
_GIB = 2.0**30
_MONTH_H = 730.0
_US = "on-demand list price in US regions, {}; from memory, check before you spend"
_EUROPE = "sustained-use list price, europe-west4, month of 730 h, 2021-11"
_MANIFEST = "GKE manifest of the 100T run, 2021-11-08, and the machine type's data sheet"
PAPER = "benchmark page of the paper (100 CPU hosts of 52 cores, 480 GB, 100 Gbit/s)"
BENCH_2021 = "first public benchmark page of Persia, 2021-09-10 (20 CPU servers at 10 Gbit/s)"


def _gpu(
    name: str, fp32: float, tf32: float | None, fp16: float, hbm: float, size: float, bus: int
) -> Gpu:
    return Gpu(
        name=name, fp32_flops=fp32 * 1e12, tf32_flops=tf32 and tf32 * 1e12,
        fp16_flops=fp16 * 1e12, hbm_bytes_per_s=hbm * 1e9, hbm_bytes=size * 1e9,
        pcie_bytes_per_s=_BUS[bus], source=f"{_SHEET}; PCIe {bus}.0 x16",
    )  # fmt: skip


GPUS = {
    "v100": _gpu("V100-SXM2-32GB", 15.7, None, 125, 900, 32, 3),
    "a100-40": _gpu("A100-SXM4-40GB", 19.5, 156, 312, 1555, 40, 4),
    "a100-80": _gpu("A100-SXM4-80GB", 19.5, 156, 312, 2039, 80, 4),
    "h100": _gpu("H100-SXM5-80GB", 67, 495, 989, 3350, 80, 5),
    "h200": _gpu("H200-SXM5-141GB", 67, 495, 989, 4800, 141, 5),
    "b200": _gpu("B200-SXM-180GB", 80, 1100, 2250, 8000, 180, 5),
    "l4": _gpu("L4-24GB", 30.3, 60, 121, 300, 24, 4),
}
"""By name."""


def _node(
    name: str, gpu: str, fabric: Fabric, intra: float, nic_gbit: float, cores: int, gib: float,
    speed: float, usd: float = 0.0, date: str = "", rdma: bool = True, bus: int = 0,
) -> Host:  # fmt: skip
    chip = GPUS[gpu]
    price = _US.format(date) if usd else "no list price"
    return Host(
        name=name, cores=cores, ram_bytes=gib * _GIB, core_speed=speed,
        nic_bytes_per_s=nic_gbit * _GBIT, rdma=rdma, gpus=8, fabric=fabric,
        gpu=replace(chip, pcie_bytes_per_s=_BUS[bus]) if bus else chip,
        intra_bytes_per_s=intra * 1e9, usd_per_hour=usd,
        source=f"{_SHEET}; NICs {nic_gbit:g} Gbit/s a machine; core speed assumed; {price}",
    )  # fmt: skip


_MESH, _SWITCH = Fabric.MESH, Fabric.SWITCH
_V100 = "v100", _MESH, 150
_MACHINES = (
    _node("dgx1-v100", *_V100, 400, 80, 512, 0.7),
    _node("dgx-a100", "a100-80", _SWITCH, 300, 1600, 256, 2048, 0.8),
    _node("dgx-h100", "h100", _SWITCH, 450, 3200, 224, 2048, 1.0),
    _node("dgx-b200", "b200", _SWITCH, 900, 3200, 224, 4096, 1.0),
    _node("v100-10gbit", *_V100, 10, 96, 512, 0.7, rdma=False),
    _node("v100-100gbit", *_V100, 100, 96, 512, 0.7, rdma=False),
    _node("p3.16xlarge", *_V100, 25, 64, 488, 0.7, 24.48, "2020-06", rdma=False),
    _node("p4d.24xlarge", "a100-40", _SWITCH, 300, 400, 96, 1152, 0.75, 32.77, "2021-11", bus=3),
    _node("nd96amsr-a100-v4", "a100-80", _SWITCH, 300, 1600, 96, 1900, 0.8, 32.77, "2022-06"),
    _node("p5.48xlarge", "h100", _SWITCH, 450, 3200, 192, 2048, 0.9, 98.32, "2023-08"),
    _node("p5e.48xlarge", "h200", _SWITCH, 450, 3200, 192, 2048, 0.9),
    _node("p6-b200.48xlarge", "b200", _SWITCH, 900, 3200, 192, 2048, 1.0),
    _node("g6.48xlarge", "l4", Fabric.PCIE, 32, 100, 192, 768, 0.9, 13.35, "2024-06", rdma=False),
    replace(
        _node("a2-highgpu-8g", "a100-40", _SWITCH, 300, 100, 96, 680, 0.75, rdma=False),
        usd_per_hour=21888 / _MONTH_H,
        source=f"{_MANIFEST}; core speed assumed; {_EUROPE}",
    ),
    Host(
        name="2 x E5-2680 v4", cores=52, ram_bytes=480e9, nic_bytes_per_s=100 * _GBIT,
        core_speed=0.7, memory_bytes_per_s=100e9,
        source=f"{PAPER}; core speed and memory bandwidth assumed",
    ),
    Host(
        name="c2-standard-30", cores=30, ram_bytes=120 * _GIB, nic_bytes_per_s=32 * _GBIT,
        core_speed=0.89, memory_bytes_per_s=80e9, usd_per_hour=1007 / _MONTH_H,
        source=f"{_MANIFEST}; memory bandwidth assumed; {_EUROPE}",
    ),
    Host(
        name="m2-ultramem-416", cores=416, ram_bytes=11776 * _GIB, nic_bytes_per_s=32 * _GBIT,
        core_speed=0.75, memory_bytes_per_s=400e9, usd_per_hour=45251 / _MONTH_H,
        source=f"{_MANIFEST}; memory bandwidth assumed; {_EUROPE}",
    ),
)  # fmt: skip

MACHINES = {host.name: host for host in _MACHINES}
"""By name. Where NICs have RDMA, or only TCP, is what the machine's network offers."""
