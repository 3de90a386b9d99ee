"""Staleness by row: how many missed pushes had touched the very row that a batch read.

A row of popularity p stands in another batch with probability q = 1 - (1 - p)^draws. A lookup that
missed M pushes of others missed Binomial(M, q) pushes of that row. Rows count as batches meet them:
each distinct row of a batch once, so popular rows weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from persia_sim.model.noise import Purpose, stream
from persia_sim.model.popularity import zipf_bins
from persia_sim.model.workload import Workload
from persia_sim.theory.alpha import of_batch

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
    probability, number = zipf_bins(workload.rows / workload.fields, workload.zipf)
    draws = workload.batch_per_rank * workload.ids_per_field
    met = of_batch(probability, draws)
    weight = met * number / (met * number).sum()
    mean_missed = float(missed_pushes.mean())
    even = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    rows = met[np.minimum(np.searchsorted(np.cumsum(weight), even), len(met) - 1)]
    lookups = np.sort(missed_pushes)[(even * len(missed_pushes)).astype(np.int64)]
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
