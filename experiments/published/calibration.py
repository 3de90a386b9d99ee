"""Constants fitted to measurements, with what the data say of each; those of GPU-sharded training.

A constant moves by factors. It starts at what a document or an assumption says, with a width (a
standard deviation of its logarithm) for how much that is trusted; the fit minimises a robust sum of
squared log errors plus the squared distances from the starts. A constant that the data leave as
wide as its start is not identified, and the table says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, nan, sqrt

import numpy as np

from experiments.published.gpu_rows import Measured
from persia_sim.cluster.machine import Fabric, Reach
from persia_sim.presets.fitted import FITTED, Constant, holders
from persia_sim.sharded.plan import Software, Strategy
from persia_sim.sharded.software import (
    BAND,
    Band,
    Seen,
    applied,
    constants_ln,
    generation,
    guessed,
    half_ln,
    strange,
)
from persia_sim.sharded.stages import Job, step_s

NOISE = 0.12
"""Standard deviation of the log of a measured step that the model does not explain: machines of one
kind differ by 5 %, software versions by more."""
_MOST_WEIGHT = 4
"""A series counts as at most so many points, however long it is."""
_BOXES = 0.4
"""Weight of a box of GPUs without NVLinks: lines do not say how its switches hang together, and
such boxes differ by more than all other machines."""
_AUDITED = 1.5
"""Weight of MLPerf's rounds, which are repeated and audited: machines of one kind differ by 5 %."""
_STEP = 0.02
_ROUNDS = 30
_SETTLED = 1e-3

Errors = np.ndarray
"""float64 [model and naive, points]: ln(predicted rate / measured rate)."""


def touches(name: str, row: Measured) -> bool:
    """Whether a constant enters the step of a row."""
    owner, _, what = name.rpartition(".")
    if owner == "reach":
        return what in _shares_of(row.job)
    return row.family in holders(owner)


def _shares_of(job: Job) -> set[str]:
    """The constants of `Reach` that a job's step can depend on."""
    system = job.system
    result = {job.arithmetic.value, "hbm", "activation_passes"}
    if system.gpus > 1:
        result |= _OF_FABRIC[system.host.fabric]
    if system.nodes > 1:
        result.add("nic")
    return result


_OF_FABRIC = {
    Fabric.SWITCH: {"switch"},
    Fabric.MESH: {"mesh", "pairs"},
    Fabric.PCIE: {"pcie", "mesh"},  # a bridge is an NVLink
}


def log_errors(rows: Sequence[Measured], reach: Reach, software: dict[str, Software]) -> np.ndarray:
    """ln(simulated step / measured step) of each row, float64 [rows]."""
    return np.array([log(step_s(row.under(reach, software)) / row.step_s) for row in rows])


def weights(rows: Sequence[Measured]) -> np.ndarray:
    """How much each row counts: those of a long series share what a few would have."""
    lengths = Counter(row.series for row in rows)
    solution = [sqrt(min(_MOST_WEIGHT, lengths[r.series]) / lengths[r.series]) for r in rows]
    systems = [row.job.system for row in rows]
    boxed = [s.gpus > 1 and s.host.fabric is Fabric.PCIE for s in systems]
    audited = ["mlperf" in row.series for row in rows]
    return np.array(solution) * np.where(boxed, _BOXES, 1.0) * np.where(audited, _AUDITED, 1.0)


@dataclass(frozen=True, slots=True)
class Fit:
    """The outcome of one fit of some constants, in their order."""

    constants: Mapping[str, Constant]
    """Constants with their starts."""
    logs: np.ndarray
    """float64 [constants]"""
    cost: float
    """Half the robust sum of squares, starts included: differences are log likelihood ratios."""
    precision: np.ndarray
    """float64 [constants, constants]: curvature of the data's part of the cost."""

    @property
    def values(self) -> dict[str, float]:
        """What was found, by name."""
        return dict(zip(self.constants, np.exp(self.logs).tolist(), strict=True))

    @property
    def spread(self) -> dict[str, float]:
        """Standard deviation of each logarithm with all others free, starts included: the profile
        likelihood in its quadratic form."""
        starts = np.diag([each.width**-2.0 for each in self.constants.values()])
        deviations = np.sqrt(np.diag(np.linalg.inv(self.precision + starts)))
        return dict(zip(self.constants, deviations.tolist(), strict=True))

    @property
    def identified(self) -> set[str]:
        """The constants that the data narrow to less than half the width of their start."""
        return {name for name, s in self.spread.items() if s < 0.5 * self.constants[name].width}


def search(
    errors: Callable[[np.ndarray], np.ndarray],
    points: int,
    constants: Mapping[str, Constant],
    *,
    first: np.ndarray | None = None,
) -> Fit:
    """Find constants: least squares of errors, robust (soft L1), and of the distances of logarithms
    from their starts, plain.

    ``errors(logs)`` are those of the points, over their noise. ``first`` is where to begin.
    """
    from scipy.optimize import least_squares  # late: a second to import

    # Where each constant starts, how wide its prior is, and the limit of a share.
    start = np.array([log(each.start) for each in constants.values()])
    widths = np.array([each.width for each in constants.values()])
    most = np.array([0.0 if each.is_share else 30.0 for each in constants.values()])
    logs = np.minimum(start if first is None else first, most)

    # Errors of the points, robust; distances from the starts, plain: they are the prior.
    def residuals(x: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(x), (x - start) / widths])

    def robust(squares: np.ndarray) -> np.ndarray:
        root = np.sqrt(1 + squares)
        loss = np.array([2 * (root - 1), 1 / root, -0.5 * root**-3])
        plain = np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
        return np.where(np.arange(len(squares)) < points, loss, plain)

    # Slopes by differences.
    def slopes(x: np.ndarray) -> np.ndarray:
        result, here = np.zeros((points, len(logs))), errors(x)
        for k in range(len(logs)):
            moved = x.copy()
            moved[k] -= _STEP  # downwards: a share may stand at its limit
            result[:, k] = (here - errors(moved)) / _STEP
        return result

    # The best logarithms, and how sharply the data say so.
    solution = least_squares(
        residuals,
        logs,
        loss=robust,
        max_nfev=_ROUNDS,
        ftol=1e-5,
        bounds=(np.full(len(logs), -np.inf), most),
        jac=lambda x: np.vstack([slopes(x), np.diag(1 / widths)]),
    )
    jacobian = slopes(solution.x)
    data = jacobian.T @ (((1.0 + errors(solution.x) ** 2) ** -0.5)[:, None] * jacobian)
    return Fit(constants, solution.x, float(solution.cost), data)


def fit(rows: Sequence[Measured], first: np.ndarray | None = None) -> Fit:
    """The constants of GPU-sharded training from measured steps."""
    logs = np.log([each.start for each in FITTED.values()]) if first is None else first
    for _ in range(_ROUNDS):
        found = tangent(rows, logs).fit(range(len(rows)))
        settled = np.abs(found.logs - logs).max() < _SETTLED
        logs = found.logs
        if settled:
            break
    return found


@dataclass(frozen=True, slots=True)
class Tangent:
    """The errors of rows as a linear law of the logarithms of the constants, near some of these:
    what is fitted to parts of the rows is found by it in no time."""

    rows: Sequence[Measured]
    logs: np.ndarray
    """float64 [constants]: where the law touches."""
    errors: np.ndarray
    """float64 [rows]: ln(simulated step / measured step) there."""
    slopes: np.ndarray
    """float64 [rows, constants]"""

    def fit(self, places: Sequence[int]) -> Fit:
        """The constants from some of the rows."""
        chosen = list(places)
        scale = weights([self.rows[k] for k in chosen]) / NOISE
        errors = self.errors[chosen]
        slopes = self.slopes[chosen]

        def off(logs: np.ndarray) -> np.ndarray:
            moved: np.ndarray = errors + slopes @ (logs - self.logs)
            return scale * moved

        return search(off, len(chosen), FITTED, first=self.logs)


def tangent(rows: Sequence[Measured], logs: np.ndarray) -> Tangent:
    """The errors of rows near some logarithms of the constants."""
    errors = log_errors(rows, *with_logs(logs))
    slopes = np.zeros((len(rows), len(FITTED)))
    for place, name in enumerate(FITTED):
        mine = [k for k, row in enumerate(rows) if touches(name, row)]
        moved = logs.copy()
        moved[place] -= _STEP  # downwards: a share may stand at its limit
        less = log_errors([rows[k] for k in mine], *with_logs(moved))
        slopes[mine, place] = (errors[mine] - less) / _STEP
    return Tangent(rows, logs, errors, slopes)


def with_logs(logs: np.ndarray) -> tuple[Reach, dict[str, Software]]:
    """The presets with these logarithms of the constants of `FITTED`."""
    return applied(dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))


def seen_of(rows: Sequence[Measured]) -> dict[str, Seen]:
    """What of each system some rows measured."""
    models: dict[str, dict[tuple[float, float], None]] = defaultdict(dict)
    nodes: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for row in rows:
        job = row.job
        models[row.family][job.ranker.dense_macs, job.ranker.ids] = None
        nodes[row.family] = max(nodes[row.family], job.system.nodes)
        copies[row.family] += job.software.strategy is Strategy.DATA_PARALLEL
    return {f: Seen(tuple(models[f]), nodes[f], bool(copies[f])) for f in models}


def generations_of(rows: Sequence[Measured]) -> set[str]:
    """Kinds of machine that some rows were measured on, with several GPUs."""
    systems = [row.job.system for row in rows]
    return {generation(s.host, s.gpus) for s in systems if s.gpus > 1}


def _machine(row: Measured) -> str:
    return generation(row.job.system.host, row.job.system.gpus)


LEFT_OUT: dict[str, Callable[[Measured], str]] = {
    "software": lambda row: row.family,
    "machine": _machine,
    "software on a machine": lambda row: f"{row.family} on {_machine(row)}",
    "nodes": lambda row: f"{row.job.system.nodes} nodes" if row.job.system.nodes > 1 else "",
    "network": lambda row: "several nodes" if row.job.system.nodes > 1 else "",
    "source": lambda row: row.series.partition(" / ")[0],
    "name of the software": lambda row: row.family.partition("-")[0],
}
"""What is left out as a whole, and which of it a row is of; empty: it is not left out."""
BY_TITLE = ("source", "name of the software")
"""Of which a row says no more than a stranger's would: what its source calls the software."""


@dataclass(frozen=True, slots=True)
class Held:
    """A row predicted by constants in which it had no part."""

    row: Measured
    group: str
    """What was left out with it."""
    error: float
    """ln(predicted rate / measured rate)."""
    naive: float
    """The error of the nearest of the other rows, taken as it is; NaN where there is none."""
    spread: float
    """Standard deviation of the error that the constants leave open."""
    strange: tuple[str, ...]
    """What of it the other rows did not measure, fields of `Band`."""

    def half(self, band: Band = BAND) -> float:
        """Half width of its 90 % band."""
        return half_ln(self.spread, self.strange, band)


def points_of(held: Sequence[Held]) -> list[Held]:
    """One of each job, that with the middle error: submitters of one class count as one point."""
    result = []
    for places in classes([each.row for each in held]):
        same = sorted((held[place] for place in places), key=lambda each: each.error)
        result.append(same[len(same) // 2])
    return result


def coverage(held: Sequence[Held], band: Band = BAND) -> float:
    """Share of the points whose error their band holds."""
    return float(np.mean([abs(each.error) <= each.half(band) for each in held]))


def left_out_table(what: str, held: Sequence[Held]) -> str:
    """A table of what was left out in turn: each, then all."""
    points = points_of(held)
    groups = {
        name: [x for x in points if x.group == name]
        for name in dict.fromkeys(x.group for x in held)
    }
    if len(groups) > _MANY:
        groups = {}
    groups[f"all, each {what} left out in turn"] = points
    lines = [f"{what + ' left out':34} {HEADER}   naive: median, p90   bands hold, middle one"]
    for name, group in groups.items():
        if group:
            errors = compared(name, (x.error for x in group), (x.naive for x in group))
            middle = exp(np.median([x.half() for x in group]))
            lines.append(f"{errors}   {coverage(group):10.0%}, {middle:.2f}")
    return "\n".join(lines)


_MANY = 24  # groups of which each has a line


def held_out(near: Tangent, label: Callable[[Measured], str], by_title: bool = False) -> list[Held]:
    """Every row that has a label, predicted by a fit to those that have another one; ``by_title``:
    by what its source calls the software."""
    groups: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(near.rows):
        if name := label(row):
            groups[name].append(place)
    result = []
    for name, places in groups.items():
        others = sorted(set(range(len(near.rows))) - set(places))
        again = near.fit(others)
        left, kept = ([near.rows[place] for place in which] for which in (places, others))
        jobs = _jobs(left, kept, *with_logs(again.logs), by_title)
        seen = seen_of(kept)
        machines = generations_of(kept)
        for row, job, naive in zip(left, jobs, naive_rates(left, kept), strict=True):
            error = log(row.step_s / step_s(job))
            off = log(naive / row.samples_per_s) if row.samples_per_s else nan
            spread = constants_ln(job, again.spread)
            result.append(Held(row, name, error, off, spread, tuple(strange(job, seen, machines))))
    return result


def _jobs(
    rows: Sequence[Measured],
    kept: Sequence[Measured],
    reach: Reach,
    software: Mapping[str, Software],
    by_title: bool,
) -> list[Job]:
    """The rows as jobs; ``by_title``: of one of the systems that the other rows measured."""
    if not by_title:
        return [row.under(reach, software) for row in rows]
    seen = seen_of(kept)
    return [
        guessed(row.title, (row.under(reach, software, name) for name in seen), seen)
        for row in rows
    ]


@dataclass(frozen=True, slots=True)
class Score:
    """Summary of log errors, ln(predicted rate / measured rate)."""

    points: int
    median: float
    """Median of the magnitude."""
    p90: float
    """90 % point of the magnitude."""
    within_20: float
    """Share of magnitudes below ln 1.2."""
    mean: float
    """Mean error with its sign."""

    def __str__(self) -> str:
        if not self.points:
            return f"{0:4} {self.short} {'-':>7} {'-':>7}"
        return f"{self.points:4} {self.short} {self.within_20:7.0%} {self.mean:+7.3f}"

    @property
    def short(self) -> str:
        """Median and 90 % point alone."""
        if not self.points:
            return f"{'-':>7} {'-':>7}"
        return f"{np.expm1(self.median):7.1%} {np.expm1(self.p90):7.1%}"


HEADER = f"{'n':>4} {'median':>7} {'p90':>7} {'<20 %':>7} {'mean ln':>7}"


def compared(name: str, model: Iterable[float], naive: Iterable[float], width: int = 34) -> str:
    """A line below `HEADER`: the model's errors, and the naive ones of the same points."""
    return f"{name:{width}} {score(model)}   {score(naive).short}"


def score(errors: Iterable[float]) -> Score:
    """Summary of log errors; those that are not finite count nowhere."""
    known = np.array([e for e in errors if np.isfinite(e)])
    if not len(known):
        return Score(0, nan, nan, nan, nan)
    size = np.abs(known)
    within = float((size < log(1.2)).mean())
    return Score(
        len(known),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        within,
        float(known.mean()),
    )


def classes(rows: Sequence[Measured]) -> list[list[int]]:
    """Places of rows that describe the same job: submitters of one class count as one point."""
    places: dict[tuple[str, Job], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[row.family, row.job].append(place)
    return list(places.values())


def unlikeness(one: Measured, other: Measured) -> float:
    """How far apart two jobs are: software, model, GPU, number of GPUs and batch, in log units."""
    a = one.job
    b = other.job
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
    neighbours = [nearest(row, known) for row in rows]
    return [
        other.per_gpu * row.job.system.gpus if other else nan
        for row, other in zip(rows, neighbours, strict=True)
    ]


def scaling_ratios(rows: Sequence[Measured], rates: Sequence[float]) -> list[tuple[float, float]]:
    """How much faster more GPUs are than the fewest of the same software, model and machine, by
    these rates and measured: at one global batch, and at one batch a GPU."""
    # Rows of one software, model and machine, at one batch or at one batch a GPU.
    groups: dict[tuple[str, str, float], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.samples_per_s:
            about = row.series + str(row.job.ranker.table_bytes)
            groups[about, "global", row.job.batch].append(place)
            groups[about, "per GPU", row.job.per_gpu].append(place)

    # Each against the fewest GPUs of its group.
    result = []
    for places in groups.values():
        first = min(places, key=lambda place: rows[place].job.system.gpus)
        base = rows[first]
        for place in places:
            row = rows[place]
            if row.job.system.gpus > base.job.system.gpus:
                measured = (row.samples_per_s or nan) / (base.samples_per_s or nan)
                result.append((rates[place] / rates[first], measured))
    return result
