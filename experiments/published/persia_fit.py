"""One set of constants for all of Persia's published clusters, fitted to all points at once.

Every cluster has the same laws (kernel: fixed + flop / rate; all-reduce: fixed + bytes / rate;
loader: seconds a column) and batches are powers of two; what such a model cannot explain shows.
Rates are the closed form's, with ranks as uneven as in a simulation: within a few per cent of one
where no NIC binds. The presets take what is found here (`persia_sim/presets/costs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log

import numpy as np

from experiments.published.compare import GPU_CV, WIDE_TAU, Point
from persia_sim.model.cluster import Cluster
from persia_sim.model.costs import Costs
from persia_sim.model.demand import demand
from persia_sim.model.incidents import Purpose, lognormal_factors, stream
from persia_sim.model.scenario import Scenario
from persia_sim.oracle.closed_form import answer
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.presets.costs import calibrated

LEAST, MOST = 256, 32768  # batches a rank that are tried, powers of two
_REFUSED = log(1e-3)  # the log error of a configuration that cannot run at all


@dataclass(frozen=True, slots=True)
class Shared:
    """A constant of all clusters: where it starts, and how far that is trusted (log units)."""

    start: float
    width: float
    is_share: bool = False


SHARED = {
    "gpu_share": Shared(0.38, 0.5, True),
    "gpu_fixed_s": Shared(1e-3, 1.0),
    "mesh_share": Shared(9.8 / 150, 0.5, True),
    "nic_share": Shared(0.5, 0.5, True),
    "sync_fixed_s": Shared(5e-3, 1.0),
    "path_s_per_byte": Shared(1e-9, 1.5),
    "path_100t": Shared(1.0, 0.7),
    "load_s_per_column": Shared(1.5e-6, 0.7),
    "kwai_flops": Shared(1.0, 0.5),
}
"""Share of float32's peak; a step's kernels; share of the V100s' NVLinks; share of 100 Gbit/s; a
step's all-reduce; a byte of rows at a worker, and how many times as long on the 100T run's hosts,
whose cores are five years younger; a column of a sample at a loader; the multiplications of Kwai's
private network over those that its published size would give."""


@cache
def cluster_of(name: str, gpus: int) -> Cluster:
    """A preset with so many GPUs, and as many loaders a rank as it has."""
    return CLUSTERS[name]().resized(gpus)


@cache
def slowest(ranks: int) -> float:
    """Mean over steps of the slowest rank's compute, as a simulation draws it."""
    draws = [lognormal_factors(stream(0, Purpose.GPU, r), GPU_CV, 60) for r in range(ranks)]
    return float(np.max(draws, axis=0).mean())


Edit = Callable[[str, Costs], Costs]
"""What a hypothesis changes in the costs of a cluster."""


def rate(
    point: Point, values: dict[str, float], batches: dict[str, int], edit: Edit | None = None
) -> tuple[float, str]:
    """Predicted samples per second, and what binds; 0 where the run would be refused."""
    work = workloads()[point.workload]
    work = replace(work, batch_per_rank=batches.get(point.cluster, work.batch_per_rank))
    costs = calibrated(values, point.cluster)
    scenario = Scenario(
        cluster=cluster_of(point.cluster, point.gpus),
        workload=work,
        costs=edit(point.cluster, costs) if edit else costs,
        mode=point.mode,
        tau=WIDE_TAU if point.mode.reads_late_rows else None,
        merge_pushes=False if point.mode.may_merge else None,
        steps=60,
    )
    try:
        need = demand(scenario)
    except ValueError:  # a round of averaging that never ends
        return 0.0, "refused"
    factor = slowest(point.gpus) if point.mode.has_barrier else 1.0
    drawn = replace(need, forward_s=need.forward_s * factor, backward_s=need.backward_s * factor)
    found = answer(scenario, need, drawn)
    return found.samples_per_s, found.binds


@dataclass(frozen=True, slots=True)
class SharedFit:
    """The outcome for one choice of batches."""

    values: dict[str, float]
    batches: dict[str, int]
    cost: float
    """Half the robust sum of squares, starts included: differences are log likelihood ratios."""
    spread: dict[str, float]
    """Standard deviation of each logarithm, all others free (quadratic profile)."""
    errors: np.ndarray
    """float64 [points]: ln(predicted / published)."""

    @property
    def identified(self) -> list[str]:
        """Constants that the points narrow to less than half the width of their start."""
        return [n for n, s in self.spread.items() if s < 0.5 * SHARED[n].width]


def fit_shared(
    known: Sequence[Point],
    batches: dict[str, int],
    edit: Edit | None = None,
    held: Sequence[str] = (),
) -> SharedFit:
    """Find the constants that serve all points at these batches a rank; ``held`` stay at their
    start."""
    from scipy.optimize import least_squares  # late: a second to import

    fixed = {name: SHARED[name].start for name in held}
    free = {name: each for name, each in SHARED.items() if name not in fixed}
    names = list(free)
    start = np.array([log(each.start) for each in free.values()])
    widths = np.array([each.width for each in free.values()])
    most = np.array([0.0 if each.is_share else inf for each in free.values()])
    spreads = np.array([point.spread for point in known])

    def errors(logs: np.ndarray) -> np.ndarray:
        values = fixed | dict(zip(names, np.exp(logs).tolist(), strict=True))
        rates = [rate(point, values, batches, edit)[0] for point in known]
        return np.array(
            [log(r / p.samples_per_s) if r else _REFUSED
             for r, p in zip(rates, known, strict=True)]
        )  # fmt: skip

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(logs) / spreads, (logs - start) / widths])

    found = least_squares(
        residuals, start, loss="soft_l1", max_nfev=30, bounds=(np.full(len(names), -inf), most)
    )
    inverse = np.linalg.inv(found.jac.T @ found.jac)
    return SharedFit(
        values=fixed | dict(zip(names, np.exp(found.x).tolist(), strict=True)),
        batches=dict(batches),
        cost=float(found.cost),
        spread=dict(zip(names, np.sqrt(np.diag(inverse)).tolist(), strict=True)),
        errors=errors(found.x),
    )


def best_batches(known: Sequence[Point], first: tuple[int, int] = (1024, 4096)) -> list[SharedFit]:
    """Fits at powers of two for Kwai's and the 100T run's batch a rank, the likeliest first.

    From ``first`` on to neighbours (half, same, twice each) until none is likelier.
    """
    seen: dict[tuple[int, int], SharedFit] = {}

    def at(pair: tuple[int, int]) -> SharedFit:
        if pair not in seen:
            seen[pair] = fit_shared(known, {"v100-paper": pair[0], "gcp-100t": pair[1]})
        return seen[pair]

    here = first
    while True:
        factors = (0.5, 1, 2)  # both at once, too: the all-reduce ties them to each other
        near = [(int(a * here[0]), int(b * here[1])) for a in factors for b in factors]
        allowed = [pair for pair in near if all(LEAST <= n <= MOST for n in pair)]
        best = min([here, *allowed], key=lambda pair: at(pair).cost)
        if best == here:
            return sorted(seen.values(), key=lambda each: each.cost)
        here = best
