"""Predictions of runs on this host, written down before these runs, and the runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

from experiments.benching.windows import ForeignCores, ForeignLoad
from experiments.options import OneOf, Planned, Some, default_jobs
from experiments.result_cache import ResultCache
from experiments.tables import leave, table
from experiments.validating.cases import Case, apart, deciding
from experiments.validating.link import Apart
from experiments.validating.loops import additions, halvings, pulls, sleeps
from experiments.validating.predictions import (
    COLUMNS,
    LINK_COLUMNS,
    conclusion,
    predictions,
    records_of,
    write_before_runs,
)
from experiments.validating.profiling import (
    REPEATS,
    MeasuredRun,
    ProfileRun,
    profile_runs,
    run_case,
)
from persia_sim.base.schema import Within, parse
from persia_sim.base.vocabulary import Mode
from runtime.profiling.laws import LawPoint

RESULTS = "measured.jsonl"
PREDICTIONS = "predictions.json"
MODES = tuple(map(str, Mode))
STARTING_S, STEP_S = 0.4, 0.008
"""Seconds of the start of a run, and of a step of the reference, on two quiet cores."""
LOOPS: dict[str, Callable[[], list[LawPoint]]] = {
    "add_gradient": additions,
    "half": halvings,
    "pull": pulls,
    "sleep": sleeps,
}
"""What is timed in a loop of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Profile sync with one rank in short runs of this host, predict every mode, run and compare.

    Each case departs from a reference (hybrid, one rank, tau 4, batch 512, 26 fields, rows of 16,
    an MLP of 256-128) in mode, ranks, shards, tau, permits, injected latency, a slow server, a dead
    one, or servers on another host. All predictions are in a file before a case runs.
    """

    hosts: Annotated[int, Within(1, 2)] = 1
    """2: servers are processes of a second host, a network namespace at a link that is shaped to
    several rates (needs root, iproute2 and util-linux)."""
    modes: Some[Annotated[str, OneOf(MODES)]] = MODES
    """Keep the cases of these modes."""
    ranks: Some[Annotated[int, Within(1, 2)]] = (1, 2)
    """Keep the cases with these numbers of ranks."""
    rounds: Annotated[int, Within(1, 1_000)] = 3
    """Interleaved rounds of all cases; with 1, a few cases only (ten minutes)."""
    steps: Annotated[int, Within(30, 100_000)] = 240
    """Steps of each rank in a run; the first third is warm-up."""
    most_foreign_cores: ForeignCores = 0.15
    """A run beside which other processes used more cores than this is repeated once."""


def cases(options: Options) -> list[Case]:
    """The cases that the options keep, in the order in which they run."""
    all_of_them = apart if options.hosts == 2 else deciding
    kept = [
        case
        for case in all_of_them(options.rounds == 1)
        if str(case.mode) in options.modes and case.ranks in options.ranks
    ]
    if not kept:
        raise ValueError(
            f"modes {', '.join(options.modes)} with ranks {', '.join(map(str, options.ranks))}"
            " leave no case; add a mode or a number of ranks"
        )
    return kept


def run(options: Options) -> None:
    """Print the plan, measure the profile, write the predictions, run the cases, print the tables;
    writes validate.csv."""
    every = cases(options)
    of_profile = profile_runs(options.hosts)
    print(plan(options, every, of_profile))
    if options.dry_run:
        return
    results = ResultCache(options.out / RESULTS)
    wanted = [ProfileRun(case, options.steps) for case in every]

    # A second host is made only where something is missing.
    labels = [_label(run, n) for run in of_profile for n in range(REPEATS)]
    labels += [_label(run, n) for run in wanted for n in range(options.rounds)]
    missing = any(label not in results for label in labels)
    with closing(Apart("hosts")) if options.hosts == 2 and missing else nullcontext() as link:
        # The profile first: what it predicts lies in the folder before a case runs.
        results.fill({name: partial(_points, loop) for name, loop in LOOPS.items()}, "validate")
        loops = {name: [parse(LawPoint, p, name) for p in results[name]] for name in LOOPS}
        profiled = _measured(options, results, of_profile, REPEATS, link)
        foretold = predictions(every, profiled, loops, default_jobs(), options.steps)
        path = options.out / PREDICTIONS
        write_before_runs(path, foretold)
        print(f"{len(every)} predictions in {path}, before any of these cases runs")
        of_cases = _measured(options, results, wanted, options.rounds, link)

    records = records_of(every, foretold, {run.case.name: many for run, many in of_cases.items()})
    print(table(records, COLUMNS))
    if options.hosts == 2:
        print(table(records, LINK_COLUMNS))
    print(conclusion(every, records))
    leave(options, {"": records})


def plan(options: Options, every: Sequence[Case], of_profile: Sequence[ProfileRun]) -> str:
    """The plan: what will be run, and for how long about."""
    results = ResultCache(options.out / RESULTS)

    def missing(runs: Sequence[ProfileRun], rounds: int) -> list[ProfileRun]:
        rounds_of_runs = ((n, run) for n in range(rounds) for run in runs)
        return [run for number, run in rounds_of_runs if _label(run, number) not in results]

    # Runs of the cases and of the profile that have no result yet.
    cases_left = missing([ProfileRun(case, options.steps) for case in every], options.rounds)
    profile_left = missing(of_profile, REPEATS)

    # How long they take, by a rule of thumb.
    seconds = 0.0
    for run in (*cases_left, *profile_left):
        case = run.case
        big = max(1.0, max(case.hidden) / 256) * case.batch / 512  # by operations, roughly
        weight = (0.3 + 0.7 * big) * case.updates_per_step + 100 * case.latency_s
        weight += 250 * case.slow_s
        seconds += STARTING_S + STEP_S * run.steps * weight + case.dead_s
    lines = [f"  {case.name}" for case in every]
    lines.append(
        f"{len(every)} cases x {options.rounds} rounds: {len(cases_left)} runs left, and"
        f" {len(profile_left)} of the profile, about"
        f" {seconds / 60:.0f} to {2 * seconds / 60 + 1:.0f} minutes on 2 cores"
        f" (load now {os.getloadavg()[0]:.1f})"
    )
    return "\n".join(lines)


def _points(loop: Callable[[], list[LawPoint]]) -> list[dict[str, Any]]:
    """What a file keeps of a loop."""
    return [asdict(point) for point in loop()]


def _measured(
    options: Options,
    results: ResultCache,
    runs: Sequence[ProfileRun],
    rounds: int,
    link: Apart | None,
) -> dict[ProfileRun, list[MeasuredRun]]:
    """So many rounds of these runs, as the file has them; what is missing is measured, round by
    round, so that a slow minute is in all."""
    every_run = [(run, number) for number in range(rounds) for run in runs]
    work = {_label(*one): partial(_run, one[0], options, link) for one in every_run}
    results.fill(work, "validate")
    return {
        run: [
            parse(MeasuredRun, results[label], f"{label} of {options.out / RESULTS}")
            for label in (_label(run, number) for number in range(rounds))
        ]
        for run in runs
    }


def _run(run: ProfileRun, options: Options, link: Apart | None) -> dict[str, Any]:
    """What a run measures, for a file; a loaded run is repeated once, then kept as such."""
    for _ in range(2):
        with ForeignLoad() as load:
            measured = run_case(run.case, run.steps, *([link] if link else []))
        if load.cores <= options.most_foreign_cores and measured.on_its_link:
            break
    return asdict(replace(measured, foreign_cores=load.cores))


def _label(run: ProfileRun, number: int) -> str:
    """The label of a run's result: everything that decides it."""
    return f"{run.case.name}, {run.steps} steps, round {number}"
