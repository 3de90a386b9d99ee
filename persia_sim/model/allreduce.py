"""All-reduce in closed form, the bucket plan of the backward pass, and what stays exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, log2

import numpy as np

from persia_sim.words.rules import RATE, SECONDS, require_within


def ring_s(ranks: int, size_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Reduce-scatter and all-gather round a ring: 2 (p - 1) a + 2 (p - 1) / p n / B.

    >>> ring_s(4, 4e9, 1e9, 0.5)
    9.0
    """
    hops = 2 * (ranks - 1)
    return hops * latency_s + hops / ranks * size_bytes / bytes_per_s


def tree_s(ranks: int, size_bytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Pipelined reduce and broadcast along a binary tree: 2 ceil(log2 p) a + 2 n / B."""
    if ranks == 1:
        return 0.0
    return 2 * ceil(log2(ranks)) * latency_s + 2 * size_bytes / bytes_per_s


class Algorithm(StrEnum):
    """How the dense gradient is summed."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSync:
    """The all-reduce of the MLP's gradient."""

    algorithm: Algorithm = Algorithm.HIERARCHICAL
    """Ring and tree run over all ranks at the slower link; hierarchical reduces inside a host, then
    rings between hosts with each GPU's part, then gathers inside the host."""
    intra_bytes_per_s: float
    """Rate that a GPU achieves inside its host, > 0."""
    inter_bytes_per_s: float
    """Rate that a host achieves to other hosts (all its GPUs together), > 0."""
    latency_s: float = 20e-6
    """Per hop, >= 0."""
    overhead_s: float = 0.0
    """Spent once a step and never overlapped, when there is more than one rank, >= 0."""
    bucket_bytes: float = 25 * 2**20
    """Gradients are summed in buckets that close at this size, > 0; smaller overlaps more and pays
    more latency. Used where the all-reduce overlaps the backward pass."""
    nic_share: float = 1.0
    """Bytes that a byte of the float32 gradient takes of a NIC's payload, in (0, 4], where both
    share it (`dense_on_nics`): 0.5 where it travels in 2 bytes, less where RDMA gets more out of
    the NIC than the rows' messages do."""
    fitted_bytes: tuple[float, float] | None = None
    """Range of the messages by which it was measured; a message outside is flagged."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        require_within(
            self, " of the all-reduce", intra_bytes_per_s=RATE, inter_bytes_per_s=RATE,
            latency_s=SECONDS, overhead_s=SECONDS, bucket_bytes=(1, inf),
            nic_share=(1e-6, 4),
        )  # fmt: skip

    def seconds(
        self, size_bytes: float, ranks: int, ranks_per_host: int, hosts: int | None = None
    ) -> float:
        """Time to sum one message over all ranks; 0 for one rank. Where hosts hold different
        numbers of ranks, the most of them and how many ``hosts`` there are."""
        local = min(ranks, ranks_per_host)
        hosts = hosts or ceil(ranks / ranks_per_host)
        if self.algorithm is not Algorithm.HIERARCHICAL:
            # A host's NIC carries one stream of a ring, so a rank sees the whole NIC.
            rate = self.intra_bytes_per_s
            rate = rate if hosts == 1 else min(rate, self.inter_bytes_per_s)
            law = ring_s if self.algorithm is Algorithm.RING else tree_s
            return law(ranks, size_bytes, rate, self.latency_s)
        inside = ring_s(local, size_bytes, self.intra_bytes_per_s, self.latency_s)
        return inside + ring_s(hosts, size_bytes, self.inter_bytes_per_s, self.latency_s)

    def extrapolates(self, size_bytes: float) -> bool:
        """Whether a message lies outside the range of the measurements."""
        if self.fitted_bytes is None:
            return False
        low, high = self.fitted_bytes
        return not low <= size_bytes <= high

    def nic_bytes(
        self, size_bytes: float, ranks: int, ranks_per_host: int, hosts: int | None = None
    ) -> float:
        """What one message puts on each host's NIC, each way; 0 inside one host."""
        hosts = hosts or ceil(ranks / ranks_per_host)
        if hosts == 1:
            return 0.0
        if self.algorithm is Algorithm.TREE:
            return 2 * size_bytes * self.nic_share
        members = hosts if self.algorithm is Algorithm.HIERARCHICAL else ranks
        return 2 * (members - 1) / members * size_bytes * self.nic_share


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of the gradient that is summed at once."""

    ready_share: float
    """Share of the backward pass after which the whole bucket is there, in (0, 1]."""
    seconds: float
    """Duration of its all-reduce."""
    nic_bytes: float = 0.0
    """Bytes that cross each GPU host's NIC, each way."""


def bucket_sizes(layer_params: Sequence[int], bucket_bytes: float) -> list[tuple[float, float]]:
    """(share of the backward pass, bytes) of each bucket, from the output layer to the input.

    A layer's gradient is not split; the backward pass spends time in proportion to parameters.
    """
    total = sum(layer_params)
    plan: list[tuple[float, float]] = []
    done = 0
    pending = 0.0
    for params in reversed(layer_params):
        done += params
        pending += 4.0 * params
        if pending >= bucket_bytes:
            plan.append((done / total, pending))
            pending = 0.0
    if pending:
        plan.append((1.0, pending))
    return plan


def sync_delay(
    now_s: float,
    forward_end_s: np.ndarray,
    backward_s: np.ndarray,
    buckets: Sequence[Bucket],
    overlapped: bool,
    overhead_s: float,
) -> float:
    """Seconds from ``now`` (the last rank's end of backward) until the weights are updated.

    Overlapped, a bucket starts when every rank has it and the bucket before is done; exposed, the
    first one starts now.
    """
    end = now_s
    if overlapped:
        end = -np.inf
        for bucket in buckets:
            ready = float((forward_end_s + bucket.ready_share * backward_s).max())
            end = max(end, ready) + bucket.seconds
        end = max(end, now_s)
    else:
        for bucket in buckets:
            end += bucket.seconds
    return end + overhead_s - now_s
