"""Cost laws from data sheets and one measured core, and those fitted to published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import hypot

from persia_sim.cluster.allreduce import DenseSync
from persia_sim.cluster.costs import Costs, Launching, Law
from persia_sim.presets.fitted import FITTED, REACH, Constant

_ALL = "all 33 points"

FITS = {
    "gpu_share": Constant(0.392, 0.38, 0.5, True, _ALL, spread=0.034),
    "gpu_fixed_s": Constant(
        0.29e-3, 1e-3, 1.0, points="the dashed bars: one GPU without all-reduce", spread=0.73
    ),
    "mesh_share": Constant(
        0.066, 9.8 / 150, 0.5, True, "Taobao, Avazu and Kwai in one host", spread=0.1
    ),
    "nic_share": Constant(0.0897, 0.5, 0.5, True, "Kwai at 16 to 64 GPUs, 100T", spread=0.036),
    "sync_fixed_s": Constant(
        7.16e-3, 5e-3, 1.0, points="Taobao and Avazu at 2 to 8 GPUs", spread=0.13
    ),
    "path_s_per_byte": Constant(4.41e-9, 1e-9, 1.5, points="Kwai in sync", spread=0.084),
    "path_100t": Constant(
        0.368, 1.0, 0.7, points="100T in sync: one point, which tests nothing", spread=0.17
    ),
    "load_s_per_column": Constant(
        1.5e-6, 1.5e-6, 0.7, points="none: no point tests the loaders", spread=0.7
    ),
    "kwai_flops": Constant(1.76, 1.0, 0.5, points="Kwai in async", spread=0.032),
}
"""Constants fitted for every published cluster of Persia: share of float32's peak; a step's
kernels; share of the V100s' NVLinks; share of 100 Gbit/s; a step's all-reduce; a byte of rows at a
worker, and how many times as long on the 100T run's hosts, whose cores are five years younger; a
column of a sample at a loader; the multiplications of Kwai's private network over those that its
published size would give."""

KERNELS_OF_A_LAYER = 8.0
"""Of a dense network in eager PyTorch, forward, backward and update."""
BATCHES = {"v100-paper": 2048, "gcp-100t": 8192}
"""Batch a rank of Kwai, and of 6.25 to 100T, where no document has it: the likeliest power of two,
tried with all other constants fitted again."""


_FITTED = "fitted: persia-experiments predict-published --of persia"
_MEASURED = (
    "one core of a Sapphire-Rapids-class Xeon, 6 GB table, rows of 512 bytes: probe, lock, relink "
    "and copy 0.28 us; probe, lock and Adagrad 0.50 us; pooling 23 ns; memcpy about 11 GB/s"
)


CATALOGUE = Costs(
    load=Law(
        fixed_s=2e-3, per_item_s=10e-6 / 39, source="assumed: a Python loader, Criteo's 39 columns"
    ),
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
    launching=Launching(
        step_s=FITTED["eager.host_s"].value,
        layer_s=FITTED["eager.launch_s"].value * KERNELS_OF_A_LAYER,
        sync_s=FITTED["eager.host_multi_s"].value,
        casts=True,
        source="torch's (PyTorch, eager: a lookup for each table, split by hand)",
    ),
    gpu_half_batch=64.0,  # assumed: matrices of 64 rows fill a fraction of a GPU's multiprocessors
    dense_sync=DenseSync(source="the machine's links"),
    reach=REACH,
    source="catalogue",
)  # fmt: skip

MACHINES_OF_RUNS = (
    "v100-100gbit", "2 x E5-2680 v4", "a2-highgpu-8g", "c2-standard-30", "m2-ultramem-416",
)  # fmt: skip
"""The costs of Persia's published runs of 2021 and 2022."""


def calibrated(
    values: Mapping[str, float], cluster: str, spreads: Mapping[str, float] | None = None
) -> Costs:
    """The laws of a published cluster from one set of values: the same for every cluster. Laws are
    as uncertain as ``spreads`` (by default those of `FITS`) say of their constants.

    Documents say what differs: the cores of the workers; and Kwai's network is not public, nor are
    its multiplications. Of the A100s' switch nobody knows: a third, as commonly achieved.
    """
    # What documents say differs between the clusters.
    flops = values["kwai_flops"] if cluster == "v100-paper" else 1.0
    load = values["load_s_per_column"]
    path = values["path_s_per_byte"]
    path *= values["path_100t"] if cluster == "gcp-100t" else 1.0
    spreads = spreads or {name: fit.spread for name, fit in FITS.items()}
    load_ln = spreads["load_s_per_column"]
    path_ln = hypot(spreads["path_s_per_byte"], spreads["path_100t"] * (cluster == "gcp-100t"))
    share = min(1.0, max(1e-9, values["gpu_share"] / flops))  # a search may try any

    # Shares of what links and GPUs could do at most.
    reach = replace(
        REACH,
        switch=1 / 3,
        mesh=min(1.0, values["mesh_share"]),
        nic=min(1.0, values["nic_share"]),
        tcp=1.0,
        host=0.75,
        activation_passes=0.0,
        intra_latency_s=20e-6,
        inter_latency_s=20e-6,
        source=f"{_FITTED}; bus, hops and the A100s' switch assumed",
    )

    # The catalogue's laws with what was fitted in place of what was assumed.
    return replace(
        CATALOGUE,
        load=Law(per_item_s=load, spread=load_ln, source=_FITTED),
        worker_pool=replace(CATALOGUE.worker_pool, per_byte_s=path, spread=path_ln, source=_FITTED),
        worker_scatter=replace(
            CATALOGUE.worker_scatter, per_byte_s=path, spread=path_ln, source=_FITTED
        ),
        gpu_fixed_s=values["gpu_fixed_s"],
        launching=None,
        gpu_efficiency=((512, share), (8192, share)),
        dense_sync=DenseSync(overhead_s=values["sync_fixed_s"], source=_FITTED),
        reach=reach,
        machines=MACHINES_OF_RUNS,
        network_of="kwai-video" if cluster == "v100-paper" else "",
        source="catalogue; fitted, the same for every cluster: " + ", ".join(values),
    )


def fitted(cluster: str) -> Costs:
    """The laws of a published cluster with the values of `FITS`."""
    return calibrated({name: fit.value for name, fit in FITS.items()}, cluster)
