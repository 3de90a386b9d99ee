"""Predictions of runs on this host against the runs: throughput, stages, staleness, with bands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np

from experiments.benching.windows import ForeignCores, ForeignLoad
from experiments.options import OneOf, Planned, Some, default_jobs
from experiments.result_cache import ResultCache
from experiments.tables import Column, aligned, leave, table
from experiments.validating import from_sync
from experiments.validating.cases import Case, apart, chosen, deciding, held_by, travels
from experiments.validating.errors import GOALS, GOALS_APART, band_of, error, verdicts
from experiments.validating.link import Apart
from experiments.validating.loops import additions, exchanges, halvings, pulls, sleeps
from experiments.validating.profiling import (
    LINK_TOLERANCE,
    REPEATS,
    MeasuredRun,
    Profile,
    ProfileRun,
    fit_profile,
    profiled,
    run_case,
)
from experiments.validating.schedule import Schedule, contended, schedule
from experiments.validating.stages import MISSING, PARTS, LawPoint, Stages, costs_by_law, parts_of
from persia_sim.base.schema import Within, parse
from persia_sim.base.vocabulary import Mode

RESULTS = "measured.jsonl"
SIMULATED_STEPS = 200
MODES = tuple(map(str, Mode))
STARTING_S, STEP_S = 0.4, 0.008
"""Seconds of the start of a run, and of a step of the reference, on two quiet cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Profile two configurations in short runs of this host, predict others, run and compare.

    Each case departs from a reference (hybrid, one rank, tau 4, batch 512, 26 fields, rows of 16,
    an MLP of 256-128) in mode, ranks, shards, tau, batch, width of rows, ids of a field, MLP,
    injected latency, or servers that are processes. The schedule's own error is that of the
    simulator with the measured stages.
    """

    hosts: Annotated[int, Within(1, 2)] = 1
    """2: servers are processes of a second host, a network namespace at a link that is shaped to
    several rates (needs root, iproute2 and util-linux)."""
    fitted_to: Annotated[str, OneOf(("modes", "sync"))] = "modes"
    """What the profile is fitted to: runs of several modes and of one and two ranks; or sync with
    one rank alone, measured twice, from which all else is predicted: every mode, windows, permits,
    a slow server, a dead one. These predictions are in a file before a case runs."""
    modes: Some[Annotated[str, OneOf(MODES)]] = MODES
    """Keep the cases of these modes."""
    ranks: Some[Annotated[int, Within(1, 2)]] = (1, 2)
    """Keep the cases with these numbers of ranks."""
    rounds: Annotated[int, Within(1, 1_000)] = 3
    """Interleaved rounds of all cases; with 1, four cases only (five minutes)."""
    steps: Annotated[int, Within(30, 100_000)] = 240
    """Steps of each rank in a run; the first third is warm-up."""
    most_foreign_cores: ForeignCores = 0.15
    """A run beside which other processes used more cores than this is repeated once."""

    def _check(self) -> None:
        if self.hosts == 2 and self.fitted_to == "sync":
            raise ValueError("--fitted-to sync is for runs of one host: drop it, or --hosts 2")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction of a case."""

    stages: Stages
    """Stages as a clock sees them beside the case's other threads."""
    schedule: Schedule
    extrapolated: tuple[str, ...]
    latency_s: float = 0.0
    """The injected one, as it is slept."""


def cases(options: Options) -> list[Case]:
    """The cases that the options keep, in the order in which they run."""
    chosen_cases = [
        case
        for case in _choice(options)(quick=options.rounds == 1)
        if str(case.mode) in options.modes and case.ranks in options.ranks
    ]
    if not chosen_cases:
        raise ValueError(
            f"modes {', '.join(options.modes)} with ranks {', '.join(map(str, options.ranks))}"
            " leave no case; add a mode or a number of ranks"
        )
    return chosen_cases


def _choice(options: Options) -> Callable[[bool], list[Case]]:
    if options.fitted_to == "sync":
        return deciding
    return apart if options.hosts == 2 else chosen


def _profile(options: Options) -> tuple[list[ProfileRun], int]:
    """The runs of the profile, and how often each is measured."""
    if options.fitted_to == "sync":
        return from_sync.profile_runs(), from_sync.REPEATS
    return profiled(options.hosts == 2), REPEATS


def run(options: Options) -> None:
    """Print the plan, measure what is missing, then the tables; writes validate.csv."""
    # The plan; a fit to sync has a way of its own.
    every = cases(options)
    print(plan(options, every))
    if options.dry_run:
        return
    if options.fitted_to == "sync":
        _from_sync(options, every)
        return

    # A profile of the host, predictions from that alone, and runs to hold them against.
    profile, foreign, done = _measure(options, every)
    forecasts = {case.name: forecast(profile, case, options.steps) for case in every}
    records = compare(every, forecasts, done)

    # Tables, goals, and what was not measured.
    print(profile_table(profile, foreign))
    print(table(records, COLUMNS))
    print(table(records, STAGE_COLUMNS if options.hosts == 1 else LINK_COLUMNS))
    print(conclusion(records))
    for missing in MISSING:
        print(f"not measured: {missing}")
    leave(options, {"": records})


def plan(options: Options, every: Sequence[Case]) -> str:
    """The plan: what will be run, and for how long about."""
    results = ResultCache(options.out / RESULTS)

    def missing(runs: Sequence[ProfileRun], rounds: int) -> list[ProfileRun]:
        rounds_of_runs = ((n, run) for n in range(rounds) for run in runs)
        return [run for number, run in rounds_of_runs if _label(run, number) not in results]

    # Runs of the cases and of the profile that have no result yet.
    of_cases = missing([ProfileRun(case, options.steps) for case in every], options.rounds)
    of_profile = missing(*_profile(options))

    # How long they take, by a rule of thumb.
    seconds = 0.0
    for run in (*of_cases, *of_profile):
        case = run.case
        big = max(1.0, max(case.hidden) / 256) * case.batch / 512  # by operations, roughly
        weight = (0.3 + 0.7 * big) * case.updates_per_step + 100 * case.latency_s
        weight += 250 * case.slow_s
        seconds += STARTING_S + STEP_S * run.steps * weight + case.dead_s
    lines = [f"  {case.name}" for case in every]
    lines.append(
        f"{len(every)} cases x {options.rounds} rounds: {len(of_cases)} runs left, and"
        f" {len(of_profile)} of the profile, about"
        f" {seconds / 60:.0f} to {2 * seconds / 60 + 1:.0f} minutes on 2 cores"
        f" (load now {os.getloadavg()[0]:.1f})"
    )
    return "\n".join(lines)


def forecast(profile: Profile, case: Case, steps: int) -> Forecast:
    """The laws' stages through the schedule, on the cores and the interpreter of this host."""
    held = held_by(case, steps)
    of_case = case.mode, case.ranks, bool(case.servers), case.spread, case.half
    costs = costs_by_law(profile.laws, held, *of_case)
    latency_s = 0.0
    if case.latency_s:
        latency_s = profile.laws["sleep"]({"one": 1.0, "asked_s": case.latency_s})
    expected, stages = contended(case, costs, profile.host, SIMULATED_STEPS, latency_s)
    return Forecast(stages, expected, costs.extrapolated, latency_s)


def compare(
    every: Sequence[Case], forecasts: dict[str, Forecast], runs: dict[str, list[MeasuredRun]]
) -> list[dict[str, Any]]:
    """A record for each case: what was predicted, what its runs measured (medians), errors."""
    # Runs on a link that was off its rate count only where there are no others.
    used = {name: [d for d in many if d.on_its_link] or many for name, many in runs.items()}
    ratios = {
        name: [d.samples_per_s / forecasts[name].schedule.samples_per_s for d in many]
        for name, many in used.items()
    }
    records = []
    for case in every:
        # The runs, and the simulator fed with their stages: the error of the schedule alone. Of
        # servers apart, a call waits for the window and the link, too: no stage is measured.
        measured_runs = used[case.name]
        expected = forecasts[case.name]
        rate = float(np.median([d.samples_per_s for d in measured_runs]))
        late = float(np.mean([d.stale_steps for d in measured_runs]))
        timed = measured_runs if case.gbit_per_s is None else []
        fed = [
            schedule(
                case, d.measured.wall, SIMULATED_STEPS, d.measured.dense_cv, expected.latency_s
            )
            for d in timed
        ]
        errors = [error(s.samples_per_s, d.samples_per_s) for s, d in zip(fed, timed, strict=True)]
        band = band_of(case.name, ratios)
        predicted = expected.schedule.samples_per_s
        record: dict[str, Any] = {
            "case": case.name,
            "samples_per_s": rate,
            "predicted": predicted,
            "error": error(predicted, rate),
            "schedule_error": float(np.median(errors)) if errors else "",
            "band_low": predicted * band[0] if band else "",
            "band_high": predicted * band[1] if band else "",
            "runs": len(measured_runs),
            "inside": sum(band[0] <= r <= band[1] for r in ratios[case.name]) if band else "",
            "stale_steps": late,
            "stale_predicted": expected.schedule.stale_steps,
            "stale_error": error(expected.schedule.stale_steps, late),
            "stale_schedule": float(np.mean([s.stale_steps for s in fed])) if fed else "",
            "foreign_cores": float(np.median([d.foreign_cores for d in measured_runs])),
            "extrapolated": "; ".join(expected.extrapolated),
        }
        if case.gbit_per_s is not None:
            record |= _of_link(case, runs[case.name])
        for stage, seconds in parts_of(expected.stages).items():
            measured = float(np.median([parts_of(d.measured.wall)[stage] for d in measured_runs]))
            record |= {
                f"{stage}_s": measured,
                f"{stage}_predicted_s": seconds,
                f"{stage}_error": error(seconds, measured),
            }
        records.append(record)
    return records


COLUMNS: dict[str, Column] = {
    "": "{case}",
    "samples/s": "{samples_per_s:,.0f}",
    "predicted": "{predicted:,.0f}",
    "error": "{error:+.1%}",
    "of schedule": lambda r: f"{r['schedule_error']:+.1%}" if r["schedule_error"] != "" else "-",
    "90 % band": lambda r: (
        f"{r['band_low']:,.0f}-{r['band_high']:,.0f}" if r["band_low"] != "" else "-"
    ),
    "inside": lambda r: f"{r['inside']}/{r['runs']}" if r["inside"] != "" else "-",
    "stale": "{stale_steps:.2f}",
    "stale predicted": "{stale_predicted:.2f}",
    "stale error": lambda r: (
        f"{r['stale_error']:+.1%}" if r["stale_steps"] or r["stale_predicted"] else "-"
    ),
    "foreign cores": "{foreign_cores:.2f}",
    "extrapolated": lambda r: r["extrapolated"] or "-",
}
"""Throughput and staleness: measured, predicted, signed errors, the band."""
STAGE_COLUMNS: dict[str, Column] = {
    "ms a batch (error)": "{case}",
    **{
        name: lambda r, name=name: f"{1e3 * r[f'{name}_s']:.2f} ({r[f'{name}_error']:+.0%})"
        for name in PARTS
    },
}
"""Milliseconds of a rank's batch in each stage, and the signed error of the prediction."""


def _of_link(case: Case, runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Bytes of a rank's batch, counted and predicted, and what the link did."""
    there, back = map(float, np.median([d.link_bytes for d in runs], axis=0))
    expected = travels(case)
    reads = 2 if case.mode is Mode.LOOKAHEAD else 1  # read ahead, and again
    sent = expected.request_bytes + expected.push_bytes + expected.summed_bytes
    came = reads * expected.rows_bytes + expected.summed_bytes
    return {
        "sent_bytes": there,
        "sent_error": error(sent, there),
        "come_bytes": back,
        "come_error": error(came, back),
        "control": max((d.control for d in runs), key=lambda share: abs(share - 1)),
        "on_its_link": sum(d.on_its_link for d in runs),
        "link_runs": len(runs),
    }


LINK_COLUMNS: dict[str, Column] = {
    "of a rank's batch": "{case}",
    "sent [kB]": lambda r: f"{r['sent_bytes'] / 1e3:,.0f} ({r['sent_error']:+.1%})",
    "come [kB]": lambda r: f"{r['come_bytes'] / 1e3:,.0f} ({r['come_error']:+.1%})",
    "worst control": "{control:.2f}",
    "on its link": "{on_its_link}/{link_runs}",
}
"""Bytes that the interface counted and the signed error of the prediction; control transfers."""


def profile_table(profile: Profile, foreign_cores: float) -> str:
    """Points, fit and range of each law, and what threads cost each other."""
    # Each law, how well it fits, and where it was measured.
    cells = []
    for name, law in profile.laws.items():
        ranges = ", ".join(f"{n} {_short(a)} to {_short(b)}" for n, (a, b) in law.ranges.items())
        cells.append([name, str(law.points), f"{law.spread:.0%}", ranges])

    # What a clock sees beyond these laws: others' threads.
    host = profile.host
    waits = ", ".join(
        f"{s} {m:.0%}, {host.among[s]:.0%} (+{host.crowded[s]:.0%})"
        for s, m in host.meeting.items()
    )
    return "\n".join(
        [
            aligned(["law", "points", "spread", "measured at"], cells),
            f"{profile.constants} fitted constants, none from a predicted case; {host.cores} cores;"
            f" a further busy core makes stages {host.memory:.1%} longer; dense steps vary by"
            f" {host.dense_cv:.0%}",
            "of the seconds for which its rank's other threads, other ranks' (and with all cores"
            " busy all of them) hold the interpreter a stage waits for:",
            f"  {waits}",
            f"other processes used {foreign_cores:.2f} cores beside the median run of the profile",
        ]
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1 else f"{number:g}"


def conclusion(records: Sequence[dict[str, Any]]) -> str:
    """The goals beside the errors."""
    late = [r["stale_error"] for r in records if r["stale_steps"] or r["stale_predicted"]]
    banded = [r for r in records if r["inside"] != ""]
    inside = [n < r["inside"] for r in banded for n in range(r["runs"])]
    alone = [abs(r["schedule_error"]) for r in records if r["schedule_error"] != ""]
    foreign = float(np.median([r["foreign_cores"] for r in records]))
    linked = [r for r in records if "control" in r]
    goals = GOALS_APART if linked else GOALS
    lines = verdicts([r["error"] for r in records], late, inside, goals)
    if alone:
        lines.append(f"of which the schedule's, with measured stages: mean {np.mean(alone):.1%}")
    lines += _of_links(linked)
    lines.append(f"other processes used {foreign:.2f} cores beside the median case")
    if foreign > 0.15:
        lines.append("the machine was loaded: these errors hold its noise, too")
    return "\n".join(lines)


def _of_links(records: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about servers apart: bytes, hybrid over sync, and runs that were refused."""
    if not records:
        return []

    # Bytes are counted on both sides: their error says whether the model moves what the run moves.
    worst = max(abs(r[f"{way}_error"]) for r in records for way in ("sent", "come"))
    lines = [f"bytes, largest error: {worst:.1%} (goal {BYTES_GOAL:.0%})"]

    # What hybrid gains over sync at each link.
    by_name = {r["case"]: r for r in records}
    for name, hybrid in by_name.items():
        sync = by_name.get(name.replace(f"{Mode.HYBRID} tau 4", Mode.SYNC))
        if sync is None or sync is hybrid:
            continue
        predicted = hybrid["predicted"] / sync["predicted"]
        measured = hybrid["samples_per_s"] / sync["samples_per_s"]
        lines.append(
            f"hybrid over sync, {name.partition(', ')[2]}: predicted {predicted:.2f}, measured"
            f" {measured:.2f} ({error(predicted, measured):+.0%}; goal {RATIO_GOAL:.0%})"
        )

    # A link that was off its rate says nothing.
    refused = sum(r["link_runs"] - r["on_its_link"] for r in records)
    lines.append(f"{refused} runs on a link more than {LINK_TOLERANCE:.0%} off its rate")
    return lines


BYTES_GOAL = 0.01
RATIO_GOAL = 0.10


def _measure(
    options: Options, every: Sequence[Case]
) -> tuple[Profile, float, dict[str, list[MeasuredRun]]]:
    """The profile and the cores of others beside its median run; the cases' runs, by name.

    Rounds of both take turns, so that a slow minute is in both.
    """
    # All runs, round by round, of the profile and of the cases.
    of_profile, _ = _profile(options)
    results = ResultCache(options.out / RESULTS)
    wanted = [ProfileRun(case, options.steps) for case in every]
    loops = _loops()
    every_run = [
        (run, number)
        for number in range(max(REPEATS, options.rounds))
        for many, runs in ((REPEATS, of_profile), (options.rounds, wanted))
        if number < many
        for run in runs
    ]

    # A second host is made only where something is missing; then loops and runs are measured.
    missing = "exchange" not in results or any(_label(*one) not in results for one in every_run)
    with closing(Apart("hosts")) if options.hosts == 2 and missing else nullcontext() as link:
        if options.hosts == 2:
            loops["exchange"] = partial(exchanges, link)
        work = _work_of(loops)
        work |= {_label(*one): partial(_run, one[0], options, link) for one in every_run}
        results.fill(work, "validate")

    # The profile is fitted anew from all of them.
    points = _points_of(results, loops)
    profile = {run: _done(results, run, REPEATS, options) for run in of_profile}
    foreign = float(np.median([one.foreign_cores for many in profile.values() for one in many]))
    of_cases = {run.case.name: _done(results, run, options.rounds, options) for run in wanted}
    return fit_profile(profile, points, default_jobs()), foreign, of_cases


def _from_sync(options: Options, every: Sequence[Case]) -> None:
    """The profile, the predictions, and only then the cases."""
    results = ResultCache(options.out / RESULTS)
    loops = _loops()
    results.fill(_work_of(loops), "validate")

    def measured(runs: Sequence[ProfileRun], rounds: int) -> dict[ProfileRun, list[MeasuredRun]]:
        every_run = [(run, number) for number in range(rounds) for run in runs]
        work = {_label(*one): partial(_run, one[0], options, None) for one in every_run}
        results.fill(work, "validate")
        return {run: _done(results, run, rounds, options) for run in runs}

    points = _points_of(results, loops)
    from_sync.run(options, every, measured, points, default_jobs())


Loops = dict[str, Callable[[], list[LawPoint]]]


def _loops() -> Loops:
    """What is timed in a loop of its own."""
    return {"add_gradient": additions, "half": halvings, "pull": pulls, "sleep": sleeps}


def _work_of(loops: Loops) -> dict[str, Callable[[], Any]]:
    """What a file keeps of each loop, when it is called."""
    return {
        name: lambda measure=measure: [*map(asdict, measure())] for name, measure in loops.items()
    }


def _points_of(results: ResultCache, loops: Loops) -> dict[str, list[LawPoint]]:
    return {name: [parse(LawPoint, p, name) for p in results[name]] for name in loops}


def _done(results: ResultCache, run: ProfileRun, count: int, options: Options) -> list[MeasuredRun]:
    """The first so many rounds of a run, as the file has them."""
    labels = [_label(run, number) for number in range(count)]
    return [
        parse(MeasuredRun, results[label], f"{label} of {options.out / RESULTS}")
        for label in labels
    ]


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
