"""Clusters of published runs, and this host. Sources say what is documented, what assumed."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

from persia_sim.model.cluster import Cluster, Gpu, Host, Link, Role

_GIB = 2.0**30
_GBIT = 1e9 / 8
_MONTH_H = 730.0
_PRICES = "sustained-use list prices, europe-west4, month of 730 h"
_BENCH_2021 = "first public benchmark page of Persia, 2021-09-10 (20 CPU servers at 10 Gbit/s)"
_PAPER = "benchmark page of the paper (100 CPU hosts of 52 cores, 480 GB, 100 Gbit/s)"
_MANIFEST = "GKE manifest of the 100T run, 2021-11-08, and the machine types' data sheets"

V100 = Gpu(
    name="V100-SXM2-32GB",
    peak_flops=15.7e12,
    pcie_bytes_per_s=12e9,
    source="data sheet, float32; PCIe 3.0 x16 as commonly achieved",
)
A100 = Gpu(
    name="A100-SXM4-40GB",
    peak_flops=19.5e12,
    pcie_bytes_per_s=24e9,
    source="data sheet, float32; PCIe 4.0 x16 as commonly achieved",
)


def _v100_host(gbit_per_s: float) -> Host:
    return Host(
        name="8 x V100",
        cores=96,
        ram_bytes=512 * _GIB,
        nic_bytes_per_s=gbit_per_s * _GBIT,
        core_speed=0.7,
        source=f"{_PAPER}; cores and memory assumed",
    )


def _cpu_host(gbit_per_s: float) -> Host:
    return Host(
        name="2 x E5-2680 v4",
        cores=52,
        ram_bytes=480e9,
        nic_bytes_per_s=gbit_per_s * _GBIT,
        core_speed=0.7,
        memory_bytes_per_s=100e9,
        source=f"{_BENCH_2021}; core speed and memory bandwidth assumed",
    )


def _v100(name: str, gbit_per_s: float, hosts: int, source: str) -> Cluster:
    """Half of the CPU hosts run workers, half run servers: the split is not published."""
    cpu = _cpu_host(gbit_per_s)
    role = Role(
        host=cpu, hosts=hosts // 2, processes_per_host=1, cores_per_process=48,
        ram_bytes_per_process=440e9,
    )  # fmt: skip
    return Cluster(
        name=name,
        ranks=8,
        gpu=V100,
        nn=Role(
            host=_v100_host(100), hosts=1, processes_per_host=8, cores_per_process=10,
            ram_bytes_per_process=60 * _GIB,
        ),
        embedding_workers=role,
        servers=role,
        loaders=64,
        link=Link(latency_s=50e-6, source="assumed: TCP inside one site"),
        source=f"{source}; split into workers and servers and number of loaders assumed",
    )  # fmt: skip


@cache
def v100_2021_09() -> Cluster:
    """The cluster of the public data sets' bars: one host of 8 V100, 20 CPU hosts at 10 Gbit/s."""
    return _v100("v100-2021-09", 10, 20, _BENCH_2021)


@cache
def v100_paper() -> Cluster:
    """The cluster of the Kwai series: up to 64 V100, 100 CPU hosts at 100 Gbit/s."""
    return _v100("v100-paper", 100, 100, _PAPER).resized(64)  # 8 loaders a rank


@cache
def gcp_100t() -> Cluster:
    """The 100-trillion-parameter run: 120 server processes on 30 hosts, 100 workers, 64 A100."""
    return Cluster(
        name="gcp-100t",
        ranks=64,
        gpu=A100,
        nn=Role(
            host=Host(
                name="a2-highgpu-8g", cores=96, ram_bytes=680 * _GIB,
                nic_bytes_per_s=100 * _GBIT, core_speed=0.75,
                usd_per_hour=21888 / _MONTH_H, source=f"{_MANIFEST}; {_PRICES}",
            ),
            hosts=8, processes_per_host=8, cores_per_process=10,
            ram_bytes_per_process=75 * _GIB,
        ),
        embedding_workers=Role(
            host=Host(
                name="c2-standard-30", cores=30, ram_bytes=120 * _GIB,
                nic_bytes_per_s=32 * _GBIT, core_speed=0.89, memory_bytes_per_s=80e9,
                usd_per_hour=1007 / _MONTH_H, source=f"{_MANIFEST}; {_PRICES}",
            ),
            hosts=100, processes_per_host=1, cores_per_process=28,
            ram_bytes_per_process=100 * _GIB,
        ),
        servers=Role(
            host=Host(
                name="m2-ultramem-416", cores=416, ram_bytes=11776 * _GIB,
                nic_bytes_per_s=32 * _GBIT, core_speed=0.75, memory_bytes_per_s=400e9,
                usd_per_hour=45251 / _MONTH_H,
                source=f"{_MANIFEST}; {_PRICES}; memory bandwidth assumed",
            ),
            hosts=30, processes_per_host=4, cores_per_process=80,
            ram_bytes_per_process=2500 * _GIB,
        ),
        loaders=240,
        link=Link(latency_s=50e-6, source="assumed: TCP inside one zone"),
        source=_MANIFEST,
    )  # fmt: skip


@cache
def this_host() -> Cluster:
    """This machine alone: every role is a process on it, and NICs are its memory."""
    cores = os.cpu_count() or 1
    ram = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    host = Host(
        name="this host", cores=cores, ram_bytes=ram, nic_bytes_per_s=5e9, core_speed=1.0,
        memory_bytes_per_s=10e9, source="operating system; rates assumed",
    )  # fmt: skip
    role = Role(
        host=host, hosts=1, processes_per_host=1, cores_per_process=cores,
        ram_bytes_per_process=ram / 4,
    )  # fmt: skip
    return Cluster(
        name="this-host",
        ranks=1,
        gpu=Gpu(
            name="one CPU core",
            peak_flops=50e9,
            pcie_bytes_per_s=10e9,
            is_host_core=True,
            source="assumed; `runtime profile` measures it",
        ),
        nn=replace(role, cores_per_process=1),
        embedding_workers=role,
        servers=role,
        loaders=1,
        link=Link(latency_s=5e-6, source="assumed: a queue between threads"),
        source="the machine that runs the simulation",
    )
