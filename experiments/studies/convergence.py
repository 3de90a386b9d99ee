"""AUC by samples, and the time to it, on four data sets: modes, rivals, what was published."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments.gaps import Run, curve_records, gap_over_seeds, mean_auc, thousandths
from experiments.options import MOST, OneOf, PairedSeeds, Parallel, Some, Tau, TestRows, hold
from experiments.points import Point, find_data, replayed
from experiments.published.curves import (
    CONTENDERS,
    KUAIRAND,
    RANKS,
    SETS,
    published_curves,
    published_lines,
    published_seconds,
    scenario,
)
from experiments.result_cache import ResultCache
from experiments.sweeping import trained
from experiments.tables import Column, leave, table
from experiments.targets import COLUMNS, FOOTNOTE, target_lines
from persia_sim.base.schema import Within
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import DEFAULT_TAU
from persia_sim.cluster.scenario import Scenario
from persia_sim.presets.catalogue import CLUSTERS
from runtime.config import DataConfig, SyncConfig

BATCH = 128
"""Samples of a dense update, of all ranks together; each stands for many of the cluster's 4,096."""
CLOCK_STEPS = 64
"""Simulated steps behind a rate where the order itself is of other batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Train in each contender's simulated order on 8 ranks, and time it by its simulated rate."""

    data_sets: Some[Annotated[str, OneOf(SETS)]] = tuple(SETS)
    """Panels: kuairand (without it the default synthetic stream), taobao-ad, avazu-ad, criteo-ad
    (synthetic, with as many samples an id as the published pass)."""
    modes: Some[Annotated[str, OneOf(CONTENDERS)]] = tuple(CONTENDERS)
    """Lines: modes with Persia's costs, and rivals; sync is the reference of the gaps."""
    tau: Tau = DEFAULT_TAU
    """Bound of the modes that read late rows (XDL async 0, PaddlePaddle 4)."""
    samples: Annotated[int, Within(BATCH * RANKS, MOST)] = 163_840
    """Training samples of a run; less than one pass over KuaiRand's training part."""
    seeds: PairedSeeds = 5
    """Paired seeds, >= 2; the order is the same."""
    snapshots: int = 10
    """Evaluations along a run."""
    target: Annotated[float, Within(0.01, 1)] = 0.95
    """Share of sync's climb from an AUC of 0.5 whose time is told."""
    test_rows: TestRows = 20_000
    """Rows that are evaluated."""

    def _check(self) -> None:
        if "sync" not in self.modes:
            raise ValueError(
                f"modes must hold sync, the reference of the gaps, got {', '.join(self.modes)}"
            )
        hold("snapshots", self.snapshots, Within(1, self.steps))

    @property
    def steps(self) -> int:
        """Dense updates of a run: a multiple of the ranks, who take turns in async."""
        return self.samples // BATCH // RANKS * RANKS

    def lines_of(self, data_set: str) -> list[str]:
        """Lines with a clock on a set: XDL's sync has none where it was not fitted."""
        return [name for name in self.modes if CONTENDERS[name].has_clock(data_set)]


def run(options: Options) -> None:
    """Simulate orders and rates, train, and draw both clocks and the gaps."""
    trains = len(_learners(options)) * len(options.data_sets) * options.seeds
    print(
        f"{len(options.modes)} lines on {len(options.data_sets)} data sets: {trains} runs of"
        f" {options.steps * BATCH:,} samples, {options.jobs} at a time; results in {options.out}"
    )
    if options.dry_run:
        print(f"  {options.duration('data_sets', 'modes', 'samples', 'seeds')}")
        return

    # Clocks: the simulated rate of each line on each set, at the published batch.
    data = {name: _data(name, options) for name in options.data_sets}
    timed = [(s, c) for s in data for c in options.lines_of(s)]
    scenarios = [(scenario(c, s, tau=options.tau, steps=CLOCK_STEPS),) for s, c in timed]
    clocks = ResultCache(options.out / "clocks.jsonl").of(_samples_per_s, scenarios, "clocks")
    rates = dict(zip(timed, clocks, strict=True))

    # Learning: real runs in the simulated orders.
    points = {(s, c): _points(s, c, data[s], options) for s in data for c in _learners(options)}
    runs = trained(points, options)

    # Both together: every snapshot gets its second, and each line its time to the target.
    records: list[dict[str, Any]] = []
    for (s, c), rate in rates.items():
        records += _records(runs[s, _learns_as(c)], s, c, rate, options)
    papers = published_lines(published_curves())
    targets = _targets(records, data, options)

    # Two tables for each set on the screen, and all of it in the folder.
    for s in data:
        title = _title(s, runs[s, "sync"])
        print(f"\n{title} ({data[s].name}), W = {RANKS}, {BATCH} samples a dense update")
        print(_ends(s, runs, rates, papers, options))
        print(f"\nthe time to it; sync is {_reference(s, options)}\n{table(targets[s], COLUMNS)}")
    print(
        f"\n± of a gap is 95 % over {options.seeds} paired seeds and test samples; published gaps"
        f" are of other data and have no seeds.\n{FOOTNOTE}"
    )
    target_rows = [line for of_set in targets.values() for line in of_set]
    leave(options, {"": records, "_published": papers, "_targets": target_rows}, drawn_first=3)


def _learns_as(name: str) -> str:
    return CONTENDERS[name].learns_as or name


def _learners(options: Options) -> tuple[str, ...]:
    """Who is trained: contenders of one order share their runs."""
    return tuple(dict.fromkeys(map(_learns_as, options.modes)))


def _data(name: str, options: Options) -> DataConfig:
    """The stream of a panel; shapes with the share of ids that a run is of the published pass."""
    whole = SETS[name].pass_samples
    if whole is None:
        return find_data(None)
    return DataConfig(name=f"synthetic:{name}:{options.samples / whole:.4g}")


def _samples_per_s(cluster_run: Scenario) -> float:
    """Throughput of the cluster, at the batch that the set was published with."""
    from persia_sim.engine.simulate import simulate  # late: simpy
    from persia_sim.report.measure import throughput

    return throughput(simulate(cluster_run)).mean


def _simulated(cluster_run: Scenario, label: str, out: Path) -> Path:
    """The file with the order of a scenario; simulated if it is missing."""
    from persia_sim.engine.simulate import simulate  # late: simpy

    path = out / f"{label}-{hashlib.sha256(repr(cluster_run).encode()).hexdigest()[:8]}.npz"
    if not path.is_file():
        simulate(cluster_run, trace=True).trace.save(path)
    return path


def _points(data_set: str, name: str, data: DataConfig, options: Options) -> list[Point]:
    """The runs of a contender; sync's order is the constant one, and needs no simulation."""
    contender = CONTENDERS[name]
    barrier = contender.mode.has_barrier
    label = f"{data_set}-{name}"
    sync = SyncConfig(mode=contender.mode, ranks=RANKS)
    if contender.mode.reads_fresh_rows:
        return replayed(label, sync, BATCH, data, None, options)

    # A push of async is a dense update of as many samples as one of sync, as if a rank summed so
    # many of its batches; a replica that is averaged makes as many updates as sync.
    averages = contender.mode.averages_replicas
    match: Literal["update", "global"] = "global" if averages else "update"
    times = 1 if barrier or averages else RANKS

    # The cluster's order, with the small batches of the training in place of its own.
    cluster_run = scenario(
        name, data_set, tau=options.tau, steps=options.steps // times, batch_times=times
    )
    path = _simulated(cluster_run, f"order-{label}", options.out)
    order = Trace.load(path).with_batch_per_rank(BATCH * times // RANKS)
    replay = path.with_name(f"replay-{path.name}")
    order.save(replay)

    sync = SyncConfig(
        mode=contender.mode,
        ranks=RANKS,
        tau=cluster_run.tau,
        match=sync.match if barrier else match,
        merge_pushes=cluster_run.merges if contender.mode.may_merge else sync.merge_pushes,
    )
    return replayed(label, sync, BATCH, data, replay, options)


def _records(
    runs: Sequence[Run], data_set: str, name: str, rate: float, options: Options
) -> list[dict[str, Any]]:
    """Every snapshot with the second at which the cluster has made as many updates."""
    # A batch here stands for more samples there, so clocks go by updates.
    chosen = SETS[data_set]
    stands_for = scenario(name, data_set, tau=options.tau, steps=2).batch / BATCH

    # Each snapshot, at the second at which the simulated cluster would have it.
    return [
        {
            "data_set": data_set,
            "data": runs[0].point.config.data.name,
            "title": _title(data_set, runs),
            "cluster": chosen.cluster,
            "line": name,
            **record,
            "share_of_run": record["samples"] / (options.steps * BATCH),
            "simulated_s": record["samples"] * stands_for / rate,
            "simulated_samples_per_s": rate,
        }
        for record in curve_records(runs, options.out)
    ]


def _reference(data_set: str, options: Options) -> str:
    """The line that times are compared with: XDL's sync where it takes part, as in the published
    comparison, since it learns as sync does."""
    return "xdl_sync" if "xdl_sync" in options.lines_of(data_set) else "sync"


def _targets(
    records: Sequence[dict[str, Any]], data_sets: Iterable[str], options: Options
) -> dict[str, list[dict[str, Any]]]:
    """By data set, each line's way to the target in the cluster's seconds and samples, and the
    published time to the same share of the published climb of sync."""
    published = published_seconds(published_curves(), options.target)
    targets = {}
    for data_set in data_sets:
        # The first task's curves, by the cluster's seconds and by the cluster's samples.
        of_set = [r for r in records if r["data_set"] == data_set]
        snapshots = (
            (
                r["line"],
                r["seed"],
                r["simulated_s"],
                r["simulated_s"] * r["simulated_samples_per_s"],
                r["auc"],
            )
            for r in of_set
            if r["task"] == of_set[0]["task"]
        )
        cluster = SETS[data_set].cluster
        usd_per_hour = CLUSTERS[cluster]().usd_per_hour
        reference = _reference(data_set, options)
        lines = target_lines(snapshots, reference, [options.target], cluster, usd_per_hour)

        # Beside each the published ratio, NaN where no curve was published.
        sync_s = published.get((data_set, "xdl_sync"), math.nan)
        targets[data_set] = []
        for line in lines:
            ratio = published.get((data_set, line["mode"]), math.nan) / sync_s
            targets[data_set].append(
                {"data_set": data_set, **line, "published_ratio_to_sync": ratio}
            )
    return targets


def _title(data_set: str, runs: Sequence[Run]) -> str:
    """The panel's title; another stream that stands in for the real clicks is named."""
    data = runs[0].point.config.data.name
    if data_set == KUAIRAND and data.startswith("synthetic"):
        return "default synthetic stream (no KuaiRand); clock of Kwai-Video"
    return SETS[data_set].title


def _ends(
    data_set: str,
    runs: dict[tuple[str, str], list[Run]],
    rates: dict[tuple[str, str], float],
    papers: Sequence[dict[str, Any]],
    options: Options,
) -> str:
    """The table of scores at the end of the runs, all pushes applied."""
    sync = runs[data_set, "sync"]
    task = next(iter(sync[0].summary["tasks"]))

    # Of a published curve its last gap stands; the clock is that of the whole run.
    last = {line["line"]: line["gap_to_sync"] for line in papers if line["data_set"] == data_set}
    batch_of = {
        name: scenario(name, data_set, tau=options.tau, steps=2).batch
        for name in options.lines_of(data_set)
    }

    def gap(name: str) -> str:
        late = runs[data_set, _learns_as(name)]
        return thousandths(gap_over_seeds(late, sync, task, options.out))

    columns: dict[str, Column] = {
        "line": str,
        "test AUC": lambda name: f"{mean_auc(runs[data_set, _learns_as(name)], task):.4f}",
        "gap to sync [1e-3]": lambda name: "-" if name == "sync" else gap(name),
        "published": lambda name: (
            f"{1e3 * last[name]:+.1f}" if name != "sync" and last.get(name, "") != "" else "-"
        ),
        "samples/s": lambda name: f"{rates[data_set, name]:,.0f}",
        "simulated s": lambda name: f"{options.steps * batch_of[name] / rates[data_set, name]:.1f}",
    }
    return table(list(batch_of), columns)
