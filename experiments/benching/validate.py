"""Predictions of runs on this host against the runs: throughput, stages, staleness, with bands."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benching.machine_load import ForeignLoad
from experiments.checks import between, each_between, each_known, not_empty
from experiments.folders import sole_writer
from experiments.tables import aligned, write_csv
from experiments.validating.bands import Band, band_of, error, verdicts
from experiments.validating.cases import Case, chosen, held_by
from experiments.validating.host_laws import (
    MISSING,
    TERMS,
    HostLaw,
    Point,
    fit_law,
    measure_host,
    measurements_of,
    stages_by_law,
)
from experiments.validating.running import Found, run_case
from experiments.validating.schedule import Schedule, contended, schedule
from experiments.validating.stages import Stages
from persia_sim.words.vocabulary import Mode
from runtime.run.folder import write_json

SIMULATED_STEPS = 200
MODES = tuple(map(str, (Mode.SYNC, Mode.LOOKAHEAD, Mode.RAW_HYBRID, Mode.HYBRID)))
PROFILED = (Case(), Case(dim=32, hidden=(512, 256)))
RUN_S, PROFILE_S = 2.5, 15.0
"""Of a run of 90 steps, and of a profiled configuration, on two quiet cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Profile two configurations of this host, predict others, run them, and compare.

    Each case departs from a reference (hybrid, one rank, tau 4, batch 512, 26 fields, rows of 16,
    an MLP of 256-128) in mode, ranks, shards, tau, batch, width of rows, ids of a field, MLP, or
    injected latency. The schedule's own error is that of the simulator with the measured stages.
    """

    modes: tuple[str, ...] = MODES
    """Keep the cases of these modes: sync, lookahead, raw_hybrid, hybrid."""
    ranks: tuple[int, ...] = (1, 2)
    """Keep the cases with these numbers of ranks."""
    rounds: int = 3
    """Interleaved rounds of all cases; with 1, four cases only (two minutes)."""
    steps: int = 90
    """Dense updates of a run; the first third is warm-up."""
    most_foreign_cores: float = 0.15
    """A run beside which other processes used more cores than this is repeated once."""
    out: Path = Path("runs/validate")
    """Folder of the profile, the runs and the CSV; a run that is there is not repeated."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        not_empty(modes=self.modes, ranks=self.ranks)
        each_known(dict.fromkeys(MODES), modes=self.modes)
        each_between(1, 2, ranks=self.ranks)
        between(1, 1_000, rounds=self.rounds)
        between(30, 100_000, steps=self.steps)
        between(0, 1024, most_foreign_cores=self.most_foreign_cores)


@dataclass(frozen=True, slots=True)
class Done:
    """One run of one case, and the machine beside it."""

    case: Case
    round: int
    found: Found
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Laws:
    """What the profile gave, and the machine beside it."""

    by_stage: dict[str, HostLaw]
    foreign_cores: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was predicted of a case before it ran."""

    stages: Stages
    """With the cores that there are."""
    schedule: Schedule
    extrapolated: tuple[str, ...]


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
        laws, done = _measure(options, every)
        forecasts = {case.name: forecast(laws.by_stage, case, options.steps) for case in every}
        records = compare(every, forecasts, done)
        write_csv(options.out / "validate.csv", records)
    print(laws_table(laws))
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
    profile_s = 0 if _laws_file(options).exists() else PROFILE_S * len(PROFILED)
    seconds = profile_s + sum(RUN_S * options.steps / 90 * _weight(case) for _, case in missing)
    lines = [f"  {case.name}" for case in every]
    lines.append(
        f"{len(every)} cases x {options.rounds} rounds: {len(missing)} runs left, about"
        f" {seconds / 60:.0f} to {2 * seconds / 60 + 1:.0f} minutes on 2 cores"
        f" (load now {os.getloadavg()[0]:.1f})"
    )
    return "\n".join(lines)


def forecast(laws: dict[str, HostLaw], case: Case, steps: int) -> Forecast:
    """The laws' stages through the schedule, on the cores of this host."""
    stages, flags = stages_by_law(laws, held_by(case, steps), case.ranks)
    found = contended(case, stages, SIMULATED_STEPS)
    return Forecast(stages.times(found.stretch), found, flags)


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
        fed = [schedule(case, d.found.stages, SIMULATED_STEPS) for d in own]
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
            "stretch": told.schedule.stretch,
            "foreign_cores": float(np.median([d.foreign_cores for d in own])),
            "extrapolated": "; ".join(told.extrapolated),
        }
        for stage, seconds in told.stages.parts().items():
            measured = float(np.median([d.found.stages.parts()[stage] for d in own]))
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


def laws_table(laws: Laws) -> str:
    """Points, fit and range of each law."""
    cells = []
    for name, law in laws.by_stage.items():
        ranges = ", ".join(f"{n} {a:,.0f} to {b:,.0f}" for n, (a, b) in law.ranges.items())
        cells.append([name, str(law.points), f"{law.spread:.0%}", ranges])
    found = aligned(["law", "points", "spread", "measured at"], cells)
    return f"{found}\nother processes used {laws.foreign_cores:.2f} cores beside the profile"


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


def _measure(options: Options, every: Sequence[Case]) -> tuple[Laws, list[Done]]:
    from tqdm import tqdm

    total = len(every) * options.rounds
    with tqdm(total=total + measurements_of(PROFILED), desc="validate", disable=None) as bar:
        laws = _laws(options, lambda: bar.update() and None)
        done = []
        for one in _runs(options, every):
            done.append(one)
            bar.update()
    return laws, done


def _laws(options: Options, tick: Callable[[], None]) -> Laws:
    """Of the profile; one beside which the machine was loaded is measured once more."""
    file = _laws_file(options)
    if file.exists():
        for _ in range(measurements_of(PROFILED)):
            tick()
    else:
        for told in ({"tick": tick}, {}):  # the bar moves once
            with ForeignLoad() as load:
                points = measure_host(PROFILED, **told)
            if load.cores <= options.most_foreign_cores:
                break
        found = {stage: [asdict(p) for p in own] for stage, own in points.items()}
        write_json(file, {"points": found, "foreign_cores": load.cores})
    kept = json.loads(file.read_text())
    laws = {
        stage: fit_law(stage, [Point(p["at"], p["seconds"]) for p in own])
        for stage, own in kept["points"].items()
    }
    return Laws(laws, kept["foreign_cores"])


def _runs(options: Options, every: Sequence[Case]) -> Iterator[Done]:
    """All cases once a round; a loaded run is repeated once, then kept as such."""
    for number in range(options.rounds):
        for case in every:
            file = _file(options, case, number)
            if not file.exists():
                for _ in range(2):
                    with ForeignLoad() as load:
                        found = run_case(case, options.steps)
                    if load.cores <= options.most_foreign_cores:
                        break
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"found": asdict(found), "foreign_cores": load.cores})
            kept = json.loads(file.read_text())
            stages = Stages(**kept["found"].pop("stages"))
            yield Done(case, number, Found(**kept["found"], stages=stages), kept["foreign_cores"])


def _file(options: Options, case: Case, number: int) -> Path:
    words = json.dumps([asdict(case), options.steps], default=str, sort_keys=True)
    return options.out / "runs" / f"{hashlib.sha256(words.encode()).hexdigest()[:12]}-{number}.json"


def _laws_file(options: Options) -> Path:
    words = json.dumps([TERMS, *map(asdict, PROFILED)], default=str, sort_keys=True)
    return options.out / f"laws-{hashlib.sha256(words.encode()).hexdigest()[:8]}.json"


def _weight(case: Case) -> float:
    """Of a run against the reference's, roughly: by operations."""
    big = max(1.0, max(case.hidden) / 256) * case.batch / 512
    return 0.5 + 0.5 * big * max(1, case.bag - 1)
