"""What a stage costs on this host: one law for all configurations, fitted to two profiled ones.

seconds = fixed + per item + per item and float of its row; for the dense network fixed + per
sample + per operation, and for its optimiser per weight. Every law says how well it fits and where.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.validating.cases import DATA, Case, Held
from experiments.validating.stages import Stages

TERMS = {
    "worker_forward": ("one", "occurrences"),
    "server_lookup": ("one", "distinct", "distinct_floats"),
    "server_create": ("one", "distinct", "distinct_floats"),
    "worker_pool": ("one", "occurrences", "occurrence_floats"),
    "worker_scatter": ("one", "occurrences", "occurrence_floats"),
    "server_update": ("one", "distinct", "distinct_floats"),
    "dense": ("one", "samples", "flops", "dense_params"),
    "add_gradient": ("one", "dense_params"),
}
"""What each law is linear in."""
RANGES = {
    "dense": ("samples", "dense_params"),
    "add_gradient": ("dense_params",),
}
"""Quantities outside whose measured range a law is extrapolated; else those of items and dim."""
MISSING = (
    "transport: rows in server processes are not profiled, so no case has any",
    "loader: samples are drawn before a run (the stream draws 16,384 at once, a burst that no mean"
    " describes)",
    "copy: the host's memory is the device's, nothing moves",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: the quantities of `TERMS` (and dim), and the seconds."""

    at: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class HostLaw:
    """A linear law with non-negative terms."""

    terms: Mapping[str, float]
    spread: float
    """Standard deviation of (law / measured - 1)."""
    points: int
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, at: Mapping[str, float]) -> float:
        """Seconds."""
        return sum(each * at[name] for name, each in self.terms.items())

    def outside(self, at: Mapping[str, float]) -> list[str]:
        """The quantities at which the law was not measured."""
        return [n for n, (low, high) in self.ranges.items() if not low <= at[n] <= high]


def quantities(held: Held) -> dict[str, float]:
    """What the laws are linear in, of one rank's batch."""
    return {
        "one": 1.0,
        "samples": held.samples,
        "occurrences": held.occurrences,
        "occurrence_floats": held.occurrences * held.dim,
        "distinct": held.distinct,
        "distinct_floats": held.distinct * held.dim,
        "dense_params": held.dense_params,
        "flops": held.flops,
        "dim": held.dim,
    }


def fit_law(stage: str, points: Sequence[Point]) -> HostLaw:
    """Nearest relative to each measurement."""
    from scipy.optimize import nnls  # late: half a second

    names = TERMS[stage]
    seconds = np.maximum([p.seconds for p in points], 1e-9)
    table = np.array([[p.at[name] for name in names] for p in points]) / seconds[:, None]
    scale = np.maximum(table.max(0), 1e-30)
    found, _ = nnls(table / scale, np.ones(len(points)))
    items = "distinct" if stage.startswith("server") else "occurrences"
    ranges = {
        name: (min(p.at[name] for p in points), max(p.at[name] for p in points))
        for name in RANGES.get(stage, (items, "dim"))
    }
    off = table / scale @ found - 1
    terms = dict(zip(names, (found / scale).tolist(), strict=True))
    return HostLaw(terms, float(off.std()), len(points), ranges)


def measure_host(
    profiled: Sequence[Case], tick: Callable[[], object] = lambda: None
) -> dict[str, list[Point]]:
    """Every stage of the profiled configurations at four batch sizes, and the addition of a rank's
    dense gradient at five sizes."""
    from runtime.run import profile  # late: loads torch

    found: dict[str, list[Point]] = {}
    for case in profiled:
        stages, dense, weights = profile.measure_stages(case.dim, case.hidden, DATA, tick)
        stages.pop("load")
        for number, (size, dense_s) in enumerate(dense):
            occurrences = stages["worker_pool"][number].items
            distinct = stages["server_lookup"][number].items
            at = quantities(Held(size, occurrences, distinct, weights, case.dim))
            found.setdefault("dense", []).append(Point(at, dense_s))
            for stage, points in stages.items():
                found.setdefault(stage, []).append(Point(at, points[number].seconds))
    for exponent in (14, 16, 18, 20, 21):
        found.setdefault("add_gradient", []).append(_add_gradient(2**exponent))
        tick()
    return found


def measurements_of(profiled: Sequence[Case]) -> int:
    """Calls of the tick of `measure_host`."""
    from runtime.run import profile

    return len(profiled) * profile.MEASUREMENTS + 5


def _add_gradient(weights: int) -> Point:
    import torch

    into, one = torch.zeros(weights), torch.ones(weights)
    seconds = _median_s(lambda: into.add_(one), 15)
    return Point(quantities(Held(1, 0, 0, weights, 1)), seconds)


def _median_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def stages_by_law(
    laws: Mapping[str, HostLaw], held: Held, ranks: int
) -> tuple[Stages, tuple[str, ...]]:
    """The stages of one rank's batch alone on a core, and which laws are extrapolated."""
    at = quantities(held)
    outside = {name: law.outside(at) for name, law in laws.items()}
    if ranks == 1:
        outside.pop("add_gradient", None)
    dense = laws["dense"]
    update_s = dense.terms["dense_params"] * held.dense_params
    compute_s = dense(at) - update_s
    stages = Stages(
        load_s=laws["worker_forward"](at),
        read_s=laws["server_lookup"](at) + held.created * laws["server_create"](at),
        pool_s=laws["worker_pool"](at),
        forward_s=compute_s / 3,
        backward_s=compute_s * 2 / 3,
        update_s=update_s + (ranks - 1) * laws["add_gradient"](at),
        scatter_s=laws["worker_scatter"](at),
        push_s=laws["server_update"](at),
        refresh_s=held.again * laws["server_lookup"](at),
    )
    flags = (f"{n} ({', '.join(names)})" for n, names in outside.items() if names)
    return stages, tuple(flags)
