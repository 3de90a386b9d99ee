"""What lateness costs, fairly: nine data sets, every mode and bound, rates fixed and tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.checks import (
    COUNT,
    JOBS,
    ROWS,
    SEEDS,
    TAU,
    all_positive,
    between,
    each_between,
    not_empty,
    positive,
)
from experiments.gap.data_sets import DATA_SETS, RANKS, Found, Rates, data_set, find
from experiments.gap.decisions import TOLERANCE, decision_table
from experiments.gap.settings import checks_of, points_of, settings_of
from experiments.gap.skew import skew_of_run
from experiments.gap.table import Group, differing, gap_rows, group_of, too_wide
from experiments.gap.tuning import Choice, Trial, choose, grid, trials_of, tuning_records
from experiments.gaps import SYNC, Setting, curve_records, finished, thousandths
from experiments.points import Point
from experiments.statistics import Interval
from experiments.sweep import default_jobs, print_plan, run_points
from experiments.tables import aligned, write_csv
from persia_sim.words.vocabulary import Mode

CORE_S_PER_SAMPLE = 1 / 20_000
"""For the plan's estimate (source: points of 12,800 and 38,400 samples of this study, eight ranks
as one batch, one core: 1.2 and 1.6 core-seconds, 2026-11-22)."""
CORE_S_PER_POINT = 0.5
"""The same: forking, opening the data, four evaluations of 8,000 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """AUC, GAUC, log-loss, entropy and calibration by mode and bound, with intervals over seeds."""

    data_sets: tuple[str, ...] = tuple(DATA_SETS)
    """Which ones, or the path of your own schema (.toml); those that are not on this machine are
    left out, each with a line."""
    data_dir: Path | None = None
    """Folder with the real data; else PERSIA_DATA_DIR, else what `data get` downloaded."""
    modes: tuple[Mode, ...] = tuple(Mode)
    """Modes to compare; sync is the reference. lookahead and raw_hybrid, which equal sync and
    hybrid here, are run once as a check."""
    taus: tuple[int, ...] = (1, 4, 16, 64)
    """Bounds of the modes that read late rows; async has 0, too."""
    seeds: int = 5
    """Paired seeds, >= 2."""
    most_seeds: int = 10
    """As many where the interval of a gap is wider than --widest."""
    widest: float = 1e-3
    """Half width of a 95 % interval of an AUC gap that is narrow enough."""
    batch: int | None = None
    """Samples of a dense update; else each data set's own, 128 to 512."""
    samples: int | None = None
    """Only the first samples of each training part."""
    test_rows: int | None = None
    """Only the first rows of each test part, and of each validation part."""
    tuned: bool = True
    """Beside the fixed rates, rates tuned for each mode and bound on the validation part."""
    row_factors: tuple[float, ...] = (0.2, 0.45, 1.0, 2.2)
    """Tuning: the fixed row rate times these."""
    dense_factors: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """Tuning: the fixed dense rate times these; every pair of both is tried."""
    tuning_seeds: int = 2
    """Tuning: seeds of each pair, >= 1."""
    snapshots: int = 7
    """Evaluations along a run, for the gap along it; 0: none."""
    tolerance: float = TOLERANCE
    """AUC that a mode may lose in the decision table."""
    out: Path = Path("runs/gap-study")
    """Folder of the results; a second run does only what is missing."""
    jobs: int = default_jobs()
    """Points at a time."""
    dry_run: bool = False
    """Print the plan and stop."""

    def __post_init__(self) -> None:
        not_empty(
            data_sets=self.data_sets, modes=self.modes, taus=self.taus,
            row_factors=self.row_factors, dense_factors=self.dense_factors,
        )  # fmt: skip
        for name in self.data_sets:
            data_set(name)  # raises for unknown ones
        if Mode.SYNC not in self.modes or len(set(self.modes)) < 2:
            named = ", ".join(self.modes)
            raise ValueError(f"modes must hold sync, the reference, and another, got {named}")
        each_between(1, TAU[1], taus=self.taus)
        between(2, SEEDS[1], seeds=self.seeds)
        between(self.seeds, SEEDS[1], most_seeds=self.most_seeds)
        between(1, SEEDS[1], tuning_seeds=self.tuning_seeds)
        between(RANKS, COUNT[1], batch=self.batch)
        between(1, ROWS[1], samples=self.samples)
        between(*ROWS, test_rows=self.test_rows)
        between(0, COUNT[1], snapshots=self.snapshots)
        between(*JOBS, jobs=self.jobs)
        all_positive(row_factors=self.row_factors, dense_factors=self.dense_factors)
        positive(widest=self.widest, tolerance=self.tolerance)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run on one data set before anything is known of it."""

    found: Found
    settings: list[Setting]
    fixed: list[Point]
    checks: list[tuple[Point, Point]]
    """Runs that must equal others by law."""
    trials: list[Trial]

    @property
    def first(self) -> list[Point]:
        """All points that need no result of another."""
        tuning = [point for trial in self.trials for point in trial.points]
        return self.fixed + [one for one, _ in self.checks] + tuning


def run(options: Options) -> None:
    """Plan, run in three rounds (fixed and tuning, tuned, more seeds), tables and figure."""
    from paper_figs.gap_study import gap_study_figure  # late: pyplot takes over a second
    from paper_figs.style import save

    plans, told = plan(options)
    for line in told:
        print(line)
    if not plans:
        raise ValueError("data_sets must name one that is here; the synthetic ones always are")
    _print_costs(plans, options)
    if options.dry_run:
        return
    groups = train(plans, options)
    root = options.out
    rows = [
        row for group in groups for task in _tasks(group) for row in gap_rows(group, task, root)
    ]
    tables = {"gap_study": rows, "gap_study_tuning": _tuning(plans, groups, root)}
    tables["gap_study_curves"] = _curves(groups, root)
    skews = {p.found.data.name: skew_of_run(p.fixed[0].config) for p in plans}
    decisions = decision_table(rows, skews, options.tolerance)
    for stem, lines in {**tables, "gap_study_decisions": decisions}.items():
        if lines:
            write_csv(root / f"{stem}.csv", lines)
    print(_laws(plans, root))
    for name in dict.fromkeys(row["data"] for row in rows):
        print(f"\n{name}")
        print(aligned(*cells([row for row in rows if row["data"] == name])))
    print(
        "\nwhich mode and bound, by latency (L / C: a lookup's seconds over a step's computation)"
    )
    print(aligned(*decision_cells(decisions)))
    figure = save(gap_study_figure(root / "gap_study.csv", root / "gap_study_curves.csv"),
                  root / "gap_study.png")  # fmt: skip
    print(f"\ntables: {root}/gap_study*.csv\nfigure: {figure}")


def plan(options: Options) -> tuple[list[Plan], list[str]]:
    """The first round of every data set, and a line for whatever is left out."""
    found, told = find(options.data_sets, options.data_dir, options.samples, options.batch)
    plans = []
    for one in found:
        settings, left_out = settings_of(one, options.modes, options.taus)
        told += left_out
        fixed = _points(one, settings, range(options.seeds), options)
        pairs = checks_of(settings, options.modes)
        checks = [tuple(_points(one, pair, [0], options)) for pair in pairs]
        trials: list[Trial] = []
        if options.tuned:
            trials = trials_of(
                one, settings, grid(options.row_factors, options.dense_factors),
                range(options.tuning_seeds), data_dir=options.data_dir, samples=options.samples,
                test_rows=options.test_rows,
            )  # fmt: skip
        plans.append(Plan(one, settings, fixed, [(a, b) for a, b in checks], trials))
    return plans, told


def train(plans: Sequence[Plan], options: Options) -> list[Group]:
    """Run everything; the groups of the table, data set by data set, fixed rates before tuned."""
    root = options.out
    longest = max(p.found.samples for p in plans)
    points = [point for p in plans for point in p.first]
    tuned_to_come = sum(len(p.fixed) for p in plans if p.trials)
    run_points(points, root, options.jobs, longest, later=tuned_to_come)
    choices = {
        p.found.data.name: choose(p.trials, _first_task(p, root), root) for p in plans if p.trials
    }
    tuned = {
        p.found.data.name: _points(
            p.found, p.settings, range(options.seeds), options,
            {setting: choice.rates for setting, choice in choices[p.found.data.name].items()},
        )
        for p in plans if p.trials
    }  # fmt: skip
    points += [point for own in tuned.values() for point in own]
    run_points(points, root, options.jobs, longest)
    groups = []
    for p in plans:
        name = p.found.data.name
        groups.append(group_of(p.found, "fixed", finished(p.fixed, root), {}))
        if name in tuned:
            runs = finished(tuned[name], root)
            groups.append(group_of(p.found, "tuned", runs, choices[name]))
    more = [_more_seeds(group, options) for group in groups]
    run_points([*points, *(point for own in more for point in own)], root, options.jobs, longest)
    return [
        group_of(
            group.found,
            group.rates,
            [run for runs in group.runs.values() for run in runs.values()] + finished(own, root),
            group.choices,
        )
        for group, own in zip(groups, more, strict=True)
    ]


def cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """What a person reads of one data set; gaps in thousandths of AUC."""
    header = ["task", "rates", "mode", "tau", "row rate", "dense rate", "AUC", "gap to sync [1e-3]",
              "gap to own tau 0 [1e-3]", "GAUC", "log-loss", "entropy", "calibration"]  # fmt: skip
    lines = []
    for row in rows:
        gap, own = (
            Interval(row[name], row[f"{name}_half_width_95"], row["seeds"])
            for name in ("gap_to_sync", "gap_to_tau_0")
        )
        lines.append([
            row["task"], row["rates"], row["mode"], str(row["tau"]),
            f"{row['row_lr']:.3g}", f"{row['lr']:.3g}", f"{row['test_auc']:.4f}",
            "-" if row["mode"] == "sync" else thousandths(gap),
            "-" if row["tau"] == 0 else thousandths(own),
            f"{row['gauc']:.4f}", f"{row['log_loss']:.4f}",
            f"{row['normalized_entropy']:.4f}", f"{row['calibration']:.3f}",
        ])  # fmt: skip
    return header, lines


def decision_cells(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The decision table as a person reads it."""
    header = ["data", "batch", "hot ids", "again", "steps", "L / C", "mode", "tau", "x sync",
              "gap [1e-3]", "why"]  # fmt: skip
    return header, [
        [
            line["data"], str(line["batch"]), f"{line['hot_share']:.0%}",
            f"{line['rows_of_the_step_before']:.0%}", f"{line['steps']:,}",
            f"{line['latency_over_compute']:g}", line["mode"], str(line["tau"]),
            f"{line['times_as_fast_as_sync']:.1f}",
            "-" if line["mode"] == "sync" else thousandths(
                Interval(line["gap_to_sync"], line["gap_to_sync_half_width_95"], line["seeds"])
            ),
            line["why"],
        ]
        for line in lines
    ]  # fmt: skip


def _points(
    found: Found,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    options: Options,
    rates: Mapping[Setting, Rates] | None = None,
) -> list[Point]:
    return points_of(
        found, settings, seeds, data_dir=options.data_dir, samples=options.samples,
        test_rows=options.test_rows, rates=rates, snapshots=options.snapshots,
    )  # fmt: skip


def _more_seeds(group: Group, options: Options) -> list[Point]:
    """Points of the settings whose gap is not known well enough, and of their references."""
    task = _tasks(group)[0]
    rows = gap_rows(group, task, options.out)
    wide = too_wide(rows, options.widest)
    if not wide or options.most_seeds == options.seeds:
        return []
    settings = [s for s in group.runs if s in wide or s == SYNC or s[1] == 0]
    rates = {setting: choice.rates for setting, choice in group.choices.items()}
    seeds = range(options.seeds, options.most_seeds)
    return _points(group.found, settings, seeds, options, rates or None)


def _tasks(group: Group) -> list[str]:
    return list(next(iter(group.runs[SYNC].values())).summary["tasks"])


def _first_task(one: Plan, root: Path) -> str:
    return next(iter(finished(one.fixed[:1], root)[0].summary["tasks"]))


def _tuning(plans: Sequence[Plan], groups: Sequence[Group], root: Path) -> list[dict[str, Any]]:
    chosen: dict[str, Mapping[Setting, Choice]] = {
        group.found.data.name: group.choices for group in groups if group.choices
    }
    return [
        record
        for p in plans
        if p.trials
        for record in tuning_records(
            p.trials, chosen[p.found.data.name], _first_task(p, root), root
        )
    ]


def _curves(groups: Sequence[Group], root: Path) -> list[dict[str, Any]]:
    return [
        {"data": group.found.data.name, "rates": group.rates, **line}
        for group in groups
        for line in curve_records([r for own in group.runs.values() for r in own.values()], root)
    ]


def _laws(plans: Sequence[Plan], root: Path) -> str:
    """Whether the runs that are equal by law were, in AUC and log-loss to the last digit."""
    broken, equal = [], []
    for p in plans:
        pairs = [(first, second) for first, second in (finished(c, root) for c in p.checks)]
        broken += differing(pairs, _first_task(p, root))
        equal += [f"{a.setting[0]} = {b.setting[0]}" for a, b in pairs]
    if broken:
        return "\n".join(f"warning: {line}" for line in broken)
    return f"equal by law, and found equal with seed 0: {', '.join(dict.fromkeys(equal)) or '-'}"


def _print_costs(plans: Sequence[Plan], options: Options) -> None:
    """The plan: points and core-minutes of each data set, without what is decided later."""
    tuned = {p.found.data.name: len(p.fixed) if p.trials else 0 for p in plans}
    points = [point for p in plans for point in p.first]
    print_plan(points, options.out, options.jobs)
    total = 0.0
    for p in plans:
        count = len(p.first) + tuned[p.found.data.name]
        each = CORE_S_PER_POINT + p.found.samples * CORE_S_PER_SAMPLE
        total += count * each
        done = sum(point.is_done(options.out) for point in p.first)
        print(
            f"  {p.found.data.name}: {p.found.samples:,} samples in {p.found.steps:,} steps of"
            f" {p.found.data.batch}; {len(p.first)} points ({done} done) and"
            f" {tuned[p.found.data.name]} with tuned rates, about {count * each / 60:.0f}"
            " core-minutes"
        )
    print(
        f"about {total / 60:.0f} core-minutes in all without what is done; more seeds, up to"
        f" {options.most_seeds}, where a gap is known to less than {options.widest:g}"
    )
