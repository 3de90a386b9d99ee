"""Each optimisation off in turn: what it does to the simulated throughput of published clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot, isfinite
from typing import Annotated, Any

from experiments.options import REFERENCE, STUDIED, Count, OneOf, Planned, SimulatedSteps, Some
from experiments.result_cache import ResultCache
from experiments.tables import Column, leave, table
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import DEFAULT_TAU, Dense, Mode, Read
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.presets import point as points
from persia_sim.report.critical_path import blame_of_resources
from persia_sim.report.measure import throughput

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


def _not_overlapped(scenario: Scenario) -> Scenario:
    rules = scenario.mode.rules._replace(dense=Dense.ALL_REDUCED)
    return replace(scenario, mode=rules.mode)


def _exact(mode: Mode, **values: Any) -> Change:
    """The change to a mode whose rows are never late."""

    def change(scenario: Scenario) -> Scenario:
        ahead = scenario.tau if mode.prefetches_rows else None
        return replace(scenario, mode=mode, tau=None, merge_pushes=None, ahead=ahead, **values)

    return change


LOOKAHEAD = REFERENCE.rules._replace(read=Read.AHEAD, dense=Dense.OVERLAPPED).mode
"""The exact mode that fetches ahead."""
VARIANTS: dict[str, Change] = {
    ALL_ON: lambda s: s,
    "all-reduce not overlapped": _not_overlapped,
    WINDOW: lambda s: replace(s, tau=0),
    "neither (sync)": _exact(REFERENCE),
    "lookahead, forwarded": _exact(LOOKAHEAD, lookahead="forwarded"),
    "lookahead, read again": _exact(LOOKAHEAD),
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
class Options(Planned):
    """Hybrid with everything on, then each optimisation off; finished points are kept."""

    places: Some[Annotated[str, OneOf(PLACES)]] = tuple(PLACES)
    """Kwai, 100T, Kwai-10Gbit, 100T-10Gbit."""
    ranks: Annotated[int, Within(2, 100_000)] = 64
    """GPUs."""
    steps: SimulatedSteps = 80
    """Simulated steps of a point."""
    tau: Count = DEFAULT_TAU
    """The window, and the steps ahead of lookahead."""


def run(options: Options) -> None:
    """Simulate what is missing, write the table and the figure, print the table."""
    count = len(options.places) * len(VARIANTS)
    print(f"{len(options.places)} clusters, {len(VARIANTS)} simulations each")
    if options.dry_run:
        share = count / (len(PLACES) * len(VARIANTS))
        print(f"  {options.duration('steps', 'ranks', share=share)}, less what is done")
        return
    records = simulated(options)
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
            mode=STUDIED,
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


def _difference(row: dict[str, Any]) -> str:
    """The difference in per cent, as a person reads it."""
    if row["variant"] == ALL_ON:
        return "-"
    wide = row["difference_half_width_95"]
    spread = f" ± {100 * wide:.2f}" if isfinite(wide) else ""
    return f"{100 * row['difference']:+.2f}{spread} %"


COLUMNS: dict[str, Column] = {
    "where": "{where}",
    "off": "{variant}",
    "samples/s": "{value:,.0f}",
    "difference": _difference,
    "binds": "{binds}",
    "$/M samples": lambda row: f"{usd:.3f}" if (usd := row["usd_per_million_samples"]) else "-",
}
