"""The options of the command, and how they become a scenario."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from persia_sim import presets
from persia_sim.costs import with_profile
from persia_sim.memory import FORMATS, capacity
from persia_sim.scenario import Averaging, Discipline, Noise, Scenario, WorkerChoice
from persia_sim.vocabulary import Mode


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
    """How network cards are shared."""
    worker_choice: WorkerChoice = WorkerChoice.SPREAD
    """Which embedding worker serves a batch."""
    gpu_cv: float = 0.05
    """Coefficient of variation of a rank's compute time."""
    server_cv: float = 0.0
    """Coefficient of variation of one request at one server."""
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
    """Also run it with each resource ten per cent faster (ten more runs)."""
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
        worker_choice=options.worker_choice,
        noise=Noise(gpu_cv=options.gpu_cv, server_cv=options.server_cv),
        steps=options.steps,
        seed=options.seed,
        trace_shards=options.trace_shards,
    )


def run(options: Options) -> str:
    """Simulate and describe; writes the files that were asked for."""
    from persia_sim.demand import demand
    from persia_sim.report import report, text
    from persia_sim.simulate import simulate
    from persia_sim.timeline import write_timeline

    if options.timeline_steps is not None and options.timeline is None:
        raise ValueError("--timeline-steps is set but --timeline is not: name the file to write")
    scenario = scenario_of(options)
    held = capacity(scenario.cluster, scenario.workload, pick(options.rows, FORMATS, "--rows"))
    if not options.evict:
        held.refuse(scenario.cluster)
    done = simulate(scenario, trace=True, need=demand(scenario, held.miss_rate))
    lines = [text(report(done, held))]
    if options.sensitivity:
        from persia_sim.sensitivity import sensitivity

        gains = sorted(sensitivity(scenario).items(), key=lambda item: -item[1])
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
