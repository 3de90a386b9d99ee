"""The constants that were fitted to published figures: which, to what, and how many.

Everything else in the presets is a document's figure, a measurement or a stated assumption.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One fitted constant."""

    value: float
    """Its value, SI units."""
    points: str
    """The published points it was fitted to; all others are predictions."""

    @property
    def integer(self) -> int:
        """The value where it counts something."""
        return round(self.value)


_TAOBAO = "Persia on Taobao at 2 and 8 GPUs"
_KWAI = "Kwai, 8 to 64 GPUs, {} (4 points)"

FITS: dict[str, dict[str, Fit]] = {
    "v100-2021-09": {
        "gpu_efficiency": Fit(
            value=0.384, points="the dashed bars: one GPU without all-reduce, Taobao and Avazu"
        ),
        "sync_overhead_s": Fit(value=7.4e-3, points=_TAOBAO),
        "intra_bytes_per_s": Fit(value=9.8e9, points=_TAOBAO),
    },
    "v100-paper": {
        "gpu_efficiency": Fit(value=0.233, points=_KWAI.format("async")),
        "inter_bytes_per_s": Fit(value=1.25e9, points=_KWAI.format("async")),
        "batch_per_rank": Fit(value=1920, points=_KWAI.format("hybrid")),
        "sync_overhead_s": Fit(value=13e-3, points=_KWAI.format("hybrid")),
        "path_s_per_byte": Fit(value=4.4e-9, points=_KWAI.format("sync")),
    },
    "gcp-100t": {
        "load_s_per_sample": Fit(value=81e-6, points="async at 100T"),
        "batch_per_rank": Fit(value=864, points="hybrid at the five sizes, sync at 100T"),
    },
}
"""By cluster. Kwai takes the rate inside a host from 2021-09, gcp-100t the GPU's efficiency."""
