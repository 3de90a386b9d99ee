"""Named clusters, workloads and costs. Numbers from documents say which; fitted ones say so."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

from persia_sim.model.allreduce import DenseSync
from persia_sim.model.cluster import Cluster, Gpu, Host, Link, Role
from persia_sim.model.costs import Costs, Law
from persia_sim.model.workload import Workload
from persia_sim.presets.fits import FITS

_GIB = 2.0**30
_GBIT = 1e9 / 8
_MONTH_H = 730.0
_PRICES = "sustained-use list prices, europe-west4, month of 730 h"
_BENCH_2021 = "first public benchmark page of Persia, 2021-09-10 (20 CPU servers at 10 Gbit/s)"
_PAPER = "benchmark page of the paper (100 CPU hosts of 52 cores, 480 GB, 100 Gbit/s)"
_MANIFEST = "GKE manifest of the 100T run, 2021-11-08, and the machine types' data sheets"
_MEASURED = (
    "one core of a Sapphire-Rapids-class Xeon, 6 GB table, rows of 512 bytes: probe, lock, relink "
    "and copy 0.28 us; probe, lock and Adagrad 0.50 us; pooling 23 ns; memcpy about 11 GB/s"
)

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
    return _v100("v100-paper", 100, 100, _PAPER).with_ranks(64)


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


CLUSTERS = {
    "v100-2021-09": v100_2021_09,
    "v100-paper": v100_paper,
    "gcp-100t": gcp_100t,
    "this-host": this_host,
}


def _public(name: str, fields: int, dense: int, parameters: float) -> Workload:
    return Workload(
        name=name,
        fields=fields,
        dense_features=dense,
        dim=16,
        rows=parameters / 16,
        batch_per_rank=512,
        source="public columns of the set, dim and batch a rank of 2021-09; skew assumed",
    )


def _criteo_syn(number: int) -> Workload:
    parameters = 6.25e12 * 2 ** (number - 1)
    return Workload(
        name=f"criteo-syn{number}",
        fields=26,
        dense_features=13,
        dim=128,
        rows=parameters / 128,
        batch_per_rank=FITS["gcp-100t"]["batch_per_rank"].integer,
        source="Criteo's columns; dim 128 is the least that fits the servers' memory; batch a rank "
        "fitted",
    )


@cache
def workloads() -> dict[str, Workload]:
    """All named workloads."""
    syn = {f"criteo-syn{n}": _criteo_syn(n) for n in range(1, 6)}
    return {
        "taobao-ad": _public("taobao-ad", 14, 0, 29e6),
        "avazu-ad": _public("avazu-ad", 22, 0, 134e6),
        "criteo-ad": _public("criteo-ad", 26, 13, 540e6),
        "kwai-video": Workload(
            name="kwai-video",
            fields=88,
            dim=64,
            rows=2e12 / 64,
            batch_per_rank=FITS["v100-paper"]["batch_per_rank"].integer,
            source="34 M dense parameters give an input of about 5,600; its split into 88 fields "
            "of 64 is assumed, the batch a rank is fitted",
        ),
        **syn,
    }


CATALOGUE = Costs(
    load=Law(fixed_s=2e-3, per_item_s=10e-6, source="assumed: a Python loader"),
    worker_forward=Law(per_item_s=30e-9, source=_MEASURED),
    worker_rpc=Law(fixed_s=30e-6, source="assumed: one HTTP/1.1 call each way"),
    worker_pool=Law(per_item_s=23e-9, per_byte_s=0.5e-9, source=f"{_MEASURED}; passes assumed"),
    worker_scatter=Law(per_item_s=23e-9, per_byte_s=0.5e-9, source=f"{_MEASURED}; passes assumed"),
    server_lookup=Law(
        fixed_s=50e-6, per_item_s=120e-9, per_byte_s=0.31e-9, source=f"{_MEASURED}; call assumed"
    ),
    server_update=Law(
        fixed_s=50e-6, per_item_s=120e-9, per_byte_s=0.74e-9, source=f"{_MEASURED}; call assumed"
    ),
    server_create=Law(per_item_s=200e-9, per_byte_s=0.3e-9, source="assumed: allocate and draw"),
    copy_in=Law(fixed_s=100e-6, per_byte_s=0.2e-9, source="assumed: one copy to pinned memory"),
    copy_out=Law(fixed_s=100e-6, per_byte_s=0.2e-9, source="assumed: one copy from pinned memory"),
    gpu_fixed_s=0.0,
    gpu_efficiency=((512, 0.384),),
    dense_sync=DenseSync(
        intra_bytes_per_s=8.4e9,
        inter_bytes_per_s=12.5e9 * 0.97,
        source="nominal between hosts; inside a host without peer-to-peer",
    ),
    source="catalogue",
)


def _fitted_2021() -> Costs:
    fit = FITS["v100-2021-09"]
    return replace(
        CATALOGUE,
        gpu_efficiency=((512, fit["gpu_efficiency"].value),),
        dense_sync=replace(
            CATALOGUE.dense_sync,
            intra_bytes_per_s=fit["intra_bytes_per_s"].value,
            overhead_s=fit["sync_overhead_s"].value,
            source="fitted",
        ),
        source="catalogue; fitted: " + ", ".join(fit),
    )


def _fitted_kwai() -> Costs:
    fit, base = FITS["v100-paper"], _fitted_2021()
    path = fit["path_s_per_byte"].value
    return replace(
        base,
        gpu_efficiency=((512, fit["gpu_efficiency"].value),),
        worker_pool=replace(base.worker_pool, per_byte_s=path, source="fitted"),
        worker_scatter=replace(base.worker_scatter, per_byte_s=path, source="fitted"),
        dense_sync=replace(
            base.dense_sync,
            inter_bytes_per_s=fit["inter_bytes_per_s"].value,
            overhead_s=fit["sync_overhead_s"].value,
        ),
        source="2021-09 fit inside a host; fitted: " + ", ".join(fit),
    )


def _fitted_100t() -> Costs:
    fit = FITS["gcp-100t"]
    gpu = FITS["v100-2021-09"]["gpu_efficiency"].value
    return replace(
        CATALOGUE,
        load=replace(CATALOGUE.load, per_item_s=fit["load_s_per_sample"].value, source="fitted"),
        gpu_efficiency=((512, gpu),),
        dense_sync=replace(
            CATALOGUE.dense_sync,
            intra_bytes_per_s=100e9,
            source="nominal: NVLink 3 as commonly achieved, 100 Gbit/s between hosts",
        ),
        source="catalogue, GPU efficiency of the 2021-09 fit; fitted: " + ", ".join(fit),
    )


@cache
def costs_of(cluster: str) -> Costs:
    """The cost laws that belong to a cluster's preset: fitted where it has published figures."""
    fitted = {
        "v100-2021-09": _fitted_2021,
        "v100-paper": _fitted_kwai,
        "gcp-100t": _fitted_100t,
    }
    return fitted[cluster]() if cluster in fitted else CATALOGUE
