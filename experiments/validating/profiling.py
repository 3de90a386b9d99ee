"""The profile of this host: short runs of two configurations, none of which is predicted.

Stages timed alone in a loop are up to ten times too fast: their rows and vectors lie in the cache
and nobody else wants the interpreter. So laws come from runs: of one thread (sync, one rank) at
several batch sizes, and of several threads for what they cost each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.validating.cases import Case, held_by
from experiments.validating.contention import AT_SERVERS, Host, burdens, threads, threads_of
from experiments.validating.link import Apart
from experiments.validating.stages import (
    LATE,
    OF_A_MODE,
    OF_SERVED,
    SERVED,
    STAGES,
    Costs,
    Hindered,
    HostLaw,
    LawPoint,
    Stages,
    StageTimes,
    TimedCalls,
    TimedSpans,
    costs_by_law,
    fit_law,
    measured_stages,
    shares_of,
    step_durations_of,
)
from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import Mode

if TYPE_CHECKING:
    from runtime.engines.rank_process import ProcessRank
    from runtime.rank.parts import Parts  # loads torch


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run without its first third."""

    samples_per_s: float
    stale_steps: float
    measured: StageTimes
    server_cpu_s: float
    """CPU seconds of all servers for a rank's batch, lookup and push; 0: not of another host."""
    foreign_cores: float = 0.0
    """Cores that other processes used meanwhile."""
    link_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes there and back of one rank's batch, by the interface's counters; of servers apart."""
    control: float = 1.0
    """Share of the link's rate that plain transfers before and behind the run had: the one that is
    further off."""
    step_p95_s: float = 0.0
    """Seconds below which 95 of 100 steps of a rank stay."""
    stale_shares: tuple[float, ...] = ()
    """Shares of the lookups whose rows missed 0, 1, 2, ... earlier steps."""

    @property
    def on_its_link(self) -> bool:
        """Whether the link had the rate that it was shaped to."""
        return abs(self.control - 1) <= LINK_TOLERANCE


LINK_TOLERANCE = 0.05
"""A run on a link that is further off its rate is repeated once, then left out where others
suffice."""


class Drawn:
    """A stream whose first samples are drawn already, so that no rank draws while it is timed."""

    def __init__(self, source: Any, samples: int) -> None:
        self._source = source
        self._chunks: list[Any] = []
        for chunk in source.chunks("train"):
            self._chunks.append(chunk)
            samples -= chunk.size
            if samples <= 0:
                break

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def chunks(self, part: str) -> Any:
        """Chunks as the stream has them; the training part ends with what is drawn."""
        return iter(self._chunks) if part == "train" else self._source.chunks(part)


@lru_cache(maxsize=1)  # it takes half as long as training on it, and most cases have the same
def _drawn(bag: int, samples: int) -> Drawn:
    return Drawn(Case(bag=bag).source(), samples)


def run_case(case: Case, steps: int, link: Apart | None = None) -> MeasuredRun:
    """Train so many steps in this process and measure them; ``link``: to servers apart."""
    if case.copies > 1:
        return _run_beside(case, steps)
    if link is None or not case.spread:
        return _run_case(case, steps, link)
    work = f"{__name__}:train_as"
    with link.two_ranks(work, case=asdict(case), steps=steps, **_where(link)) as rank:
        return _run_case(case, steps, link, rank)


def _run_beside(case: Case, steps: int) -> MeasuredRun:
    """One run, while the case's other copies train in threads of this process: of twice as many
    steps, so that they last for as long as it does."""
    from runtime.engines.threads import ConcurrentRun

    alone = replace(case, copies=1)
    others = [_assembled(alone, 2 * steps, {}, None) for _ in range(case.copies - 1)]
    beside = [threading.Thread(target=ConcurrentRun(parts).run) for parts in others]
    for parts, thread in zip(others, beside, strict=True):
        parts.meter.start()
        thread.start()
    try:
        return _run_case(alone, steps, None)
    finally:
        for thread in beside:
            thread.join()


def _where(link: Apart | None) -> dict[str, Any]:
    return {"servers_at": [link.servers_at], "servers_secret": str(link.secret)} if link else {}


def train_as(rank: ProcessRank, case: dict[str, Any], steps: int, **where: Any) -> None:
    """Train as the rank of another host."""
    from runtime.engines.threads import ConcurrentRun

    typed = {"mode": Mode(case["mode"]), "hidden": tuple(case["hidden"])}
    parts = _assembled(Case(**case | typed), steps, where, rank)
    parts.meter.start()
    ConcurrentRun(parts).run()


def _assembled(case: Case, steps: int, where: dict[str, Any], rank: ProcessRank | None) -> Parts:
    import torch

    from runtime.engines.open import assemble_for

    torch.set_num_threads(1)
    source: Any = _drawn(case.bag, steps * case.updates_per_step * case.batch)
    return assemble_for(case.config(steps, **where), source, rank=rank)


def _run_case(
    case: Case, steps: int, link: Apart | None, rank: ProcessRank | None = None
) -> MeasuredRun:
    from runtime.engines.threads import ConcurrentRun
    from runtime.order.merge_recordings import merged_trace

    # The link at the case's rate, which a plain transfer checks.
    spans = TimedSpans()
    if link is not None:
        link.shape(case.gbit_per_s or 0.0)
    controls = [link.control() if link else 1.0]

    # A run whose spans are timed, those of the rows' own work at the store.
    parts = replace(_assembled(case, steps, _where(link), rank), spans=spans)
    store: Any = parts.store
    if case.servers:
        parts.worker.store = TimedCalls(store, spans)  # type: ignore[assignment]
    else:  # rows of this process, one server for each shard
        store.record_spans(spans.span)
        if case.slow_s or case.dead_s:
            store.servers[-1].span = Hindered(
                spans.span, case.slow_s, case.dead_s, 2 * steps // 3
            ).span

    # Train, with the counters of the link before and after.
    before, cpu_before_s = (link.moved(), link.cpu_s()) if link else ((0, 0), 0.0)
    parts.meter.start()
    ConcurrentRun(parts).run()
    after, cpu_after_s = (link.moved(), link.cpu_s()) if link else ((0, 0), 0.0)
    controls.append(link.control() if link else 1.0)

    # Staleness from the recorded order, and stages from the spans, without the first third.
    first = steps // 3
    facts = {"mode": str(case.mode), "ranks": case.ranks}
    late = staleness_in_steps(merged_trace(parts.recorder.finish(**facts), store.recorded()))
    if case.servers and rank is None:  # else both ranks part together
        store.close()
    steady = late.missing_steps[late.step >= first]
    measured = measured_stages(spans.timed, first, case.mode is Mode.LOOKAHEAD)

    batches = steps * (1 if case.spread else case.ranks)  # whose rows the link has carried
    sent, came = ((b - a) / batches for a, b in zip(before, after, strict=True))
    return MeasuredRun(
        parts.meter.samples_per_s(skip=first * case.updates_per_step),
        float(steady.mean()),
        measured,
        (cpu_after_s - cpu_before_s) / (steps * case.ranks),
        link_bytes=(sent, came),
        control=max(controls, key=lambda share: abs(share - 1)),
        step_p95_s=float(np.quantile(step_durations_of(spans.timed, first), 0.95)),
        stale_shares=shares_of(steady),
    )


CONFIGURATIONS = (Case(), Case(dim=32, hidden=(512, 256)))
STEPS_OF_BATCH = {64: 240, 192: 180, 768: 80, 1536: 60, 4096: 36}
"""Runs of one rank: their batches and dense updates; half as many, at least 24, of the second
configuration, so that the share of rows that are made does not go with the batch alone."""
TOGETHER = (256, 1024)
"""Batches of the runs of several threads."""
STEPS_TOGETHER = 180
AHEAD = (192, 768, 3072)
"""Batches of the runs that bring prefetched rows up to date."""
SHARDED = (192, 1536)
"""Batches of the runs with two servers."""
REPEATS = 3


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A case that is run for the profile."""

    case: Case
    steps: int


def profiled(apart: bool = False, alone_only: bool = False) -> list[ProfileRun]:
    """The runs of a profile; ``apart``: all with servers of another host, on an unshaped link, and
    in the second configuration rows as wide as those that are predicted. ``alone_only``: those of
    sync with one rank, by themselves and two that know nothing of each other at once."""
    first, second = CONFIGURATIONS
    two = {"shards": 2}
    if apart:
        first = replace(first, servers=1, gbit_per_s=0.0)
        second, two = replace(second, dim=64, servers=1, gbit_per_s=0.0), {"servers": 2}
    # A rank's stages on three threads.
    late = [
        *(ProfileRun(replace(first, batch=b), n) for b, n in STEPS_OF_BATCH.items()),
        *(ProfileRun(replace(first, batch=b, **two), STEPS_OF_BATCH[b]) for b in SHARDED),
        *(ProfileRun(replace(second, batch=b), max(24, n // 2)) for b, n in STEPS_OF_BATCH.items()),
    ]
    # One thread does everything: what a stage costs.
    alone = [replace(run, case=replace(run.case, mode=Mode.SYNC)) for run in late]
    if alone_only:
        # What threads of two ranks cost each other, of runs that do nothing together.
        beside = [
            ProfileRun(replace(base, mode=Mode.SYNC, copies=2, batch=batch), STEPS_TOGETHER)
            for base in (first, second)
            for batch in TOGETHER
        ]
        return [*alone, *beside]
    # What it costs to bring prefetched rows up to date.
    ahead = [
        ProfileRun(replace(base, mode=Mode.LOOKAHEAD, batch=batch), max(30, 46_080 // batch))
        for base in (first, second)
        for batch in AHEAD
    ]
    # Two ranks: with the runs of three threads, what threads cost each other.
    together = [
        ProfileRun(replace(base, mode=mode, ranks=2, batch=batch), STEPS_TOGETHER)
        for base in (first, second)
        for batch in TOGETHER
        for mode in (Mode.SYNC, Mode.HYBRID)
    ]
    # Rows in a server process, one thread that asks it.
    served = [
        ProfileRun(Case(mode=Mode.SYNC, batch=batch, servers=1), steps)
        for batch, steps in STEPS_OF_BATCH.items()
    ]
    return [*alone, *late, *ahead, *together, *([] if apart else served)]


@dataclass(frozen=True, slots=True)
class Profile:
    """Laws of this host, and what its threads cost each other."""

    laws: Mapping[str, HostLaw]
    host: Host

    @property
    def constants(self) -> int:
        """How many numbers were fitted."""
        shares = 3 * len(self.host.meeting)
        return sum(len(law.terms) for law in self.laws.values()) + shares + 2


Runs = Mapping[ProfileRun, Sequence[MeasuredRun]]
"""The repeats of each profiled run."""


def fit_profile(runs: Runs, loops: Mapping[str, Sequence[LawPoint]], cores: int) -> Profile:
    """Laws from the runs of one rank, then what threads cost each other."""
    laws = fit_laws(runs, loops)
    return Profile(laws, fit_host(laws, runs, cores))


def fit_laws(runs: Runs, loops: Mapping[str, Sequence[LawPoint]]) -> dict[str, HostLaw]:
    """The laws of loops, and of stages in the runs of one rank."""
    # Points of every law: first those of loops, then a run's stages under the names of its laws.
    points = {name: list(in_loop) for name, in_loop in loops.items()}
    for run, repeats in runs.items():
        mode = run.case.mode
        if run.case.ranks_at_once > 1:
            continue
        at = held_by(run.case, run.steps)
        stages = _median([repeat.measured.cpu for repeat in repeats])
        wall = _median([repeat.measured.wall for repeat in repeats])
        served = SERVED if run.case.servers else ""
        late = LATE if mode.reads_late_rows else ""
        waited = {name: wall[name] - stages[name] for name in ("read", "refresh")}

        # CPU time of the rank is its own work on a call; waiting for it is the server's.
        if mode is Mode.LOOKAHEAD:
            seconds_of = {
                "read_ahead" + served: stages["read"],
                "refresh" + served: stages["refresh"],
            }
            rest = {"served_ahead": waited["read"], "renewed": waited["refresh"]}
        else:
            seconds_of = {
                name + (served if name in OF_SERVED else "") + late: stages[name]
                for name in (OF_SERVED if served and run.case.gbit_per_s is None else STAGES)
                if name not in OF_A_MODE and not (served and name == "push")
            }
            rest = {} if late else {"served": waited["read"]}
            if run.case.gbit_per_s is not None:
                rest["push" + SERVED] = float(np.median([f.server_cpu_s for f in repeats]))
        if served:
            seconds_of |= rest
        for name, seconds in seconds_of.items():
            points.setdefault(name, []).append(LawPoint(at, seconds))

    return {name: fit_law(name, of_law) for name, of_law in points.items()}


def fit_host(laws: Mapping[str, HostLaw], runs: Runs, cores: int) -> Host:
    """Memory from CPU times, the variation from dense steps, waiting from the clock beside CPU."""
    # Runs of several threads, and of two ranks at once, against what their laws say of one thread.
    many = {run: repeats for run, repeats in runs.items() if len(threads_of(run.case.mode)) > 1}
    both = {run: repeats for run, repeats in runs.items() if run.case.ranks_at_once > 1}
    costs = {
        run: costs_by_law(
            laws,
            held_by(run.case, run.steps),
            run.case.mode,
            run.case.ranks,
            bool(run.case.servers),
        )
        for run in many | both
    }

    # Memory: CPU time that grows with busy cores, as a line through the origin, not negative.
    busy, more = np.array(
        [_grown(run.case, costs[run], one, cores) for run in both for one in both[run]]
    ).T
    spreads = [np.median([f.measured.dense_cv for f in both[run]]) for run in both]
    host = Host(
        cores,
        memory=max(0.0, float(busy @ more / (busy @ busy))),
        dense_cv=float(np.median(spreads)),
    )

    # The interpreter: what each stage waits by the clock beyond its CPU time, in three shares.
    waits: dict[str, list[list[float]]] = {}
    for run, repeats in (many | both).items():
        for stage, wait in _waits(run, costs[run], repeats, host):
            waits.setdefault(stage, []).append(wait)
    shares = {stage: _shares(np.array(of_stage)) for stage, of_stage in waits.items()}
    return replace(
        host,
        meeting={stage: share[0] for stage, share in shares.items()},
        among={stage: share[1] for stage, share in shares.items()},
        crowded={stage: share[2] for stage, share in shares.items()},
    )


def _waits(
    run: ProfileRun, costs: Costs, repeats: Sequence[MeasuredRun], host: Host
) -> Iterator[tuple[str, list[float]]]:
    """What every stage took by the clock beyond its CPU time, and for how long the rank's own
    threads and those of others hold the interpreter, in shares of a step; the share for which they
    keep all cores busy; the ranks.

    The dense update is among them only where one rank does it: another's waiting is no work.
    """
    # The medians of the repeats, and the time of a step.
    case = run.case
    cpu = _median([repeat.measured.cpu for repeat in repeats])
    wall = _median([repeat.measured.wall for repeat in repeats])
    rate = float(np.median([repeat.samples_per_s for repeat in repeats]))
    step_s = case.updates_per_step * case.batch / rate

    # How the threads meet at that rate.
    away = AT_SERVERS if case.servers else ()
    now = threads(
        case.mode, case.ranks, cpu | {stage: costs.stages[stage] for stage in away}, costs.python
    )
    met = burdens(now, case.ranks_at_once, 1 / step_s, replace(host, memory=0.0))

    # What a call to a server process waits for is not the interpreter.
    others = {"update"} if case.ranks > 1 else set()
    if away:
        others |= {"read", "refresh", *away}
    for thread, by in zip(now, met, strict=True):
        for stage in thread.stages:
            if stage not in others:
                seconds = max(0.0, wall[stage] - cpu[stage] / by.core), by.rank_s, by.others_s
                yield stage, [*(s / step_s for s in seconds), by.crowd, case.ranks_at_once]


def _shares(waits: np.ndarray) -> list[float]:
    """Shares of the seconds for which the rank's own threads, other ranks', and all of them beside
    busy cores hold the interpreter: nearest in shares of a step, which throughput is off by."""
    from scipy.optimize import nnls  # late: half a second

    seconds, by_rank, others, crowd, ranks = waits.T
    # One rank alone hardly crowds two cores: what it says of that would be noise, extrapolated.
    crowd = crowd if ranks.max() > 1 else 0.0 * crowd
    shares, _ = nnls(np.column_stack([by_rank, others, (by_rank + others) * crowd]), seconds)
    return [float(share) for share in shares]


def _grown(case: Case, costs: Costs, run: MeasuredRun, cores: int) -> tuple[float, float]:
    """Busy cores beside the busiest thread, and the share by which its CPU time has grown."""
    cpu = run.measured.cpu
    alone = threads(case.mode, case.ranks, costs.stages, costs.python)
    now = threads(case.mode, case.ranks, cpu, cpu)
    number = max(range(len(now)), key=lambda n: alone[n].work_s)
    busy = np.minimum(1.0, [t.work_s * run.samples_per_s / case.batch for t in now])
    other_cores = min(cores - 1.0, (case.ranks_at_once - 1) * busy.sum())
    return other_cores, now[number].work_s / alone[number].work_s - 1


def _median(of: Sequence[Stages]) -> Stages:
    return {name: float(np.median([s[name] for s in of])) for name in STAGES}
