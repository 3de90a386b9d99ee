"""What each stage costs: affine laws, from a catalogue or from measurements (see `profile`).

`demand` turns a description into the service times and bytes of one batch. It is pure: every
engine (SimPy, max-plus, bounds) starts from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Annotated

import numpy as np

from persia_sim.base.rules import SECONDS, Usual, require, require_within
from persia_sim.base.schema import require_possible
from persia_sim.cluster.allreduce import DenseSync
from persia_sim.cluster.machine import Precision, Reach


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """An affine service time: fixed_s + per_item_s * items + per_byte_s * bytes."""

    fixed_s: Annotated[float, Usual.STAGE] = 0.0
    """Paid once a call, >= 0."""
    per_item_s: Annotated[float, Usual.ITEM] = 0.0
    """Paid for each item, >= 0: a column of a sample for the loader, an occurrence of an id for an
    embedding worker, an id that is sent for a server."""
    per_byte_s: Annotated[float, Usual.BYTE] = 0.0
    """Paid for each payload byte touched, >= 0."""
    spread: float = 0.0
    """How far off it may be: a standard deviation, relative, >= 0; 0 where nobody knows. No run
    draws it (`Noise` does), a range does."""
    fitted_items: tuple[float, float] | None = None
    """Range of items in which the law was measured; outside it a result is flagged."""
    source: str
    """Where it comes from."""

    def __post_init__(self) -> None:
        # Each figure by itself.
        require_possible(self)
        require_within(self, spread=SECONDS)
        low, high = self.fitted_items or (0.0, 0.0)
        require(0 <= low <= high, "fitted_items", [low, high], "must be [least, most]")

    def __call__(self, items: float, size_bytes: float = 0.0) -> float:
        """Seconds for so many items and bytes."""
        return self.fixed_s + self.per_item_s * items + self.per_byte_s * size_bytes

    def extrapolates(self, items: float) -> bool:
        """Whether ``items`` lies outside the range of the measurements."""
        low, high = self.fitted_items or (-np.inf, np.inf)
        return not low <= items <= high


CASTS = 1.5
"""Kernels of a layer in mixed precision over those in float32, where weights and activations are
cast: torch's autocast launches 77 for an MLP of six layers in place of 49."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launching:
    """What the host of a rank does for a step of the dense network while its GPU waits."""

    step_s: Annotated[float, Usual.LATENCY]
    """Once a step, on a core of speed 1, >= 0."""
    layer_s: Annotated[float, Usual.LATENCY] = 0.0
    """Seconds for each layer in float32: its kernels are launched, >= 0."""
    casts: bool = False
    """Mixed precision casts weights and activations: half as many kernels more."""
    sync_s: Annotated[float, Usual.LATENCY] = 0.0
    """Seconds more where gradients of several ranks are summed, >= 0."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_possible(self, prefix="launching.")

    def seconds(self, layers: float, ranks: int, precision: Precision) -> float:
        """Seconds of a step's launching, on a core of speed 1."""
        more = CASTS if self.casts and precision is Precision.FP16 else 1.0
        return self.step_s + self.layer_s * layers * more + self.sync_s * (ranks > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The laws of all stages, for a core of speed 1."""

    load: Law
    """Loader: build one batch and send it; items are samples x columns (fields and dense)."""
    worker_forward: Law
    """Embedding worker: hash, split by server, write requests; items are occurrences of ids."""
    worker_rpc: Law
    """Embedding worker: one call to one server, paid once a server each way; a fixed part only,
    since what ids and bytes cost is the other laws'."""
    worker_pool: Law
    """Embedding worker: read rows, sum, convert; items are occurrences, bytes are rows received."""
    worker_scatter: Law
    """Embedding worker: gradients to rows, write pushes; items are occurrences, bytes are sent."""
    server_lookup: Law
    """Server: find and copy rows of one request; items are ids, bytes are rows."""
    server_update: Law
    """Server: apply one push; items are ids, bytes are rows."""
    server_create: Law
    """Server: extra cost of an id that is not resident; items are missing ids."""
    copy_in: Law
    """Rank: one thread that moves activations to the GPU; bytes beside the bus itself."""
    copy_out: Law
    """Rank: one thread that moves gradients back; bytes beside the bus itself."""
    gpu_fixed_s: Annotated[float, Usual.LATENCY]
    """What a step takes on the GPU however small it is, >= 0."""
    launching: Launching | None = None
    """What the host adds to that, as fast as its cores are. None: nothing, or it is in
    `gpu_fixed_s`. A rank that is a core of its host launches nothing."""
    gpu_efficiency: tuple[tuple[int, float], ...] = ()
    """(batch_per_rank, share of the peak rate), the first increasing; linear in its log between.
    Above the last it stays, below the first it falls with `gpu_half_batch`; both are flagged. None
    given: the share of `reach` at many samples."""
    gpu_half_batch: float = 0.0
    """Samples of a rank at which the GPU reaches half of the rate that it reaches at many, >= 0:
    a step of b takes as long as b + this many samples do at many. Not used above the first
    point."""
    dense_sync: DenseSync
    """All-reduce of the dense gradient."""
    reach: Reach
    """Shares of the nominal rates of GPUs, links and NICs."""
    dense_server_bytes_per_s: Annotated[float, Usual.NIC] = np.inf
    """Rate at which a server of dense weights hands out and takes in copies in async, > 0."""
    machines: tuple[str, ...] = ()
    """Hosts on which the fitted ones were found: on others they are borrowed, and a report says
    so. None: nothing here was fitted to whole runs."""
    network_of: str = ""
    """Workload whose multiplications, which nobody published, are in `gpu_efficiency`."""
    source: str
    """Where the set comes from, and the name of what was fitted."""

    def __post_init__(self) -> None:
        for part in ("per_item_s", "per_byte_s"):
            value = getattr(self.worker_rpc, part)
            remedy = "put it into worker_forward or worker_scatter"
            require(value == 0, f"worker_rpc.{part}", value, "a call has a fixed part only", remedy)
        require_possible(self)
        require_within(self, gpu_half_batch=(0, 1e9))

        # The table of the GPU's efficiency grows in batch sizes.
        sizes = [size for size, _ in self.gpu_efficiency]
        require(
            sizes == sorted(set(sizes)),
            "gpu_efficiency",
            self.gpu_efficiency,
            "needs points in increasing order of batch_per_rank",
        )
        ok = all(size >= 1 and 1e-9 <= share <= 1 for size, share in self.gpu_efficiency)
        rule = "needs batches >= 1 and shares in [1e-9, 1]"
        require(ok, "gpu_efficiency", self.gpu_efficiency, rule)

    def efficiency(self, batch_per_rank: int, precision: Precision = Precision.FP32) -> float:
        """Share of the GPU's peak rate that a step of so many samples of a rank reaches."""
        points = self.gpu_efficiency
        half = self.gpu_half_batch
        if not points:
            return self.reach.gemm(precision) * batch_per_rank / (batch_per_rank + half)
        least, share = points[0]
        if batch_per_rank < least:
            return share * (batch_per_rank / least) * (least + half) / (batch_per_rank + half)
        logs = [log(size) for size, _ in points]
        return float(np.interp(log(batch_per_rank), logs, [share for _, share in points]))
