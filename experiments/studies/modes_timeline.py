"""The stages of a few steps in every mode (the paper's figure 3): simulated, and as they ran here.

This host is recorded with a latency added to each lookup and each push, and simulated with the
seconds that the stages took in the recorded run of sync. A simulated cluster stands beside it,
because ranks that are threads have no all-reduce that could hide behind the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.checks import COUNT, RANKS, between, each_known, known, not_empty
from experiments.tables import aligned, write_csv
from experiments.validating.cases import Case
from experiments.validating.schedule import need_of, scenario_of
from experiments.validating.stages import Stages
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of as scenario_of_options
from persia_sim.engine.run import Run
from persia_sim.engine.simulate import simulate
from persia_sim.model.scenario import DenseHome
from persia_sim.model.stamps import Leg, Mark
from persia_sim.presets.catalogue import CLUSTERS, workloads
from persia_sim.words.chrome import Span
from persia_sim.words.vocabulary import Mode, Stage

MODES = (Mode.SYNC, Mode.LOOKAHEAD, Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC)
HOST = "this host"
SHOWN_RANKS = 2
READ, REFRESH, UPDATE = "read", "refresh", "update"
"""Work on rows inside a server, beside the words of `Stage`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A few steps of two ranks in every mode: a cluster simulated, this host simulated and run."""

    modes: tuple[str, ...] = tuple(map(str, MODES))
    """Modes; sync is always run, since its stages are what this host is simulated with."""
    window: int = 2
    """tau of modes that read late rows; steps ahead of lookahead."""
    latency_s: float = 0.02
    """Of each lookup and each push on this host, in [0.001, 10]."""
    batch: int = 256
    """Samples of a dense update on this host, over its two ranks."""
    rounds: int = 3
    """Recordings of each mode; the quickest is kept, being the least disturbed by others."""
    steps: int = 36
    """Steps of a recorded or simulated run; a few from its middle are kept."""
    shown: int = 4
    """Steps that are kept."""
    cluster: str = "v100-paper"
    """The simulated cluster."""
    workload: str = "kwai-video"
    """What it trains."""
    cluster_ranks: int = 16
    """Its GPUs; two of them are kept."""
    out: Path = Path("runs/modes-timeline")
    """Folder of the table and the figure."""

    def __post_init__(self) -> None:
        not_empty(modes=self.modes)
        each_known(dict.fromkeys(map(str, MODES)), modes=self.modes)
        between(1, 64, window=self.window)
        between(1e-3, 10.0, latency_s=self.latency_s)
        between(8, COUNT[1], batch=self.batch)
        between(1, 100, rounds=self.rounds)
        between(1, 64, shown=self.shown)
        between(3 * self.shown + self.window, 100_000, steps=self.steps)
        known(CLUSTERS, cluster=self.cluster)
        known(workloads(), workload=self.workload)
        between(SHOWN_RANKS, RANKS[1], cluster_ranks=self.cluster_ranks)


class Bar(NamedTuple):
    """One stage of one batch, from when its work or its message begins until it is there."""

    rank: int
    step: int
    stage: str
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """The bars of the kept steps, and the mean time between steps."""

    bars: list[Bar]
    step_s: float


def run(options: Options) -> None:
    """Record, simulate, write the table and the figure, print the time of a step of each."""
    from tqdm import tqdm

    from paper_figs.modes_timeline import modes_timeline_figure  # late: pyplot
    from paper_figs.style import save

    asked = [mode for mode in MODES if str(mode) in options.modes]
    ways = ("recorded", "simulated")
    found: dict[tuple[str, str, Mode], Timeline] = {}
    with tqdm(total=3 * len(asked) + 1, desc="timelines", disable=None) as bar:
        sync, stages = quickest(options, Mode.SYNC)
        bar.update()
        for mode in asked:
            ran = sync if mode is Mode.SYNC else quickest(options, mode)[0]
            found["recorded", HOST, mode] = ran
            bar.update()
            found["simulated", HOST, mode] = kept(this_host(options, mode, stages), options, True)
            bar.update()
            found["simulated", options.cluster, mode] = kept(
                a_cluster(options, mode), options, False
            )
            bar.update()
    path = options.out / "modes_timeline.csv"
    write_csv(path, records(found))
    print(table(found, asked, options.cluster, ways))
    figure = save(modes_timeline_figure(path), options.out / "modes_timeline.png")
    print(f"{path}; {figure}")


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
    ways: Sequence[str],
) -> str:
    """Milliseconds of a step by mode: this host recorded and simulated, and the cluster."""
    lines = []
    for mode in modes:
        ran, told = (1e3 * found[way, HOST, mode].step_s for way in ways)
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


class SpannedRows:
    """The rows of a server; each work on them leaves a span."""

    def __init__(self, rows: Any, spans: Any) -> None:
        self._rows, self._spans = rows, spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def read(self, handle: Any, create: bool, batch_step: int) -> None:
        """As the rows'."""
        with self._spans.span("rows", READ, handle.rank, handle.step):
            self._rows.read(handle, create, batch_step)

    def refresh(self, handle: Any, batch_step: int) -> Any:
        """As the rows'."""
        with self._spans.span("rows", REFRESH, handle.rank, handle.step):
            return self._rows.refresh(handle, batch_step)

    def update(self, pushes: Any, update: int, step: int, *more: Any) -> Any:
        """As the rows'; the step of an update is counted from 1."""
        with self._spans.span("rows", UPDATE, 0, step - 1):
            return self._rows.update(pushes, update, step, *more)


def quickest(options: Options, mode: Mode) -> tuple[Timeline, Stages]:
    """The recording with the shortest mean step, of several."""
    found = [recorded(options, mode) for _ in range(options.rounds)]
    return min(found, key=lambda one: one[0].step_s)


def recorded(options: Options, mode: Mode) -> tuple[Timeline, Stages]:
    """Train with threads of this process; the kept steps, and the mean seconds of the stages."""
    import torch

    from runtime.engines.threads import ConcurrentRun
    from runtime.rank.parts import assemble

    torch.set_num_threads(1)
    case = case_of(options, mode)
    config = case.config(options.steps)
    if not mode.has_barrier:  # a rank's batch as in the other modes
        config = replace(config, sync=replace(config.sync, match="global"))
    parts = assemble(config, case.source())
    store: Any = parts.store
    for server in store.servers:
        server.rows = SpannedRows(server.rows, parts.spans)
    parts.meter.start()
    ConcurrentRun(parts).run()
    spans = parts.spans.spans
    stages = mean_stages(spans, options.steps // 3)
    first = first_kept(options)
    bars = list(bars_of(spans, range(first, first + options.shown), options.latency_s))
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


def bars_of(spans: Sequence[Span], steps: range, latency_s: float) -> Iterator[Bar]:
    """What a recording says of these steps: a lookup lasts from the read of the rows until they
    are at the rank, a push from the end of the rank's step until the rows are written."""
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


def kept(found: Run, options: Options, loads: bool) -> Timeline:
    """The steps that are kept of a simulated run; ``loads``: its workers also load the batch."""
    first = first_kept(options)
    bars = list(simulated_bars(found, range(first, first + options.shown), loads))
    return Timeline(bars, mean_step_s(found.stamps[Mark.START, :SHOWN_RANKS]))


def simulated_bars(found: Run, steps: range, loads: bool) -> Iterator[Bar]:
    """The first ranks' stages. An all-reduce that overlaps the backward pass begins when every
    rank has the gradients of the first bucket; copies to and from a GPU are left out."""
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
    for rank in range(SHOWN_RANKS):
        for stage, begun, ended in parts:
            for step in steps:
                bar = Bar(rank, step, stage, float(begun[rank, step]), float(ended[rank, step]))
                if bar.end_s > bar.start_s:
                    yield bar


def first_kept(options: Options) -> int:
    """The first of the kept steps, past the start of the run."""
    return options.steps // 2


def mean_step_s(starts: np.ndarray) -> float:
    """Seconds between steps of a rank, without the first third of the run and its last steps.

    >>> mean_step_s(np.array([[9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 99.0]]))
    1.0
    """
    steps = starts.shape[1]
    inside = starts[:, steps // 3 : steps - steps // 8]
    return float(np.diff(inside, axis=1).mean())
