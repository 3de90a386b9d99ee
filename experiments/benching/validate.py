"""Predictions of runs on this host against the runs: throughput, stages, staleness, with bands."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.benching.windows import ForeignCores, ForeignLoad
from experiments.kept import sole_writer
from experiments.options import Planned, Some, one_of, within
from experiments.tables import aligned, write_csv
from experiments.validating.bands import Band, band_of, error, verdicts
from experiments.validating.cases import Case, chosen, held_by
from experiments.validating.host_laws import MISSING, Costs, Point, costs_by_law
from experiments.validating.profiling import (
    REPEATS,
    Found,
    Profile,
    ProfileRun,
    additions,
    ahead,
    alone,
    fit_profile,
    late,
    pulls,
    run_case,
    served,
    sleeps,
    together,
)
from experiments.validating.schedule import Schedule, contended, cores_here, schedule
from experiments.validating.stages import Stages
from persia_sim.words.vocabulary import Mode
from runtime.run.folder import write_json

SIMULATED_STEPS = 200
MODES = tuple(map(str, Mode))
STARTING_S, STEP_S = 0.4, 0.008
"""Of a run, and of a step of the reference, on two quiet cores."""
_FORMAT = 3
"""Of a run's file; one of another format is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Profile two configurations in short runs of this host, predict others, run and compare.

    Each case departs from a reference (hybrid, one rank, tau 4, batch 512, 26 fields, rows of 16,
    an MLP of 256-128) in mode, ranks, shards, tau, batch, width of rows, ids of a field, MLP,
    injected latency, or servers that are processes. The schedule's own error is that of the
    simulator with the measured stages.
    """

    modes: Some[Annotated[str, one_of(MODES)]] = MODES
    """Keep the cases of these modes."""
    ranks: Some[Annotated[int, within(1, 2)]] = (1, 2)
    """Keep the cases with these numbers of ranks."""
    rounds: Annotated[int, within(1, 1_000)] = 3
    """Interleaved rounds of all cases; with 1, four cases only (five minutes)."""
    steps: Annotated[int, within(30, 100_000)] = 240
    """Steps of each rank in a run; the first third is warm-up."""
    most_foreign_cores: ForeignCores = 0.15
    """A run beside which other processes used more cores than this is repeated once."""


@dataclass(frozen=True, slots=True)
class Done:
    """One run of one case, and the machine beside it."""

    case: Case
    round: int
    found: Found
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was predicted of a case."""

    stages: Stages
    """As a clock sees them beside the case's other threads."""
    schedule: Schedule
    extrapolated: tuple[str, ...]
    latency_s: float = 0.0
    """The injected one, as it is slept."""


def cases(options: Options) -> list[Case]:
    """Those that the options keep, in the order in which they run."""
    found = [
        case
        for case in chosen(quick=options.rounds == 1)
        if str(case.mode) in options.modes and case.ranks in options.ranks
    ]
    if not found:
        raise ValueError(
            f"modes {', '.join(options.modes)} with ranks {', '.join(map(str, options.ranks))}"
            " leave no case; add a mode or a number of ranks"
        )
    return found


def run(options: Options) -> None:
    """Print the plan, measure what is missing, then the tables; writes validate.csv."""
    every = cases(options)
    print(plan(options, every))
    if options.dry_run:
        return
    with sole_writer(options.out):
        profile, foreign, done = _measure(options, every)
        forecasts = {case.name: forecast(profile, case, options.steps) for case in every}
        records = compare(every, forecasts, done)
        write_csv(options.out / "validate.csv", records)
    print(profile_table(profile, foreign))
    print(table(records))
    print(stage_table(records))
    print(conclusion(records))
    for missing in MISSING:
        print(f"not measured: {missing}")
    print(options.out / "validate.csv")


def plan(options: Options, every: Sequence[Case]) -> str:
    """What will be run, and for how long about."""
    missing = [
        (number, case)
        for number in range(options.rounds)
        for case in every
        if not _file(options, case, number).exists()
    ]
    runs = [(case, options.steps) for _, case in missing]
    own = [
        run for n in range(REPEATS) for run in profiled() if not _run_file(options, run, n).exists()
    ]
    runs += [(run.case, run.steps) for run in own]
    seconds = sum(STARTING_S + STEP_S * steps * _weight(case) for case, steps in runs)
    lines = [f"  {case.name}" for case in every]
    lines.append(
        f"{len(every)} cases x {options.rounds} rounds: {len(missing)} runs left, and {len(own)} of"
        " the profile, about"
        f" {seconds / 60:.0f} to {2 * seconds / 60 + 1:.0f} minutes on 2 cores"
        f" (load now {os.getloadavg()[0]:.1f})"
    )
    return "\n".join(lines)


def forecast(profile: Profile, case: Case, steps: int) -> Forecast:
    """The laws' stages through the schedule, on the cores and the interpreter of this host."""
    costs = costs_of(profile, case, steps)
    latency_s = _slept_s(profile, case)
    found, stages = contended(case, costs, profile.host, SIMULATED_STEPS, latency_s)
    return Forecast(stages, found, costs.extrapolated, latency_s)


def costs_of(profile: Profile, case: Case, steps: int) -> Costs:
    """What a case's stages cost alone, by the laws."""
    held = held_by(case, steps)
    return costs_by_law(profile.laws, held, case.mode, case.ranks, bool(case.servers))


def _slept_s(profile: Profile, case: Case) -> float:
    """How long a thread sleeps that asks for the case's latency."""
    asked = case.latency_s
    return profile.laws["sleep"]({"one": 1.0, "asked_s": asked}) if asked else 0.0


def compare(
    every: Sequence[Case], forecasts: dict[str, Forecast], done: Sequence[Done]
) -> list[dict[str, Any]]:
    """A record for each case: what was predicted, what its runs measured (medians), errors."""
    runs = {case.name: [d for d in done if d.case == case] for case in every}
    ratios = {
        name: [d.found.samples_per_s / forecasts[name].schedule.samples_per_s for d in own]
        for name, own in runs.items()
    }
    records = []
    for case in every:
        own, told = runs[case.name], forecasts[case.name]
        rate = float(np.median([d.found.samples_per_s for d in own]))
        late = float(np.mean([d.found.stale_steps for d in own]))
        runs_stages = [d.found.measured for d in own]
        fed = [
            schedule(case, m.wall, SIMULATED_STEPS, m.dense_cv, told.latency_s) for m in runs_stages
        ]
        errors = [
            error(s.samples_per_s, d.found.samples_per_s) for s, d in zip(fed, own, strict=True)
        ]
        band = band_of(case.name, ratios)
        predicted = told.schedule.samples_per_s
        record: dict[str, Any] = {
            "case": case.name,
            "samples_per_s": rate,
            "predicted": predicted,
            "error": error(predicted, rate),
            "schedule_error": float(np.median(errors)),
            "band_low": predicted * band.low if band else "",
            "band_high": predicted * band.high if band else "",
            "runs": len(own),
            "inside": _inside(band, ratios[case.name]),
            "stale_steps": late,
            "stale_predicted": told.schedule.stale_steps,
            "stale_error": error(told.schedule.stale_steps, late),
            "stale_schedule": float(np.mean([s.stale_steps for s in fed])),
            "foreign_cores": float(np.median([d.foreign_cores for d in own])),
            "extrapolated": "; ".join(told.extrapolated),
        }
        for stage, seconds in told.stages.parts().items():
            measured = float(np.median([d.found.measured.wall.parts()[stage] for d in own]))
            record |= {
                f"{stage}_s": measured,
                f"{stage}_predicted_s": seconds,
                f"{stage}_error": error(seconds, measured),
            }
        records.append(record)
    return records


def _inside(band: Band | None, ratios: Sequence[float]) -> int | str:
    return sum(map(band.holds, ratios)) if band else ""


def table(records: Sequence[dict[str, Any]]) -> str:
    """Throughput and staleness: measured, predicted, signed errors, the band."""
    header = ["", "samples/s", "predicted", "error", "of schedule", "90 % band", "inside"]
    header += ["stale", "predicted", "error", "foreign cores", "extrapolated"]
    cells = []
    for r in records:
        band = f"{r['band_low']:,.0f}-{r['band_high']:,.0f}" if r["band_low"] != "" else "-"
        inside = f"{r['inside']}/{r['runs']}" if r["inside"] != "" else "-"
        late = f"{r['stale_error']:+.1%}" if r["stale_steps"] or r["stale_predicted"] else "-"
        cells.append(
            [r["case"], f"{r['samples_per_s']:,.0f}", f"{r['predicted']:,.0f}",
             f"{r['error']:+.1%}", f"{r['schedule_error']:+.1%}", band, inside,
             f"{r['stale_steps']:.2f}", f"{r['stale_predicted']:.2f}", late,
             f"{r['foreign_cores']:.2f}", r["extrapolated"] or "-"]
        )  # fmt: skip
    return aligned(header, cells)


def stage_table(records: Sequence[dict[str, Any]]) -> str:
    """Milliseconds of a rank's batch in each stage, and the signed error of the prediction."""
    names = ("load", "lookup", "dense", "push")
    cells = [
        [r["case"], *(f"{1e3 * r[f'{n}_s']:.2f} ({r[f'{n}_error']:+.0%})" for n in names)]
        for r in records
    ]
    return aligned(["ms a batch (error)", *names], cells)


def profile_table(profile: Profile, foreign_cores: float) -> str:
    """Points, fit and range of each law, and what threads cost each other."""
    cells = []
    for name, law in profile.laws.items():
        ranges = ", ".join(f"{n} {_short(a)} to {_short(b)}" for n, (a, b) in law.ranges.items())
        cells.append([name, str(law.points), f"{law.spread:.0%}", ranges])
    host = profile.host
    waits = host.meeting
    return "\n".join(
        [
            aligned(["law", "points", "spread", "measured at"], cells),
            f"{profile.constants} fitted constants, none from a predicted case; {host.cores} cores;"
            f" a further busy core makes stages {host.memory:.1%} longer; dense steps vary by"
            f" {host.dense_cv:.0%}",
            "of the seconds for which its rank's other threads, other ranks' (and with all cores"
            " busy all of them) hold the interpreter a stage waits for:",
            "  "
            + ", ".join(
                f"{s} {m:.0%}, {host.among[s]:.0%} (+{host.crowded[s]:.0%})"
                for s, m in waits.items()
            ),
            f"other processes used {foreign_cores:.2f} cores beside the median run of the profile",
        ]
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1 else f"{number:g}"


def conclusion(records: Sequence[dict[str, Any]]) -> str:
    """The goals beside what was found."""
    late = [r["stale_error"] for r in records if r["stale_steps"] or r["stale_predicted"]]
    inside = [
        hit
        for r in records
        if r["inside"] != ""
        for hit in [True] * r["inside"] + [False] * (r["runs"] - r["inside"])
    ]
    found = verdicts([r["error"] for r in records], late, inside)
    alone = float(np.mean([abs(r["schedule_error"]) for r in records]))
    foreign = float(np.median([r["foreign_cores"] for r in records]))
    lines = [str(verdict) for verdict in found]
    lines.append(f"of which the schedule's, with measured stages: mean {alone:.1%}")
    lines.append(f"other processes used {foreign:.2f} cores beside the median case")
    if foreign > 0.15:
        lines.append("the machine was loaded: these errors hold its noise, too")
    return "\n".join(lines)


def profiled() -> list[ProfileRun]:
    """The runs of a profile."""
    return [*alone(), *late(), *ahead(), *together(), *served()]


def _measure(options: Options, every: Sequence[Case]) -> tuple[Profile, float, list[Done]]:
    """The profile and the cores of others beside its median run; the cases' runs.

    Rounds of both take turns, so that a slow minute is in both.
    """
    from tqdm import tqdm

    own = profiled()
    total = len(every) * options.rounds + REPEATS * len(own)
    runs: dict[ProfileRun, list[Found]] = {run: [] for run in own}
    loads, done = [], []
    loops = _loops(options.out / "profile" / f"loops-{_FORMAT}.json")
    with tqdm(total=total, desc="validate", disable=None) as bar:
        for number in range(max(REPEATS, options.rounds)):
            for run in own if number < REPEATS else ():
                file = _run_file(options, run, number)
                found, load = _kept(file, run.case, run.steps, options.most_foreign_cores)
                runs[run].append(found)
                loads.append(load)
                bar.update()
            for case in every if number < options.rounds else ():
                file = _file(options, case, number)
                found, load = _kept(file, case, options.steps, options.most_foreign_cores)
                done.append(Done(case, number, found, load))
                bar.update()
    return fit_profile(runs, loops, cores_here()), float(np.median(loads)), done


def _loops(file: Path) -> dict[str, list[Point]]:
    """What is measured without a run."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        measured = {"add_gradient": additions(), "pull": pulls(), "sleep": sleeps()}
        write_json(file, {name: [asdict(p) for p in own] for name, own in measured.items()})
    kept = json.loads(file.read_text())
    return {name: [Point(p["at"], p["seconds"]) for p in own] for name, own in kept.items()}


def _kept(file: Path, case: Case, steps: int, most_foreign: float) -> tuple[Found, float]:
    """What the run measured, and the cores of others beside it; run now if it is not there.

    A loaded run is repeated once, then kept as such.
    """
    if not file.exists():
        for _ in range(2):
            with ForeignLoad() as load:
                found = run_case(case, steps)
            if load.cores <= most_foreign:
                break
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"found": asdict(found), "foreign_cores": load.cores})
    kept = json.loads(file.read_text())
    return Found.read(kept["found"]), kept["foreign_cores"]


def _file(options: Options, case: Case, number: int) -> Path:
    return options.out / "runs" / f"{_hash(case, options.steps)}-{number}.json"


def _run_file(options: Options, run: ProfileRun, number: int) -> Path:
    return options.out / "profile" / f"{_hash(run.case, run.steps)}-{number}.json"


def _hash(case: Case, steps: int) -> str:
    words = json.dumps([_FORMAT, asdict(case), steps], default=str, sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def _weight(case: Case) -> float:
    """Of a step against the reference's, roughly: by operations."""
    big = max(1.0, max(case.hidden) / 256) * case.batch / 512
    return (0.3 + 0.7 * big) * case.updates_per_step + 100 * case.latency_s
