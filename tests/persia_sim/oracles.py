"""What the simulator and its closed forms are held against: Daly's formula, a certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from persia_sim.base.popularity import expected_distinct
from persia_sim.base.staleness import PushStaleness
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import constant_lag
from persia_sim.cluster.workload import Workload


def resident_after(workload: Workload, samples: float) -> float:
    """Expected rows that so many samples have touched (no eviction)."""
    draws = samples * workload.ids_per_field
    per_field = workload.rows / workload.fields
    return workload.fields * expected_distinct(draws, per_field, workload.zipf)


def violations(
    rates: Sequence[float],
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    bounds: Sequence[float],
    capacities: Mapping[int, float],
    tolerance: float = 1e-9,
) -> list[str]:
    """What contradicts max-min fairness; empty is the certificate.

    A solution is the max-min one if and only if no link carries more than its capacity and every
    flow is at its bound or crosses a full link on which no flow has a larger rate per weight.
    """
    used: dict[int, float] = {}
    top: dict[int, float] = {}
    found: list[str] = []
    for flow, path in enumerate(paths):
        level = rates[flow] / weights[flow]
        for link in path:
            used[link] = used.get(link, 0.0) + rates[flow]
            top[link] = max(top.get(link, 0.0), level)
    for link, rate in used.items():
        if rate > capacities[link] * (1 + tolerance):
            found.append(f"link {link} carries {rate:.6g} of {capacities[link]:.6g}")
    for flow, path in enumerate(paths):
        if rates[flow] >= bounds[flow] * (1 - tolerance):
            continue
        level = rates[flow] / weights[flow]
        full = [link for link in path if used[link] >= capacities[link] * (1 - tolerance)]
        if not any(level >= top[link] * (1 - tolerance) for link in full):
            found.append(f"flow {flow} at {rates[flow]:.6g} could grow")
    return found


def constant_lag_trace(
    mode: Mode, *, ranks: int, steps: int, tau: int = 0, merge_pushes: bool = True
) -> Trace:
    """`constant_lag` of a known number of batches, as a table."""
    events = constant_lag(
        mode, ranks=ranks, has_batch=lambda k: k < steps, tau=tau, merge_pushes=merge_pushes
    )
    return Trace.of(list(events), mode=str(mode), ranks=ranks, tau=tau)


def mean_by_shard(pushes: PushStaleness) -> dict[int, tuple[float, float]]:
    """Means of pushes missed and of batches in flight: Little's law says that they are equal."""
    of = {int(k): pushes.shard == k for k in np.unique(pushes.shard)}
    both = pushes.missed_pushes, pushes.in_flight
    return {k: (float(both[0][own].mean()), float(both[1][own].mean())) for k, own in of.items()}
