"""Every fitted constant of kernels, links and hosts, and what kernels and links reach.

`FITTED` is what `persia-experiments predict-published --fit` found, how sure it is, and where it
started.
"""

from __future__ import annotations

from dataclasses import dataclass

from persia_sim.cluster.machine import Reach


@dataclass(frozen=True, slots=True)
class Constant:
    """One fitted constant."""

    value: float
    """What the fit found."""
    start: float
    """Where it started: what a document or an assumption says."""
    width: float
    """Standard deviation of the logarithm of the start: how far it is trusted."""
    is_share: bool = False
    """Whether it is a share, at most 1."""
    points: str = ""
    """The published points that narrow it, or that none does, where somebody looked."""
    spread: float = 0.0
    """Standard deviation of the logarithm of what was found, with all others free."""


FITTED = {
    "reach.fp32": Constant(0.7737, 0.72, 0.1, True, spread=0.028),
    "reach.tf32": Constant(0.4677, 0.5, 0.2, True, spread=0.094),
    "reach.fp16": Constant(0.4421, 0.5, 0.2, True, spread=0.087),
    "reach.hbm": Constant(0.8255, 0.8, 0.1, True, spread=0.068),
    "reach.switch": Constant(0.8439, 0.7, 0.2, True, spread=0.18),
    "reach.mesh": Constant(0.8328, 0.85, 0.1, True, spread=0.099),
    "reach.pairs": Constant(0.1723, 0.15, 0.3, True, spread=0.22),
    "reach.pcie": Constant(0.75, 0.75, 0.2, True, spread=0.2),
    "reach.nic": Constant(0.7295, 0.85, 0.1, True, spread=0.066),
    "reach.activation_passes": Constant(2.334, 4.0, 0.5, spread=0.17),
    "eager.launch_s": Constant(1.356e-05, 12e-6, 0.5, spread=0.33),
    "compiled.launch_s": Constant(8.14e-06, 7e-6, 0.5, spread=0.18),
    "graphs.replay_s": Constant(6.415e-06, 6e-6, 0.5, spread=0.26),
    "eager.host_s": Constant(0.0004084, 0.5e-3, 0.7, spread=0.62),
    "eager.host_multi_s": Constant(0.0006249, 1e-3, 0.7, spread=0.49),
    "torchrec.host_exchange_s": Constant(0.002748, 2e-3, 0.7, spread=0.17),
    "compiled.host_s": Constant(0.0003927, 0.5e-3, 0.7, spread=0.33),
    "compiled.host_multi_s": Constant(0.001428, 1.5e-3, 0.7, spread=0.18),
    "hugectr-2.host_multi_s": Constant(0.0004656, 1.5e-3, 0.7, spread=0.34),
    "oneflow.host_multi_s": Constant(0.005311, 1.5e-3, 0.7, spread=0.099),
    "overlapped.exposed": Constant(0.4835, 0.6, 0.5, True, spread=0.17),
    "tf2-copies.host_multi_s": Constant(0.02862, 1.5e-3, 0.7, spread=0.089),
    "hugectr.tuned": Constant(1.136, 1.0, 0.3, spread=0.11),
    "unfused.unfused_passes": Constant(8.12, 4.0, 0.7, spread=0.24),
    "sort.id_s": Constant(1.504e-09, 1e-9, 1.0, spread=0.075),
    "hash.id_s": Constant(4.94e-09, 1e-9, 1.0, spread=0.17),
}
"""Fitted constants by owner and field. What stands in no line here is assumed, and its owner's
`source` says so."""

_TF2 = ("tf2", "tf2-plain", "tf2-copies")
_HOLDERS = {
    "eager": ("torch", "torch-fused", "torchrec"),
    "compiled": (
        "hugectr-v07",
        "hugectr-2",
        "hugectr-3",
        "oneflow",
        "oneflow-v06",
        *_TF2,
    ),
    "graphs": ("hugectr", "hugectr-v07", "hugectr-3", "torch-graphs"),
    "sort": ("torch", "oneflow", "oneflow-v06", *_TF2),
    "hash": ("hugectr-2", "hugectr-3"),
    "unfused": ("tf2-plain",),
    "hugectr-2": ("hugectr-v07", "hugectr-2", "hugectr-3"),
    "overlapped": ("hugectr", "hugectr-v07", *_TF2),
}
"""Owner of a constant -> whose field it is. Who launches a kernel decides what that takes: Python,
a runtime in C++ or the GPU that replays a graph. What libraries take to sort an id is alike on V100
and A100, whose memories differ by 1.8; where a hash table finds its row, that is beside it. A
constant is a release's own only where it buys a fifth of the error of all rows that would share it,
each machine and number of GPUs of a release left out in turn."""


def holders(owner: str) -> tuple[str, ...]:
    """Whose field an owner's constant is: its own, or that of all of a kind."""
    return _HOLDERS.get(owner, (owner,))


def fitted_fields(holder: str) -> dict[str, float]:
    """The fitted fields of a system, or of `Reach`."""
    parts = {name: name.rpartition(".") for name in FITTED}
    return {what: FITTED[n].value for n, (who, _, what) in parts.items() if holder in holders(who)}


REACH = Reach(
    **fitted_fields("reach"),
    tcp=0.6, host=0.8, uvm=0.1, sockets_bytes_per_s=20e9,
    intra_latency_s=1.9e-6, inter_latency_s=4e-6,
    source="fitted to published steps on V100 to B200; tcp, host, sockets and uvm assumed (page "
    "faults take a row over the bus down to a tenth); hops: NCCL's own table (its protocol LL128 "
    "round a ring)",
)  # fmt: skip
