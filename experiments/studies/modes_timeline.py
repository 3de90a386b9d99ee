"""The stages of a few steps in every mode on a simulated cluster (the paper's figure 3).

A bar lasts from when its work or its message begins until its result is there: a lookup until the
rows are at the rank, a push until they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from experiments.options import OneOf, Planned, Some, hold
from experiments.tables import leave, table
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode, Stage
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets.catalogue import CLUSTERS, workloads

MODES = tuple(mode for mode in Mode if not mode.averages_replicas)


class Bar(NamedTuple):
    """One stage of one batch of the first rank; seconds since any instant."""

    step: int
    stage: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """A few steps of one rank in every mode."""

    modes: Some[Annotated[str, OneOf(map(str, MODES))]] = tuple(map(str, MODES))
    """Modes that are simulated."""
    window: Annotated[int, Within(1, 64)] = 2
    """tau of modes that read late rows; steps ahead of lookahead."""
    steps: int = 36
    """Steps of a simulated run; a few from its middle are shown."""
    shown: Annotated[int, Within(1, 64)] = 4
    """Steps that are shown."""
    cluster: Annotated[str, OneOf(CLUSTERS)] = "v100-paper"
    """The simulated cluster."""
    workload: Annotated[str, OneOf(workloads())] = "kwai-video"
    """What it trains."""
    cluster_ranks: Annotated[int, Within(1, 100_000)] = 16
    """Its GPUs; one of them is shown."""

    def _check(self) -> None:
        hold("steps", self.steps, Within(3 * self.shown + self.window, 100_000))


def run(options: Options) -> None:
    """Simulate, write the table and the figure, print the time of a step of each mode."""
    if options.dry_run:
        time = options.duration("modes", "steps", "cluster_ranks")
        print(f"{len(options.modes)} simulations of {options.steps} steps; {time}")
        return
    runs = {mode: simulated(options, mode) for mode in MODES if str(mode) in options.modes}
    records = [line for mode, of_mode in runs.items() for line in lines_of(options, mode, of_mode)]
    firsts = {line["mode"]: line for line in records}
    print(table(list(firsts.values()), {"mode": "{mode}", "ms a step": _step_ms}))
    leave(options, {"": records}, drawn_first=1)


def _step_ms(line: Mapping[str, Any]) -> str:
    return f"{1e3 * line['mean_step_s']:.1f}"


def simulated(options: Options, mode: Mode) -> Run:
    """The preset in this mode, without noise."""
    return simulate(
        scenario_of(
            SimulateOptions(
                cluster=options.cluster,
                workload=options.workload,
                ranks=options.cluster_ranks,
                mode=mode,
                gpu_cv=0.0,
                steps=options.steps,
                tau=options.window if mode.reads_late_rows else None,
                ahead=options.window if mode.prefetches_rows else None,
            )
        )
    )


def lines_of(options: Options, mode: Mode, of_mode: Run) -> list[dict[str, object]]:
    """Lines of the CSV, from the middle of the run, past its start; the first bar begins at 0."""
    shown = range(options.steps // 2, options.steps // 2 + options.shown)
    bars = list(bars_of(of_mode, shown))
    step_s = mean_step_s(of_mode.stamps[Mark.START, 0])
    zero_s = min(bar.start_s for bar in bars)
    lines: list[dict[str, object]] = []
    for bar in bars:
        ends = {name: round(getattr(bar, name) - zero_s, 7) for name in ("start_s", "end_s")}
        about = {"system": options.cluster, "mode": str(mode)}
        lines.append(about | bar._asdict() | ends | {"mean_step_s": round(step_s, 7)})
    return lines


def bars_of(run: Run, steps: range) -> Iterator[Bar]:
    """The first rank's stages in these steps.

    An all-reduce that overlaps the backward pass begins when every rank has the gradients of the
    first bucket; copies to and from a GPU are left out.
    """
    # Every array is [ranks, steps]: instants of a mark.
    mode = run.scenario.mode
    need = run.need
    at = run.stamps

    # The forward pass takes its share of the time of computing.
    start = at[Mark.START]
    end = at[Mark.BACKWARD_END]
    forward_end = start + (end - start) * (need.forward_s / need.compute_s)

    # The all-reduce begins after the backward pass, or inside it with the first bucket.
    summed = end
    if mode.overlaps_dense_sync and need.buckets:
        ready = forward_end + need.buckets[0].ready_share * (end - forward_end)
        summed = np.broadcast_to(ready.max(0), end.shape)

    # Stages that every mode has, and those that only some have.
    latency_s = run.scenario.cluster.link.latency_s
    stages = [
        (Stage.LOOKUP, at[Mark.LOOKUP], at[Mark.ROWS]),
        (Stage.FORWARD, start, forward_end),
        (Stage.BACKWARD, forward_end, end),
        (Stage.PUSH, at[Mark.COPY_OUT], at[Mark.APPLIED]),
    ]
    if need.refresh is not None:
        requested = run.legs[Leg.ASKED_AGAIN] - need.refresh.worker_forward_s - 2 * latency_s
        stages.append((Stage.LOOKUP, requested, at[Mark.REFRESHED]))
    if mode.has_dense_server:
        stages.append((Stage.DENSE_PULL, at[Mark.REFRESHED], start))
    if mode.has_barrier:
        stages.append((Stage.DENSE_SYNC, summed, at[Mark.UPDATED]))

    # A stage without duration has no bar.
    for stage, begun, ended in stages:
        for step in steps:
            bar = Bar(step, stage, float(begun[0, step]), float(ended[0, step]))
            if bar.end_s > bar.start_s:
                yield bar


def mean_step_s(starts: np.ndarray) -> float:
    """Seconds between steps of a rank, without the first third of the run and its last steps.

    ``starts``: [steps], when each began to compute.

    >>> mean_step_s(np.array([9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 99.0]))
    1.0
    """
    steps = len(starts)
    inside = starts[steps // 3 : steps - steps // 8]
    return float(np.diff(inside).mean())
