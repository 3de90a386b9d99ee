"""The stages of a few steps in every mode (the paper's figure 3): simulated, and as they ran here.

This host is recorded with a latency added to each lookup and each push, and simulated with the
seconds that the stages took in the recorded run of sync. A simulated cluster stands beside it,
because ranks that are threads have no all-reduce that could hide behind the backward pass. A bar
lasts from when its work or its message begins until its result is there: a lookup until the rows
are at the rank, a push until they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np

from experiments.options import MOST, REFERENCE, OneOf, Planned, Some, hold
from experiments.result_cache import ResultCache
from experiments.tables import Column, leave, table
from experiments.validating.cases import Case
from experiments.validating.schedule import need_of, scenario_of
from persia_sim.base.chrome import Span
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode, Stage
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of as scenario_of_options
from persia_sim.cluster.scenario import DenseHome
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.engine.simulate import Run, simulate
from persia_sim.presets.catalogue import CLUSTERS, workloads
from runtime.embedding.server import READ, REFRESH, UPDATE
from runtime.run.stage_times import STAGES, Stages

MODES = tuple(mode for mode in Mode if not mode.averages_replicas)
HOST = "this host"
SHOWN_RANKS = 2


class Bar(NamedTuple):
    """One stage of one batch; seconds since any instant."""

    rank: int
    step: int
    stage: str
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """The bars of the steps that are shown, and the mean time between steps."""

    bars: list[Bar]
    step_s: float

    @classmethod
    def of_lists(cls, bars: list[list[int | str | float]], step_s: float) -> Timeline:
        """The timeline of lists, as they come back from JSON."""
        return cls([Bar(*bar) for bar in bars], step_s)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
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

    def _check(self) -> None:
        hold("steps", self.steps, Within(3 * self.shown + self.window, 100_000))


def run(options: Options) -> None:
    """Record, simulate, write the table and the figure, print the time of a step of each."""
    # Record every mode on this host, and sync in any case, whose stages the simulation needs.
    chosen = [mode for mode in MODES if str(mode) in options.modes]
    results = ResultCache(options.out / "recordings.jsonl")
    recordings = {
        label: partial(recorded, options, mode)
        for mode in dict.fromkeys((REFERENCE, *chosen))
        for label in _labels_of(options, mode)
    }
    if options.dry_run:
        done = sum(label in results for label in recordings)
        print(
            f"{len(recordings)} recordings of {options.steps} steps on this host ({done} done) and"
            f" {2 * len(chosen)} simulations; {options.duration('modes', 'rounds', 'steps')}"
        )
        return
    results.fill(recordings, "recordings")
    stages = quickest(options, REFERENCE, results)[1]

    # Simulate every mode, on this host and on the cluster.
    timelines: Timelines = {}
    where = (
        f"{options.workload} on {options.cluster_ranks} ranks of {options.cluster},"
        f" {options.shown} of {options.steps} steps"
    )
    for mode in chosen:
        work = {
            f"{on_this_host(options, mode)}, {stages}": partial(simulated, options, mode, stages),
            f"{mode}, window {options.window}, {where}": partial(simulated, options, mode, None),
        }
        here, there = results.fill(work, f"simulations of {mode}")
        timelines["recorded", HOST, mode] = quickest(options, mode, results)[0]
        timelines["simulated", HOST, mode] = Timeline.of_lists(*here)
        timelines["simulated", options.cluster, mode] = Timeline.of_lists(*there)

    print(times(timelines, chosen, options.cluster))
    leave(options, {"": records(timelines)}, drawn_first=1)


Timelines = dict[tuple[str, str, Mode], Timeline]
"""Timelines by source (recorded or simulated), system and mode."""


def records(timelines: Timelines) -> list[dict[str, object]]:
    """Lines of the CSV; each timeline begins at 0."""
    lines: list[dict[str, object]] = []
    for (source, system, mode), (bars, step_s) in timelines.items():
        zero_s = min(bar.start_s for bar in bars)
        for bar in bars:
            ends = {name: round(getattr(bar, name) - zero_s, 7) for name in ("start_s", "end_s")}
            about = {"source": source, "system": system, "mode": str(mode)}
            lines.append(about | bar._asdict() | ends | {"mean_step_s": round(step_s, 7)})
    return lines


def times(timelines: Timelines, modes: Sequence[Mode], cluster: str) -> str:
    """Milliseconds of a step by mode: this host recorded and simulated, and the cluster."""

    def step_ms(mode: Mode, source: str, system: str = HOST) -> float:
        return 1e3 * timelines[source, system, mode].step_s

    columns: dict[str, Column] = {
        "mode": str,
        "recorded [ms]": lambda mode: f"{step_ms(mode, 'recorded'):.2f}",
        "simulated [ms]": lambda mode: f"{step_ms(mode, 'simulated'):.2f}",
        "difference": lambda mode: (
            f"{step_ms(mode, 'simulated') / step_ms(mode, 'recorded') - 1:+.1%}"
        ),
        f"{cluster} [ms]": lambda mode: f"{step_ms(mode, 'simulated', cluster):.1f}",
    }
    return table(modes, columns)


def _case_of(options: Options, mode: Mode) -> Case:
    return Case(
        mode=mode,
        ranks=SHOWN_RANKS,
        window=options.window,
        batch=options.batch,
        latency_s=options.latency_s,
    )


def on_this_host(options: Options, mode: Mode) -> str:
    """The label of a recording: all that decides it, beside the machine."""
    return (
        f"{mode}, window {options.window}, {options.batch} samples, latency {options.latency_s} s,"
        f" {options.shown} of {options.steps} steps"
    )


def _labels_of(options: Options, mode: Mode) -> list[str]:
    return [f"{on_this_host(options, mode)}, round {n}" for n in range(options.rounds)]


def quickest(options: Options, mode: Mode, results: ResultCache) -> tuple[Timeline, Stages]:
    """The recording with the shortest mean step."""
    rounds = [results[label] for label in _labels_of(options, mode)]
    recordings = [(Timeline.of_lists(*bars), stages) for bars, stages in rounds]
    return min(recordings, key=lambda one: one[0].step_s)


def recorded(options: Options, mode: Mode) -> tuple[Timeline, Stages]:
    """Train with threads of this process; the shown steps, and the mean seconds of the stages."""
    import torch

    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    # Train; in modes without a common step, too, a rank's batch is as large as in the others.
    torch.set_num_threads(1)
    case = _case_of(options, mode)
    config = case.config(options.steps)
    if not mode.has_barrier:
        config = replace(config, sync=replace(config.sync, match="global"))
    parts = assemble(config, case.source())
    parts.meter.start()
    ConcurrentRun(parts).run()

    # The recorded spans give the stages' means and the bars of the shown steps.
    spans = parts.spans.spans
    stages = mean_stages(spans, options.steps // 3)
    bars = list(recorded_bars(spans, shown_steps(options), options.latency_s))

    # When each rank began to compute; in async one may have taken a batch more.
    starts = [[s.start_s for s in spans if (s.rank, s.stage) == (r, Stage.FORWARD)] for r in (0, 1)]
    least = min(map(len, starts))
    return Timeline(bars, mean_step_s(np.array([rank[:least] for rank in starts]))), stages


def mean_stages(spans: Sequence[Span], first: int) -> Stages:
    """Seconds a batch of the steps >= ``first``; the update of the dense weights is what the last
    rank of a step sees of it, since the others' spans hold their waiting."""
    steady = [span for span in spans if span.step >= first]
    batches = len({(s.rank, s.step) for s in steady if s.stage == Stage.FORWARD})

    # The shortest span of a step is that of its last rank.
    updates: dict[int, float] = {}
    for s in steady:
        if s.stage == Stage.DENSE_SYNC:
            updates[s.step] = min(updates.get(s.step, np.inf), s.end_s - s.start_s)

    def mean(stage: str) -> float:
        return sum(s.end_s - s.start_s for s in steady if s.stage == stage) / batches

    # A push of a rank contains the store's update, which is a stage of its own.
    return dict.fromkeys(STAGES, 0.0) | {
        "load": mean(Stage.LOAD),
        "read": mean(READ),
        "pool": mean(Stage.LOOKUP),
        "forward": mean(Stage.FORWARD),
        "backward": mean(Stage.BACKWARD),
        "update": sum(updates.values()) / max(1, len(updates)),
        "scatter": max(0.0, mean(Stage.PUSH) - mean(UPDATE)),
        "push": mean(UPDATE),
        "refresh": mean(READ),
    }


def simulated(options: Options, mode: Mode, stages: Stages | None) -> Timeline:
    """The timeline of this host, simulated with its stages; without any, of the cluster."""
    run = a_cluster(options, mode) if stages is None else this_host(options, mode, stages)
    loads = stages is not None  # here a lookup's thread also makes the batch
    bars = list(simulated_bars(run, SHOWN_RANKS, shown_steps(options), loads))
    return Timeline(bars, mean_step_s(run.stamps[Mark.START, :SHOWN_RANKS]))


def this_host(options: Options, mode: Mode, stages: Stages) -> Run:
    """This host's run, simulated: messages take the latency and nothing else is on a wire."""
    case = _case_of(options, mode)
    scenario = scenario_of(case, options.steps)
    scenario = replace(
        scenario,
        dense_home=DenseHome.APART if mode.has_dense_server else None,
        # A bar of a lookup is its way, as in a recording, without its wait for the window.
        queues=replace(scenario.queues, at_servers=False),
    )
    return simulate(scenario, need=replace(need_of(case, stages), dense_copy_s=0.0))


def a_cluster(options: Options, mode: Mode) -> Run:
    """The preset in this mode, without noise."""
    return simulate(
        scenario_of_options(
            Simulation(
                cluster=options.cluster,
                workload=options.workload,
                ranks=options.cluster_ranks,
                mode=mode,
                gpu_cv=0.0,
                steps=options.steps,
                **_case_of(options, mode).bound,
            )
        )
    )


def shown_steps(options: Options) -> range:
    """The steps that are shown: from the middle of the run, past its start."""
    return range(options.steps // 2, options.steps // 2 + options.shown)


def recorded_bars(spans: Sequence[Span], steps: range, latency_s: float) -> Iterator[Bar]:
    """The bars of these steps of a recording.

    ``latency_s`` was added to each message: a lookup lasts from the read of the rows until they are
    at the rank, a push from the end of the rank's step until the rows are written.
    """
    # The spans of each batch, in order.
    by_batch: dict[tuple[int, int], list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        by_batch.setdefault((span.rank, span.step), []).append(span)

    for (rank, step), of_batch in sorted(by_batch.items()):
        if step not in steps:
            continue

        # Lookups: the n-th read belongs to the n-th pooled result.
        reads = [s.start_s for s in of_batch if s.stage in (READ, REFRESH)]
        pooled = [s.end_s for s in of_batch if s.stage == Stage.LOOKUP]
        for start_s, end_s in zip(reads, pooled, strict=False):
            yield Bar(rank, step, Stage.LOOKUP, start_s, end_s + latency_s)

        # The push begins when the rank's own stages of the batch have ended.
        trained_s = 0.0
        for span in of_batch:
            if span.track == "dense":
                trained_s = max(trained_s, span.end_s)
            if span.stage == Stage.PUSH:
                yield Bar(rank, step, Stage.PUSH, trained_s, span.end_s)
            elif span.stage not in (Stage.LOOKUP, READ, REFRESH, UPDATE):
                yield Bar(rank, step, span.stage, span.start_s, span.end_s)


def simulated_bars(run: Run, ranks: int, steps: range, loads: bool) -> Iterator[Bar]:
    """The first ranks' stages in these steps; ``loads``: the run's workers also load the batch.

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
    load_s = need.fetch.worker_forward_s if loads else 0.0
    latency_s = run.scenario.cluster.link.latency_s
    stages = [
        (Stage.LOAD, at[Mark.LOOKUP], at[Mark.LOOKUP] + load_s),
        (Stage.LOOKUP, at[Mark.LOOKUP] + load_s, at[Mark.ROWS]),
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
    for rank in range(ranks):
        for stage, begun, ended in stages:
            for step in steps:
                bar = Bar(rank, step, stage, float(begun[rank, step]), float(ended[rank, step]))
                if bar.end_s > bar.start_s:
                    yield bar


def mean_step_s(starts: np.ndarray) -> float:
    """Seconds between steps of a rank, without the first third of the run and its last steps.

    ``starts``: [ranks, steps], when each began to compute.

    >>> mean_step_s(np.array([[9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 99.0]]))
    1.0
    """
    steps = starts.shape[1]
    inside = starts[:, steps // 3 : steps - steps // 8]
    return float(np.diff(inside, axis=1).mean())
