"""Published throughput beside the model's: fits and predictions apart, errors with their sign."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import hypot
from pathlib import Path

from experiments.published.descriptions import number, read_csv
from experiments.published.rivals import GPU_CV, RIVALS, samples_per_s
from persia_sim.engine.simulate import simulate
from persia_sim.insight.measure import throughput
from persia_sim.model.cluster import Cluster
from persia_sim.model.costs import Costs
from persia_sim.model.scenario import Noise, Scenario
from persia_sim.model.workload import Workload
from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.words.vocabulary import Mode

DATA = Path(__file__).resolve().parent
RUN_NOISE = 0.05
"""Standard deviation of the log of a measured rate: machines and runs differ by so much."""
MODES = {"hybrid": Mode.HYBRID, "sync": Mode.SYNC, "async": Mode.ASYNC_AVERAGING}


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
        found.append(Point(line["cluster"], line["dataset"], MODES[line["mode"]],
                           int(line["gpus"]), rate, 4000 / rate))  # fmt: skip
    for line in read_csv(data / "throughput_model_size.csv", "published"):
        rate = number(line, "samples_per_s")
        found.append(Point(line["cluster"], line["workload"], MODES[line["mode"]], 64, rate,
                           15000 / rate))  # fmt: skip
    return found


WIDE_TAU = 16  # the bound of the published runs is not known; wide enough never to bind


@dataclass(frozen=True, slots=True)
class Row:
    """One published point, or one that is only predicted."""

    series: str
    label: str
    gpus: int
    published: float | None
    """Samples per second; None where the project predicts without a published figure."""
    model: float
    kind: str
    """``fit``: a constant was fitted to this point; ``prediction``: none was."""
    note: str = ""

    @property
    def error(self) -> float | None:
        """Model over published, minus one."""
        return self.model / self.published - 1 if self.published else None


@cache
def simulated(cluster: str, workload: str, mode: Mode, ranks: int, steps: int) -> float:
    """Throughput of a preset with the constants of its fit."""
    machine, work = CLUSTERS[cluster]().resized(ranks), workloads()[workload]
    return rate_of(machine, work, costs_of(cluster), mode, steps)


def rate_of(cluster: Cluster, work: Workload, costs: Costs, mode: Mode, steps: int) -> float:
    """Simulated samples per second of the original: wide window, pushes on arrival."""
    scenario = Scenario(
        cluster=cluster,
        workload=work,
        costs=costs,
        mode=mode,
        tau=WIDE_TAU if mode.reads_late_rows else None,
        merge_pushes=False if mode.may_merge else None,
        noise=Noise(gpu_cv=GPU_CV),
        steps=steps,
    )
    return throughput(simulate(scenario)).mean


def _read(name: str, data: Path) -> list[dict[str, str]]:
    path = data / name
    if not path.is_file():
        raise ValueError(f"published figures {path} are missing; run from a checkout")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def public(data: Path = DATA, steps: int = 80) -> Iterator[Row]:
    """Taobao and Avazu as published, then Criteo, whose bars the project has not seen."""
    cluster = "v100-2021-09"
    for row in _read("throughput_public.csv", data):
        name, system, mode = row["dataset"], row["system"], row["mode"]
        gpus, published = int(row["gpus"]), float(row["samples_per_s"])
        note = ""
        if system != "Persia":
            machine = CLUSTERS[cluster]().with_ranks(gpus)
            rival = RIVALS[system, mode]
            model = samples_per_s(rival, machine, workloads()[name], steps)
            kind = "fit"
        elif gpus == 1 and "dashed" in row["note"]:
            model, kind = simulated(cluster, name, MODES[mode], 1, steps), "fit"
            note = "dashed bar: no all-reduce"
        elif gpus == 1:
            model = simulated(cluster, name, MODES[mode], 2, steps) / 2
            kind, note = "prediction", "plotted as half of 2 GPUs, so is the model's"
        else:
            model = simulated(cluster, name, MODES[mode], gpus, steps)
            kind = "fit"
        yield Row(f"{name} {system} {mode}", f"{gpus} GPUs", gpus, published, model, kind, note)
    name = "criteo-ad"
    for gpus in (1, 2, 4, 8):
        model = simulated(cluster, name, Mode.HYBRID, gpus, steps)
        note = "without all-reduce (a dashed bar)" if gpus == 1 else ""
        yield Row(f"{name} Persia hybrid", f"{gpus} GPUs", gpus, None, model, "prediction", note)
        if gpus == 2:
            note = "if plotted as half of 2 GPUs, as on the other sets"
            yield Row(f"{name} Persia hybrid", "1 GPUs", 1, None, model / 2, "prediction", note)
    for (system, mode), rival in RIVALS.items():
        for gpus in (1, 2, 4, 8) if not rival.only_its_sets else ():
            machine = CLUSTERS[cluster]().with_ranks(gpus)
            model = samples_per_s(rival, machine, workloads()[name], steps)
            yield Row(f"{name} {system} {mode}", f"{gpus} GPUs", gpus, None, model, "prediction")


def kwai(data: Path = DATA, steps: int = 60) -> Iterator[Row]:
    """The Kwai series: three modes, 1 to 64 GPUs."""
    for row in _read("throughput_kwai.csv", data):
        gpus = int(row["gpus"])
        model = simulated("v100-paper", "kwai-video", MODES[row["mode"]], gpus, steps)
        published = float(row["samples_per_s"])
        yield Row(f"kwai-video {row['mode']}", f"{gpus} GPUs", gpus, published, model, "fit")


def model_size(data: Path = DATA, steps: int = 100) -> Iterator[Row]:
    """Five sizes on 64 A100, and three modes at 100T."""
    for row in _read("throughput_model_size.csv", data):
        mode = MODES[row["mode"]]
        model = simulated("gcp-100t", row["workload"], mode, 64, steps)
        label = f"{float(row['params']) / 1e12:g}T"
        published = float(row["samples_per_s"])
        yield Row(f"100T cluster {row['mode']}", label, 64, published, model, "fit")


def table(rows: list[Row]) -> str:
    """Aligned text, one line a point."""
    lines = [f"{'series':28} {'point':8} {'published':>10} {'model':>10} {'error':>8}  kind"]
    for row in rows:
        published = f"{row.published:,.0f}" if row.published else "-"
        error = f"{row.error:+.1%}" if row.error is not None else "-"
        kind = f"{row.kind}{'; ' + row.note if row.note else ''}"
        lines.append(
            f"{row.series:28} {row.label:8} {published:>10} {row.model:>10,.0f} {error:>8}  {kind}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One resource alone made slow enough to explain the published async rate at 100T."""

    name: str
    constant: str
    """The value it would need."""
    batch_per_rank: int
    errors: dict[str, float]
    """By mode: model over published, minus one; async is fitted, the others are predicted."""


def candidates(steps: int = 60, per_rank: tuple[int, ...] = (1024, 8192)) -> list[Candidate]:
    """What could bind the 100T run: each suspect alone, the rest nominal, at several batches."""
    published = {"async": 2.16e6, "hybrid": 1.92e6, "sync": 0.733e6}
    cluster, found = CLUSTERS["gcp-100t"](), []
    per_rank_s = cluster.ranks / published["async"]  # seconds a sample at a rank
    nominal = replace(
        CATALOGUE,  # nominal NICs and NVLink; the GPU as it was fitted
        gpu_efficiency=costs_of("gcp-100t").gpu_efficiency,
        reach=replace(costs_of("gcp-100t").reach, nic=0.97),
    )
    speed = cluster.nn.host.core_speed
    load_s = cluster.loaders / published["async"] * speed
    for batch_per_rank in per_rank:
        work = replace(workloads()["criteo-syn5"], batch_per_rank=batch_per_rank)
        copy = speed * per_rank_s * batch_per_rank / work.activation_bytes
        share = work.flops_per_sample / (per_rank_s * cluster.gpu.fp32_flops)
        suspects = {
            "nothing (nominal)": ("-", nominal),
            "loaders": (
                f"{load_s * 1e6:.0f} us a sample on a core",
                replace(nominal, load=replace(nominal.load, fixed_s=0.0, per_item_s=load_s)),
            ),
            "copy threads": (
                f"{speed / copy / 1e6:.0f} MB/s each way",
                replace(
                    nominal,
                    copy_in=replace(nominal.copy_in, per_byte_s=copy),
                    copy_out=replace(nominal.copy_out, per_byte_s=copy),
                ),
            ),
            "GPU": (
                f"{share:.0%} of float32 peak",
                replace(nominal, gpu_efficiency=((512, share),)),
            ),
        }
        for name, (constant, costs) in suspects.items():
            errors = {
                label: rate_of(cluster, work, costs, MODES[label], steps) / rate - 1
                for label, rate in published.items()
            }
            found.append(Candidate(name, constant, batch_per_rank, errors))
    return found
