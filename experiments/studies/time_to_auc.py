"""AUC against the wall clock of a cluster that you do not own: simulated order, true gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.gaps import Run, curve_records, gap_over_seeds, mean_auc, thousandths
from experiments.options import Count, OneOf, Parallel, Seeds, Some, Tau, TestRows, hold
from experiments.points import Point, data_sha256, over_seeds
from experiments.sweep import trained
from experiments.tables import Column, leave, table
from experiments.targets import COLUMNS, FOOTNOTE, target_lines
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.schema import Within
from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import DEFAULT_TAU, Mode
from runtime.config import DataConfig, EngineConfig, EvaluationConfig, SyncConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Simulate a cluster in three modes, then train in the very order of its reads and writes."""

    cluster: Annotated[str, OneOf(CLUSTERS)] = "gcp-100t"
    """A preset of the simulator; the default is the paper's: 64 GPUs, 120 server processes."""
    workload: Annotated[str, OneOf(workloads())] = "criteo-syn5"
    """A preset of the simulator."""
    modes: tuple[Mode, ...] = (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID)
    """Modes to compare; sync is the reference. In async every rank's small batch is a dense update
    of its own, as many times more updates as there are ranks: that alone changes what is learned,
    so it is a comparison of two things at once."""
    tau: Tau = DEFAULT_TAU
    """Bound of the modes that read late rows, and steps that lookahead fetches ahead."""
    steps: Count = 400
    """Steps of the simulated run."""
    batch_per_rank: Count = 8
    """Samples that stand for a rank's (far larger) simulated batch in the training."""
    snapshots: int = 10
    """Evaluations along a run."""
    targets: Some[Annotated[float, Within(0.01, 1)]] = (0.9, 0.95, 0.99)
    """Targets, in shares of sync's climb from an AUC of 0.5 to its end, seed by seed; above 0."""
    seeds: Seeds = 5
    """Paired seeds of the training; the order is the same."""
    test_rows: TestRows = 20_000
    """Rows that are evaluated."""
    data: DataConfig = field(default_factory=lambda: DataConfig(name="synthetic"))

    def check(self) -> None:
        """What goes with what."""
        if Mode.SYNC not in self.modes:
            raise ValueError(
                f"modes must hold sync, the reference of the gaps, got {', '.join(self.modes)}"
            )
        hold("snapshots", self.snapshots, Within(1, self.steps))


def run(options: Options) -> None:
    """Simulate, replay, and put both on one time axis."""
    if options.dry_run:
        print(_plan(options))
        return
    modes = dict.fromkeys(options.modes)
    instants = {mode: _simulate(options, mode) for mode in modes}
    runs = trained({mode: _points(options, mode) for mode in modes}, options)
    assert runs is not None  # no dry run
    curves = curve_records([run for own in runs.values() for run in own], options.out)
    records = _with_time(curves, options, instants)
    snapshots = (
        (r["mode"], r["seed"], r["simulated_s"],
         r["samples"] * _stands_for(options, Mode(r["mode"])), r["auc"])
        for r in records
        if r["task"] == records[0]["task"]
    )  # fmt: skip
    found = target_lines(
        snapshots, "sync", options.targets, options.cluster,
        CLUSTERS[options.cluster]().usd_per_hour,
    )  # fmt: skip
    batch = next(iter(runs.values()))[0].point.config.batch
    print(f"\n{options.cluster}, {options.workload}, tau {options.tau}; learning on"
          f" {options.data.name}, {batch} samples a step")  # fmt: skip
    print(_ends(runs, instants, options))
    print(f"\n{table(found, COLUMNS)}\n{FOOTNOTE}")
    leave(options, {"": records, "_targets": found}, figure_of=2)


def _plan(options: Options) -> str:
    """What would run; the points' folders depend on the orders, which only simulating tells."""
    ranks = CLUSTERS[options.cluster]().ranks
    return (
        f"{len(set(options.modes))} simulated runs of {options.steps:,} steps on {options.cluster},"
        f" then each order with {options.seeds} seeds,"
        f" {ranks * options.batch_per_rank:,} samples a step, {options.jobs} at a time;"
        f" results in {options.out}"
    )


def _trace_path(options: Options, mode: Mode) -> Path:
    return options.out / f"order-{mode}.npz"


def _simulate(options: Options, mode: Mode) -> np.ndarray:
    """Simulated seconds of every dense update, in order; writes the trace for the replay."""
    from persia_sim.cli import Options as Simulation
    from persia_sim.cli import scenario_of
    from persia_sim.engine.simulate import simulate
    from persia_sim.model.stamps import Mark

    bound = options.tau if mode.reads_late_rows else None
    scenario = scenario_of(
        Simulation(
            cluster=options.cluster,
            workload=options.workload,
            mode=mode,
            tau=bound,
            steps=options.steps,
            ahead=max(1, options.tau) if mode is Mode.LOOKAHEAD else None,
        )
    )
    found = simulate(scenario, trace=True)
    if found.trace is None:
        raise RuntimeError("the simulator was asked for a trace and gave none")
    found.trace.with_batch_per_rank(options.batch_per_rank).save(_trace_path(options, mode))
    updated = found.stamps[Mark.UPDATED]
    return np.asarray(updated[0]) if mode.has_barrier else np.sort(updated.ravel())


def _points(options: Options, mode: Mode) -> list[Point]:
    ranks = int(Trace.load(_trace_path(options, mode)).meta["ranks"])
    base = TrainConfig(
        sync=SyncConfig(
            mode=mode,
            ranks=ranks,
            tau=options.tau if mode.reads_late_rows else DEFAULT_TAU,
            match="update" if mode.has_barrier else "global",
        ),
        batch=ranks * options.batch_per_rank,
        steps=options.steps,
        engine=EngineConfig(executor="replay", trace=_trace_path(options, mode)),
        data=options.data,
        evaluation=EvaluationConfig(
            evaluate_every_steps=max(1, options.steps // options.snapshots),
            test_rows=options.test_rows,
        ),
    )
    decides = f"{data_sha256(base)} {Trace.load(_trace_path(options, mode)).sha256()}"
    return over_seeds(str(mode), base, options.seeds, decides)


def _with_time(
    records: Sequence[dict[str, Any]], options: Options, instants: dict[Mode, np.ndarray]
) -> list[dict[str, Any]]:
    """Give each snapshot the simulated second of the dense update that it follows."""
    placed = []
    for record in records:
        mode = Mode(record["mode"])
        times = instants[mode]
        share = record["samples"] / _samples_of(options, mode, len(times))
        update = min(len(times), max(1, round(share * len(times))))
        placed.append(
            {
                "cluster": options.cluster,
                "data": options.data.name,
                **record,
                "simulated_s": float(times[update - 1]),
            }
        )
    return placed


def _samples_of(options: Options, mode: Mode, updates: int) -> int:
    """Samples of a whole run."""
    ranks = int(Trace.load(_trace_path(options, mode)).meta["ranks"])
    return updates * options.batch_per_rank * (ranks if mode.has_barrier else 1)


def _ends(
    by_mode: dict[Mode, list[Run]], instants: dict[Mode, np.ndarray], options: Options
) -> str:
    """At the end of the run, all pushes applied."""
    task = next(iter(by_mode[Mode.SYNC][0].summary["tasks"]))

    def gap(mode: Mode) -> str:
        return thousandths(gap_over_seeds(by_mode[mode], by_mode[Mode.SYNC], task, options.out))

    columns: dict[str, Column] = {
        "mode": str,
        "simulated s": lambda mode: f"{instants[mode][-1]:.1f}",
        "test AUC": lambda mode: f"{mean_auc(by_mode[mode], task):.4f}",
        "gap to sync [1e-3]": lambda mode: "-" if mode is Mode.SYNC else gap(mode),
    }
    return table(list(by_mode), columns)


def _stands_for(options: Options, mode: Mode) -> float:
    """Samples of the cluster for one that is trained."""
    meta = Trace.load(_trace_path(options, mode)).meta
    return float(meta["simulated_batch_per_rank"]) / options.batch_per_rank
