"""Lines of CSVs of published GPU-sharded training as jobs that can be simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from experiments.options import Planned
from experiments.published.descriptions import (
    DATA,
    choice,
    has_columns,
    hosts_of,
    number,
    numbered_csv,
    positive,
    rankers_of,
    yes_or_no,
)
from persia_sim.base.rules import require
from persia_sim.base.schema import nearest
from persia_sim.cluster.machine import Host, Precision, Reach, System
from persia_sim.cluster.tables import RowUpdate, Storage, Table
from persia_sim.presets.catalogue import MACHINES
from persia_sim.presets.fitted import REACH
from persia_sim.sharded.plan import Software, Strategy
from persia_sim.sharded.ranker import Ranker
from persia_sim.sharded.software import SOFTWARE, guessed
from persia_sim.sharded.stages import Job

_SAME = 1.25
"""Factor up to which two measured columns of a line agree: published pairs (a mean and a median)
are up to 1.15 apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A line of a measurements file as a job, with what was measured if anything was."""

    label: str
    """The line's id, or its file and number."""
    series: str
    """Lines of one source, software, model, machine and arithmetic: left out together."""
    title: str
    """What the source calls the software."""
    family: str
    """The system whose constants the software has."""
    told: Mapping[str, Any]
    """Fields of the software that the line gives."""
    job: Job
    samples_per_s: float | None
    """None where the measured columns are empty."""

    @property
    def per_gpu(self) -> float:
        """Measured samples per second of one GPU."""
        return (self.samples_per_s or 0.0) / self.job.system.gpus

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        return self.job.batch / (self.samples_per_s or float("nan"))

    @property
    def program(self) -> str:
        """Software and model: lines of one share what no constant knows."""
        return f"{self.family} {self.job.ranker.name.partition('_')[0]}"

    def under(self, reach: Reach, software: Mapping[str, Software], system: str = "") -> Job:
        """This job with other constants, or by another system of that name."""
        own = self.job.software
        soft = replace(software[system or self.family], **self.told)
        if not system:
            soft = replace(soft, name=own.name, unmeasured=own.unmeasured, guess_ln=own.guess_ln)
        return replace(self.job, reach=reach, software=soft)


def measured_of(
    path: Path, rankers: dict[str, Ranker], hosts: dict[str, Host], ids: set[str] | None = None
) -> tuple[list[Measured], list[str]]:
    """Every line as a job; and why lines were left out that cannot be one.

    ``ids``: those of lines before, of other files; those of this one are added. Raises ValueError
    where the file lacks a column that every line needs.
    """
    # A file without the columns that every line needs is refused as a whole.
    lines = numbered_csv(path, "rows")
    needed = "workload", "software", "gpus", "system", "global_batch|per_gpu_batch"
    has_columns(lines[0][1], f"rows {path}", *needed)
    ids = set() if ids is None else ids

    # A line that is none is left out with its number and reason.
    measured = []
    left_out = []
    for place, (number_in_file, line) in enumerate(lines):
        label = line.get("id") or f"{path.stem}-{place + 1}"
        try:
            require(
                line.get("id") not in ids, "id", repr(label), "an earlier line has it", "change one"
            )
            measured.append(_measured(label, line.get("set") or path.stem, line, rankers, hosts))
            ids |= {line["id"]} if line.get("id") else set()
        except ValueError as error:
            left_out.append(f"{label} ({path.name}, line {number_in_file}): {error}")
    return measured, left_out


def _systems(line: dict[str, str]) -> list[Software]:
    """The system that a line names; where the name is no system's, all of them."""
    name = line["software"]
    require(bool(name), "software", "''", f"must name one of {', '.join(SOFTWARE)}, or any other")
    return [SOFTWARE[name]] if name in SOFTWARE else [*SOFTWARE.values()]


def _told(line: dict[str, str]) -> dict[str, Any]:
    """Options that change what a system does, as far as a line gives them."""
    told: dict[str, Any] = {}
    if line.get("strategy"):
        told["strategy"] = choice(line, "strategy", Strategy, Strategy.PLANNED)
    if line.get("sparse_gradients"):
        told["sparse_gradients"] = yes_or_no(line, "sparse_gradients", False)
    return told


@cache
def _stored_hosts() -> dict[str, Host]:
    """Machines that need no systems file: those of data sheets, and the simulator's presets."""
    presets = {name: host for name, host in MACHINES.items() if host.gpus}
    return presets | hosts_of(DATA / "gpu" / "systems.csv")


def _host(name: str, hosts: dict[str, Host]) -> Host:
    known = _stored_hosts() | hosts
    rule = f"is no machine: {nearest(name, known)}"
    require(name in known, "system", repr(name), rule, "add a line to the systems file")
    return known[name]


def _model(line: dict[str, str], ranker: Ranker, gpus: int, strategy: Strategy) -> Ranker:
    """The model with the optimiser, the vocabulary and the rows' place that the line gives."""
    # Rows of each table, of all or of every GPU.
    tables = ranker.tables
    vocabulary = positive(line, "vocabulary")
    if vocabulary is not None:
        of_each = yes_or_no(line, "vocabulary_per_gpu", False)
        ways = [_ways(table, gpus, strategy) if of_each else 1.0 for table in tables]
        tables = tuple(replace(t, rows=vocabulary * n) for t, n in zip(tables, ways, strict=True))

    # Where they are, and what of them a cache holds.
    storage = choice(line, "storage", Storage, Storage.HBM)
    if storage is not Storage.HBM:
        share = number(line, "cached_share", 0.2)
        tables = tuple(replace(t, storage=storage, cached_share=share) for t in tables)
    update = choice(line, "optimizer", RowUpdate, ranker.update)
    return replace(ranker, update=update, tables=tables)


def _ways(table: Table, gpus: int, strategy: Strategy) -> float:
    """All rows of a table over those that the fullest GPU has."""
    if strategy is not Strategy.SLOT or table.dim == 1:
        return gpus
    features = len(table.ids_per_sample)
    return features / ceil(features / gpus)


def _measured(
    label: str,
    source: str,
    line: dict[str, str],
    rankers: dict[str, Ranker],
    hosts: dict[str, Host],
) -> Measured:

    # Model, machine and numbers of the line.
    name = line.get("workload", "")
    require(name in rankers, "workload", repr(name), "the workloads file does not describe it")
    told = _told(line)
    softwares = [replace(software, **told) for software in _systems(line)]
    host = _host(line.get("system", ""), hosts)
    gpus = _gpus(line)
    used = min(host.gpus, int(number(line, "gpus_per_node", gpus)))  # NICs serve only those
    batch = _batch(line, gpus)
    wire_bytes = positive(line, "wire_bytes")

    # The job by each system that may be meant, and by which of them it is.
    jobs = [
        Job(
            ranker=_model(line, rankers[name], gpus, software.strategy),
            system=System(host=replace(host, gpus=used), gpus=gpus),
            software=software,
            reach=REACH,
            batch=int(batch),
            precision=choice(line, "precision", Precision, Precision.FP32),
            wire_bytes=None if wire_bytes is None else int(wire_bytes),
            reads_files=yes_or_no(line, "reads_files", True),
        )
        for software in softwares
    ]
    called = line["software"]
    job = jobs[0] if called in SOFTWARE else guessed(called, jobs)

    # To which series it belongs: what it shares with others.
    title = line.get("framework") or called
    facts = (source, title, name, host.name, line.get("precision", ""))
    family = job.software.unmeasured or called
    return Measured(
        label=label,
        series=" / ".join(filter(None, facts)),
        title=title,
        family=family,
        told=told,
        job=job,
        samples_per_s=_samples_per_s(line, batch),
    )


def _gpus(line: dict[str, str]) -> int:
    """All of them; of one machine a line may use a part."""
    nodes = positive(line, "nodes")
    each = positive(line, "gpus_per_node")
    gpus = number(line, "gpus", nodes * each if nodes and each and not line.get("gpus") else None)
    ok = gpus >= 1 and gpus.is_integer()
    require(ok, "gpus", repr(line.get("gpus")), "must be a whole number >= 1")
    same = nodes is None or each is None or nodes * each == gpus or (nodes == 1 and gpus < each)
    rule = f"{line.get('nodes')} nodes of {line.get('gpus_per_node')} GPUs have another number"
    require(same, "gpus", int(gpus), rule, "mend one of the three")
    return int(gpus)


def _batch(line: dict[str, str], gpus: int) -> float:
    """Samples of a step over all GPUs."""
    whole = positive(line, "global_batch")
    each = positive(line, "per_gpu_batch")
    if whole is None:
        require(each is not None, "global_batch", "''", "it or per_gpu_batch must be > 0")
        return (each or 0.0) * gpus
    same = each is None or abs(whole - each * gpus) <= 0.01 * whole
    rule = f"per_gpu_batch {line.get('per_gpu_batch')} on {gpus} GPUs is another batch"
    require(same, "global_batch", line["global_batch"], rule, "mend one of them")
    return whole


def _samples_per_s(line: dict[str, str], batch: float) -> float | None:
    """What was measured: a rate, else the time of a step."""
    rate = positive(line, "samples_per_s")
    step_ms = positive(line, "step_ms")
    if step_ms is None:
        return rate
    by_step = 1e3 * batch / step_ms
    if rate is None:
        return by_step
    same = 1 / _SAME <= by_step / rate <= _SAME
    rule = f"samples_per_s gives {rate:,.0f}, but {batch:,.0f} samples in it {by_step:,.0f}"
    require(same, "step_ms", line["step_ms"], rule, "mend or empty one of them")
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFiles(Planned):
    """The options of every study over such CSVs."""

    rows: tuple[Path, ...] = ()
    """Lines of measurements, as rows.csv: workload, system, software, precision, gpus, global_batch
    and the like; measured columns may be empty where only a prediction is asked for. Without any,
    the project's own: published steps, each with its source."""
    workloads: tuple[Path, ...] = ()
    """What the workloads of the rows are made of. Example: workloads.csv."""
    systems: tuple[Path, ...] = ()
    """What the systems of the rows are made of. Example: systems.csv."""
    tables: Path | None = None
    """Tables of each workload, as my_tables.csv; else workload_tables.csv beside them, where there
    is one."""

    def check_files(self, needed: bool) -> None:
        """Raise ValueError naming the first option whose file is not there, or that is needed and
        not given."""
        asked = {"rows": self.rows, "workloads": self.workloads, "systems": self.systems}
        for name, paths in (asked | {"tables": (self.tables or Path(),)}).items():
            for path in paths:
                if path != Path() and not path.is_file():
                    raise ValueError(f"{name} {path} is missing; name a CSV with a header line")
        for name, paths in asked.items():
            if needed and set(paths) <= {Path()}:
                raise ValueError(
                    f"--{name} names no file; give one or more CSVs with measured rates, as"
                    " docs/simulator.md describes them"
                )

    def load(self, rows: Sequence[Path]) -> tuple[list[Measured], list[str]]:
        """All lines of some files as jobs, and why others are left out. Raises ValueError where
        they give none."""
        # Without files, those that lie in the package.
        rankers: dict[str, Ranker] = {}
        hosts: dict[str, Host] = {}
        folder = DATA / "gpu"
        if not rows:
            named = {what: (folder / f"{what}.csv",) for what in ("rows", "workloads", "systems")}
            return replace(self, tables=None, **named).load(named["rows"])

        # Models and machines first: rows name them.
        for path in self.workloads:
            beside = path.with_name("workload_tables.csv")
            rankers |= rankers_of(path, self.tables or (beside if beside.is_file() else None))
        for path in self.systems:
            hosts |= hosts_of(path)

        # Ids are unique over all files.
        measured: list[Measured] = []
        left_out: list[str] = []
        ids: set[str] = set()
        for file in rows:
            known, missing = measured_of(file, rankers, hosts, ids)
            measured += known
            left_out += missing
        if not measured:
            first = left_out[0] if left_out else "no file was named"
            raise ValueError(f"rows give nothing to predict: {first}")
        return measured, left_out
