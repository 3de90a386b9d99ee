"""The stages of a few steps in every mode (the paper's figure 3): simulated, and as they ran here.

This host is recorded with a latency added to each lookup and each push, and simulated with the
seconds that the stages took in the recorded run of sync. A simulated cluster stands beside it,
because ranks that are threads have no all-reduce that could hide behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np

from experiments.kept import Kept, sole_writer
from experiments.options import MOST, OneOf, Some, StudyOptions, hold
from experiments.stage_bars import (
    Timeline,
    mean_step_s,
    recorded_bars,
    simulated_bars,
)
from experiments.tables import aligned, drawn, write_csv
from experiments.validating.cases import Case
from experiments.validating.schedule import need_of, scenario_of
from experiments.validating.stages import Stages
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of as scenario_of_options
from persia_sim.engine.run import Run
from persia_sim.engine.simulate import simulate
from persia_sim.model.scenario import DenseHome
from persia_sim.model.stamps import Mark
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.chrome import Span
from persia_sim.words.schema import Within
from persia_sim.words.vocabulary import Mode, Stage
from runtime.embedding.server import READ, UPDATE

MODES = (Mode.SYNC, Mode.LOOKAHEAD, Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC)
HOST = "this host"
SHOWN_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(StudyOptions):
    """A few steps of two ranks in every mode: a cluster simulated, this host simulated and run."""

    modes: Some[Annotated[str, OneOf(map(str, MODES))]] = tuple(map(str, MODES))
    """Modes; sync is always run, since its stages are what this host is simulated with."""
    window: Annotated[int, Within(1, 64)] = 2
    """tau of modes that read late rows; steps ahead of lookahead."""
    latency_s: Annotated[float, Within(1e-3, 10.0)] = 0.02
    """Seconds added to each lookup and each push on this host, in [0.001, 10]."""
    batch: Annotated[int, Within(8, MOST)] = 256
    """Samples of a dense update on this host, over its two ranks."""
    rounds: Annotated[int, Within(1, 100)] = 3
    """Recordings of each mode; the quickest is shown, being the least disturbed by others."""
    steps: int = 36
    """Steps of a recorded or simulated run; a few from its middle are shown."""
    shown: Annotated[int, Within(1, 64)] = 4
    """Steps that are shown."""
    cluster: Annotated[str, OneOf(CLUSTERS)] = "v100-paper"
    """The simulated cluster."""
    workload: Annotated[str, OneOf(workloads())] = "kwai-video"
    """What it trains."""
    cluster_ranks: Annotated[int, Within(SHOWN_RANKS, 100_000)] = 16
    """Its GPUs; two of them are shown."""

    def check(self) -> None:
        """That the shown steps lie inside."""
        hold("steps", self.steps, Within(3 * self.shown + self.window, 100_000))


def run(options: Options) -> None:
    """Record, simulate, write the table and the figure, print the time of a step of each."""
    from tqdm import tqdm

    asked = [mode for mode in MODES if str(mode) in options.modes]
    found: dict[tuple[str, str, Mode], Timeline] = {}
    with (
        sole_writer(options.out),
        tqdm(total=3 * len(asked) + 1, desc="timelines", disable=None) as bar,
    ):
        kept = Kept(options.out / "timelines.jsonl")
        sync, stages = quickest(options, Mode.SYNC, kept)
        bar.update()
        for mode in asked:
            ran = sync if mode is Mode.SYNC else quickest(options, mode, kept)[0]
            found["recorded", HOST, mode] = ran
            bar.update()
            for system, label, by in (
                (HOST, f"{on_this_host(options, mode)}, {stages}", stages),
                (options.cluster, on_the_cluster(options, mode), None),
            ):
                row = kept.row(label, partial(simulated, options, mode, by))
                found["simulated", system, mode] = Timeline.of_lists(*row)
                bar.update()
    path = write_csv(options.out / "modes_timeline.csv", records(found))
    print(table(found, asked, options.cluster))
    print(f"{path}; {drawn(path)}")


def records(found: dict[tuple[str, str, Mode], Timeline]) -> list[dict[str, object]]:
    """Lines of the CSV; each timeline begins at 0."""
    lines: list[dict[str, object]] = []
    for (source, system, mode), (bars, step_s) in found.items():
        zero_s = min(bar.start_s for bar in bars)
        for bar in bars:
            lines.append(
                {
                    "source": source,
                    "system": system,
                    "mode": str(mode),
                    "rank": bar.rank,
                    "step": bar.step,
                    "stage": bar.stage,
                    "start_s": round(bar.start_s - zero_s, 7),
                    "end_s": round(bar.end_s - zero_s, 7),
                    "mean_step_s": round(step_s, 7),
                }
            )
    return lines


def table(
    found: dict[tuple[str, str, Mode], Timeline],
    modes: Sequence[Mode],
    cluster: str,
) -> str:
    """Milliseconds of a step by mode: this host recorded and simulated, and the cluster."""
    lines = []
    for mode in modes:
        ran, told = (1e3 * found[way, HOST, mode].step_s for way in ("recorded", "simulated"))
        there = 1e3 * found["simulated", cluster, mode].step_s
        lines.append(
            [str(mode), f"{ran:.2f}", f"{told:.2f}", f"{told / ran - 1:+.1%}", f"{there:.1f}"]
        )
    header = ["mode", "recorded [ms]", "simulated [ms]", "difference", f"{cluster} [ms]"]
    return aligned(header, lines)


def case_of(options: Options, mode: Mode) -> Case:
    """What this host trains."""
    return Case(
        mode=mode,
        ranks=SHOWN_RANKS,
        window=options.window,
        batch=options.batch,
        latency_s=options.latency_s,
    )


def on_this_host(options: Options, mode: Mode) -> str:
    """What decides a recording, beside the machine."""
    return (
        f"{mode}, window {options.window}, {options.batch} samples, latency {options.latency_s} s,"
        f" {options.shown} of {options.steps} steps"
    )


def on_the_cluster(options: Options, mode: Mode) -> str:
    """What decides a simulation of the cluster."""
    return (
        f"{mode}, window {options.window}, {options.workload} on {options.cluster_ranks} ranks of"
        f" {options.cluster}, {options.shown} of {options.steps} steps"
    )


def quickest(options: Options, mode: Mode, kept: Kept) -> tuple[Timeline, Stages]:
    """The recording with the shortest mean step, of several; those that are kept count."""

    def record() -> tuple[Timeline, dict[str, float]]:
        timeline, stages = recorded(options, mode)
        return timeline, asdict(stages)

    label = on_this_host(options, mode)
    found = [kept.row(f"{label}, round {number}", record) for number in range(options.rounds)]
    timelines = [(Timeline.of_lists(*bars), Stages(**stages)) for bars, stages in found]
    return min(timelines, key=lambda one: one[0].step_s)


def recorded(options: Options, mode: Mode) -> tuple[Timeline, Stages]:
    """Train with threads of this process; the shown steps, and the mean seconds of the stages."""
    import torch

    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    torch.set_num_threads(1)
    case = case_of(options, mode)
    config = case.config(options.steps)
    if not mode.has_barrier:  # a rank's batch as in the other modes
        config = replace(config, sync=replace(config.sync, match="global"))
    parts = assemble(config, case.source())
    parts.meter.start()
    ConcurrentRun(parts).run()
    spans = parts.spans.spans
    stages = mean_stages(spans, options.steps // 3)
    bars = list(recorded_bars(spans, shown_steps(options), options.latency_s))
    starts = [[s.start_s for s in spans if (s.rank, s.stage) == (r, Stage.FORWARD)] for r in (0, 1)]
    least = min(map(len, starts))  # in async one rank may have taken a batch more
    return Timeline(bars, mean_step_s(np.array([own[:least] for own in starts]))), stages


def mean_stages(spans: Sequence[Span], first: int) -> Stages:
    """Seconds a batch of the steps >= ``first``; the update of the dense weights is what the last
    rank of a step sees of it, since the others' spans hold their waiting."""
    kept = [span for span in spans if span.step >= first]
    batches = len({(s.rank, s.step) for s in kept if s.stage == Stage.FORWARD})
    updates: dict[int, float] = {}
    for s in kept:
        if s.stage == Stage.DENSE_SYNC:
            updates[s.step] = min(updates.get(s.step, np.inf), s.end_s - s.start_s)

    def mean(stage: str) -> float:
        return sum(s.end_s - s.start_s for s in kept if s.stage == stage) / batches

    return Stages(
        load_s=mean(Stage.LOAD),
        read_s=mean(READ),
        pool_s=mean(Stage.LOOKUP),
        forward_s=mean(Stage.FORWARD),
        backward_s=mean(Stage.BACKWARD),
        check_s=0.0,
        update_s=sum(updates.values()) / max(1, len(updates)),
        scatter_s=max(0.0, mean(Stage.PUSH) - mean(UPDATE)),
        push_s=mean(UPDATE),
        refresh_s=mean(READ),
    )


def simulated(options: Options, mode: Mode, stages: Stages | None) -> Timeline:
    """What is shown of this host, simulated with its stages; without any, of the cluster."""
    found = a_cluster(options, mode) if stages is None else this_host(options, mode, stages)
    loads = stages is not None  # here a lookup's thread also makes the batch
    bars = list(simulated_bars(found, SHOWN_RANKS, shown_steps(options), loads))
    return Timeline(bars, mean_step_s(found.stamps[Mark.START, :SHOWN_RANKS]))


def this_host(options: Options, mode: Mode, stages: Stages) -> Run:
    """The same run simulated: messages take the latency and nothing else is on a wire."""
    case = case_of(options, mode)
    scenario = scenario_of(case, options.steps)
    scenario = replace(scenario, dense_home=DenseHome.APART if mode is Mode.ASYNC else None)
    return simulate(scenario, need=replace(need_of(case, stages), dense_copy_s=0.0))


def a_cluster(options: Options, mode: Mode) -> Run:
    """The preset in this mode, without noise."""
    window: dict[str, Any] = {}
    if mode is Mode.LOOKAHEAD:
        window["ahead"] = options.window
    elif mode.reads_late_rows:
        window["tau"] = options.window
    return simulate(
        scenario_of_options(
            Simulation(
                cluster=options.cluster,
                workload=options.workload,
                ranks=options.cluster_ranks,
                mode=mode,
                gpu_cv=0.0,
                steps=options.steps,
                **window,
            )
        )
    )


def shown_steps(options: Options) -> range:
    """Some from the middle of the run, past its start."""
    return range(options.steps // 2, options.steps // 2 + options.shown)
