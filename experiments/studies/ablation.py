"""Each optimisation off in turn: what it does to simulated throughput, and to the AUC if anything.

Throughput is the simulator's on published clusters. What may change learning (window, merging,
rows in two bytes) is trained for real by the deterministic executor, with paired seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import hypot, isfinite
from typing import Annotated, Any

from experiments.gaps import Run, gap_over_seeds
from experiments.options import Count, OneOf, Parallel, SimulatedSteps, TestRows, hold
from experiments.points import Point, data_sha256, over_seeds
from experiments.result_cache import ResultCache
from experiments.statistics import t_interval
from experiments.sweeping import trained
from experiments.tables import Column, leave, table
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import DEFAULT_TAU, Mode
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.presets import point as points
from persia_sim.report.critical_path import blame_of_resources
from persia_sim.report.measure import throughput
from runtime.config import DataConfig, EvaluationConfig, SyncConfig, TrainConfig

ALL_ON = "all on"
WINDOW = "no window (tau 0)"
MERGING = "pushes not merged"
HALF_ROWS = "rows in 2 bytes (added)"
Change = Callable[[Scenario], Scenario]


def _wire(**values: Any) -> Change:
    def change(scenario: Scenario) -> Scenario:
        work = scenario.workload
        return replace(scenario, workload=replace(work, wire=replace(work.wire, **values)))

    return change


def _exact(mode: Mode, **values: Any) -> Change:
    """The change to a mode whose rows are never late."""

    def change(scenario: Scenario) -> Scenario:
        ahead = scenario.tau if mode.prefetches_rows else None
        return replace(scenario, mode=mode, tau=None, merge_pushes=None, ahead=ahead, **values)

    return change


VARIANTS: dict[str, Change] = {
    ALL_ON: lambda s: s,
    "all-reduce not overlapped": lambda s: replace(s, mode=Mode.RAW_HYBRID),
    WINDOW: lambda s: replace(s, tau=0),
    "neither (sync)": _exact(Mode.SYNC),
    "lookahead, forwarded": _exact(Mode.LOOKAHEAD, lookahead="forwarded"),
    "lookahead, read again": _exact(Mode.LOOKAHEAD),
    MERGING: lambda s: replace(s, merge_pushes=False),
    "duplicate ids sent": _wire(deduplicate=False),
    "not pooled at the worker": _wire(pooled=False),
    "vectors in 4 bytes": _wire(activation_value_bytes=4),
    HALF_ROWS: _wire(row_value_bytes=2),
}
"""What is changed; the two lookaheads are the exact alternatives to a window."""


PLACES: dict[str, tuple[str, str, float | None]] = {
    "Kwai": ("v100-paper", "kwai-video", None),
    "100T": ("gcp-100t", "criteo-syn5", None),
    "Kwai-10Gbit": ("v100-paper", "kwai-video", 10),
    "100T-10Gbit": ("gcp-100t", "criteo-syn5", 10),
}
"""The published clusters, what each trains, and the same with slow NICs, where what travels
matters: Gbit/s of those that rows travel by, of all hosts (the all-reduce keeps its own)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Hybrid with everything on, then each optimisation off; finished points are kept."""

    places: tuple[Annotated[str, OneOf(PLACES)], ...] = tuple(PLACES)
    """Kwai, 100T, Kwai-10Gbit, 100T-10Gbit; none: no simulation."""
    ranks: Annotated[int, Within(2, 100_000)] = 64
    """GPUs."""
    steps: SimulatedSteps = 80
    """Simulated steps of a point."""
    tau: Count = DEFAULT_TAU
    """The window, and the steps ahead of lookahead."""
    data: DataConfig = field(default_factory=lambda: DataConfig(name="synthetic"))
    samples: int = 160_000
    """Training samples of a run for the AUC."""
    test_rows: TestRows = 50_000
    """Rows that the AUC is of."""
    batch: Count = 128
    """Samples of a dense update in those runs."""
    train_ranks: int = 8
    """Ranks in those runs."""
    seeds: Annotated[int, Within(0, 1_000)] = 5
    """Paired seeds of those runs; 0: no AUC."""

    def _check(self) -> None:
        hold("samples", self.samples, Within(self.batch, 10**12))
        hold("train_ranks", self.train_ranks, Within(1, self.batch))
        if not self.places and not self.seeds:
            raise ValueError("places must name one, or seeds be >= 1, got neither")


def run(options: Options) -> None:
    """Simulate and train what is missing, write the table and the figure, print the table."""
    learners = learning_points(options) if options.seeds else {}
    print(f"{len(options.places)} clusters, {len(VARIANTS)} simulations each")
    runs = trained(learners, options, options.out / "runs")
    if runs is None:
        return
    records = simulated(options) + (learned(options, runs) if runs else [])
    print(table(records, COLUMNS))
    leave(options, {"": records}, drawn_first=1)


def scenario_of(place: str, options: Options) -> Scenario:
    """Hybrid with everything on, at one of `PLACES`."""
    # The published cluster as it is.
    cluster, workload, nic_gbit_per_s = PLACES[place]
    published = points.scenario_of(
        points.Point(
            cluster=cluster,
            workload=workload,
            ranks=options.ranks,
            mode=Mode.HYBRID,
            tau=options.tau,
            merge_pushes=True,
            steps=options.steps,
        )
    )
    if nic_gbit_per_s is None:
        return published

    # Slow NICs in all hosts, for what rows travel by.
    rate = nic_gbit_per_s * 1e9 / 8
    roles = {}
    for name in ("nn", "embedding_workers", "servers"):
        role = getattr(published.cluster, name)
        roles[name] = replace(role, host=replace(role.host, nic_bytes_per_s=rate))

    # The all-reduce still takes as long as on the published hosts.
    sync = published.costs.dense_sync.on([published.cluster.nn.host], published.costs.reach)
    costs = replace(published.costs, dense_sync=sync)
    return replace(published, cluster=replace(published.cluster, **roles), costs=costs)


def simulated(options: Options) -> list[dict[str, Any]]:
    """Lines of throughput: each variant beside the one with everything on."""
    # Simulate what the folder lacks.
    plan = [(name, variant) for name in options.places for variant in VARIANTS]
    scenarios = [(VARIANTS[variant](scenario_of(name, options)),) for name, variant in plan]
    rows = ResultCache(options.out / "points.jsonl").of(_rate, scenarios, "simulations")

    # At each place the variant with everything on comes first, and is the base of the others.
    records: list[dict[str, Any]] = []
    base: dict[str, Any] = {}
    for (name, variant), row in zip(plan, rows, strict=True):
        if variant == ALL_ON:
            base = row
        share = row["samples_per_s"] / base["samples_per_s"]
        wide = 0.0 if variant == ALL_ON else hypot(row["relative"], base["relative"])
        records.append(
            {
                "kind": "throughput",
                "where": f"{name}, {options.ranks} GPUs",
                "variant": variant,
                "value": row["samples_per_s"],
                "value_half_width_95": row["samples_per_s"] * row["relative"],
                "difference": share - 1,
                "difference_half_width_95": share * wide,
                "n": options.steps,
                "binds": row["binds"],
                "usd_per_million_samples": row["usd_per_million_samples"],
            }
        )
    return records


def _rate(scenario: Scenario) -> dict[str, Any]:
    result = simulate(scenario)
    rate = throughput(result)
    blame = blame_of_resources(result)
    usd = scenario.cluster.usd_per_hour / 3600 / rate.mean * 1e6
    return {
        "samples_per_s": rate.mean,
        "relative": rate.relative,
        "binds": max(blame, key=lambda name: blame[name]),
        "usd_per_million_samples": usd or None,
    }


def learning_points(options: Options) -> dict[str, list[Point]]:
    """The training runs of each variant that may change what is learned, a point a seed."""
    base = TrainConfig(
        sync=SyncConfig(mode=Mode.HYBRID, ranks=options.train_ranks, tau=options.tau),
        batch=options.batch,
        steps=options.samples // options.batch,
        data=options.data,
        evaluation=EvaluationConfig(test_rows=options.test_rows),
    )

    # Only these variants may change what is learned; one word of each names the run folders.
    variants = {
        ALL_ON: base,
        WINDOW: replace(base, sync=replace(base.sync, tau=0)),
        MERGING: replace(base, sync=replace(base.sync, merge_pushes=False)),
        HALF_ROWS: replace(base, sync=replace(base.sync, wire="half")),
    }
    checksum = data_sha256(base)
    words = {ALL_ON: "on", WINDOW: "tau0", MERGING: "unmerged", HALF_ROWS: "half"}
    return {
        name: over_seeds(words[name], config, options.seeds, checksum)
        for name, config in variants.items()
    }


def learned(options: Options, runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Lines of the first task's test AUC: each variant minus the one with everything on."""
    # Paired by seed against the variant with everything on.
    records = []
    task = next(iter(runs[ALL_ON][0].summary["tasks"]))
    for name, runs_of_variant in runs.items():
        value = t_interval([run.auc(task) for run in runs_of_variant])
        gap = gap_over_seeds(runs_of_variant, runs[ALL_ON], task, options.out / "runs")
        records.append(
            {
                "kind": "auc",
                "where": f"{options.data.name}, {options.train_ranks} ranks",
                "variant": name,
                "value": value.mean,
                "value_half_width_95": value.half_width,
                "difference": gap.mean,
                "difference_half_width_95": 0.0 if name == ALL_ON else gap.half_width,
                "n": gap.n,
                "binds": "",
                "usd_per_million_samples": None,
            }
        )
    return records


def _difference(row: dict[str, Any]) -> str:
    """The difference as a person reads it: throughput in per cent, AUC in thousandths."""
    if row["variant"] == ALL_ON:
        return "-"
    unit, digits = (100, "%") if row["kind"] == "throughput" else (1e3, "e-3")
    wide = row["difference_half_width_95"]
    spread = f" ± {unit * wide:.2f}" if isfinite(wide) else ""
    return f"{unit * row['difference']:+.2f}{spread} {digits}"


COLUMNS: dict[str, Column] = {
    "where": "{where}",
    "off": "{variant}",
    "samples/s or AUC": lambda row: format(
        row["value"], ",.0f" if row["kind"] == "throughput" else ".4f"
    ),
    "difference": _difference,
    "binds": lambda row: row["binds"] or "-",
    "$/M samples": lambda row: f"{usd:.3f}" if (usd := row["usd_per_million_samples"]) else "-",
}
