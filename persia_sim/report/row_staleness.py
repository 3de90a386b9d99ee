"""How late the rows of a run were: in steps, in pushes, and by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from persia_sim.base.popularity import of_batch, zipf_bins
from persia_sim.base.staleness import staleness_in_pushes, staleness_in_steps
from persia_sim.base.trace import Trace
from persia_sim.cluster.incidents import Purpose, stream
from persia_sim.cluster.stamps import Mark
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import Run
from persia_sim.report.measure import steady_steps

_SAMPLES = 200_000  # standard error of a share: at most 0.11 percentage points


@dataclass(frozen=True, slots=True)
class RowStaleness:
    """Missed pushes of a row, over the distinct rows of all batches."""

    mean: float
    """Exact, given the pushes that lookups missed."""
    fresh: float
    """Share of rows that missed nothing."""
    p50: float
    p90: float
    p99: float
    hottest: float
    """Mean of a field's most popular row."""


def row_staleness(missed_pushes: np.ndarray, workload: Workload) -> RowStaleness:
    """The distribution, from the missed pushes of a run's lookups and the rows' Zipf law.

    The quantiles come from draws: lookups and rows evenly spread over their distributions and
    paired at random, then a binomial number each; the same input gives the same figures.
    """
    if not len(missed_pushes) or not missed_pushes.any():
        return RowStaleness(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)

    # Bins of rows alike in popularity: how likely a batch has each.
    each_met, each_number = [], []
    for table in workload.alike:
        probability, number = zipf_bins(table.rows, table.zipf)
        each_met.append(of_batch(probability, workload.batch_per_rank * table.ids))
        each_number.append(number * (table.count / workload.alike[0].count))
    met = np.concatenate(each_met)
    number = np.concatenate(each_number)
    weight = met * number / (met * number).sum()
    mean_missed = float(missed_pushes.mean())

    # Draws, evenly spread over rows and over lookups, paired at random.
    even = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    rows = met[np.minimum(np.searchsorted(np.cumsum(weight), even), len(met) - 1)]
    lookups = np.sort(missed_pushes)[(even * len(missed_pushes)).astype(np.int64)]

    # How many of the missed pushes touched the row.
    random = stream(0, Purpose.ROWS, 0)
    missed = random.binomial(lookups, random.permutation(rows))
    p50, p90, p99 = np.percentile(missed, (50, 90, 99)).tolist()
    return RowStaleness(
        mean=mean_missed * float((weight * met).sum()),
        fresh=float((missed == 0).mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        hottest=mean_missed * float(met.max()),
    )


@dataclass(frozen=True, slots=True)
class Staleness:
    """How late rows were, over the lookups of a run's steady steps."""

    steps_mean: float
    steps_p99: float
    steps_oldest: int
    pushes_mean: float
    pushes_p99: float
    rows: RowStaleness
    """Missed pushes that touched the same row, over the distinct rows of all batches."""


def staleness(run: Run) -> Staleness:
    """Statistics of the steady steps of the run's trace.

    Pushes count until the last lookup of some rank: later ones meet a run that empties itself.
    """
    if run.trace is None:
        raise ValueError("the run has no trace: simulate with trace=True")
    steady = steady_steps(run)
    stamps = run.stamps
    full_until_s = float(stamps[Mark.READ][:, -1].min())
    closed = np.flatnonzero(stamps[Mark.APPLIED].max(0) <= full_until_s)
    end = int(closed[-1]) + 1 if len(closed) else 0
    return staleness_of(
        run.trace, run.scenario.workload, steady, end if end > steady.start else None
    )


def staleness_of(
    trace: Trace, workload: Workload, steady: range, pushes_end: int | None = None
) -> Staleness:
    """Statistics of the lookups of some steps, and of their pushes up to a step."""
    # Lookups of steady steps, in steps that they missed.
    in_steps = staleness_in_steps(trace)
    in_pushes = staleness_in_pushes(trace)
    lookups = (in_steps.step >= steady.start) & (in_steps.step < steady.stop)
    missing = in_steps.missing_steps[lookups]
    oldest = in_steps.oldest_missing_steps[lookups]

    # The same in pushes of others, and by row.
    end = steady.stop if pushes_end is None else pushes_end
    pushed = (in_pushes.step >= steady.start) & (in_pushes.step < end)
    pushes = in_pushes.missed_pushes[pushed]
    mean, p99 = (pushes.mean(), np.percentile(pushes, 99)) if len(pushes) else (0.0, 0.0)
    return Staleness(
        float(missing.mean()),
        float(np.percentile(missing, 99)),
        int(oldest.max()),
        float(mean),
        float(p99),
        row_staleness(pushes, workload),
    )
