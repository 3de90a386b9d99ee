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

from experiments.kept import Kept
from experiments.options import MOST, OneOf, Some, StudyOptions, hold
from experiments.tables import Column, leave, table
from experiments.validating.cases import Case
from experiments.validating.schedule import need_of, scenario_of
from experiments.validating.stages import STAGES, Stages
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of as scenario_of_options
from persia_sim.engine.simulate import Run, simulate
from persia_sim.model.scenario import DenseHome
from persia_sim.model.stamps import Leg, Mark
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.chrome import Span
from persia_sim.words.schema import Within
from persia_sim.words.vocabulary import Mode, Stage
from runtime.embedding.server import READ, REFRESH, UPDATE

MODES = (Mode.SYNC, Mode.LOOKAHEAD, Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC)
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
        """As it comes back from JSON."""
        return cls([Bar(*bar) for bar in bars], step_s)  # type: ignore[arg-type]


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

    def _check(self) -> None:
        hold("steps", self.steps, Within(3 * self.shown + self.window, 100_000))


def run(options: Options) -> None:
    """Record, simulate, write the table and the figure, print the time of a step of each."""
    asked = [mode for mode in MODES if str(mode) in options.modes]
    kept = Kept(options.out / "recordings.jsonl")
    recordings = {
        label: partial(recorded, options, mode)
        for mode in dict.fromkeys((Mode.SYNC, *asked))
        for label in _labels_of(options, mode)
    }
    kept.fill(recordings, "recordings")
    stages = quickest(options, Mode.SYNC, kept)[1]
    found: dict[tuple[str, str, Mode], Timeline] = {}
    where = (
        f"{options.workload} on {options.cluster_ranks} ranks of {options.cluster},"
        f" {options.shown} of {options.steps} steps"
    )
    for mode in asked:
        work = {
            f"{on_this_host(options, mode)}, {stages}": partial(simulated, options, mode, stages),
            f"{mode}, window {options.window}, {where}": partial(simulated, options, mode, None),
        }
        here, there = kept.fill(work, f"simulations of {mode}")
        found["recorded", HOST, mode] = quickest(options, mode, kept)[0]
        found["simulated", HOST, mode] = Timeline.of_lists(*here)
        found["simulated", options.cluster, mode] = Timeline.of_lists(*there)
    print(times(found, asked, options.cluster))
    leave(options, {"": records(found)}, drawn_first=1)


def records(found: dict[tuple[str, str, Mode], Timeline]) -> list[dict[str, object]]:
    """Lines of the CSV; each timeline begins at 0."""
    lines: list[dict[str, object]] = []
    for (source, system, mode), (bars, step_s) in found.items():
        zero_s = min(bar.start_s for bar in bars)
        for bar in bars:
            ends = {name: round(getattr(bar, name) - zero_s, 7) for name in ("start_s", "end_s")}
            about = {"source": source, "system": system, "mode": str(mode)}
            lines.append(about | bar._asdict() | ends | {"mean_step_s": round(step_s, 7)})
    return lines


def times(found: dict[tuple[str, str, Mode], Timeline], modes: Sequence[Mode], cluster: str) -> str:
    """Milliseconds of a step by mode: this host recorded and simulated, and the cluster."""

    def step_ms(mode: Mode, source: str, system: str = HOST) -> float:
        return 1e3 * found[source, system, mode].step_s

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
    """What decides a recording, beside the machine."""
    return (
        f"{mode}, window {options.window}, {options.batch} samples, latency {options.latency_s} s,"
        f" {options.shown} of {options.steps} steps"
    )


def _labels_of(options: Options, mode: Mode) -> list[str]:
    return [f"{on_this_host(options, mode)}, round {n}" for n in range(options.rounds)]


def quickest(options: Options, mode: Mode, kept: Kept) -> tuple[Timeline, Stages]:
    """The recording with the shortest mean step."""
    found = [kept[label] for label in _labels_of(options, mode)]
    timelines = [(Timeline.of_lists(*bars), stages) for bars, stages in found]
    return min(timelines, key=lambda one: one[0].step_s)


def recorded(options: Options, mode: Mode) -> tuple[Timeline, Stages]:
    """Train with threads of this process; the shown steps, and the mean seconds of the stages."""
    import torch

    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    torch.set_num_threads(1)
    case = _case_of(options, mode)
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
    """What is shown of this host, simulated with its stages; without any, of the cluster."""
    found = a_cluster(options, mode) if stages is None else this_host(options, mode, stages)
    loads = stages is not None  # here a lookup's thread also makes the batch
    bars = list(simulated_bars(found, SHOWN_RANKS, shown_steps(options), loads))
    return Timeline(bars, mean_step_s(found.stamps[Mark.START, :SHOWN_RANKS]))


def this_host(options: Options, mode: Mode, stages: Stages) -> Run:
    """The same run simulated: messages take the latency and nothing else is on a wire."""
    case = _case_of(options, mode)
    scenario = scenario_of(case, options.steps)
    scenario = replace(scenario, dense_home=DenseHome.APART if mode is Mode.ASYNC else None)
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
    """Some from the middle of the run, past its start."""
    return range(options.steps // 2, options.steps // 2 + options.shown)


def recorded_bars(spans: Sequence[Span], steps: range, latency_s: float) -> Iterator[Bar]:
    """What a recording says of these steps.

    ``latency_s`` was added to each message: a lookup lasts from the read of the rows until they are
    at the rank, a push from the end of the rank's step until the rows are written.
    """
    by_batch: dict[tuple[int, int], list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        by_batch.setdefault((span.rank, span.step), []).append(span)
    for (rank, step), own in sorted(by_batch.items()):
        if step not in steps:
            continue
        reads = [s.start_s for s in own if s.stage in (READ, REFRESH)]
        pooled = [s.end_s for s in own if s.stage == Stage.LOOKUP]
        for start_s, end_s in zip(reads, pooled, strict=False):
            yield Bar(rank, step, Stage.LOOKUP, start_s, end_s + latency_s)
        trained_s = 0.0
        for span in own:
            if span.track == "dense":
                trained_s = max(trained_s, span.end_s)
            if span.stage == Stage.PUSH:
                yield Bar(rank, step, Stage.PUSH, trained_s, span.end_s)
            elif span.stage not in (Stage.LOOKUP, READ, REFRESH, UPDATE):
                yield Bar(rank, step, span.stage, span.start_s, span.end_s)


def simulated_bars(found: Run, ranks: int, steps: range, loads: bool) -> Iterator[Bar]:
    """The first ranks' stages in these steps; ``loads``: its workers also load the batch.

    An all-reduce that overlaps the backward pass begins when every rank has the gradients of the
    first bucket; copies to and from a GPU are left out.
    """
    mode, need, at, legs = found.scenario.mode, found.need, found.stamps, found.legs
    start, end = at[Mark.START], at[Mark.BACKWARD_END]
    forward_end = start + (end - start) * (need.forward_s / need.compute_s)
    summed = end
    if mode.overlaps_dense_sync and need.buckets:
        ready = forward_end + need.buckets[0].ready_share * (end - forward_end)
        summed = np.broadcast_to(ready.max(0), end.shape)
    load_s = need.fetch.worker_forward_s if loads else 0.0
    latency_s = found.scenario.cluster.link.latency_s
    parts = [
        (Stage.LOAD, at[Mark.LOOKUP], at[Mark.LOOKUP] + load_s),
        (Stage.LOOKUP, at[Mark.LOOKUP] + load_s, at[Mark.ROWS]),
        (Stage.FORWARD, start, forward_end),
        (Stage.BACKWARD, forward_end, end),
        (Stage.PUSH, at[Mark.COPY_OUT], at[Mark.APPLIED]),
    ]
    if need.refresh is not None:
        asked = legs[Leg.ASKED_AGAIN] - need.refresh.worker_forward_s - 2 * latency_s
        parts.append((Stage.LOOKUP, asked, at[Mark.REFRESHED]))
    if mode is Mode.ASYNC:
        parts.append((Stage.DENSE_PULL, at[Mark.REFRESHED], start))
    if mode.has_barrier:
        parts.append((Stage.DENSE_SYNC, summed, at[Mark.UPDATED]))
    for rank in range(ranks):
        for stage, begun, ended in parts:
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
