"""Machines, clusters, workloads and costs by name.

Sources say what is documented, a list price, assumed or fitted.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from persia_sim.base.files import read_document
from persia_sim.cluster.cluster import Cluster, Link, Role
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.machine import Fabric, Gpu, Host
from persia_sim.cluster.workload import Workload
from persia_sim.presets.costs import BATCHES, CATALOGUE, fitted

_SHEET = "vendor's data sheet, without sparsity"
_BUS = {3: 16e9, 4: 32e9, 5: 64e9}
"""PCIe generation -> nominal bytes per second of 16 lanes, each way."""
_GBIT = 1e9 / 8
_GIB = 2.0**30
_MONTH_H = 730.0
_US = "on-demand list price in US regions, {}; from memory, check before you spend"
_EUROPE = "sustained-use list price, europe-west4, month of 730 h, 2021-11"
_MANIFEST = "GKE manifest of the 100T run, 2021-11-08"
_MACHINE_TYPE = f"{_MANIFEST}, and the machine type's data sheet"
PAPER = "benchmark page of the paper (100 CPU hosts of 52 cores, 480 GB, 100 Gbit/s)"
BENCH_2021 = "first public benchmark page of Persia, 2021-09-10 (20 CPU servers at 10 Gbit/s)"


def _gpu(
    name: str, fp32: float, tf32: float | None, fp16: float, hbm: float, size: float, bus: int
) -> Gpu:
    return Gpu(
        name=name,
        fp32_flops=fp32 * 1e12,
        tf32_flops=tf32 and tf32 * 1e12,
        fp16_flops=fp16 * 1e12,
        hbm_bytes_per_s=hbm * 1e9,
        hbm_bytes=size * 1e9,
        pcie_bytes_per_s=_BUS[bus],
        source=f"{_SHEET}; PCIe {bus}.0 x16",
    )


GPUS = {
    "v100": _gpu("V100-SXM2-32GB", 15.7, None, 125, 900, 32, 3),
    "a100-40": _gpu("A100-SXM4-40GB", 19.5, 156, 312, 1555, 40, 4),
    "a100-80": _gpu("A100-SXM4-80GB", 19.5, 156, 312, 2039, 80, 4),
    "h100": _gpu("H100-SXM5-80GB", 67, 495, 989, 3350, 80, 5),
    "h200": _gpu("H200-SXM5-141GB", 67, 495, 989, 4800, 141, 5),
    "b200": _gpu("B200-SXM-180GB", 80, 1100, 2250, 8000, 180, 5),
    "l4": _gpu("L4-24GB", 30.3, 60, 121, 300, 24, 4),
}
"""GPUs by name."""


def _node(
    name: str,
    gpu: str,
    fabric: Fabric,
    intra: float,
    nic_gbit: float,
    cores: int,
    gib: float,
    speed: float,
    usd: float = 0.0,
    date: str = "",
    rdma: bool = True,
    bus: int = 0,
) -> Host:
    # Prices of other regions or dates differ: the source says which.
    chip = GPUS[gpu]
    price = _US.format(date) if usd else "no list price"

    # Eight GPUs a host, as the datasheets have them.
    return Host(
        name=name,
        cores=cores,
        ram_bytes=gib * _GIB,
        core_speed=speed,
        nic_bytes_per_s=nic_gbit * _GBIT,
        rdma=rdma,
        gpus=8,
        fabric=fabric,
        gpu=replace(chip, pcie_bytes_per_s=_BUS[bus]) if bus else chip,
        intra_bytes_per_s=intra * 1e9,
        usd_per_hour=usd,
        source=f"{_SHEET}; NICs {nic_gbit:g} Gbit/s a machine; core speed assumed; {price}",
    )


_MESH = Fabric.MESH
_SWITCH = Fabric.SWITCH
_V100 = "v100", _MESH, 150
_MACHINES = (
    _node("dgx1-v100", *_V100, 400, 80, 512, 0.7),
    _node("dgx-a100", "a100-80", _SWITCH, 300, 1600, 256, 2048, 0.9),
    _node("dgx-h100", "h100", _SWITCH, 450, 3200, 224, 2048, 1.0),
    _node("dgx-b200", "b200", _SWITCH, 900, 3200, 224, 4096, 1.0),
    _node("v100-10gbit", *_V100, 10, 96, 512, 0.7, rdma=False),
    _node("v100-100gbit", *_V100, 100, 96, 512, 0.7, rdma=False),
    _node("p3.16xlarge", *_V100, 25, 64, 488, 0.7, 24.48, "2020-06", rdma=False),
    _node("p4d.24xlarge", "a100-40", _SWITCH, 300, 400, 96, 1152, 0.75, 32.77, "2021-11", bus=3),
    _node("nd96amsr-a100-v4", "a100-80", _SWITCH, 300, 1600, 96, 1900, 0.9, 32.77, "2022-06"),
    _node("p5.48xlarge", "h100", _SWITCH, 450, 3200, 192, 2048, 0.9, 98.32, "2023-08"),
    _node("p5e.48xlarge", "h200", _SWITCH, 450, 3200, 192, 2048, 0.9),
    _node("p6-b200.48xlarge", "b200", _SWITCH, 900, 3200, 192, 2048, 1.0),
    _node("g6.48xlarge", "l4", Fabric.PCIE, 32, 100, 192, 768, 0.9, 13.35, "2024-06", rdma=False),
    replace(
        _node("a2-highgpu-8g", "a100-40", _SWITCH, 300, 100, 96, 680, 0.75, rdma=False),
        usd_per_hour=21888 / _MONTH_H,
        source=f"{_MACHINE_TYPE}; core speed assumed; {_EUROPE}",
    ),
    Host(
        name="2 x E5-2680 v4", cores=52, ram_bytes=480e9, nic_bytes_per_s=100 * _GBIT,
        core_speed=0.7, memory_bytes_per_s=100e9,
        source=f"{PAPER}; core speed and memory bandwidth assumed",
    ),
    Host(
        name="c2-standard-30", cores=30, ram_bytes=120 * _GIB, nic_bytes_per_s=32 * _GBIT,
        core_speed=0.89, memory_bytes_per_s=80e9, usd_per_hour=1007 / _MONTH_H,
        source=f"{_MACHINE_TYPE}; memory bandwidth assumed; {_EUROPE}",
    ),
    Host(
        name="m2-ultramem-416", cores=416, ram_bytes=11776 * _GIB, nic_bytes_per_s=32 * _GBIT,
        core_speed=0.75, memory_bytes_per_s=400e9, usd_per_hour=45251 / _MONTH_H,
        source=f"{_MACHINE_TYPE}; memory bandwidth assumed; {_EUROPE}",
    ),
)  # fmt: skip

MACHINES = {host.name: host for host in _MACHINES}
"""Machines by name. Where NICs have RDMA, or only TCP, is what the machine's network offers."""


def _v100(name: str, cpu: Host, hosts: int, source: str) -> Cluster:
    """Half of the CPU hosts run workers, half run servers: the split is not published."""
    # One process on each CPU host, worker or server.
    role = Role(
        host=cpu,
        hosts=hosts // 2,
        processes_per_host=1,
        cores_per_process=48,
        ram_bytes_per_process=440e9,
    )

    # One host of eight GPUs beside them.
    return Cluster(
        name=name,
        ranks=8,
        nn=Role(
            host=MACHINES["v100-100gbit"],
            hosts=1,
            processes_per_host=8,
            cores_per_process=10,
            ram_bytes_per_process=60 * _GIB,
        ),
        embedding_workers=role,
        servers=role,
        loaders=64,
        link=Link(latency_s=50e-6, source="assumed: TCP inside one site"),
        source=f"{source}; split into workers and servers and number of loaders assumed",
    )


@cache
def v100_2021_09() -> Cluster:
    """The cluster of the public data sets' bars: one host of 8 V100, 20 CPU hosts at 10 Gbit/s."""
    cpu = replace(MACHINES["2 x E5-2680 v4"], nic_bytes_per_s=10 * _GBIT, source=BENCH_2021)
    return _v100("v100-2021-09", cpu, 20, BENCH_2021)


@cache
def v100_paper() -> Cluster:
    """The cluster of the Kwai series: up to 64 V100, 100 CPU hosts at 100 Gbit/s."""
    cluster = _v100("v100-paper", MACHINES["2 x E5-2680 v4"], 100, PAPER)
    return cluster.resized(64)  # 8 loaders a rank


@cache
def gcp_100t() -> Cluster:
    """The 100-trillion-parameter run: 120 server processes on 30 hosts, 100 workers, 64 A100."""
    # The machines and processes of the original's manifest.
    return Cluster(
        name="gcp-100t",
        ranks=64,
        nn=Role(
            host=MACHINES["a2-highgpu-8g"],
            hosts=8,
            processes_per_host=8,
            cores_per_process=10,
            ram_bytes_per_process=75 * _GIB,
        ),
        embedding_workers=Role(
            host=MACHINES["c2-standard-30"],
            hosts=100,
            processes_per_host=1,
            cores_per_process=28,
            ram_bytes_per_process=100 * _GIB,
        ),
        servers=Role(
            host=MACHINES["m2-ultramem-416"],
            hosts=30,
            processes_per_host=4,
            cores_per_process=80,
            ram_bytes_per_process=2500 * _GIB,
        ),
        loaders=240,
        source=_MANIFEST,
    )


@cache
def h100_host() -> Cluster:
    """One rented host of 8 H100, its rows on CPU servers: 4 hosts of workers, 3 of servers."""
    # What somebody could rent today to do the same; as many as `size` takes for a rate.
    return Cluster(
        name="h100-host",
        ranks=8,
        nn=Role(
            host=MACHINES["p5.48xlarge"],
            hosts=1,
            processes_per_host=8,
            cores_per_process=12,
            ram_bytes_per_process=200 * _GIB,
        ),
        embedding_workers=Role(
            host=MACHINES["c2-standard-30"],
            hosts=4,
            processes_per_host=1,
            cores_per_process=28,
            ram_bytes_per_process=100 * _GIB,
        ),
        servers=Role(
            host=MACHINES["m2-ultramem-416"],
            hosts=3,
            processes_per_host=4,
            cores_per_process=80,
            ram_bytes_per_process=2500 * _GIB,
        ),
        loaders=96,
        source="nobody's: a cluster that one could rent; as many hosts as `persia-sim size` takes"
        " for 500,000 samples/s of kwai-video; number of loaders assumed",
    )


@cache
def this_host() -> Cluster:
    """This machine alone: every role is a process on it, and NICs are its memory."""
    # A core in the place of a GPU.
    cores = os.cpu_count() or 1
    ram = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    core = Gpu(
        name="one CPU core",
        fp32_flops=50e9,
        pcie_bytes_per_s=10e9,
        is_host_core=True,
        source="assumed; `runtime profile` measures it",
    )
    host = Host(
        name="this host",
        cores=cores,
        ram_bytes=ram,
        nic_bytes_per_s=5e9,
        core_speed=1.0,
        memory_bytes_per_s=10e9,
        gpu=core,
        gpus=cores,
        source="operating system; rates assumed",
    )

    return _alone("this-host", host, source="the machine that runs the simulation")


def _alone(name: str, host: Host, source: str) -> Cluster:
    """One machine in every role: a process of each role may use all of its cores."""
    # Roles share its memory; a rank has one core for what surrounds its network.
    role = Role(
        host=host,
        hosts=1,
        processes_per_host=1,
        cores_per_process=host.cores,
        ram_bytes_per_process=host.ram_bytes / 4,
    )
    return Cluster(
        name=name,
        ranks=1,
        nn=replace(role, cores_per_process=1),
        embedding_workers=role,
        servers=role,
        loaders=1,
        link=Link(latency_s=5e-6, source="assumed: a queue between threads"),
        source=source,
    )


def _one_gpu(gpu: str) -> Cluster:
    """A virtual machine with one GPU and 16 cores, which holds all: rows and loaders, too."""
    cores, ram = 16, 128 * _GIB
    host = Host(
        name=f"one {gpu.upper()}, 16 cores",
        cores=cores,
        ram_bytes=ram,
        nic_bytes_per_s=5e9,
        core_speed=1.0,
        memory_bytes_per_s=100e9,
        gpu=GPUS[gpu],
        gpus=1,
        source=f"{_SHEET}; 16 cores, 128 GiB; core speed and memory bandwidth assumed",
    )

    measured = "a virtual machine with one GPU; `runtime profile --device cuda` measures the rest"
    return _alone(f"{gpu}-16-cores", host, source=measured)


@cache
def h100_16_cores() -> Cluster:
    """One H100 and 16 cores of a virtual machine: the network on the GPU, the rows beside it."""
    return _one_gpu("h100")


@cache
def h200_16_cores() -> Cluster:
    """One H200 and 16 cores of a virtual machine: the network on the GPU, the rows beside it."""
    return _one_gpu("h200")


CLUSTERS = {
    "v100-2021-09": v100_2021_09,
    "v100-paper": v100_paper,
    "gcp-100t": gcp_100t,
    "h100-host": h100_host,
    "h100-16-cores": h100_16_cores,
    "h200-16-cores": h200_16_cores,
    "this-host": this_host,
}
SIZED_FOR = {"h100-host": 5e5}
"""Clusters that nobody has -> the samples per second of kwai-video in hybrid for which
`persia-sim size` takes as many hosts as they have."""
SPLIT_ASSUMED = ("v100-2021-09", "v100-paper")
"""Clusters of which the number of CPU hosts is published, but not how many of them are workers."""
UNFITTED = ("h100-host", "h100-16-cores", "h200-16-cores", "this-host")
"""Clusters of which no throughput was published: their costs are the catalogue's."""


@cache
def workloads() -> dict[str, Workload]:
    """All named workloads."""
    syn = {f"criteo-syn{n}": criteo_syn(n) for n in range(1, 6)}
    return {
        "taobao-ad": public_set("taobao-ad", 14, 0, 29e6),
        "avazu-ad": public_set("avazu-ad", 22, 0, 134e6),
        "criteo-ad": public_set("criteo-ad", 26, 13, 540e6),
        "kwai-video": kwai_video(),
        **syn,
    }


def rows_of(workload: str) -> str:
    """How servers keep the rows of a workload, by the names of both: the 100T run's without
    optimiser state, all others' with Adagrad's. A file's are kept as its ``update`` says, or as its
    base's."""
    if workload.endswith(".toml"):
        document = read_document(Path(workload))
        if (update := document.get("update")) in _KEPT:
            return _KEPT[update]
        workload = str(document.get("base"))
    return "fp16-lean" if workload.startswith("criteo-syn") else "f32-adagrad"


_KEPT = {
    "sgd": "f32-sgd",
    "rowwise_adagrad": "f32-sgd",
    "adagrad": "f32-adagrad",
    "lazy_adam": "f32-adam",
    "dense_adam": "f32-adam",
}
"""Optimiser of rows -> how servers keep them."""


@cache
def costs_of(cluster: str) -> Costs:
    """The cost laws that belong to a cluster's preset: fitted where it has published figures."""
    known = cluster in CLUSTERS and cluster not in UNFITTED
    return fitted(cluster) if known else CATALOGUE


def public_set(name: str, fields: int, dense: int, parameters: float) -> Workload:
    """A public data set with so many fields, dense features and row parameters."""
    return Workload(
        name=name,
        fields=fields,
        dense_features=dense,
        dim=16,
        rows=parameters / 16,
        batch_per_rank=512,
        source="public columns of the set, dim and batch a rank of 2021-09; skew assumed",
    )


def criteo_syn(number: int) -> Workload:
    """Criteo's columns with tables of 6.25e12 parameters (1) to 100e12 (5)."""
    parameters = 6.25e12 * 2 ** (number - 1)
    return Workload(
        name=f"criteo-syn{number}",
        fields=26,
        dense_features=13,
        dim=128,
        rows=parameters / 128,
        batch_per_rank=BATCHES["gcp-100t"],
        source="Criteo's columns; dim 128 is the least that fits the servers' memory; batch a rank "
        "fitted",
    )


def kwai_video() -> Workload:
    """Kwai's production set of two trillion parameters."""
    return Workload(
        name="kwai-video",
        fields=88,
        dim=64,
        rows=2e12 / 64,
        batch_per_rank=BATCHES["v100-paper"],
        source="34 M dense parameters give an input of about 5,600; its split into 88 fields "
        "of 64 is assumed, the batch a rank is fitted",
    )
