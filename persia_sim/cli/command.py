"""The command: its options, the scenario that they describe, and what it prints."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from persia_sim.model.incidents import MOST_S, Checkpoints, Crash, SlowDown, Target
from persia_sim.model.memory import capacity
from persia_sim.model.profile import read_profile
from persia_sim.model.scenario import (
    Averaging,
    DenseHome,
    Discipline,
    Noise,
    Scenario,
    WorkerChoice,
)
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import find_cluster, find_rows, find_workload
from persia_sim.words.rules import SECONDS, require
from persia_sim.words.vocabulary import (
    DEFAULT_AHEAD,
    DEFAULT_AVERAGE_EVERY_S,
    DEFAULT_TAU,
    Mode,
)

if TYPE_CHECKING:
    from persia_sim.insight.measure import Estimate
    from persia_sim.oracle.closed_form import Answer


def unset(means: str) -> Any:
    """What `--help` says of an option that is not given, in place of None."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {means})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to simulate. An option that the mode does not read is an error."""

    cluster: str = "gcp-100t"
    """v100-2021-09, v100-paper, gcp-100t, this-host, or a .toml file."""
    workload: str = "criteo-syn5"
    """taobao-ad, avazu-ad, criteo-ad, kwai-video, criteo-syn1 to criteo-syn5, or a .toml file."""
    mode: Mode = Mode.HYBRID
    """How rows and dense weights are kept up to date."""
    tau: int | None = DEFAULT_TAU
    """Window in steps, or none: unbounded (raw_hybrid, hybrid, async)."""
    permits: Annotated[int | None, unset("unlimited")] = None
    """Batches of a rank in flight (raw_hybrid, hybrid, async)."""
    ahead: Annotated[int | None, unset(str(DEFAULT_AHEAD))] = None
    """Steps of prefetch (lookahead)."""
    lookahead: Literal["reread", "forwarded"] = "reread"
    """Stale rows of a prefetch are read again, or kept up to date by the workers (lookahead)."""
    merge_pushes: Annotated[bool | None, unset("yes")] = None
    """Apply the pushes of a step at once (raw_hybrid, hybrid)."""
    average_every_s: Annotated[float | None, unset(str(DEFAULT_AVERAGE_EVERY_S))] = None
    """Seconds between two rounds (async_averaging)."""
    ranks: Annotated[int | None, unset("the preset's")] = None
    """GPUs."""
    batch_per_rank: Annotated[int | None, unset("the workload's")] = None
    """Samples of a rank in a step, in [1, 65535]."""
    servers: Annotated[int | None, unset("the preset's")] = None
    """Server hosts."""
    workers: Annotated[int | None, unset("the preset's")] = None
    """Embedding worker hosts."""
    loaders: Annotated[int | None, unset("as many a rank as the preset has")] = None
    """Data loader processes."""
    discipline: Discipline = Discipline.FLUID
    """How NICs are shared."""
    dense_on_nics: bool = False
    """All-reduce and averaging share the NICs with rows; else they have a network of their own."""
    dense_home: Annotated[DenseHome | None, unset("servers")] = None
    """Where the dense weights are (async): servers, one or apart."""
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
    detect_s: Annotated[float | None, unset("1 (assumed)")] = None
    """Seconds until a crash is noticed."""
    restart_s: Annotated[float | None, unset("5 (assumed)")] = None
    """Seconds until the process runs again."""
    load_s: Annotated[float | None, unset("2 (assumed)")] = None
    """Seconds until its checkpoint is loaded."""
    full_recovery: bool = False
    """A server's crash takes everybody back to the checkpoint, not only that server."""
    checkpoint_every_s: Annotated[float | None, unset("none is written")] = None
    """Useful seconds between checkpoints."""
    checkpoint_s: Annotated[float | None, unset("1 (assumed)")] = None
    """Seconds that training stands still for a checkpoint."""
    steps: int = 100
    """Batches that each rank trains."""
    seed: int = 0
    """Root of all random draws."""
    rows: Annotated[str | None, unset("f32-adagrad; fp16-lean for criteo-syn1 to 5")] = None
    """How servers keep rows: fp16-lean, f32-adagrad, f32-adam, f32-sgd, or a .toml file."""
    evict: bool = False
    """Keep the most recently used rows when not all fit, instead of refusing."""
    after_samples: Annotated[float | None, unset("full, or as full as they will be")] = None
    """Samples since the servers were empty."""
    profile: Path | None = None
    """Measured costs (JSON, written by `python -m runtime profile`) instead of the catalogue's."""
    sensitivity: bool = False
    """Also run it with each resource ten per cent faster (a run for each)."""
    compare: Literal["sharded"] | None = None
    """Also say what tables on these GPUs would give, and how many GPUs have room for them."""
    timeline: Path | None = None
    """Write a Chrome trace (open it in Perfetto) of the steps in --timeline-steps."""
    timeline_steps: Annotated[tuple[int, int] | None, unset("ten from the middle")] = None
    """First and last step of the timeline."""
    trace: Path | None = None
    """Write the order of events (.npz), which the replay can execute."""
    trace_shards: bool = False
    """One row of the trace for each server process, not for all of them together; a replay then
    needs that number of shards."""


_PLACE = rf"({'|'.join(Target)}):(\d+)"
_KINDS = f"KIND is {', '.join(Target)}"
_SECONDS = r"(\d+(?:\.\d*)?(?:e-?\d+)?)"


def disturbances_of(options: Options) -> tuple[SlowDown | Crash, ...]:
    """Read --slow and --crash."""
    found: list[SlowDown | Crash] = []
    for text in options.slow:
        match = re.fullmatch(f"{_PLACE}x{_SECONDS}(?:@{_SECONDS}-{_SECONDS})?", text)
        if not match:
            raise ValueError(
                f"--slow is {text!r}: {_KINDS}; write KIND:INDEXxFACTOR@FROM-TO, as rank:0x3@1-4"
            )
        kind, index, factor, start, end = match.groups()
        when = {} if start is None else {"start_s": float(start), "end_s": float(end)}
        slow = SlowDown(target=Target(kind), index=int(index), factor=float(factor), **when)
        found.append(slow)
    names = ("detect_s", "restart_s", "load_s")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if given and not options.crash:
        name = f"--{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{name} is set but --crash is not: add --crash KIND:INDEX@SECONDS, as "
                         f"server:0@2.5, or drop {name}")  # fmt: skip
    times = {"detect_s": 1.0, "restart_s": 5.0, "load_s": 2.0} | given
    for text in options.crash:
        match = re.fullmatch(f"{_PLACE}@{_SECONDS}", text)
        if not match:
            raise ValueError(
                f"--crash is {text!r}: {_KINDS}; write KIND:INDEX@SECONDS, as server:0@2.5"
            )
        kind, index, at = match.groups()
        full = options.full_recovery and kind == "server"
        found.append(
            Crash(target=Target(kind), index=int(index), at_s=float(at), full=full, **times)
        )
    if options.full_recovery and not any(isinstance(e, Crash) and e.full for e in found):
        raise ValueError("--full-recovery is set but --crash names no server: add --crash "
                         "server:INDEX@SECONDS, or drop --full-recovery")  # fmt: skip
    return tuple(found)


def checkpoints_of(options: Options) -> Checkpoints | None:
    """Read --checkpoint-every-s and --checkpoint-s."""
    if options.checkpoint_every_s is None:
        if options.checkpoint_s is not None:
            raise ValueError(
                "--checkpoint-s is set but --checkpoint-every-s is not: add it, or drop "
                "--checkpoint-s"
            )
        return None
    write_s = 1.0 if options.checkpoint_s is None else options.checkpoint_s
    return Checkpoints(interval_s=options.checkpoint_every_s, write_s=write_s)


MOST = {"ranks": 16_384, "workers": 10_000, "servers": 10_000, "loaders": 100_000,
        "steps": 1_000_000}  # fmt: skip
"""Beyond these a simulation takes days or more memory than a host has."""
MOST_BATCHES = 5_000_000


def _refuse_absurd(options: Options) -> None:
    """Sizes that no machine simulates are refused before anything of that size is made."""
    for name, most in MOST.items():
        value = getattr(options, name)
        require(value is None or value <= most, name, value, f"must be <= {most:,}")
    unshared = options.dense_on_nics and options.discipline is Discipline.UNSHARED
    remedy = "choose fluid or fifo"
    require(not unshared, "dense_on_nics", True, "unshared NICs slow nobody down", remedy)
    if options.restart_s is not None:
        ok = 0 <= options.restart_s <= MOST_S
        require(ok, "restart_s", options.restart_s, f"must lie in [0, {MOST_S:g}]")


def _window(options: Options) -> int | None:
    """The bound where the mode reads one; the default is nobody's choice."""
    read = options.mode.reads_late_rows or options.tau != DEFAULT_TAU
    return options.tau if read else None


def scenario_of(options: Options) -> Scenario:
    """Apply the options to the presets."""
    _refuse_absurd(options)
    cluster, costs = find_cluster(options.cluster)
    workload = find_workload(options.workload)
    cluster = cluster.resized(options.ranks, options.workers, options.servers, options.loaders)
    counts = {"ranks": cluster.ranks, "workers": cluster.embedding_workers.all_hosts,
              "servers": cluster.servers.all_hosts, "loaders": cluster.loaders}  # fmt: skip
    for name, value in counts.items():
        ok = value <= MOST[name]
        require(ok, f"{name} of {cluster.name}", f"{value:,}", f"must be <= {MOST[name]:,}")
    if options.batch_per_rank is not None:
        workload = replace(workload, batch_per_rank=options.batch_per_rank)
    if options.profile is not None:
        cluster, costs = read_profile(options.profile).apply(cluster, workload, costs)
    batches = cluster.ranks * options.steps
    rule = f"must be <= {MOST_BATCHES:,} (about 1 kB of memory and 0.4 ms of time each)"
    require(batches <= MOST_BATCHES, "ranks x steps", f"{batches:,}", rule, "lower --steps")
    averaging = None
    if options.average_every_s is not None:
        averaging = Averaging(period_s=options.average_every_s)
    return Scenario(
        cluster=cluster,
        workload=workload,
        costs=costs,
        mode=options.mode,
        tau=_window(options),
        permits=options.permits,
        ahead=options.ahead,
        lookahead=options.lookahead,
        merge_pushes=options.merge_pushes,
        averaging=averaging,
        discipline=options.discipline,
        dense_on_nics=options.dense_on_nics,
        dense_home=options.dense_home,
        worker_choice=options.worker_choice,
        noise=Noise(gpu_cv=options.gpu_cv, server_cv=options.server_cv),
        disturbances=disturbances_of(options),
        checkpoints=checkpoints_of(options),
        steps=options.steps,
        seed=options.seed,
        trace_shards=options.trace_shards,
    )


BAR_AFTER_S = 1.0
"""Runs shorter than this show no progress."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, after a second; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm  # only a terminal needs it

    with tqdm(total=total, unit=" pushes", delay=BAR_AFTER_S, leave=False) as bar:
        yield bar.update


def run(options: Options) -> str:
    """Simulate and describe; writes the files that were asked for."""
    from persia_sim.engine.rank import pushes_of
    from persia_sim.engine.simulate import simulate
    from persia_sim.insight.report import report, text
    from persia_sim.insight.timeline import write_timeline
    from persia_sim.model.demand import demand
    from persia_sim.oracle.closed_form import answer

    scenario = scenario_of(options)
    kept = find_rows(options.rows or rows_of(options.workload))
    held = capacity(scenario.cluster, scenario.workload, kept, options.after_samples)
    if not options.evict:
        held.refuse(scenario.cluster)
    first, last = _check_before(options)
    with progress(pushes_of(scenario)) as on_push:
        need = demand(scenario, held.miss_rate)
        _check_step(answer(scenario, need))
        done = simulate(scenario, trace=True, need=need, on_push=on_push)
    _check_incidents(scenario, done.makespan_s)
    lines = [text(report(done, held))]
    if options.profile is not None:
        lines.append(f"costs        {scenario.costs.source}")
    if options.sensitivity:
        from persia_sim.insight.sensitivity import choices, gains

        lines.append(f"10 % faster  {_shown(gains(scenario, held.miss_rate))}")
        lines.append(f"twice        {_shown(gains(scenario, held.miss_rate, choices(scenario)))}")
    if options.compare is not None:
        from persia_sim.insight.compare import compared

        lines.append(compared(scenario, held.miss_rate))
    if options.trace is not None and done.trace is not None:
        done.trace.save(options.trace)
        lines.append(f"order        {len(done.trace)} events in {options.trace}")
    if options.timeline is not None:
        count = write_timeline(done, options.timeline, first, last)
        lines.append(f"timeline     {count} spans in {options.timeline}")
    return "\n".join(lines)


def _shown(gains: dict[str, Estimate]) -> str:
    """Gains beyond their interval, the largest first."""
    told = []
    for name, gain in sorted(gains.items(), key=lambda item: -item[1].mean):
        known = gain.half_width < inf  # else the steps are too few for an interval
        if abs(gain.mean) > max(5e-4, gain.half_width if known else 0.0):
            told.append(f"{name} {gain.mean:+.1%}" + (f" +-{gain.half_width:.1%}" if known else ""))
    return ", ".join(told) or "nothing helps alone"


def _check_before(options: Options) -> tuple[int, int]:
    """What can be told before the run; returns the steps of the timeline."""
    require(options.steps >= 2, "steps", options.steps, "a time between steps needs >= 2")
    if options.trace_shards and options.trace is None:
        raise ValueError("--trace-shards is set but --trace is not: name the file to write")
    if options.timeline_steps is not None and options.timeline is None:
        raise ValueError("--timeline-steps is set but --timeline is not: name the file to write")
    for name, path in (("--timeline", options.timeline), ("--trace", options.trace)):
        if path is not None:
            _require_writable(name, path)
    middle, end = options.steps // 2, options.steps - 1
    first, last = options.timeline_steps or (middle, min(middle + 9, end))
    rule = f"must be a range inside [0, {end}]"
    require(0 <= first <= last <= end, "timeline steps", (first, last), rule)
    return first, last


def _check_step(bound: Answer) -> None:
    """Numbers that are each possible may together describe nothing that ends."""
    told, rule = f"{bound.step_s:.3g} s ({bound.binds})", f"must lie in (0, {SECONDS[1]:g}]"
    ok = 0 < bound.step_s <= SECONDS[1]
    require(ok, "a step", told, rule, "look at the rates and sizes behind it")


def _require_writable(name: str, path: Path) -> None:
    folder = path.parent
    require(folder.is_dir(), name, path, f"there is no folder {folder}", "make it first")
    require(not path.is_dir(), name, path, "it is a folder", "name a file in it")
    require(os.access(folder, os.W_OK), name, path, f"the folder {folder} cannot be written to")


def _check_incidents(scenario: Scenario, end_s: float) -> None:
    """What never happened was not meant."""
    ends, remedy = f"the run ends at {end_s:.4g} s", "choose an earlier time or more --steps"
    for event in scenario.disturbances:
        at_s = event.at_s if isinstance(event, Crash) else event.start_s
        what = "crash" if isinstance(event, Crash) else "slow-down"
        name = f"{what} of {event.target} {event.index} (seconds)"
        require(at_s <= end_s, name, f"{at_s:g}", ends, remedy)
    if scenario.checkpoints is not None:
        interval_s = scenario.checkpoints.interval_s
        require(interval_s <= end_s, "checkpoint_every_s", interval_s, ends, remedy)
    if scenario.averaging is not None:
        period_s = scenario.averaging.period_s
        require(period_s <= end_s, "average_every_s", period_s, ends, remedy)
