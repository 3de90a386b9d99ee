"""The profile of this host: short runs of sync with one rank, in two configurations.

What a stage costs comes from runs by themselves (`runtime/profiling/stage_times.py`). What ranks
cost each other by being on one host comes from two such runs at once, which know nothing of each
other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.options import REFERENCE
from experiments.validating.cases import Case, held_by
from experiments.validating.contention import Host, burdens, threads
from experiments.validating.link import Apart
from experiments.validating.slow_wire import Wire, rows_behind, slow_wire
from experiments.validating.stages import (
    TERMS,
    Costs,
    Hindered,
    TimedCalls,
    costs_by_law,
    shares_of,
    step_durations_of,
)
from persia_sim.base.staleness import staleness_in_steps
from runtime.profiling.laws import LawPoint, LinearLaw, fit_law
from runtime.profiling.stage_times import (
    OF_A_MODE,
    STAGES,
    Drawn,
    Stages,
    StageTimes,
    TimedSpans,
    measured_stages,
)

if TYPE_CHECKING:
    from runtime.rank.components import Components  # loads torch


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


@lru_cache(maxsize=1)  # it takes half as long as training on it, and most cases have the same
def _drawn(bag: int, samples: int) -> Drawn:
    return Drawn(Case(bag=bag).source(), samples)


def run_case(case: Case, steps: int, link: Apart | None = None) -> MeasuredRun:
    """Train so many steps in this process and measure them; ``link``: to servers apart."""
    return _run_beside(case, steps) if case.copies > 1 else _run_case(case, steps, link)


def _run_beside(case: Case, steps: int) -> MeasuredRun:
    """One run, while the case's other copies train in threads of this process: of twice as many
    steps, so that they last for as long as it does."""
    from runtime.executors.threads import ConcurrentRun

    alone = replace(case, copies=1)
    others = [_assembled(alone, 2 * steps, {}) for _ in range(case.copies - 1)]
    beside = [threading.Thread(target=ConcurrentRun(components).run) for components in others]
    for components, thread in zip(others, beside, strict=True):
        components.meter.start()
        thread.start()
    try:
        return _run_case(alone, steps, None)
    finally:
        for thread in beside:
            thread.join()


def _where(link: Apart | None) -> dict[str, Any]:
    return {"servers_at": [link.servers_at], "servers_secret": str(link.secret)} if link else {}


def _assembled(
    case: Case, steps: int, where: dict[str, Any], wire: Wire | None = None
) -> Components:
    import torch

    from runtime.executors.open import assemble_for
    from runtime.rank.components import assemble

    torch.set_num_threads(1)
    source: Any = _drawn(case.bag, steps * case.updates_per_step * case.batch)
    config = case.config(steps, **where)
    if wire is None:
        return assemble_for(config, source)
    return assemble(config, source, open_rows=rows_behind(wire))


def _run_case(case: Case, steps: int, link: Apart | None) -> MeasuredRun:
    if not case.round_trip_s:
        return _run_over(None, case, steps, link)
    with slow_wire(case.round_trip_s / 2) as wire:
        return _run_over(wire, case, steps, link)


def _run_over(wire: Wire | None, case: Case, steps: int, link: Apart | None) -> MeasuredRun:
    from runtime.executors.open import merged_trace
    from runtime.executors.threads import ConcurrentRun

    # The link at the case's rate, which a plain transfer checks.
    spans = TimedSpans()
    if link is not None:
        link.shape(case.gbit_per_s)
    controls = [link.control() if link else 1.0]

    # A run whose spans are timed, those of the rows' own work at the store.
    components = replace(_assembled(case, steps, _where(link), wire), spans=spans)
    store: Any = components.store
    if case.servers:
        components.worker.store = TimedCalls(store, spans)  # type: ignore[assignment]
    else:  # rows of this process, one server for each shard
        store.record_spans(spans.span)
        if case.slow_s or case.dead_s:
            store.servers[-1].span = Hindered(
                spans.span, case.slow_s, case.dead_s, 2 * steps // 3
            ).span

    # Train, with the counters of the link before and after.
    before, cpu_before_s = (link.moved(), link.cpu_s()) if link else ((0, 0), 0.0)
    components.meter.start()
    ConcurrentRun(components).run()
    after, cpu_after_s = (link.moved(), link.cpu_s()) if link else ((0, 0), 0.0)
    controls.append(link.control() if link else 1.0)

    # Staleness from the recorded order, and stages from the spans, without the first third.
    first = steps // 3
    facts = {"mode": str(case.mode), "ranks": case.ranks}
    late = staleness_in_steps(merged_trace(components.recorder.finish(**facts), store.recorded()))
    if case.servers:
        store.close()
    steady = late.missing_steps[late.step >= first]
    measured = measured_stages(spans.timed, first, case.mode.prefetches_rows)

    batches = steps * case.ranks
    sent, came = ((b - a) / batches for a, b in zip(before, after, strict=True))
    return MeasuredRun(
        components.meter.samples_per_s(skip=first * case.updates_per_step),
        float(steady.mean()),
        measured,
        (cpu_after_s - cpu_before_s) / batches,
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
"""Batches of the runs of which two go on at once."""
STEPS_TOGETHER = 180
SHARDED = (192, 1536)
"""Batches of the runs with two servers."""
REPEATS = 2
"""How often each run is measured."""


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A case that is run for the profile."""

    case: Case
    steps: int


def profile_runs(hosts: int = 1) -> list[ProfileRun]:
    """The runs of a profile; of two ``hosts`` all have their servers on the other one, on an
    unshaped link, and in the second configuration rows as wide as those that are predicted."""
    first, second = (replace(case, mode=REFERENCE) for case in CONFIGURATIONS)
    two = {"shards": 2}
    if hosts == 2:
        first = replace(first, servers=1)
        second, two = replace(second, dim=64, servers=1), {"servers": 2}

    # One thread does everything: what a stage costs.
    alone = [
        *(ProfileRun(replace(first, batch=b), n) for b, n in STEPS_OF_BATCH.items()),
        *(ProfileRun(replace(first, batch=b, **two), STEPS_OF_BATCH[b]) for b in SHARDED),
        *(ProfileRun(replace(second, batch=b), max(24, n // 2)) for b, n in STEPS_OF_BATCH.items()),
    ]

    # What threads of two ranks cost each other, of runs that do nothing together.
    beside = [
        ProfileRun(replace(base, copies=2, batch=batch), STEPS_TOGETHER)
        for base in (first, second)
        for batch in TOGETHER
    ]
    return [*alone, *(beside if hosts == 1 else [])]


@dataclass(frozen=True, slots=True)
class Profile:
    """Laws of this host, and what its threads cost each other."""

    laws: Mapping[str, LinearLaw]
    host: Host


Runs = Mapping[ProfileRun, Sequence[MeasuredRun]]
"""The repeats of each profiled run."""


def fit_profile(runs: Runs, loops: Mapping[str, Sequence[LawPoint]], cores: int) -> Profile:
    """Laws from the runs by themselves, then what threads cost each other, from two at once.

    Of what the threads of one rank do it is known that they share cores, and take turns at the
    interpreter.
    """
    laws = fit_laws(runs, loops)
    both = {run: repeats for run, repeats in runs.items() if run.case.copies > 1}
    if both:
        return Profile(laws, fit_host(laws, both, cores))
    spreads = [one.measured.dense_cv for repeats in runs.values() for one in repeats]
    return Profile(laws, Host(cores, dense_cv=float(np.median(spreads))))


def fit_laws(runs: Runs, loops: Mapping[str, Sequence[LawPoint]]) -> dict[str, LinearLaw]:
    """The laws of loops, and of stages in the runs by themselves."""
    points = {name: list(in_loop) for name, in_loop in loops.items()}
    for run, repeats in runs.items():
        if run.case.copies > 1:
            continue
        at = held_by(run.case, run.steps)
        cpu = _median([repeat.measured.cpu for repeat in repeats])
        seconds_of = {name: cpu[name] for name in STAGES if name not in OF_A_MODE}

        # CPU time of the rank is its own work on a call; waiting for it is the servers'.
        if run.case.servers:
            wall = _median([repeat.measured.wall for repeat in repeats])
            del seconds_of["push"]
            seconds_of["served"] = wall["read"] - cpu["read"]
            seconds_of["servers"] = float(np.median([one.server_cpu_s for one in repeats]))
        for name, seconds in seconds_of.items():
            points.setdefault(name, []).append(LawPoint(at, seconds))

    return {name: fit_law(TERMS[name], of_law) for name, of_law in points.items()}


def fit_host(laws: Mapping[str, LinearLaw], both: Runs, cores: int) -> Host:
    """From runs of which two go on at once: memory from CPU times, the variation from dense steps,
    waiting from the clock beside CPU."""
    costs = {
        run: costs_by_law(laws, held_by(run.case, run.steps), run.case.mode, 1) for run in both
    }

    # Memory: CPU time that grows with busy cores, as a line through the origin, not negative.
    grown = [
        _grown(run.case, costs[run], one, cores) for run, repeats in both.items() for one in repeats
    ]
    busy, more = np.array(grown).T
    spreads = [np.median([one.measured.dense_cv for one in repeats]) for repeats in both.values()]
    host = Host(
        cores,
        memory=max(0.0, float(busy @ more / (busy @ busy))),
        dense_cv=float(np.median(spreads)),
    )

    # The interpreter: what each stage waits by the clock beyond its CPU time, in two shares.
    waits: dict[str, list[list[float]]] = {}
    for run, repeats in both.items():
        for stage, wait in _waits(run.case, costs[run], repeats, host).items():
            waits.setdefault(stage, []).append(wait)
    shares = {stage: _shares(np.array(of_stage)) for stage, of_stage in waits.items()}
    return replace(
        host,
        among={stage: share[0] for stage, share in shares.items()},
        crowded={stage: share[1] for stage, share in shares.items()},
    )


def _waits(
    case: Case, costs: Costs, repeats: Sequence[MeasuredRun], host: Host
) -> dict[str, list[float]]:
    """What every stage took by the clock beyond its CPU time, and for how long others hold the
    interpreter, in shares of a step; the share of time for which they keep all cores busy."""
    # The medians of the repeats, and the time of a step.
    cpu = _median([repeat.measured.cpu for repeat in repeats])
    wall = _median([repeat.measured.wall for repeat in repeats])
    step_s = case.batch / float(np.median([repeat.samples_per_s for repeat in repeats]))

    # How the threads meet at that rate.
    [now] = threads(case.mode, 1, cpu, costs.python)
    [by] = burdens([now], case.copies, 1 / step_s, replace(host, memory=0.0))
    return {
        stage: [
            max(0.0, wall[stage] - cpu[stage] / by.core) / step_s,
            by.others_s / step_s,
            by.crowd,
        ]
        for stage in now.stages
    }


def _shares(waits: np.ndarray) -> list[float]:
    """Shares of the seconds for which others hold the interpreter, and of these beside busy cores:
    nearest in shares of a step, which throughput is off by."""
    from scipy.optimize import nnls  # late: half a second

    seconds, others, crowd = waits.T
    shares, _ = nnls(np.column_stack([others, others * crowd]), seconds)
    return [float(share) for share in shares]


def _grown(case: Case, costs: Costs, run: MeasuredRun, cores: int) -> tuple[float, float]:
    """Busy cores beside the run's own, and the share by which its CPU time has grown."""
    cpu = run.measured.cpu
    [alone] = threads(case.mode, 1, costs.stages, costs.python)
    [now] = threads(case.mode, 1, cpu, cpu)
    busy = min(1.0, now.work_s * run.samples_per_s / case.batch)
    other_cores = min(cores - 1.0, (case.copies - 1) * busy)
    return other_cores, now.work_s / alone.work_s - 1


def _median(of: Sequence[Stages]) -> Stages:
    return {name: float(np.median([s[name] for s in of])) for name in STAGES}
