"""Data sets and models of published runs. Sources say what is documented, assumed or fitted."""

from __future__ import annotations

from persia_sim.model.workload import Workload
from persia_sim.presets.fits import FITS


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
        batch_per_rank=FITS["gcp-100t"]["batch_per_rank"].integer,
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
        batch_per_rank=FITS["v100-paper"]["batch_per_rank"].integer,
        source="34 M dense parameters give an input of about 5,600; its split into 88 fields "
        "of 64 is assumed, the batch a rank is fitted",
    )
