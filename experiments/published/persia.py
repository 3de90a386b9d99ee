"""One set of constants for Persia's published clusters, fitted to all points at once, in a table.

Every cluster has the same laws (kernel: fixed + flop / rate; all-reduce: fixed + bytes / rate;
loader: seconds a column) and batches are powers of two; what such a model cannot explain shows.
Rates are the closed form's, with ranks as uneven as in a simulation: within a few per cent of one
where no NIC binds. The presets take what is found here (`persia_sim/presets/costs.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, hypot, log
from typing import Any

import numpy as np

from experiments.published.calibration import HEADER, Fit, compared, search
from experiments.published.descriptions import number, published_rates
from experiments.published.rivals import GPU_CV, RIVALS, refitted, samples_per_s
from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import Purpose, lognormal_factors, stream
from persia_sim.cluster.scenario import Noise, Scenario
from persia_sim.cluster.workload import Workload
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.presets.costs import FITS, calibrated
from persia_sim.report.hosts import unknown_hosts
from persia_sim.report.ranges import OnServers, Range, range_of

MODES = {"hybrid": Mode.HYBRID, "sync": Mode.SYNC, "async": Mode.ASYNC_AVERAGING}
WIDE_TAU = 16  # the bound of the published runs is not known; wide enough never to bind
RUN_NOISE = 0.05
"""Standard deviation of the log of a measured rate: machines and runs differ by so much."""
LEAST, MOST = 256, 32768  # batches a rank that are tried, powers of two
_REFUSED = log(1e-3)  # the log error of a configuration that cannot run at all


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """One published rate."""

    cluster: str
    workload: str
    mode: Mode
    gpus: int
    samples_per_s: float
    digitisation: float
    """Standard deviation of reading it off a plot, relative."""

    @property
    def series(self) -> str:
        """Points of one figure's one line."""
        return f"{self.workload.rstrip('12345')} {self.mode}"

    @property
    def spread(self) -> float:
        """Spread of the rate's logarithm: run and reading together."""
        return hypot(RUN_NOISE, self.digitisation)


def points() -> list[PublishedRate]:
    """Persia's points; bars that only halve another bar are no measurement and left out."""
    result = []
    for end, misread in (("public", 150), ("kwai", 4000), ("model_size", 15000)):
        for line in published_rates(f"throughput_{end}.csv"):
            gpus = int(line.get("gpus", 64))
            rate = number(line, "samples_per_s")
            halved = end == "public" and gpus == 1 and "dashed" not in line["note"]
            if line.get("system", "Persia") == "Persia" and not halved:
                work = line.get("dataset") or line["workload"]
                mode = MODES[line["mode"]]
                result.append(
                    PublishedRate(line["cluster"], work, mode, gpus, rate, misread / rate)
                )
    return result


@cache
def cluster_of(name: str, gpus: int) -> Cluster:
    """A preset with so many GPUs, and as many loaders a rank as it has."""
    return CLUSTERS[name]().resized(gpus)


@cache
def slowest(ranks: int) -> float:
    """Mean over steps of the slowest rank's compute, as a simulation draws it."""
    draws = [lognormal_factors(stream(0, Purpose.GPU, r), GPU_CV, 60) for r in range(ranks)]
    return float(np.max(draws, axis=0).mean())


def scenario_of(
    cluster: Cluster, work: Workload, costs: Costs, mode: Mode, steps: int, gpu_cv: float = 0.0
) -> Scenario:
    """The original: wide window, pushes on arrival."""
    return Scenario(
        cluster=cluster,
        workload=work,
        costs=costs,
        mode=mode,
        steps=steps,
        tau=WIDE_TAU if mode.reads_late_rows else None,
        merge_pushes=False if mode.may_merge else None,
        noise=Noise(gpu_cv=gpu_cv),
    )


def may_be(point: PublishedRate, fit: Fit, batches: Mapping[str, int], predicted: float) -> Range:
    """What a prediction by a fit's constants may be: these are as uncertain as that fit says."""
    work = workloads()[point.workload]
    work = replace(work, batch_per_rank=batches.get(point.cluster, work.batch_per_rank))
    costs = calibrated(fit.values, point.cluster, fit.spread)
    scenario = scenario_of(cluster_of(point.cluster, point.gpus), work, costs, point.mode, 60)
    hosts = unknown_hosts(point.cluster, scenario)
    side = OnServers(scenario=scenario, hosts=hosts, spreads=fit.spread)
    return range_of(side, value=predicted, simulated=False)


def rate(point: PublishedRate, values: dict[str, float], batches: dict[str, int]) -> float:
    """Predicted samples per second; 0 where the run would be refused."""
    work = workloads()[point.workload]
    work = replace(work, batch_per_rank=batches.get(point.cluster, work.batch_per_rank))
    costs = calibrated(values, point.cluster)
    scenario = scenario_of(cluster_of(point.cluster, point.gpus), work, costs, point.mode, 60)
    try:
        need = demand(scenario)
    except ValueError:  # a round of averaging that never ends
        return 0.0
    factor = slowest(point.gpus) if point.mode.has_barrier else 1.0
    drawn = replace(need, forward_s=need.forward_s * factor, backward_s=need.backward_s * factor)
    return answer(scenario, need, drawn).samples_per_s


@dataclass(frozen=True, slots=True)
class SharedFit:
    """The outcome for one choice of batches."""

    fit: Fit
    batches: dict[str, int]
    errors: np.ndarray
    """float64 [points]: ln(predicted / published)."""


def log_errors(
    known: Sequence[PublishedRate], values: dict[str, float], batches: dict[str, int]
) -> np.ndarray:
    """ln(predicted / published), float64 [points]."""
    rates = [rate(point, values, batches) for point in known]
    pairs = zip(rates, known, strict=True)
    return np.array([log(r / p.samples_per_s) if r else _REFUSED for r, p in pairs])


def fit_shared(known: Sequence[PublishedRate], batches: dict[str, int]) -> SharedFit:
    """Find the constants that serve all points at these batches a rank."""
    spreads = np.array([point.spread for point in known])

    def errors(logs: np.ndarray) -> np.ndarray:
        values = dict(zip(FITS, np.exp(logs).tolist(), strict=True))
        return log_errors(known, values, batches) / spreads

    solution = search(errors, len(known), FITS)
    return SharedFit(solution, dict(batches), log_errors(known, solution.values, batches))


def best_batches(
    known: Sequence[PublishedRate], first: tuple[int, int] = (1024, 4096)
) -> list[SharedFit]:
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
        best = min([here, *allowed], key=lambda pair: at(pair).fit.cost)
        if best == here:
            return sorted(seen.values(), key=lambda each: each.fit.cost)
        here = best


def rivals() -> list[str]:
    """A line for each rival: its constants fitted again, and its errors."""
    lines = []
    for (system, mode), rival in RIVALS.items():
        measured = [_bar(line) for line in _bars(system, mode)]
        again, errors = refitted(rival, measured)
        constants = ", ".join(f"{name} {getattr(again, name):.3g}" for name in again.fitted)
        size = np.expm1(np.abs(errors))
        within = f"median {np.median(size):.1%}, largest {size.max():.1%}"
        lines.append(f"  {rival.name:20} {constants}; {len(measured)} points: {within}")
    return lines


def _bars(system: str, mode: str) -> list[dict[str, str]]:
    lines = published_rates("throughput_public.csv")
    return [line for line in lines if (line["system"], line["mode"]) == (system, mode)]


def _bar(line: dict[str, str]) -> tuple[Cluster, Workload, float]:
    cluster = cluster_of(line["cluster"], int(line["gpus"]))
    return cluster, workloads()[line["dataset"]], number(line, "samples_per_s")


def left_out(known: Sequence[PublishedRate], batches: dict[str, int]) -> list[dict[str, Any]]:
    """A line for each point of each class, predicted by constants fitted without the class: the
    series, the data sets, the modes, and what has several GPU hosts. Batches are those of all
    points. The naive rate: a GPU does what it does in the series with the nearest number of GPUs.
    """
    # A point belongs to its series, and to every word in that.
    classes: dict[str, list[PublishedRate]] = defaultdict(list)
    for point in known:
        several = cluster_of(point.cluster, point.gpus).nn.hosts > 1
        for name in (point.series, *point.series.split(), *["several hosts"] * several):
            classes[name].append(point)

    # Fit without the class, predict the class; beside it the naive guess.
    lines: list[dict[str, Any]] = []
    for name, points_of_it in classes.items():
        others = [point for point in known if point not in points_of_it]
        found = fit_shared(others, batches).fit
        for point in points_of_it:
            nearest = min(others, key=lambda other: abs(log(other.gpus / point.gpus)))
            naive = nearest.samples_per_s / nearest.gpus * point.gpus
            predicted = rate(point, found.values, batches)
            lines.append(
                _line(
                    name,
                    f"Persia {point.mode}",
                    point.workload,
                    point.gpus,
                    point.samples_per_s,
                    predicted,
                    naive,
                    may_be(point, found, batches, predicted),
                )
            )
    return lines


def rivals_left_out(data_set: str) -> list[dict[str, Any]]:
    """How well the rivals' bars of one public data set are predicted without that data set."""
    result = []
    for (system, mode), rival in RIVALS.items():
        lines = _bars(system, mode)
        again, _ = refitted(rival, [_bar(x) for x in lines if x["dataset"] != data_set])
        for line in (x for x in lines if x["dataset"] == data_set):
            cluster, work, measured = _bar(line)
            predicted = samples_per_s(again, cluster, work)
            result.append(_line(data_set, rival.name, data_set, cluster.ranks, measured, predicted))
    return result


def _line(
    without: str,
    system: str,
    workload: str,
    gpus: int,
    published: float,
    predicted: float,
    naive: float | None = None,
    drawn: Range | None = None,
) -> dict[str, Any]:
    return {
        "left_out": without,
        "system": system,
        "workload": workload,
        "gpus": gpus,
        "published": published,
        "predicted": predicted,
        "low": "" if drawn is None else drawn.low,
        "high": "" if drawn is None else drawn.high,
        "ln_rate_error": log(predicted / published),
        "naive_ln_rate_error": "" if naive is None else log(naive / published),
    }


def left_out_table(lines: Sequence[dict[str, Any]], rivals: Sequence[dict[str, Any]]) -> str:
    """How far predictions of each class are off, and the naive ones; how many ranges hold what was
    published, and how wide they are; the speed-ups over rivals at 8 GPUs that they give."""
    # A line a class, and one for each point in turn.
    text = [f"\n{'left out of the fit':28} {HEADER}   nearest number of GPUs: median, p90"]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["left_out"]].append(line)
    for name, members in (groups | {"each in turn": list(lines)}).items():
        errors = (
            [x[column] for x in members] for column in ("ln_rate_error", "naive_ln_rate_error")
        )
        text.append(compared(name, *errors, 28))

    # Whether the ranges hold what was published.
    held = [x["low"] <= x["published"] <= x["high"] for x in lines]
    width = float(np.median([x["high"] / x["low"] for x in lines]))
    share = f"ranges hold {np.mean(held):.0%} of {len(lines)}"
    text.append(f"{share}; the median one is a factor of {width:.2g} wide")

    # Speed-ups are what a reader of the paper asks for.
    data_set = rivals[0]["left_out"]
    (at_eight,) = (x for x in groups[data_set] if x["gpus"] == 8)
    for line in (x for x in rivals if x["gpus"] == 8):
        predicted, published = (at_eight[c] / line[c] for c in ("predicted", "published"))
        over = f"{data_set}, Persia over {line['system']}"
        text.append(f"{over:40} {predicted:5.2f} predicted, {published:5.2f} published")
    return "\n".join(text)


def report(fits: Sequence[SharedFit], known: Sequence[PublishedRate]) -> str:
    """Constants, batches, errors by series, and rivals."""
    # Constants, and whether the points identify them.
    best = fits[0]
    lines = [f"Persia: {len(FITS)} constants and 2 batches for {len(known)} points", ""]
    lines.append(f"{'constant':20} {'value':>10} {'low 95':>10} {'high 95':>10}  identified")
    for name, value in best.fit.values.items():
        wide = exp(1.96 * best.fit.spread[name])
        sure = name in best.fit.identified
        ends = f"{value:10.3g} {value / wide:10.3g} {value * wide:10.3g}"
        lines.append(f"{name:20} {ends}  {'yes' if sure else 'no'}")

    # Two batches were never published: how much better the best guess is.
    lines += ["", "batch a rank, Kwai and 100T: log likelihood below the best"]
    lines += [
        f"  {each.batches['v100-paper']:5} {each.batches['gcp-100t']:5}  "
        f"{best.fit.cost - each.fit.cost:6.1f}"
        for each in fits[:6]
    ]

    # Errors by series.
    lines += ["", f"{'series':28} {'n':>3} {'median':>8} {'largest':>8}  at"]
    for name in dict.fromkeys(point.series for point in known):
        places = [place for place, point in enumerate(known) if point.series == name]
        errors = best.errors[places]
        worst = places[int(np.argmax(np.abs(errors)))]
        lines.append(
            f"{name:28} {len(places):3} {np.median(np.abs(errors)):8.1%} "
            f"{best.errors[worst]:+8.1%}  {known[worst].gpus} GPUs"
        )
    everything = np.abs(best.errors)
    lines.append(f"{'all':28} {len(known):3} {np.median(everything):8.1%} {everything.max():8.1%}")

    # Rivals.
    lines += ["", "rivals, as modes of the simulator", *rivals()]
    return "\n".join(lines)
