"""The systems that Persia was compared with, as step-time laws with one or two fitted constants.

These are closed forms, not simulations: too little is known of the runs to fit more. The form of
each law is a reading of eight bars (Taobao and Avazu, 1 to 8 GPUs), the constants are their least
squares in log throughput; other data sets are predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

from persia_sim.model.cluster import Cluster
from persia_sim.model.workload import Workload
from persia_sim.words.rules import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Step time = GPU + fixed_s + ids * (per_id_s + per_id_and_rank_s * ranks) + dense traffic."""

    name: str
    """System and mode."""
    fixed_s: float = 0.0
    """A step's fixed cost."""
    per_id_s: float = 0.0
    """Cost of one id of a rank's batch."""
    per_id_and_rank_s: float = 0.0
    """What the same id costs more with each rank that shares the servers."""
    dense_through_servers: bool = False
    """Every rank pulls and pushes the dense weights through the server hosts' NICs."""
    fitted_constants: int
    """How many of these were fitted."""
    source: str
    """The points they were fitted to, and the reading behind the form."""


_BARS = "fitted to its 8 bars on Taobao and Avazu"

RIVALS = {
    ("XDL", "async"): Rival(
        name="XDL async",
        fixed_s=57.4e-3,
        per_id_s=7.77e-6,
        dense_through_servers=True,
        fitted_constants=2,
        source=f"{_BARS}; dense weights cross 20 hosts' NICs at nominal rate (not fitted)",
    ),
    ("XDL", "sync"): Rival(
        name="XDL sync",
        per_id_s=16.5e-6,
        per_id_and_rank_s=1.016e-6,
        fitted_constants=2,
        source=f"{_BARS}; time goes with the ids, and ranks wait for each other at the servers",
    ),
    ("PaddlePaddle", "heter"): Rival(
        name="PaddlePaddle heter",
        fixed_s=37.9e-3,
        fitted_constants=1,
        source=f"{_BARS}; rows are cached beside the GPU, so neither ids nor ranks matter",
    ),
}


def samples_per_s(
    rival: Rival, cluster: Cluster, workload: Workload, gpu_efficiency: float
) -> float:
    """Throughput of all ranks."""
    require(cluster.ranks >= 1, "ranks", cluster.ranks, "must be >= 1")
    ids, samples = workload.ids_per_batch, workload.batch_per_rank
    gpu = samples * workload.flops_per_sample / (gpu_efficiency * cluster.gpu.peak_flops)
    step = gpu + rival.fixed_s
    step += ids * (rival.per_id_s + rival.per_id_and_rank_s * cluster.ranks)
    if rival.dense_through_servers:
        # Workers' and servers' hosts are one pool of machines in this system.
        hosts = cluster.servers.hosts + cluster.embedding_workers.hosts
        rate = hosts * cluster.nic_payload_bytes_per_s[2]
        step += 2 * cluster.ranks * workload.dense_bytes / rate
    return cluster.ranks * samples / step
