"""Cost laws from data sheets and one measured core, and those fitted to published figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from persia_sim.model.allreduce import DenseSync
from persia_sim.model.costs import Costs, Law
from persia_sim.presets.fits import EVERY, FITS

_FITTED = "fitted: python -m experiments fit"
_MEASURED = (
    "one core of a Sapphire-Rapids-class Xeon, 6 GB table, rows of 512 bytes: probe, lock, relink "
    "and copy 0.28 us; probe, lock and Adagrad 0.50 us; pooling 23 ns; memcpy about 11 GB/s"
)

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
    gpu_half_batch=64.0,  # assumed: matrices of 64 rows fill a fraction of a GPU's multiprocessors
    dense_sync=DenseSync(
        intra_bytes_per_s=8.4e9,
        inter_bytes_per_s=12.5e9 * 0.97,
        source="nominal between hosts; inside a host without peer-to-peer",
    ),
    source="catalogue",
)


_NIC_BYTES_PER_S = 12.5e9  # of the GPU hosts of every published cluster: 100 Gbit/s
NVLINK_3 = 100e9  # of gcp-100t's A100, as commonly achieved; the V100s' is fitted
_COLUMNS = {"v100-2021-09": 39, "v100-paper": 88, "gcp-100t": 39}
"""Of the widest data set of each cluster, dense features among them: what loaders build."""


def calibrated(values: Mapping[str, float], cluster: str) -> Costs:
    """The laws of a published cluster from one set of values: the same for every cluster.

    Documents say what differs: the link inside a host, the columns that loaders build, the cores of
    the workers; and Kwai's network is not public, nor are its multiplications.
    """
    flops = values["kwai_flops"] if cluster == "v100-paper" else 1.0
    load, path = values["load_s_per_column"] * _COLUMNS[cluster], values["path_s_per_byte"]
    path *= values["path_100t"] if cluster == "gcp-100t" else 1.0
    share = min(1.0, max(1e-9, values["gpu_share"] / flops))  # a search may try any
    return replace(
        CATALOGUE,
        load=replace(CATALOGUE.load, fixed_s=0.0, per_item_s=load, source=_FITTED),
        worker_pool=replace(CATALOGUE.worker_pool, per_byte_s=path, source=_FITTED),
        worker_scatter=replace(CATALOGUE.worker_scatter, per_byte_s=path, source=_FITTED),
        gpu_fixed_s=values["gpu_fixed_s"],
        gpu_efficiency=((512, share),),
        dense_sync=replace(
            CATALOGUE.dense_sync,
            intra_bytes_per_s=NVLINK_3 if cluster == "gcp-100t" else values["intra_bytes_per_s"],
            inter_bytes_per_s=values["nic_share"] * _NIC_BYTES_PER_S,
            overhead_s=values["sync_fixed_s"],
            source=_FITTED,
        ),
        source="catalogue; fitted, the same for every cluster: " + ", ".join(values),
    )


def fitted(cluster: str) -> Costs:
    """The laws of a published cluster with the values of `fits`."""
    return calibrated({name: fit.value for name, fit in FITS[EVERY].items()}, cluster)
