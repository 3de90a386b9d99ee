"""A measured profile: what `runtime profile` writes, checked, and put in the catalogue's place.

The file is JSON: ``{"schema": 3, "source": "...", "dim": 16, "hidden": [256, 128], "laws":
{"server_lookup": {"fixed_s": ..., "per_item_s": ..., "per_byte_s": ..., "spread": ...,
"fitted_items": [low, high]}, ...}, "gpu": {"device": "cpu", "fixed_s": ..., "flops_per_s":
[[batch_per_rank, rate], ...]}, "all_reduce": {"ranks": 2, "fixed_s": ..., "per_byte_s": ...,
"spread": ..., "fitted_bytes": [low, high]}, "copies": "none: ..."}``. Laws or rates may be absent,
not both; the all-reduce and the word on copies may be, too; unknown names are errors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from persia_sim.model.allreduce import Algorithm, DenseSync
from persia_sim.model.cluster import Cluster
from persia_sim.model.costs import Costs, Law
from persia_sim.model.workload import Workload
from persia_sim.words.documents import Node, read_node
from persia_sim.words.rules import require

PROFILE_SCHEMA = 3
_KNOWN = {
    "schema", "source", "dim", "hidden", "laws", "gpu", "all_reduce", "copies", "provenance",
}  # fmt: skip
_NO_COPIES = "none"
"""How the word on copies begins where a device shares its host's memory."""
_NO_BUS_BYTES_PER_S = 1e18
_LAWS = {field.name for field in fields(Costs) if field.type == "Law"}
_TIMES = ("fixed_s", "per_item_s", "per_byte_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """A measured sum of vectors: fixed_s + per_byte_s * bytes of one rank."""

    ranks: int
    """Processes that summed, >= 2."""
    fixed_s: float
    per_byte_s: float
    fitted_bytes: tuple[float, float]
    """Range of the measurements."""

    def instead_of(self, sync: DenseSync, source: str) -> DenseSync:
        """The same ring for any number of ranks of one host: hops and bytes cost what they did."""
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
class Profile:
    """What was measured."""

    path: Path
    """Where it was read."""
    source: str
    """On what machine, by what."""
    laws: dict[str, Law]
    """By the name that `Costs` gives them."""
    dim: int | None
    """Numbers in a row while the laws were measured."""
    hidden: tuple[int, ...] | None
    """Widths of the MLP while the rate was measured."""
    device: str
    """cpu, or the name of a GPU: what computed the MLP."""
    gpu_fixed_s: float
    """Spent once a step, >= 0."""
    flops_per_s: tuple[tuple[int, float], ...]
    """(batch_per_rank, operations a second), the first increasing; empty: not measured."""

    all_reduce: AllReduce | None = None
    """Over ranks of one host that are processes; None: not measured."""
    copies: str = ""
    """What was found of copies between host and device; empty: nothing is said."""

    def apply(self, cluster: Cluster, workload: Workload, costs: Costs) -> tuple[Cluster, Costs]:
        """Cluster and costs with what was measured in place of the presets' constants.

        Raises ValueError when rows are of another width, or a rate is above the GPU's peak.
        """
        require(
            self.dim in (None, workload.dim),
            f"dim of profile {self.path}",
            self.dim,
            f"rows of {workload.name} have dim {workload.dim}",
            f"measure again with: runtime profile --dim {workload.dim}",
        )
        notes = [f"measured: {self.source}"]
        if self.hidden is not None and self.hidden != tuple(w for w in workload.mlp if w > 1):
            notes.append(f"at an MLP of {'-'.join(map(str, self.hidden))}, another one than here")
        changes: dict[str, object] = dict(self.laws)
        if "load" in self.laws:  # measured a sample
            changes["load"] = _a_column(self.laws["load"], workload.columns)
        if self.flops_per_s and cluster.gpu.is_host_core:
            peak = max(rate for _, rate in self.flops_per_s)
            cluster = cluster.with_gpu(fp32_flops=peak, source=self.source)
        here = cluster.gpu.is_host_core
        if self.copies.startswith(_NO_COPIES) and here:
            nothing = Law(source=f"{self.source}: {self.copies}")
            changes |= {"copy_in": nothing, "copy_out": nothing}
            cluster = cluster.with_gpu(pcie_bytes_per_s=_NO_BUS_BYTES_PER_S)
        if self.all_reduce is not None and here:
            changes["dense_sync"] = self.all_reduce.instead_of(costs.dense_sync, self.source)
        elif self.all_reduce is not None:
            notes.append("the all-reduce of one host's processes is not used for GPUs")
        if self.flops_per_s and (self.device == "cpu") != cluster.gpu.is_host_core:
            notes.append(f"the rate of a {self.device} is not used for a {cluster.gpu.name}")
        elif self.flops_per_s:
            changes |= {
                "gpu_efficiency": self._shares(cluster, workload),
                "gpu_fixed_s": self.gpu_fixed_s,
            }
            if cluster.gpu.is_host_core:
                changes["gpu_half_batch"] = 0.0  # a core needs no batch to be busy
        source = "; ".join([costs.source, *notes])
        return cluster, replace(costs, source=source, **changes)  # type: ignore[arg-type]

    def _shares(self, cluster: Cluster, workload: Workload) -> tuple[tuple[int, float], ...]:
        peak = cluster.gpu.peak_flops(workload.precision)
        for batch_per_rank, rate in self.flops_per_s:
            require(
                rate <= peak,
                f"flops_per_s of profile {self.path} at batch_per_rank {batch_per_rank}",
                f"{rate:.4g}",
                f"a {cluster.gpu.name} of {cluster.name} has {peak:.4g} at most",
                "use the profile with the cluster on whose GPU it was measured",
            )
        return tuple((size, rate / peak) for size, rate in self.flops_per_s)


def _a_column(law: Law, columns: int) -> Law:
    """The law of a loader whose items were samples of so many columns."""
    fitted = law.fitted_items and (law.fitted_items[0] * columns, law.fitted_items[1] * columns)
    return replace(law, per_item_s=law.per_item_s / columns, fitted_items=fitted)


def read_profile(path: Path) -> Profile:
    """Read and check a profile. Raises ValueError that names the first wrong value."""
    top = read_node(path, "profile", "write it with: runtime profile")
    top.members(_KNOWN)
    schema = top["schema"].integer(0)
    rule = f"must be {PROFILE_SCHEMA}"
    require(schema == PROFILE_SCHEMA, "schema", schema, rule, "measure again with: runtime profile")
    source = top["source"].text() if top.has("source") else path.name
    laws: dict[str, Law] = {}
    if top.has("laws"):
        laws = {n: _law(top["laws"][n], source) for n in top["laws"].members(_LAWS)}
    fixed_s, rates, device = 0.0, (), "cpu"  # type: tuple[float, tuple[tuple[int, float], ...], str]
    if top.has("gpu"):
        gpu = top["gpu"]
        gpu.members({"device", "fixed_s", "flops_per_s"})
        fixed_s = gpu["fixed_s"].number()
        rates, device = _rates(gpu["flops_per_s"]), gpu["device"].text()
    measured = bool(laws or rates)
    require(measured, f"profile {path}", "without laws and gpu", "nothing in it was measured")
    return Profile(
        path=path,
        source=source,
        laws=laws,
        dim=top["dim"].integer(1) if top.has("dim") else None,
        hidden=tuple(w.integer(1) for w in top["hidden"].items()) if top.has("hidden") else None,
        device=device,
        gpu_fixed_s=fixed_s,
        flops_per_s=rates,
        all_reduce=_all_reduce(top["all_reduce"]) if top.has("all_reduce") else None,
        copies=top["copies"].text() if top.has("copies") else "",
    )


def _all_reduce(node: Node) -> AllReduce:
    node.members({"ranks", "fixed_s", "per_byte_s", "spread", "fitted_bytes"})
    low, high = (entry.number() for entry in node["fitted_bytes"].items(length=2))
    require(low <= high, node["fitted_bytes"].where, [low, high], "must be [least, most]")
    return AllReduce(
        ranks=node["ranks"].integer(2),
        fixed_s=node["fixed_s"].number(),
        per_byte_s=node["per_byte_s"].number(),
        fitted_bytes=(low, high),
    )


def _law(node: Node, source: str) -> Law:
    given = node.members({*_TIMES, "spread", "fitted_items"})
    found = any(name in given for name in _TIMES)
    require(found, node.where, given, f"must hold one of {', '.join(_TIMES)}")
    numbers = {n: node[n].number() for n in (*_TIMES, "spread") if n in given}
    fitted = None
    if node.has("fitted_items"):
        low, high = (entry.number() for entry in node["fitted_items"].items(length=2))
        require(low <= high, node["fitted_items"].where, [low, high], "must be [least, most]")
        fitted = (low, high)
    return Law(source=source, fitted_items=fitted, **numbers)


def _rates(node: Node) -> tuple[tuple[int, float], ...]:
    pairs = [entry.items(length=2) for entry in node.items()]
    found = tuple((size.integer(1), rate.number(above=0)) for size, rate in pairs)
    sizes = [size for size, _ in found]
    ordered = bool(sizes) and sizes == sorted(set(sizes))
    require(ordered, node.where, sizes, "needs points in increasing order of batch_per_rank")
    return found
