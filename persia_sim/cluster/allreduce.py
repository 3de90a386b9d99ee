"""What GPUs send each other, in closed form: all-reduce, exchange, all-gather, and what of the
all-reduce the backward pass hides.

Times are hops x latency + bytes / rate, over the links inside a machine and the NICs between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, inf, log2
from typing import Annotated, Self

import numpy as np

from persia_sim.base.rules import Usual
from persia_sim.base.schema import hold_choices, require_possible
from persia_sim.cluster.machine import Host, Reach, System


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


SITE_LATENCY_S = 50e-6
"""What TCP takes one way inside a site, as the presets' links: mostly software, which GPUs' own
network does without (source: assumed). Of what a link takes above that the rest is distance."""


class Algorithm(StrEnum):
    """How the dense gradient is summed."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSync:
    """The all-reduce of the MLP's gradient. Rates and latencies follow the machine (`Reach`), but
    for those that are given: these were measured, whatever the machine."""

    algorithm: Algorithm = Algorithm.HIERARCHICAL
    """Ring and tree run over all ranks at the slower link; hierarchical reduces inside a host, then
    between hosts with each GPU's part (round a ring or along a tree, as is faster), then gathers
    inside the host."""
    intra_bytes_per_s: Annotated[float | None, Usual.BUS] = None
    """Rate that a GPU achieves inside its host, > 0."""
    inter_bytes_per_s: Annotated[float | None, Usual.NIC] = None
    """Rate that a host achieves to other hosts (all its GPUs together), > 0."""
    intra_latency_s: Annotated[float | None, Usual.LATENCY] = None
    """Seconds of a hop inside a host, >= 0."""
    inter_latency_s: Annotated[float | None, Usual.LATENCY] = None
    """Seconds of a hop between hosts, >= 0. None: what `Reach` says, and the latency of the
    cluster's link where hosts are apart, which is where that is above 50 us."""
    overhead_s: Annotated[float, Usual.LATENCY] = 0.0
    """Spent once a step and never overlapped, when there is more than one rank, >= 0."""
    bucket_bytes: Annotated[float, Usual.BUCKET] = 25 * 2**20
    """Gradients are summed in buckets that close at this size in float32, > 0 (also where they
    travel in 2 bytes, as by DDP's hook); smaller overlaps more and pays more latency. Used where
    the all-reduce overlaps the backward pass."""
    fitted_bytes: tuple[float, float] | None = None
    """Range of the messages by which it was measured; a message outside is flagged."""
    source: str
    """Where these constants come from."""

    def __post_init__(self) -> None:
        hold_choices(self)
        require_possible(self, " of the all-reduce")

    def on(self, hosts: Sequence[Host], reach: Reach, link_s: float = 0.0) -> Self:
        """Fill in what was not measured with what the slowest of these machines gives, and with the
        latency of the link between them, one way."""
        far_s = link_s if link_s > SITE_LATENCY_S else 0.0
        derived = {
            "intra_bytes_per_s": min(reach.inside(host, host.gpus) for host in hosts),
            "inter_bytes_per_s": min(map(reach.outside, hosts)) or inf,
            "intra_latency_s": reach.intra_latency_s,
            "inter_latency_s": max(reach.inter_latency_s, far_s),
        }
        missing = {name: value for name, value in derived.items() if getattr(self, name) is None}
        return replace(self, **missing)  # type: ignore[arg-type]

    def seconds(
        self, size_bytes: float, ranks: int, ranks_per_host: int, hosts: int | None = None
    ) -> float:
        """Time to sum one message over all ranks; 0 for one rank. Where hosts hold different
        numbers of ranks, the most of them and how many ``hosts`` there are."""
        local = min(ranks, ranks_per_host)
        hosts = hosts or ceil(ranks / ranks_per_host)
        intra = self.intra_bytes_per_s or inf
        inter = self.inter_bytes_per_s or inf
        near_s = self.intra_latency_s or 0.0
        far_s = self.inter_latency_s or 0.0
        if self.algorithm is not Algorithm.HIERARCHICAL:
            # A host's NIC carries one stream of a ring, so a rank sees the whole NIC.
            law = ring_s if self.algorithm is Algorithm.RING else tree_s
            if hosts == 1:
                return law(ranks, size_bytes, intra, near_s)
            return law(ranks, size_bytes, min(intra, inter), far_s)
        inside = ring_s(local, size_bytes, intra, near_s)
        between = hosts, size_bytes, inter, far_s
        return inside + min(ring_s(*between), tree_s(*between))

    def extrapolates(self, size_bytes: float) -> bool:
        """Whether a message lies outside the range of the measurements."""
        low, high = self.fitted_bytes or (-inf, inf)
        return not low <= size_bytes <= high


def allreduce_s(system: System, reach: Reach, size_bytes: float) -> float:
    """Seconds to sum one message over all GPUs of a system."""
    sync = DenseSync(inter_bytes_per_s=nics_of_group(system, reach) or inf, source=reach.source)
    sync = sync.on([system.host], reach)
    return sync.seconds(size_bytes, system.gpus, system.local, system.nodes)


def nics_of_group(system: System, reach: Reach) -> float:
    """What GPUs that need no NIC among themselves get to all others, together, bytes per second."""
    return reach.outside(system.host) * system.local / system.host.gpus


def exchange_s(system: System, reach: Reach, bytes_each: float) -> float:
    """An all-to-all in which every GPU sends so many bytes in all, evenly to the others.

    What stays in the machine and what leaves it travel at the same time.
    """
    gpus = system.gpus
    local = system.local
    if gpus == 1 or not bytes_each:
        return 0.0
    inside = bytes_each * (local - 1) / (gpus - 1)
    took = reach.intra_latency_s + inside / reach.across(system.host, local)
    if system.nodes > 1:
        each = nics_of_group(system, reach) / local
        took = max(took, reach.inter_latency_s + (bytes_each - inside) / each)
    return took


def gather_s(system: System, reach: Reach, bytes_each: float) -> float:
    """An all-gather of so many bytes from every GPU (or the reduce-scatter that undoes it).

    Partial sums are added inside a machine first, and what is gathered is passed on there, chunk by
    chunk: a machine's NICs carry what the other machines have, once, together.
    """
    gpus = system.gpus
    local = system.local
    nodes = system.nodes
    if gpus == 1:
        return 0.0
    whole = bytes_each * gpus
    hops_s = (local - 1) * reach.intra_latency_s
    took = whole * (local - 1) / local / reach.inside(system.host, local)
    if nodes > 1:
        hops_s += (nodes - 1) * reach.inter_latency_s
        took = max(took, whole * (nodes - 1) / nodes / nics_of_group(system, reach))
    return hops_s + took


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of the gradient that is summed at once."""

    ready_share: float
    """Share of the backward pass after which the whole bucket is there, in (0, 1]."""
    seconds: float
    """Duration of its all-reduce."""


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
