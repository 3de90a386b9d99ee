"""Lines of CSVs of published GPU-sharded training as jobs that can be simulated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

from experiments.options import Planned
from experiments.published.descriptions import (
    DATA,
    UNTOLD,
    has_columns,
    hosts_of,
    number,
    numbered_csv,
    positive,
    rankers_of,
    row_update,
)
from persia_sim.base.rules import require
from persia_sim.cluster.machine import Fabric, Host, Precision, Reach, System
from persia_sim.presets.catalogue import MACHINES
from persia_sim.presets.software import REACH, SOFTWARE
from persia_sim.sharded.plan import Software, Strategy
from persia_sim.sharded.ranker import Ranker, Storage, Table
from persia_sim.sharded.stages import Job

_MEASURED = {"samples_per_s": 1.0, "Msamples_s_median": 1e6, "train_Msamples_s": 1e6}
"""Column -> its unit in samples per second."""
_FORMS = {"sxm", "pcie", "nvl", "ada"}
_MODEL = r"titan\w+|(?!hbm|nvl|gen|sxm)[a-z]+\d+[a-z]*"
_GPU_WORDS = rf"\b(?:{_MODEL})\b|\b\d+(?=gb|\b)|\b(?:{'|'.join(sorted(_FORMS))})\b"
_FAMILIES = {
    "oneembedding": "oneflow-1", "oneflow": "oneflow", "torchrec": "torchrec",
    "fbgemm": "torchrec", "torch": "torch", "tf": "tf2", "tensorflow": "tf2", "sok": "tf2",
    "distributed-embeddings": "tf2", "colossal": "torchrec", "dlrm": "torch",
}  # fmt: skip
"""Word in a framework's name -> family; the first that is there."""
_FUSES = ("xla", "hybrid", "distributed", "sok", "merlin")
"""Words of TensorFlow's embedding libraries, which run with XLA, and of itself."""
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "amp", "mixed")
_OPTIMISERS = ("adam", "adagrad", "sgd", "rmsprop", "ftrl", "lamb")
_SAME = 1.25
"""Factor up to which two measured columns of a line agree: published pairs (a mean and a median)
are up to 1.15 apart."""
_ALIKE, _GIVEN = 4.0, 0.75
"""Weights of a match: one model of GPU, whatever its memory and form; and being of the systems
file: more than a number of GPUs that agrees, less than a memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A line of a measurements file as a job, with what was measured if anything was."""

    label: str
    """The line's id, or its file and number."""
    series: str
    """Lines of one source, software, model, machine and arithmetic: left out together."""
    family: str
    """Key of the software's constants."""
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

    def under(self, reach: Reach, software: dict[str, Software]) -> Job:
        """This job with other constants."""
        described = self.job.software
        chosen = replace(
            software[self.family],
            strategy=described.strategy,
            sparse_gradients=described.sparse_gradients,
        )
        return replace(self.job, reach=reach, software=chosen)


def measured_of(
    path: Path, rankers: dict[str, Ranker], hosts: dict[str, Host], ids: set[str] | None = None
) -> tuple[list[Measured], list[str]]:
    """Every line as a job; and why lines were left out that cannot be one.

    ``ids``: those of lines before, of other files; those of this one are added. Raises ValueError
    where the file lacks a column that every line needs.
    """
    # A file without the columns that every line needs is refused as a whole.
    lines = numbered_csv(path, "rows")
    needed = "workload", "framework", "gpus", "system|accelerator", "global_batch|per_gpu_batch"
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


def family_of(line: dict[str, str]) -> str:
    """Whose constants describe the software that a line names, by its release.

    >>> family_of({"framework": "TF2 + SOK"}), family_of({"framework": "HugeCTR 2.2"})
    ('tf2', 'hugectr-2')
    >>> family_of({"framework": "TF 1.15"}), family_of({"framework": "HugeCTR 3.2"})
    ('tf1', 'hugectr-3')
    """
    # HugeCTR by its release, or by its round of MLPerf.
    named = line.get("framework", "").lower()
    rounds = line.get("rounds") or line.get("round") or ""
    if "hugectr" in named and "sok" not in named:
        if rounds:
            return "hugectr-v07" if line.get("newest_round", rounds) == "v0.7" else "hugectr"
        return "hugectr-2" if re.search(r"hugectr[ -]?v?(?:2|3\.0)\b", named) else "hugectr-3"

    # Others by name; of some, releases differ in what they launch.
    family = next((known for word, known in _FAMILIES.items() if word in named), "")
    require(bool(family), "framework", repr(named), f"must name one of {', '.join(_FAMILIES)}")
    if family == "torch":
        if rounds == "v0.7":
            return "torch-fused"
        graphs = "graph" in f"{named} {line.get('extra', '')}".lower() or rounds
        return "torch-graphs" if graphs else family
    if family == "oneflow":
        return _oneflow_of(named)
    if family == "tf2":
        return _tensorflow_of(named)
    return family


def _oneflow_of(named: str) -> str:
    release = re.search(r"oneflow[ -]?v?0\.([0-7])\b", named)
    if release is None:
        return "oneflow-1"
    return "oneflow" if int(release.group(1)) < 5 else "oneflow-v06"


def _tensorflow_of(named: str) -> str:
    if re.search(r"\b(?:tf|tensorflow)[ -]?v?1\b", named):
        return "tf1"
    if "data-parallel" in named or "data parallel" in named:
        return "tf2-copies"
    return "tf2" if any(word in named for word in _FUSES) else "tf2-plain"


def precision_of(line: dict[str, str], family: str) -> tuple[Precision, int | None]:
    """Arithmetic, and the bytes of a number that travels where the line says it apart.

    Untold, it is mixed in MLPerf's rounds and in HugeCTR, else the framework's default.
    """
    text = _names_one(line, "precision", _PRECISIONS)
    rounds = line.get("rounds") or line.get("round") or family.startswith("hugectr")
    if any(word in text for word in ("amp", "fp16", "bf16", "mixed")) or (rounds and not text):
        return Precision.FP16, None
    wire = 2 if "compress" in text else None
    tensor_cores = "tf32" in text or family.startswith("tf2")  # TensorFlow's default
    return Precision.TF32 if tensor_cores else Precision.FP32, wire


def _names_one(line: dict[str, str], column: str, words: tuple[str, ...]) -> str:
    """What a cell says that must name one of these; empty where it says nothing."""
    text = line.get(column, "").lower().split("(")[0].strip()
    for long, short in (("float", "fp"), ("bfp", "bf"), ("half", "fp16"), ("single", "fp32")):
        text = text.replace(long, short)
    ok = text in UNTOLD or any(word in text for word in words)
    require(ok, column, repr(text), f"must name one of {', '.join(words)}, or be empty")
    return "" if text in UNTOLD else text


@cache
def stored_hosts() -> dict[str, Host]:
    """Machines that need no systems file: those of data sheets, and the simulator's presets."""
    presets = {name: host for name, host in MACHINES.items() if host.gpus}
    return hosts_of(DATA / "gpu" / "systems.csv") | presets


def host_for(line: dict[str, str], hosts: dict[str, Host]) -> Host:
    """The machine that a line names, else the one whose GPUs are most like those it names: of the
    systems file, or a stored one where that is more like them."""
    name = line.get("system", "")
    stored = stored_hosts()
    for word in (name, *name.split()):
        if word in hosts or word in stored:
            return hosts.get(word) or stored[word]
    asked = line.get("accelerator", "") or name
    per_node = number(line, "gpus_per_node", 8)
    enough = (host for host in stored.values() if host.gpus >= per_node or host.nic_bytes_per_s)
    alike = {host: _likeness(asked, host, per_node) for host in enough}
    alike |= {host: _likeness(asked, host, per_node) + _GIVEN for host in hosts.values()}
    best = max(alike, key=lambda host: alike[host])
    rule = "no machine of the systems file has such GPUs, nor has a stored data sheet"
    require(alike[best] >= _ALIKE, "system", repr(name or asked), rule, "add a line with theirs")
    return best


def _likeness(asked: str, host: Host, per_node: float) -> float:
    words = _words(asked)
    have = _words(host.chip.name)
    models = {word for word in words if word[0].isalpha()} - _FORMS
    boxed = bool(words & {"pcie", "nvl"}) == (host.fabric is Fabric.PCIE)
    same = _ALIKE if models & have else 0.0
    return same + 2.0 * boxed + len(words & have - models) + 0.5 * (host.gpus == per_node)


def _words(gpu: str) -> set[str]:
    """Model, form and memory in a GPU's name: "1xA100-SXM4-40GB" gives a100, sxm and 40, "RTX 2080
    Ti" rtx2080ti, "RTX A6000" a6000."""
    text = re.sub(r"^\d+x", "", gpu.lower().strip())
    text = re.sub(r"\b(rtx|gtx|titan)[ -]+(?=\d|xp|rtx)", r"\1", text)
    return set(re.findall(_GPU_WORDS, re.sub(r"(?<=\d) (?=ti\b)|(?<=sxm)\d", "", text)))


def _model(line: dict[str, str], ranker: Ranker, gpus: int, strategy: Strategy) -> Ranker:
    """The model with the optimiser, the vocabulary and the rows' place that the line gives."""
    # Rows of each table, of all or of every GPU.
    optimiser = _names_one(line, "optimizer", _OPTIMISERS)
    extra = line.get("extra", "")
    tables = ranker.tables
    text = f"{line.get('framework', '')} {extra}".lower()
    vocabulary = re.search(r"vocab=(\d[\d,.]*(?:e\d+)?)", extra)
    if vocabulary:
        rows = number({"vocab": vocabulary.group(1)}, "vocab")
        ways = [_ways(t, gpus, strategy) if "per GPU" in extra else 1.0 for t in tables]
        tables = tuple(replace(t, rows=rows * n) for t, n in zip(tables, ways, strict=True))

    # Where they are, and what of them a cache holds.
    cached = re.search(r"uvm.*cach|cach.*(?:embed|ratio)|embed.*cach|colossal", text)
    if cached or "uvm" in text:
        given = re.search(r"(?:ratio|factor|cache)[ =:]*(\d*\.?\d+) ?(%?)", text)
        share = float(given.group(1)) / (100 if given.group(2) else 1) if given else 0.2
        storage = Storage.UVM_CACHE if cached else Storage.UVM
        tables = tuple(replace(t, storage=storage, cached_share=share) for t in tables)
    return replace(ranker, update=row_update(optimiser, ranker.update), tables=tables)


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
    family = family_of(line)
    host = host_for(line, hosts)
    gpus = _gpus(line)
    used = min(host.gpus, int(number(line, "gpus_per_node", gpus)))  # NICs serve only those
    precision, wire = precision_of(line, family)
    batch = _batch(line, gpus)

    # Options of a line that change what its software does.
    software = SOFTWARE[family]
    if "data-parallel" in line.get("framework", "").lower():
        software = replace(software, strategy=Strategy.DATA_PARALLEL)
    if "sparse_as_dense" in line.get("extra", ""):  # an option of Horovod
        software = replace(software, sparse_gradients=False)

    # The job, and to which series it belongs: what it shares with others.
    job = Job(
        ranker=_model(line, rankers[name], gpus, software.strategy),
        system=System(host=replace(host, gpus=used), gpus=gpus),
        software=software,
        reach=REACH,
        batch=int(batch),
        precision=precision,
        wire_bytes=wire,
        reads_files="data on gpu" not in line.get("extra", "").lower(),
    )
    facts = (source, line.get("framework", ""), name, host.name, line.get("precision", ""))
    return Measured(
        label=label,
        series=" / ".join(filter(None, facts)),
        family=family,
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
    """What was measured: the first column of a rate, else the time of a step."""
    rates = [(column, positive(line, column), unit) for column, unit in _MEASURED.items()]
    known = [(column, rate * unit) for column, rate, unit in rates if rate is not None]
    step_ms = positive(line, "step_ms")
    if step_ms is None:
        return known[0][1] if known else None
    by_step = 1e3 * batch / step_ms
    if not known:
        return by_step
    column, rate = known[0]
    same = 1 / _SAME <= by_step / rate <= _SAME
    rule = f"{column} gives {rate:,.0f} samples/s, but {batch:,.0f} samples in it {by_step:,.0f}"
    require(same, "step_ms", line["step_ms"], rule, "mend or empty one of them")
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFiles(Planned):
    """The options of every study over such CSVs."""

    rows: tuple[Path, ...] = ()
    """Lines of measurements, as rows.csv: workload, system, framework, precision, gpus,
    global_batch and the like; measured columns may be empty where only a prediction is asked for.
    Without any, the project's own: published steps, each with its source."""
    workloads: tuple[Path, ...] = ()
    """What the workloads of the rows are made of. Example: workloads.csv."""
    systems: tuple[Path, ...] = ()
    """What the systems of the rows are made of. Example: systems.csv."""
    tables: Path | None = None
    """Tables of each workload, as my_tables.csv; else workload_tables.csv beside them, where there
    is one."""

    def check_files(self, needed: bool, **others: tuple[Path, ...]) -> None:
        """Raise ValueError naming the first option whose file is not there, or that is needed and
        not given."""
        asked = {"rows": self.rows, "workloads": self.workloads, "systems": self.systems}
        for name, paths in (asked | others | {"tables": (self.tables or Path(),)}).items():
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
