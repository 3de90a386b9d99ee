"""A measured profile: what `runtime profile` writes, checked, and put in the catalogue's place.

The file is JSON: ``{"schema": 3, "source": "...", "dim": 16, "hidden": [256, 128], "precision":
"float32", "threads": 1, "laws":
{"server_lookup": {"fixed_s": ..., "per_item_s": ..., "per_byte_s": ..., "spread": ...,
"fitted_items": [low, high]}, ...}, "gpu": {"device": "cpu", "fixed_s": ..., "flops_per_s":
[[batch_per_rank, rate], ...]}, "all_reduce": {"ranks": 2, "fixed_s": ..., "per_byte_s": ...,
"spread": ..., "fitted_bytes": [low, high]}, "copies": "none: ..." (or "measured: ...")}``. Laws
or rates may be absent, as may all-reduce and the word on copies; unknown names are errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from persia_sim.base.rules import AMOUNT, NUMBERS, SECONDS, require, require_within
from persia_sim.base.schema import nearest
from persia_sim.cluster.allreduce import Algorithm, DenseSync
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.costs import Costs, Law
from persia_sim.cluster.machine import Precision
from persia_sim.cluster.workload import Workload
from persia_sim.presets.from_file import document_of, record_of

PROFILE_SCHEMA = 3
_COPIES = "measured"  # so begins the word on copies where their laws hold the bus, too
_NO_BUS_BYTES_PER_S = 1e18
_LAWS = {each.name for each in fields(Costs) if each.type == "Law"}
_TIMES = {"fixed_s", "per_item_s", "per_byte_s"}
_AGAIN = "measure again with: persia-runtime profile"
_SHORT = {
    "float32": Precision.FP32,
    "tf32": Precision.TF32,
    "bfloat16": Precision.FP16,
    "float16": Precision.FP16,
}
_LONG = {Precision.FP32: "float32", Precision.TF32: "tf32", Precision.FP16: "bfloat16"}
"""What a run calls the simulator's arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """A measured sum of vectors: fixed_s + per_byte_s * bytes of one rank."""

    ranks: int
    """Processes that summed, >= 2."""
    fixed_s: float
    per_byte_s: float
    spread: float = 0.0
    """Residual standard deviation relative to the fit."""
    fitted_bytes: tuple[float, float]
    """Range of the measurements."""

    def __post_init__(self) -> None:
        require_within(self, ranks=(2, 1e6), fixed_s=SECONDS, per_byte_s=SECONDS)
        low, high = self.fitted_bytes
        require(0 <= low <= high, "fitted_bytes", [low, high], "must be [least, most]")

    def instead_of(self, sync: DenseSync, source: str) -> DenseSync:
        """The measured ring for any number of ranks of one host: hops and bytes cost what they
        did."""
        hops = 2 * (self.ranks - 1)
        return replace(
            sync,
            algorithm=Algorithm.RING,
            intra_latency_s=self.fixed_s / hops,
            intra_bytes_per_s=hops / self.ranks / max(self.per_byte_s, 1 / _NO_BUS_BYTES_PER_S),
            overhead_s=0.0,
            fitted_bytes=self.fitted_bytes,
            source=source,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What computed the dense network, and how fast."""

    device: str
    """cpu, or the name of a GPU."""
    fixed_s: float
    """Spent once a step, >= 0."""
    flops_per_s: tuple[tuple[int, float], ...]
    """(batch_per_rank, operations a second), the first increasing."""

    def __post_init__(self) -> None:
        require_within(self, fixed_s=SECONDS)
        sizes = [size for size, _ in self.flops_per_s]
        ordered = bool(sizes) and sizes == sorted(set(sizes)) and sizes[0] >= 1
        rule = "needs points in increasing order of batch_per_rank"
        require(ordered, "flops_per_s", sizes, rule)
        least = min(rate for _, rate in self.flops_per_s)
        require(least > 0, "flops_per_s", least, "must be > 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured."""

    schema: int
    """The version of the file's format."""
    source: str = ""
    """On what machine, by what."""
    laws: dict[str, Any] = field(default_factory=dict)
    """A `Law` each, by the name that `Costs` gives it."""
    dim: int | None = None
    """Numbers in a row while the laws were measured."""
    hidden: tuple[int, ...] | None = None
    """Widths of the MLP while the rate was measured."""
    precision: str = "float32"
    """What the network computed in while the rate was measured."""
    threads: int = 1
    """Threads of each stage while the laws were measured."""
    gpu: Rate | None = None
    """Not measured: None."""
    all_reduce: AllReduce | None = None
    """Over ranks of one host that are processes; None: not measured."""
    copies: str = ""
    """What was found of copies between host and device; empty: nothing is said."""
    provenance: Any = None
    """Who measured; not read."""

    def __post_init__(self) -> None:
        rule = f"must be {PROFILE_SCHEMA}"
        require(self.schema == PROFILE_SCHEMA, "schema", self.schema, rule, _AGAIN)
        require_within(self, dim=NUMBERS, threads=NUMBERS)
        rule = f"must be one of {', '.join(_SHORT)}"
        require(self.precision in _SHORT, "precision", self.precision, rule)
        for width in self.hidden or ():
            require(1 <= width <= AMOUNT[1], "hidden", width, "needs widths >= 1")
        unknown = sorted(self.laws.keys() - _LAWS)
        if unknown:
            raise ValueError(f"laws.{unknown[0]} is unknown: {nearest(unknown[0], _LAWS)}")
        measured = bool(self.laws or self.gpu)
        require(measured, "it", "without laws and gpu", "nothing in it was measured")

    def apply(self, cluster: Cluster, workload: Workload, costs: Costs) -> tuple[Cluster, Costs]:
        """Cluster and costs with what was measured in place of the presets' constants.

        Raises ValueError when rows are of another width, or a rate is above the GPU's peak.
        """
        again = f"measure again with: persia-runtime profile --dim {workload.kept_dim:.0f}"
        dims = sorted({table.dim for table in workload.alike})
        rule = f"rows of {workload.name} have dim {', '.join(f'{dim:g}' for dim in dims)}"
        require(self.dim is None or dims == [self.dim], "dim of the profile", self.dim, rule, again)
        notes = [f"measured: {self.source}"]
        if self.hidden is not None and self.hidden != tuple(w for w in workload.mlp if w > 1):
            notes.append(f"at an MLP of {'-'.join(map(str, self.hidden))}, another one than here")

        # Laws of stages, as of a core of speed 1.
        laws = {name: _at_speed_1(name, law, cluster) for name, law in self.laws.items()}
        changes: dict[str, object] = dict(laws)
        if "load" in laws:  # measured a sample
            changes["load"] = _a_column(laws["load"], workload.columns)

        # A rank that computes on a core: its peak, and no copies to a GPU.
        here = cluster.gpu.is_host_core
        if self.gpu is not None and here:
            peak = max(rate for _, rate in self.gpu.flops_per_s)
            cluster = cluster.with_gpu(fp32_flops=peak, source=self.source)
        if here and self.copies:  # whatever was found elsewhere, a core has none
            nothing = Law(source=f"{self.source}: {self.copies}")
            changes |= {"copy_in": nothing, "copy_out": nothing}
        if (here and self.copies) or self.copies.startswith(_COPIES):
            cluster = cluster.with_gpu(pcie_bytes_per_s=_NO_BUS_BYTES_PER_S)

        # The all-reduce between processes of one host.
        if self.all_reduce is not None and here:
            changes["dense_sync"] = self.all_reduce.instead_of(costs.dense_sync, self.source)
        elif self.all_reduce is not None:
            notes.append("the all-reduce of one host's processes is not used for GPUs")

        # The rate of the dense network, where it is that of such a device.
        precision = _SHORT[self.precision]
        if self.gpu is not None and not here and precision is not workload.precision:
            notes.append(
                f"the rate was measured in {self.precision} and is not used for"
                f" {workload.precision}: measure it with --precision {_LONG[workload.precision]}"
            )
        elif self.gpu is not None and (self.gpu.device == "cpu") != here:
            notes.append(f"the rate of a {self.gpu.device} is not used for a {cluster.gpu.name}")
        elif self.gpu is not None:
            shares = _shares(self.gpu, cluster, workload)
            changes |= {
                "gpu_efficiency": shares,
                "gpu_fixed_s": self.gpu.fixed_s,
                "network_of": "",
                "launching": None,
            }
            changes["reach"] = replace(costs.reach, activation_passes=0.0)  # the step has them
            if here:
                changes["gpu_half_batch"] = 0.0  # a core needs no batch to be busy
        source = "; ".join([costs.source, *notes])
        return cluster, replace(costs, source=source, **changes)  # type: ignore[arg-type]


def _shares(gpu: Rate, cluster: Cluster, workload: Workload) -> tuple[tuple[int, float], ...]:
    """The measured rates over the GPU's peak."""
    peak = cluster.gpu.peak_flops(workload.precision)
    rule = f"a {cluster.gpu.name} of {cluster.name} has {peak:.4g} at most"
    remedy = "use the profile with the cluster on whose GPU it was measured"
    for batch_per_rank, rate in gpu.flops_per_s:
        name = f"flops_per_s of the profile at batch_per_rank {batch_per_rank}"
        require(rate <= peak, name, f"{rate:.4g}", rule, remedy)
    return tuple((size, rate / peak) for size, rate in gpu.flops_per_s)


def _at_speed_1(name: str, law: Law, cluster: Cluster) -> Law:
    """What a law of `Costs` must be, so that a core of the role takes what was measured on it."""
    roles = {"worker": cluster.embedding_workers, "server": cluster.servers}
    speed = roles.get(name.partition("_")[0], cluster.nn).host.core_speed
    return replace(law, **{part: speed * getattr(law, part) for part in _TIMES})


def _a_column(law: Law, columns: int) -> Law:
    """The law of a loader whose items were samples of so many columns."""
    fitted = law.fitted_items and (law.fitted_items[0] * columns, law.fitted_items[1] * columns)
    return replace(law, per_item_s=law.per_item_s / columns, fitted_items=fitted)


def read_profile(path: Path) -> Profile:
    """Read and check a profile. Raises ValueError that names the first wrong value."""
    document = document_of(path, "profile", "write it with: persia-runtime profile")
    try:
        profile = record_of(Profile, {"source": path.name} | document, "")
        return replace(profile, laws={n: _law(n, law, profile) for n, law in profile.laws.items()})
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from None


def _law(name: str, table: Any, of: Profile) -> Law:
    if isinstance(table, dict):
        rule = f"must hold one of {', '.join(sorted(_TIMES))}"
        require(bool(_TIMES & table.keys()), f"laws.{name}", table, rule)
        table = {"source": of.source} | table
    return record_of(Law, table, f"laws.{name}")
