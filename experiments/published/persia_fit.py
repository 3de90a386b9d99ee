"""One set of constants for all of Persia's published clusters, and hypotheses by their likelihood.

The presets fit each cluster by itself, closely but with constants that contradict each other. Here
every cluster has the same laws (kernel: fixed + flop / rate; all-reduce: fixed + bytes / rate;
loader: seconds a field) and batches are powers of two; what such a model cannot explain shows.
Rates are the closed form's: within a few per cent of a simulation where no NIC binds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, hypot, inf, log, pi, sqrt
from pathlib import Path

import numpy as np

from experiments.published.compare import DATA, WIDE_TAU
from experiments.published.descriptions import number, read_csv
from experiments.published.rivals import RIVALS, refitted, told, within
from persia_sim.model.cluster import Cluster
from persia_sim.model.costs import Costs
from persia_sim.model.scenario import Scenario
from persia_sim.oracle.closed_form import answer
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.words.vocabulary import Mode

RUN_NOISE = 0.05
"""Standard deviation of the log of a measured rate: machines and runs differ by so much."""
V100_LOADERS_PER_RANK = 8  # not published; enough that one GPU without all-reduce has its samples
LEAST, MOST = 256, 32768  # batches a rank that are tried, powers of two
_MODES = {"hybrid": Mode.HYBRID, "sync": Mode.SYNC, "async": Mode.ASYNC_AVERAGING}
_FIELDS = 26  # the loader's constant is told for a sample of so many
_REFUSED = log(1e-3)  # the log error of a configuration that cannot run at all


@dataclass(frozen=True, slots=True)
class Point:
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
        """Of its logarithm: run and reading together."""
        return hypot(RUN_NOISE, self.digitisation)


@dataclass(frozen=True, slots=True)
class Shared:
    """A constant of all clusters: where it starts, and how far that is trusted (log units)."""

    start: float
    width: float
    is_share: bool = False


SHARED = {
    "gpu_share": Shared(0.38, 0.5, True),
    "gpu_fixed_s": Shared(1e-3, 1.0),
    "intra_bytes_per_s": Shared(9.8e9, 0.5),
    "nic_share": Shared(0.5, 0.5, True),
    "sync_fixed_s": Shared(5e-3, 1.0),
    "path_s_per_byte": Shared(1e-9, 1.5),
    "load_s_per_sample": Shared(60e-6, 0.7),
    "kwai_flops": Shared(1.0, 0.5),
}
"""Share of float32's peak; a step's kernels; NVLink or bus without peer-to-peer (V100); share of
100 Gbit/s; a step's all-reduce; a byte of rows at a worker; a sample of 26 fields at a loader; the
multiplications of Kwai's private network over those that its published size would give."""


def points(data: Path = DATA) -> list[Point]:
    """Persia's points; bars that only halve another bar are no measurement and left out."""
    found = []
    for line in read_csv(data / "throughput_public.csv", "published"):
        gpus = int(line["gpus"])
        if line["system"] == "Persia" and (gpus > 1 or "dashed" in line["note"]):
            rate = number(line, "samples_per_s")
            found.append(Point(line["cluster"], line["dataset"], Mode.HYBRID, gpus, rate,
                               150 / rate))  # fmt: skip
    for line in read_csv(data / "throughput_kwai.csv", "published"):
        rate = number(line, "samples_per_s")
        found.append(Point(line["cluster"], line["dataset"], _MODES[line["mode"]],
                           int(line["gpus"]), rate, 4000 / rate))  # fmt: skip
    for line in read_csv(data / "throughput_model_size.csv", "published"):
        rate = number(line, "samples_per_s")
        found.append(Point(line["cluster"], line["workload"], _MODES[line["mode"]], 64, rate,
                           15000 / rate))  # fmt: skip
    return found


@cache
def _cluster(name: str, gpus: int) -> Cluster:
    cluster = CLUSTERS[name]()
    loaders = None if name == "gcp-100t" else V100_LOADERS_PER_RANK * gpus
    return cluster.resized(gpus, loaders=loaders)


Edit = Callable[[str, Costs], Costs]
"""What a hypothesis changes in the costs of a cluster."""


def costs_of(values: dict[str, float], cluster: str, fields: int) -> Costs:
    """The same laws for every cluster; only links inside a host differ, as documents say."""
    flops = values["kwai_flops"] if cluster == "v100-paper" else 1.0
    load = values["load_s_per_sample"] * fields / _FIELDS
    path = values["path_s_per_byte"]
    nic = _cluster(cluster, 8).nn.host.nic_bytes_per_s
    return replace(
        CATALOGUE,
        load=replace(CATALOGUE.load, fixed_s=0.0, per_item_s=load),
        worker_pool=replace(CATALOGUE.worker_pool, per_byte_s=path),
        worker_scatter=replace(CATALOGUE.worker_scatter, per_byte_s=path),
        gpu_fixed_s=values["gpu_fixed_s"],
        gpu_efficiency=((512, min(1.0, values["gpu_share"] / flops)),),
        dense_sync=replace(
            CATALOGUE.dense_sync,
            intra_bytes_per_s=100e9 if cluster == "gcp-100t" else values["intra_bytes_per_s"],
            inter_bytes_per_s=values["nic_share"] * nic,
            overhead_s=values["sync_fixed_s"],
        ),
    )


def rate(
    point: Point, values: dict[str, float], batches: dict[str, int], edit: Edit | None = None
) -> tuple[float, str]:
    """Predicted samples per second, and what binds; 0 where the run would be refused."""
    work = workloads()[point.workload]
    work = replace(work, batch_per_rank=batches.get(point.cluster, work.batch_per_rank))
    costs = costs_of(values, point.cluster, work.fields)
    late = point.mode.reads_late_rows
    try:
        found = answer(
            Scenario(
                cluster=_cluster(point.cluster, point.gpus),
                workload=work,
                costs=edit(point.cluster, costs) if edit else costs,
                mode=point.mode,
                tau=WIDE_TAU if late else None,
                merge_pushes=False if point.mode.may_merge else None,
                steps=60,
            )
        )
    except ValueError:  # a round of averaging that never ends
        return 0.0, "refused"
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
    known: Sequence[Point], batches: dict[str, int], edit: Edit | None = None
) -> SharedFit:
    """Find the constants that serve all points at these batches a rank."""
    from scipy.optimize import least_squares  # late: a second to import

    names = list(SHARED)
    start = np.array([log(each.start) for each in SHARED.values()])
    widths = np.array([each.width for each in SHARED.values()])
    most = np.array([0.0 if each.is_share else inf for each in SHARED.values()])
    spreads = np.array([point.spread for point in known])

    def errors(logs: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(logs).tolist(), strict=True))
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
        values=dict(zip(names, np.exp(found.x).tolist(), strict=True)),
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


def without_sync_fixed(cluster: str, costs: Costs) -> Costs:
    """The fixed cost of an all-reduce only where peer-to-peer was off (the 2021 machines)."""
    if cluster == "v100-2021-09":
        return costs
    return replace(costs, dense_sync=replace(costs.dense_sync, overhead_s=0.0))


def moves(known: Sequence[Point], found: SharedFit) -> dict[str, list[tuple[Point, float]]]:
    """Part made 10 % faster -> points whose predicted rate gains 1 % or more by it."""

    def faster(*laws: str) -> Edit:
        def edit(_: str, costs: Costs) -> Costs:
            return replace(
                costs,
                **{
                    law: replace(
                        getattr(costs, law),
                        fixed_s=getattr(costs, law).fixed_s / 1.1,
                        per_item_s=getattr(costs, law).per_item_s / 1.1,
                        per_byte_s=getattr(costs, law).per_byte_s / 1.1,
                    )
                    for law in laws
                },
            )

        return edit

    def gpu(_: str, costs: Costs) -> Costs:
        ((batch, share),) = costs.gpu_efficiency
        return replace(costs, gpu_efficiency=((batch, min(1.0, 1.1 * share)),),
                       gpu_fixed_s=costs.gpu_fixed_s / 1.1)  # fmt: skip

    def dense_sync(_: str, costs: Costs) -> Costs:
        sync = costs.dense_sync
        quicker = replace(
            sync, intra_bytes_per_s=1.1 * sync.intra_bytes_per_s,
            inter_bytes_per_s=1.1 * sync.inter_bytes_per_s, overhead_s=sync.overhead_s / 1.1,
        )  # fmt: skip
        return replace(costs, dense_sync=quicker)

    edits = {
        "GPUs": gpu, "all-reduce": dense_sync, "loaders": faster("load"),
        "embedding workers": faster("worker_forward", "worker_rpc", "worker_pool",
                                    "worker_scatter"),
        "servers": faster("server_lookup", "server_update"),
    }  # fmt: skip
    gained: dict[str, list[tuple[Point, float]]] = {}
    for part, edit in edits.items():
        gained[part] = []
        for point in known:
            before, after = (rate(point, found.values, found.batches, e)[0] for e in (None, edit))
            if before and after / before >= 1.01:
                gained[part].append((point, after / before - 1.0))
    return gained


def divided_bar(bar: float, other: float, divisor: int, reading: float, model: float) -> float:
    """Log likelihood ratio: a bar is another one divided, against both were measured.

    ``reading`` is the relative error of reading a bar off the plot, ``model`` how well the ratio of
    two measurements could have been predicted (relative standard deviation), by which the chance
    that it comes out as the divisor is spread.

    >>> divided_bar(50.0, 100.0, 2, 0.01, 0.2) > 2, divided_bar(45.0, 100.0, 2, 0.01, 0.2) < -10
    (True, True)
    """
    away = log(bar * divisor / other)

    def density(spread: float) -> float:
        return -0.5 * (away / spread) ** 2 - log(spread * sqrt(2 * pi))

    return density(reading * sqrt(2.0)) - density(hypot(model, reading * sqrt(2.0)))


def divided_bars(data: Path = DATA) -> dict[str, float]:
    """Log likelihood ratio of each bar that may be another one divided."""
    found = {}
    bars: dict[tuple[str, str], dict[int, float]] = {}
    for line in read_csv(data / "throughput_public.csv", "published"):
        if line["system"] == "Persia" and "dashed" not in line["note"]:
            key = line["dataset"], "hybrid"
            bars.setdefault(key, {})[int(line["gpus"])] = number(line, "samples_per_s")
    for (name, mode), rates in bars.items():
        reading = 150 / rates[2]
        found[f"{name} {mode}: 1 GPU = 2 GPUs / 2"] = divided_bar(
            rates[1], rates[2], 2, reading, 0.3
        )
    kwai: dict[str, dict[int, float]] = {}
    for line in read_csv(data / "throughput_kwai.csv", "published"):
        kwai.setdefault(line["mode"], {})[int(line["gpus"])] = number(line, "samples_per_s")
    for mode, rates in kwai.items():
        for gpus in (1, 4):
            reading = 4000 / rates[gpus]
            found[f"kwai-video {mode}: {gpus} GPUs = 8 GPUs / {8 // gpus}"] = divided_bar(
                rates[gpus], rates[8], 8 // gpus, reading, 0.3
            )
    return found


def rivals(data: Path = DATA) -> list[str]:
    """A line for each rival: its constants fitted again, and its errors."""
    lines = []
    for (system, mode), rival in RIVALS.items():
        measured = [
            (_cluster(line["cluster"], int(line["gpus"])), workloads()[line["dataset"]],
             number(line, "samples_per_s"))
            for line in read_csv(data / "throughput_public.csv", "published")
            if (line["system"], line["mode"]) == (system, mode)
        ]  # fmt: skip
        again, errors = refitted(rival, measured)
        lines.append(f"  {rival.name:20} {told(again)}; {len(measured)} points: {within(errors)}")
    return lines


def report(found: Sequence[SharedFit], known: Sequence[Point]) -> str:
    """Constants, batches, errors, hypotheses and what the points test."""
    best = found[0]
    lines = [f"Persia: {len(SHARED)} constants and 2 batches for {len(known)} points", ""]
    lines.append(f"{'constant':20} {'value':>10} {'low 95':>10} {'high 95':>10}  identified")
    for name, value in best.values.items():
        wide = exp(1.96 * best.spread[name])
        known_word = "yes" if name in best.identified else "no"
        lines.append(f"{name:20} {value:10.3g} {value / wide:10.3g} {value * wide:10.3g}  "
                     f"{known_word}")  # fmt: skip
    lines += ["", "batch a rank, Kwai and 100T: log likelihood below the best"]
    lines += [
        f"  {each.batches['v100-paper']:5} {each.batches['gcp-100t']:5}  "
        f"{best.cost - each.cost:6.1f}"
        for each in found[:6]
    ]
    lines += ["", f"{'series':28} {'n':>3} {'median':>8} {'largest':>8}  at"]
    groups: dict[str, list[int]] = {}
    for place, point in enumerate(known):
        groups.setdefault(point.series, []).append(place)
    for name, places in groups.items():
        errors = best.errors[places]
        worst = places[int(np.argmax(np.abs(errors)))]
        lines.append(
            f"{name:28} {len(places):3} {np.median(np.abs(errors)):8.1%} "
            f"{best.errors[worst]:+8.1%}  {known[worst].gpus} GPUs"
        )
    everything = np.abs(best.errors)
    lines.append(f"{'all':28} {len(known):3} {np.median(everything):8.1%} {everything.max():8.1%}")
    ratio = best.cost - fit_shared(known, best.batches, without_sync_fixed).cost
    lines += [
        "",
        "hypotheses, log likelihood ratio (above 3: clearly yes, below -3: clearly no)",
        f"  {'an all-reduce has a fixed cost only without peer-to-peer':60} {ratio:+.1f}",
    ]
    lines += [f"  {name:60} {ratio:+.1f}" for name, ratio in divided_bars().items()]
    lines += ["", "rivals, as modes of the simulator", *rivals()]
    lines += ["", "points whose rate gains 1 % or more where a part is 10 % faster"]
    for part, gained in moves(known, best).items():
        by_mode: dict[str, int] = {}
        for point, _ in gained:
            by_mode[point.mode] = by_mode.get(point.mode, 0) + 1
        told = ", ".join(f"{count} {mode}" for mode, count in by_mode.items())
        lines.append(
            f"  {part:18} {len(gained):3} of {len(known)}" + (f" ({told})" if told else "")
        )
    return "\n".join(lines)
