"""Cost laws from data sheets and one measured core, and those fitted to published figures."""

from __future__ import annotations

from dataclasses import replace

from persia_sim.model.allreduce import DenseSync
from persia_sim.model.costs import Costs, Law
from persia_sim.presets.fits import FITS

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


def fitted_2021() -> Costs:
    """The public data sets' bars."""
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


def fitted_kwai() -> Costs:
    """The Kwai series; inside a host as the bars."""
    fit, base = FITS["v100-paper"], fitted_2021()
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


def fitted_100t() -> Costs:
    """The 100-trillion-parameter run; the GPU as the bars have it."""
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
