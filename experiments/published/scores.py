"""How wrong predictions are: by class, against the nearest published series, and in scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log, nan

import numpy as np

from experiments.published.gpu_rows import Measured
from persia_sim.sharded.stages import Job


@dataclass(frozen=True, slots=True)
class Score:
    """Of log errors, ln(predicted rate / measured rate)."""

    points: int
    median: float
    """Of the magnitude."""
    p90: float
    """90 % point of the magnitude."""
    within_20: float
    """Share of magnitudes below ln 1.2."""
    mean: float
    """With its sign."""

    def __str__(self) -> str:
        if not self.points:
            return f"{0:4} {'-':>7} {'-':>7} {'-':>7} {'-':>7}"
        return (
            f"{self.points:4} {np.expm1(self.median):7.1%} {np.expm1(self.p90):7.1%} "
            f"{self.within_20:7.0%} {self.mean:+7.3f}"
        )


HEADER = f"{'n':>4} {'median':>7} {'p90':>7} {'<20 %':>7} {'mean ln':>7}"


def score(errors: Iterable[float]) -> Score:
    """Summary of log errors; those that are not finite count nowhere."""
    known = np.array([e for e in errors if np.isfinite(e)])
    if not len(known):
        return Score(0, nan, nan, nan, nan)
    size = np.abs(known)
    within = float((size < log(1.2)).mean())
    return Score(
        len(known), float(np.median(size)), float(np.quantile(size, 0.9)), within,
        float(known.mean()),
    )  # fmt: skip


def classes(rows: Sequence[Measured]) -> list[list[int]]:
    """Places of rows that describe the same job: submitters of one class count as one point."""
    found: dict[tuple[str, Job], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        found[row.family, row.job].append(place)
    return list(found.values())


def unlikeness(one: Measured, other: Measured) -> float:
    """How far apart two jobs are: software, model, GPU, number of GPUs and batch, in log units."""
    a, b = one.job, other.job
    pairs = (
        (a.ranker.dense_macs, b.ranker.dense_macs, 1.0),
        (a.ranker.ids * 100.0, b.ranker.ids * 100.0, 0.5),
        (_rate(a), _rate(b), 1.0),
        (a.system.gpus, b.system.gpus, 0.3),
        (a.per_gpu, b.per_gpu, 0.5),
    )
    far = sum(weight * abs(log(x / y)) for x, y, weight in pairs)
    return far + (0.5 if one.family != other.family else 0.0)


def _rate(job: Job) -> float:
    gpu = job.system.host.chip
    return gpu.peak_flops(gpu.arithmetic(job.precision))


def nearest(row: Measured, known: Sequence[Measured]) -> Measured | None:
    """The measured row of another series that is most like this one: the naive baseline."""
    others = [k for k in known if k.series != row.series and k.samples_per_s]
    return min(others, key=lambda other: unlikeness(row, other), default=None)


def naive_rates(rows: Sequence[Measured], known: Sequence[Measured]) -> list[float]:
    """Samples per second of each row if a GPU did what it does in the nearest other series."""
    found = [nearest(row, known) for row in rows]
    return [
        other.per_gpu * row.job.system.gpus if other else nan
        for row, other in zip(rows, found, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster more GPUs were than the fewest of the same software, model and machine."""

    series: str
    gpus: tuple[int, int]
    measured: float
    predicted: float


def scaling_ratios(rows: Sequence[Measured], rates: Sequence[float]) -> list[Ratio]:
    """Ratios of rates against numbers of GPUs: at one global batch, and at one batch a GPU."""
    groups: dict[tuple[str, str, float], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.samples_per_s:
            about = row.series + str(row.job.ranker.table_bytes)
            groups[about, "global", row.job.batch].append(place)
            groups[about, "per GPU", row.job.per_gpu].append(place)
    found = []
    for places in groups.values():
        first = min(places, key=lambda place: rows[place].job.system.gpus)
        base = rows[first]
        for place in places:
            row = rows[place]
            if row.job.system.gpus > base.job.system.gpus:
                measured = (row.samples_per_s or nan) / (base.samples_per_s or nan)
                gpus = (base.job.system.gpus, row.job.system.gpus)
                found.append(Ratio(row.series, gpus, measured, rates[place] / rates[first]))
    return found
