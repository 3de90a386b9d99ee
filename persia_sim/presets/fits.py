"""The constants that were fitted to published figures: which, to what, and how many.

One set of laws serves all of Persia's clusters: `python -m experiments fit` finds the values again.
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
    """The published points that narrow it; or that none does."""

    @property
    def integer(self) -> int:
        """The value where it counts something."""
        return round(self.value)


EVERY = "every cluster"
_ALL = "all 33 points"

FITS: dict[str, dict[str, Fit]] = {
    EVERY: {
        "gpu_share": Fit(value=0.392, points=_ALL),
        "gpu_fixed_s": Fit(value=0.29e-3, points="the dashed bars: one GPU without all-reduce"),
        "intra_bytes_per_s": Fit(value=9.9e9, points="Taobao, Avazu and Kwai in one host"),
        "nic_share": Fit(value=0.0897, points="Kwai at 16 to 64 GPUs, 100T"),
        "sync_fixed_s": Fit(value=7.16e-3, points="Taobao and Avazu at 2 to 8 GPUs"),
        "path_s_per_byte": Fit(value=4.41e-9, points="Kwai in sync"),
        "path_100t": Fit(
            value=0.368, points="100T in sync: one point, which therefore tests nothing"
        ),
        "load_s_per_column": Fit(value=1.5e-6, points="none: no point tests the loaders"),
        "kwai_flops": Fit(value=1.76, points="Kwai in async"),
    },
    "v100-paper": {
        "batch_per_rank": Fit(value=2048, points="Kwai, a power of two"),
    },
    "gcp-100t": {
        "batch_per_rank": Fit(value=8192, points="6.25 to 100T, a power of two"),
    },
}
"""Of every cluster, then by cluster."""
