"""AUC against the wall clock of a cluster that you do not own: simulated order, true gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.checks import COUNT, JOBS, ROWS, SEEDS, TAU, between, known
from experiments.gaps import Run, curve_records, finished, thousandths
from experiments.points import Point, data_sha256
from experiments.statistics import t_interval
from experiments.sweep import default_jobs, print_plan, run_points
from experiments.tables import aligned, write_csv
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.trace import Trace
from persia_sim.words.vocabulary import DEFAULT_TAU, Mode
from runtime.config import DataConfig, EngineConfig, EvaluationConfig, SyncConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Simulate a cluster in three modes, then train in the very order of its reads and writes."""

    cluster: str = "gcp-100t"
    """A preset of the simulator; the default is the paper's: 64 GPUs, 120 server processes."""
    workload: str = "criteo-syn5"
    """A preset of the simulator."""
    modes: tuple[Mode, ...] = (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID)
    """Modes to compare; sync is the reference. In async every rank's small batch is a dense update
    of its own, as many times more updates as there are ranks: that alone changes what is learned,
    so it is a comparison of two things at once."""
    tau: int = DEFAULT_TAU
    """Bound of the modes that read late rows, and steps that lookahead fetches ahead."""
    steps: int = 400
    """Steps of the simulated run."""
    batch_per_rank: int = 8
    """Samples that stand for a rank's (far larger) simulated batch in the training."""
    snapshots: int = 10
    """Evaluations along a run."""
    seeds: int = 3
    """Paired seeds of the training; the order is the same."""
    test_rows: int = 20_000
    """Rows that are evaluated."""
    data: DataConfig = field(default_factory=lambda: DataConfig(name="synthetic"))
    out: Path = Path("runs/time-to-auc")
    """Folder of the results; a second run does only what is missing."""
    jobs: int = default_jobs()
    """Points at a time."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        known(CLUSTERS, cluster=self.cluster)
        known(workloads(), workload=self.workload)
        between(*TAU, tau=self.tau)
        if Mode.SYNC not in self.modes:
            raise ValueError(
                f"modes must hold sync, the reference of the gaps, got {', '.join(self.modes)}"
            )
        between(*COUNT, steps=self.steps)
        between(1, self.steps, snapshots=self.snapshots)
        between(*SEEDS, seeds=self.seeds)
        between(*JOBS, jobs=self.jobs)
        between(*COUNT, batch_per_rank=self.batch_per_rank)
        between(*ROWS, test_rows=self.test_rows)


def run(options: Options) -> None:
    """Simulate, replay, and put both on one time axis."""
    from paper_figs.style import save  # late: pyplot
    from paper_figs.time_to_auc import time_to_auc_figure

    if options.dry_run:
        print(_plan(options))
        return
    modes = dict.fromkeys(options.modes)
    instants = {mode: _simulate(options, mode) for mode in modes}
    points = [p for mode in modes for p in _points(options, mode)]
    print_plan(points, options.out, options.jobs)
    run_points(points, options.out, options.jobs, points[0].config.batch * options.steps)
    runs = finished(points, options.out)
    records = _with_time(curve_records(runs, options.out), options, instants)
    csv = options.out / "time_to_auc.csv"
    write_csv(csv, records)
    figure = save(time_to_auc_figure(csv), options.out / "time_to_auc.png")
    print(f"\n{options.cluster}, {options.workload}, tau {options.tau}; learning on"
          f" {options.data.name}, {points[0].config.batch} samples a step")  # fmt: skip
    print(_table(runs, records, instants, options))
    print(f"table:  {csv}\nfigure: {figure}")


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
        sync=SyncConfig(mode=mode, ranks=ranks, match="update" if mode.has_barrier else "global"),
        batch=ranks * options.batch_per_rank,
        steps=options.steps,
        engine=EngineConfig(executor="replay", trace=_trace_path(options, mode)),
        data=options.data,
        evaluation=EvaluationConfig(
            evaluate_every_steps=max(1, options.steps // options.snapshots),
            test_rows=options.test_rows,
        ),
    )
    checksum = f"{data_sha256(base)} {Trace.load(_trace_path(options, mode)).sha256()}"
    return [
        Point(label=f"{mode}-seed{seed}", config=replace(base, seed=seed), data_sha256=checksum)
        for seed in range(options.seeds)
    ]


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
            {"cluster": options.cluster, **record, "simulated_s": float(times[update - 1])}
        )
    return placed


def _samples_of(options: Options, mode: Mode, updates: int) -> int:
    """Samples of a whole run."""
    ranks = int(Trace.load(_trace_path(options, mode)).meta["ranks"])
    return updates * options.batch_per_rank * (ranks if mode.has_barrier else 1)


def _table(
    runs: Sequence[Run],
    records: Sequence[dict[str, Any]],
    instants: dict[Mode, np.ndarray],
    options: Options,
) -> str:
    task = next(iter(runs[0].summary["tasks"]))
    final = {(r.setting[0], r.summary["seed"]): r.auc(task) for r in runs}
    records = [r for r in records if r["task"] == task]
    start = min(r["auc"] for r in records if r["mode"] == "sync")
    target = start + 0.9 * (np.mean([final["sync", s] for s in range(options.seeds)]) - start)
    header = ["mode", "simulated s", "test AUC", "gap to sync [1e-3]", f"s to AUC {target:.4f}"]
    cells = []
    for mode in instants:
        aucs = [final[str(mode), seed] for seed in range(options.seeds)]
        gap = t_interval([final[str(mode), s] - final["sync", s] for s in range(options.seeds)])
        reached = [
            min(
                (r["simulated_s"] for r in records
                 if r["mode"] == mode and r["seed"] == seed and r["auc"] >= target),
                default=np.nan,
            )
            for seed in range(options.seeds)
        ]  # fmt: skip
        cells.append(
            [
                str(mode),
                f"{instants[mode][-1]:.1f}",
                f"{np.mean(aucs):.4f}",
                "-" if mode is Mode.SYNC else thousandths(gap),
                f"{np.mean(reached):.1f}" if np.isfinite(reached).all() else "not reached",
            ]
        )
    return aligned(header, cells)
