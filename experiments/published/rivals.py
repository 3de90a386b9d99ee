"""XDL and PaddlePaddle as scenarios of the simulator: same hosts, modes and messages, own costs.

What a rival is here: one of the simulator's modes, without Persia's pipelining, and one or two cost
constants fitted to its bars. So it has traces, staleness and scale like every other run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.scenario import Noise, Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import costs_of, workloads
from persia_sim.report.measure import throughput

GPU_CV = 0.05  # assumed; see simulators' practice for healthy machines
_FIT_STEPS = 16
_LOADERS = 64  # as the preset, whatever the number of GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """One system in one mode."""

    name: str
    """System and mode."""
    mode: Mode
    """How the simulator runs it."""
    step_fixed_s: float = 0.0
    """A step's fixed cost beside the GPU's work."""
    worker_s_per_id: float | None = None
    """An id at the worker, on a core of speed 1; None: as in Persia."""
    server_s_per_id: float | None = None
    """An id's update at a server, on a core of speed 1; None: as in Persia."""
    server_threads: int = 48
    """Pushes that a server applies at once."""
    free_dense_sync: bool = False
    """The all-reduce has no fixed cost and NVLink's rate."""
    fitted: tuple[str, ...]
    """Which of these were fitted."""
    holds_for: tuple[str, ...] = tuple(workloads())
    """Workloads that its costs hold for: what an id costs it need not carry over to others."""
    source: str
    """The points they were fitted to, and the reading behind the form."""


_BARS = "fitted to its 8 bars on Taobao and Avazu"

RIVALS = {
    ("XDL", "async"): Rival(
        name="XDL async",
        mode=Mode.ASYNC,
        step_fixed_s=75.8e-3,
        worker_s_per_id=4.37e-6,
        fitted=("step_fixed_s", "worker_s_per_id"),
        source=f"{_BARS}; lookup, step and push one after the other; dense weights on the servers",
    ),
    ("XDL", "sync"): Rival(
        name="XDL sync",
        mode=Mode.SYNC,
        worker_s_per_id=10.9e-6,
        server_s_per_id=7.61e-6,
        server_threads=1,
        fitted=("worker_s_per_id", "server_s_per_id"),
        holds_for=("taobao-ad", "avazu-ad"),
        source=f"{_BARS}; a server applies the pushes of a step one after the other; on a third set"
        " it was 30 % off, always to one side",
    ),
    ("PaddlePaddle", "heter"): Rival(
        name="PaddlePaddle heter",
        mode=Mode.HYBRID,
        step_fixed_s=36.9e-3,
        free_dense_sync=True,
        fitted=("step_fixed_s",),
        source=f"{_BARS}; rows are cached beside the GPU, so neither ids nor ranks matter",
    ),
}


def scenario_of(rival: Rival, cluster: Cluster, workload: Workload, steps: int = 60) -> Scenario:
    """The rival on these hosts."""
    # Persia's costs, but for what is known of the rival.
    costs = costs_of("v100-2021-09")
    laws = {"worker_forward": rival.worker_s_per_id, "server_update": rival.server_s_per_id}
    changed_costs = {
        name: replace(getattr(costs, name), per_item_s=each, source=rival.source)
        for name, each in laws.items()
        if each is not None
    }

    # Some rivals sum their dense gradients without a fixed cost, at the rate of NVLink.
    sync = costs.dense_sync
    if rival.free_dense_sync:
        sync = replace(sync, overhead_s=0.0, intra_bytes_per_s=45e9, source=rival.source)

    # async reads its own rows fresh; hybrid has the default bound.
    return Scenario(
        cluster=replace(
            cluster.resized(loaders=_LOADERS),
            servers=replace(cluster.servers, cores_per_process=rival.server_threads),
        ),
        workload=workload,
        costs=replace(
            costs,
            gpu_fixed_s=rival.step_fixed_s,
            dense_sync=sync,
            source=rival.source,
            **changed_costs,
        ),
        mode=rival.mode,
        tau=(4 if rival.mode.has_barrier else 0) if rival.mode.reads_late_rows else None,
        merge_pushes=False if rival.mode.may_merge else None,
        noise=Noise(gpu_cv=GPU_CV),
        steps=steps,
    )


def samples_per_s(rival: Rival, cluster: Cluster, workload: Workload, steps: int = 60) -> float:
    """Simulated throughput of all ranks."""
    return throughput(simulate(scenario_of(rival, cluster, workload, steps))).mean


def refitted(
    rival: Rival, measured: Sequence[tuple[Cluster, Workload, float]]
) -> tuple[Rival, np.ndarray]:
    """The rival with its constants fitted again, and the log errors of its rates, float64 [points].

    By short simulations: where pushes queue at servers no closed form is near.
    """
    from scipy.optimize import least_squares  # late: a second to import

    def with_logs(logs: np.ndarray) -> Rival:
        values = dict(zip(rival.fitted, np.exp(logs).tolist(), strict=True))
        return replace(rival, **values)

    def errors(logs: np.ndarray) -> np.ndarray:
        chosen = with_logs(logs)
        rates = [samples_per_s(chosen, c, w, _FIT_STEPS) for c, w, _ in measured]
        return np.log(rates) - np.log([rate for *_, rate in measured])

    start = np.array([log(getattr(rival, name)) for name in rival.fitted])
    solution = least_squares(
        lambda x: errors(x) / 0.1, start, loss="soft_l1", max_nfev=8, diff_step=0.01
    )
    return with_logs(solution.x), errors(solution.x)
