"""The options of the command, and how they become a scenario."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from persia_sim.model.costs import with_profile
from persia_sim.model.incidents import Checkpoints, Crash, SlowDown, Target
from persia_sim.model.memory import FORMATS, capacity
from persia_sim.model.scenario import Averaging, Discipline, Noise, Scenario, WorkerChoice
from persia_sim.presets import catalogue as presets
from persia_sim.words.vocabulary import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to simulate. An option that the mode does not read is an error."""

    cluster: str = "gcp-100t"
    """v100-2021-09, v100-paper, gcp-100t or this-host."""
    workload: str = "criteo-syn5"
    """taobao-ad, avazu-ad, criteo-ad, kwai-video or criteo-syn1 to criteo-syn5."""
    mode: Mode = Mode.HYBRID
    """How rows and dense weights are kept up to date."""
    tau: int | None = None
    """Window in steps (raw_hybrid, hybrid, async); default: unbounded."""
    permits: int | None = None
    """Batches of a rank in flight (raw_hybrid, hybrid, async); default: unlimited."""
    ahead: int | None = None
    """Steps of prefetch (lookahead); default: 1."""
    merge_pushes: bool = False
    """Apply the pushes of a step at once (raw_hybrid, hybrid)."""
    averaging_period_s: float | None = None
    """Seconds between two rounds (async_averaging); default: 0.5."""
    ranks: int | None = None
    """GPUs; default: the preset's."""
    batch: int | None = None
    """Samples of a rank in a step; default: the workload's."""
    servers: int | None = None
    """Server hosts; default: the preset's."""
    workers: int | None = None
    """Embedding worker hosts; default: the preset's."""
    discipline: Discipline = Discipline.FLUID
    """How NICs are shared."""
    dense_on_nics: bool = False
    """All-reduce and dense copies share the NICs with rows; default: a network of their own."""
    worker_choice: WorkerChoice = WorkerChoice.SPREAD
    """Which embedding worker serves a batch."""
    gpu_cv: float = 0.05
    """Coefficient of variation of a rank's compute time."""
    server_cv: float = 0.0
    """Coefficient of variation of one request at one server."""
    slow: tuple[str, ...] = ()
    """Stragglers, KIND:INDEXxFACTOR and perhaps @FROM-TO in seconds: rank:0x3 worker:5x2@1-4."""
    crash: tuple[str, ...] = ()
    """Crashes, KIND:INDEX@SECONDS: rank:3@2.5 server:0@1 worker:7@4."""
    detect_s: float | None = None
    """Until a crash is noticed; default: 1 (assumed)."""
    restart_s: float | None = None
    """Until the process runs again; default: 5 (assumed)."""
    load_s: float | None = None
    """Until its checkpoint is loaded; default: 2 (assumed)."""
    full_recovery: bool = False
    """A server's crash takes everybody back to the checkpoint, not only that server."""
    checkpoint_every_s: float | None = None
    """Useful seconds between checkpoints; default: none is written."""
    checkpoint_s: float | None = None
    """Training stands still this long for a checkpoint; default: 1 (assumed)."""
    steps: int = 100
    """Batches that each rank trains."""
    seed: int = 0
    """Root of all random draws."""
    rows: str = "fp16-lean"
    """How servers keep rows: fp16-lean, f32-adagrad or f32-sgd."""
    evict: bool = False
    """Keep the most recently used rows when not all fit, instead of refusing."""
    profile: Path | None = None
    """Measured costs (JSON, written by `python -m runtime profile`) instead of the catalogue's."""
    sensitivity: bool = False
    """Also run it with each resource ten per cent faster (a run for each)."""
    timeline: Path | None = None
    """Write a Chrome trace (open it in Perfetto) of the steps in --timeline-steps."""
    timeline_steps: tuple[int, int] | None = None
    """First and last step of the timeline; default: ten from the middle."""
    trace: Path | None = None
    """Write the order of events (.npz), which the replay can execute."""
    trace_shards: bool = False
    """One row of the trace for each server process, not for all of them together; a replay then
    needs that number of shards."""


def pick(name: str, known: dict[str, Any], what: str) -> Any:
    """The entry of a table, or an error that lists the names."""
    if name not in known:
        raise ValueError(f"{what} is {name!r}: choose one of {', '.join(known)}")
    return known[name]


_PLACE = r"(rank|worker|server):(\d+)"
_SECONDS = r"(\d+(?:\.\d*)?(?:e-?\d+)?)"


def disturbances_of(options: Options) -> tuple[SlowDown | Crash, ...]:
    """Read --slow and --crash."""
    found: list[SlowDown | Crash] = []
    for text in options.slow:
        match = re.fullmatch(f"{_PLACE}x{_SECONDS}(?:@{_SECONDS}-{_SECONDS})?", text)
        if not match:
            raise ValueError(
                f"--slow is {text!r}: write KIND:INDEXxFACTOR@FROM-TO, as rank:0x3@1-4"
            )
        kind, index, factor, start, end = match.groups()
        when = {} if start is None else {"start_s": float(start), "end_s": float(end)}
        slow = SlowDown(target=Target(kind), index=int(index), factor=float(factor), **when)
        found.append(slow)
    names = ("detect_s", "restart_s", "load_s")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if given and not options.crash:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} is set but --crash is not")
    times = {"detect_s": 1.0, "restart_s": 5.0, "load_s": 2.0} | given
    for text in options.crash:
        match = re.fullmatch(f"{_PLACE}@{_SECONDS}", text)
        if not match:
            raise ValueError(f"--crash is {text!r}: write KIND:INDEX@SECONDS, as server:0@2.5")
        kind, index, at = match.groups()
        full = options.full_recovery and kind == "server"
        found.append(
            Crash(target=Target(kind), index=int(index), at_s=float(at), full=full, **times)
        )
    if options.full_recovery and not any(isinstance(e, Crash) and e.full for e in found):
        raise ValueError("--full-recovery is set but --crash names no server")
    return tuple(found)


def checkpoints_of(options: Options) -> Checkpoints | None:
    """Read --checkpoint-every-s and --checkpoint-s."""
    if options.checkpoint_every_s is None:
        if options.checkpoint_s is not None:
            raise ValueError("--checkpoint-s is set but --checkpoint-every-s is not")
        return None
    write_s = 1.0 if options.checkpoint_s is None else options.checkpoint_s
    return Checkpoints(interval_s=options.checkpoint_every_s, write_s=write_s)


def scenario_of(options: Options) -> Scenario:
    """Apply the options to the presets."""
    cluster = pick(options.cluster, presets.CLUSTERS, "--cluster")()
    workload = pick(options.workload, presets.workloads(), "--workload")
    if options.ranks is not None:
        cluster = cluster.with_ranks(options.ranks)
    if options.servers is not None:
        cluster = cluster.with_servers(options.servers)
    if options.workers is not None:
        cluster = cluster.with_workers(options.workers)
    if options.batch is not None:
        workload = replace(workload, batch=options.batch)
    costs = presets.costs_of(cluster.name)
    if options.profile is not None:
        costs = with_profile(costs, options.profile)
    averaging = None
    if options.averaging_period_s is not None:
        averaging = Averaging(period_s=options.averaging_period_s)
    return Scenario(
        cluster=cluster,
        workload=workload,
        costs=costs,
        mode=options.mode,
        tau=options.tau,
        permits=options.permits,
        ahead=options.ahead,
        merge_pushes=options.merge_pushes,
        averaging=averaging,
        discipline=options.discipline,
        dense_on_nics=options.dense_on_nics,
        worker_choice=options.worker_choice,
        noise=Noise(gpu_cv=options.gpu_cv, server_cv=options.server_cv),
        disturbances=disturbances_of(options),
        checkpoints=checkpoints_of(options),
        steps=options.steps,
        seed=options.seed,
        trace_shards=options.trace_shards,
    )


def run(options: Options) -> str:
    """Simulate and describe; writes the files that were asked for."""
    from persia_sim.engine.simulate import simulate
    from persia_sim.insight.report import report, text
    from persia_sim.insight.timeline import write_timeline
    from persia_sim.model.demand import demand

    if options.timeline_steps is not None and options.timeline is None:
        raise ValueError("--timeline-steps is set but --timeline is not: name the file to write")
    scenario = scenario_of(options)
    held = capacity(scenario.cluster, scenario.workload, pick(options.rows, FORMATS, "--rows"))
    if not options.evict:
        held.refuse(scenario.cluster)
    done = simulate(scenario, trace=True, need=demand(scenario, held.miss_rate))
    lines = [text(report(done, held))]
    if options.sensitivity:
        from persia_sim.insight.sensitivity import sensitivity

        gains = sorted(sensitivity(scenario, held.miss_rate).items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {gain:+.1%}" for name, gain in gains if abs(gain) >= 5e-4)
        lines.append(f"10 % faster  {shown or 'nothing helps alone'}")
    if options.trace is not None and done.trace is not None:
        done.trace.save(options.trace)
        lines.append(f"order        {len(done.trace)} events in {options.trace}")
    if options.timeline is not None:
        middle = scenario.steps // 2
        first, last = options.timeline_steps or (middle, min(middle + 9, scenario.steps - 1))
        count = write_timeline(done, options.timeline, first, last)
        lines.append(f"timeline     {count} spans in {options.timeline}")
    return "\n".join(lines)
