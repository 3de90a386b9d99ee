"""AUC against the wall clock of a cluster that you do not own: simulated order, true gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from experiments.gaps import Run, curve_records, gap_over_seeds, mean_auc, thousandths
from experiments.options import (
    REFERENCE,
    Count,
    OneOf,
    Parallel,
    Seeds,
    Some,
    Tau,
    TestRows,
    hold,
)
from experiments.points import Point, replayed
from experiments.sweeping import trained
from experiments.tables import Column, leave, table
from experiments.targets import COLUMNS, FOOTNOTE, target_lines
from persia_sim.base.schema import Within
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import DEFAULT_TAU, Mode
from persia_sim.presets.catalogue import CLUSTERS, workloads
from runtime.config import DataConfig, SyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Simulate a cluster in three modes, then train in the very order of its reads and writes."""

    cluster: Annotated[str, OneOf(CLUSTERS)] = "gcp-100t"
    """A preset of the simulator; the default is the paper's: 64 GPUs, 120 server processes."""
    workload: Annotated[str, OneOf(workloads())] = "criteo-syn5"
    """A preset of the simulator."""
    modes: tuple[Mode, ...] = (REFERENCE, Mode.LOOKAHEAD, Mode.HYBRID)
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

    def _check(self) -> None:
        if REFERENCE not in self.modes:
            raise ValueError(
                f"modes must hold sync, the reference of the gaps, got {', '.join(self.modes)}"
            )
        hold("snapshots", self.snapshots, Within(1, self.steps))


class Order(NamedTuple):
    """The order that a simulated run of a mode gives to the training, and its clock."""

    trace: Trace
    path: Path
    instants: np.ndarray
    """Simulated seconds of every dense update, in order."""

    @property
    def ranks(self) -> int:
        """Ranks of the cluster."""
        return int(self.trace.meta["ranks"])


def run(options: Options) -> None:
    """Simulate, replay, and put both on one time axis."""
    # The points' folders depend on the orders, which only simulating tells: a dry run names none.
    if options.dry_run:
        samples = CLUSTERS[options.cluster]().ranks * options.batch_per_rank
        print(
            f"{len(options.modes)} simulated runs of {options.steps:,} steps on"
            f" {options.cluster}, then each order with {options.seeds} seeds,"
            f" {samples:,} samples a step, {options.jobs} at a time; results in {options.out}\n"
            f"  {options.duration('modes', 'steps', 'seeds', 'batch_per_rank')}"
        )
        return

    # Simulate the order of each mode, then train in it.
    orders = {mode: _simulate(options, mode) for mode in options.modes}
    runs = trained({mode: _points(options, mode, order) for mode, order in orders.items()}, options)

    # Every snapshot gets the simulated second of its update.
    records = [
        {
            "cluster": options.cluster,
            "data": options.data.name,
            **record,
            "simulated_s": _second(options, mode, orders[mode], record["samples"]),
        }
        for mode, of_mode in runs.items()
        for record in curve_records(of_mode, options.out)
    ]

    # The first task's way to the targets; a trained sample stands for so many of the cluster's.
    stands_for = {
        mode: float(order.trace.meta["simulated_batch_per_rank"]) / options.batch_per_rank
        for mode, order in orders.items()
    }
    snapshots = (
        (r["mode"], r["seed"], r["simulated_s"], r["samples"] * stands_for[r["mode"]], r["auc"])
        for r in records
        if r["task"] == records[0]["task"]
    )
    usd_per_hour = CLUSTERS[options.cluster]().usd_per_hour
    lines = target_lines(snapshots, "sync", options.targets, options.cluster, usd_per_hour)

    # Print both tables, write them and draw the figure.
    batch = next(iter(runs.values()))[0].point.config.batch
    print(
        f"\n{options.cluster}, {options.workload}, tau {options.tau}; learning on"
        f" {options.data.name}, {batch} samples a step"
    )
    print(_ends(runs, orders, options))
    print(f"\n{table(lines, COLUMNS)}\n{FOOTNOTE}")
    leave(options, {"": records, "_targets": lines}, drawn_first=2)


def _simulate(options: Options, mode: Mode) -> Order:
    """The order of a mode's run, written for the replay."""
    from persia_sim.cli import Options as Simulation
    from persia_sim.cli import scenario_of
    from persia_sim.cluster.stamps import Mark
    from persia_sim.engine.simulate import simulate

    # Lookahead fetches as many steps ahead as the others may be late.
    scenario = scenario_of(
        Simulation(
            cluster=options.cluster,
            workload=options.workload,
            mode=mode,
            tau=options.tau if mode.reads_late_rows else None,
            steps=options.steps,
            ahead=max(1, options.tau) if mode.prefetches_rows else None,
        )
    )
    result = simulate(scenario, trace=True)
    path = options.out / f"order-{mode}.npz"
    result.trace.with_batch_per_rank(options.batch_per_rank).save(path)

    # At a barrier all ranks update at one instant; without, each update is one of its own.
    updated = result.stamps[Mark.UPDATED]
    instants = np.asarray(updated[0]) if mode.has_barrier else np.sort(updated.ravel())
    return Order(Trace.load(path), path, instants)


def _points(options: Options, mode: Mode, order: Order) -> list[Point]:
    sync = SyncConfig(
        mode=mode,
        ranks=order.ranks,
        tau=options.tau if mode.reads_late_rows else DEFAULT_TAU,
        match="update" if mode.has_barrier else "global",
    )
    batch = order.ranks * options.batch_per_rank
    return replayed(str(mode), sync, batch, options.data, order.path, options)


def _second(options: Options, mode: Mode, order: Order, samples: int) -> float:
    """The simulated second of the dense update that a snapshot after so many samples follows."""
    updates = len(order.instants)
    whole = updates * options.batch_per_rank * (order.ranks if mode.has_barrier else 1)
    update = min(updates, max(1, round(samples / whole * updates)))
    return float(order.instants[update - 1])


def _ends(runs: dict[Mode, list[Run]], orders: dict[Mode, Order], options: Options) -> str:
    """The table of scores at the end of the runs, all pushes applied."""
    sync = runs[REFERENCE]
    task = next(iter(sync[0].summary["tasks"]))

    def gap(mode: Mode) -> str:
        return thousandths(gap_over_seeds(runs[mode], sync, task, options.out))

    columns: dict[str, Column] = {
        "mode": str,
        "simulated s": lambda mode: f"{orders[mode].instants[-1]:.1f}",
        "test AUC": lambda mode: f"{mean_auc(runs[mode], task):.4f}",
        "gap to sync [1e-3]": lambda mode: "-" if mode is REFERENCE else gap(mode),
    }
    return table(list(runs), columns)
