"""Which mode for a log on a cluster: what each gains there and loses here, and what follows.

Speeds are simulated, losses are trained: with a constant lag at the mean of the simulated lateness,
rounded up. A budget decides how much of the log is trained, and with how many seeds.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.choosing.batch import Cell, Plan, planned, samples_for
from experiments.choosing.decision import LOOKS, Decision, Entry, decide
from experiments.choosing.speeds import (
    HALF_WIDTH,
    MOST_STEPS,
    Candidate,
    Simulated,
    candidates,
    label_of,
    on_front,
    simulated,
)
from experiments.deriving import derive_workload
from experiments.gaps import Run, curve_records, finished, gap_over_seeds
from experiments.line_search import first_task, write_config
from experiments.option_values import typed_values
from experiments.points import Line, Point, points_of
from experiments.result_cache import ResultCache
from experiments.statistics import Interval
from experiments.study_file import read_study
from experiments.sweeping import START_S, Speed, measured_speed, run_points
from experiments.tables import Column, leave, table
from experiments.targets import target_lines
from persia_sim.base.files import atomic_write
from persia_sim.base.rules import Refused, counted
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.memory import lasting
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import workload_text
from persia_sim.report import sweep
from persia_sim.report.ranges import Range
from runtime.config import TrainConfig
from runtime.data.source import Provenance

MOST_CELLS = 4
"""Late cells that are trained beside sync."""
SNAPSHOTS = 5
"""Evaluations along a run, for the way to sync's AUC."""
EVALUATING = 1 / 3
"""Seconds to evaluate a sample over those to train it: a forward pass of three parts."""
FIRST_LOOK = 0.5
"""Share of the time for training that two seeds of all cells may take."""
SECOND_BATCH = 4
"""The mode that is advised is trained at a batch so many times as large, too."""
LEAST_S = 5.0
"""Seconds of training that a budget is taken to hold at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is trained on, and how."""

    config: TrainConfig
    """Sync on the whole log, as options and files have it."""
    facts: Provenance
    speed: Speed

    @property
    def samples(self) -> int:
        """Of the training part."""
        return self.facts.train_rows or self.speed.train_rows or 0

    @property
    def test_rows(self) -> int:
        """Of the part that judges."""
        all_rows = self.facts.test_rows or 0
        return min(all_rows, self.config.evaluation.test_rows or all_rows)

    def run_s(self, samples: int) -> float:
        """Seconds of one run, its start and its evaluations among them."""
        judged = (1 + SNAPSHOTS) * EVALUATING * self.test_rows
        return START_S + (samples + judged) / self.speed.samples_per_s


@dataclass(slots=True)
class Budget:
    """The minutes of a whole call."""

    total_s: float
    began_s: float
    jobs: int

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.total_s - (time.monotonic() - self.began_s)

    def holds(self, runs: int, log: Log, samples: int) -> bool:
        """Whether so many runs end in time."""
        return self.wall_s(runs, log, samples) <= self.left_s

    def wall_s(self, runs: int, log: Log, samples: int) -> float:
        """Seconds that so many runs take, as many at a time as may."""
        return math.ceil(runs / self.jobs) * log.run_s(samples)

    def first_look_samples(self, log: Log) -> float:
        """Samples that all runs of the first look may train together."""
        for_training_s = FIRST_LOOK * max(LEAST_S, self.left_s) * self.jobs
        runs = 2 * (1 + MOST_CELLS)
        return max(0.0, for_training_s - runs * log.run_s(0)) * log.speed.samples_per_s


def answered(options: Any) -> list[dict[str, Any]]:
    """Print the answer and leave it as files; the rows of its table, none of a dry run.

    ``options``: those of `which-mode`. Raises ValueError for a log, a model or a cluster that
    cannot be asked about, naming the remedy.
    """
    sink = sys.stderr if options.json else sys.stdout
    with redirect_stdout(sink):
        rows, advice = _answer(options)
    if options.json and rows:
        plain = [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in rows
        ]
        print(json.dumps({"advice": advice, "modes": plain}, indent=1))
    return rows


def _answer(options: Any) -> tuple[list[dict[str, Any]], str]:
    budget = Budget(60 * options.minutes, time.monotonic(), options.jobs)

    # The log and the model, counted; the modes that are worth asking about.
    log = _log_of(options)
    workload = _workload_of(options, log)
    chosen = candidates(
        options.cluster or "gcp-100t", workload, rows_of(workload), options.hosts == "given"
    )
    _say_plan(options, budget, log, chosen)
    if options.dry_run:
        return [], ""

    # What each gains.
    every = _simulate(options, chosen, workload)
    kept = on_front(every)
    front = [one for one, keep in zip(every, kept, strict=True) if keep]
    dropped = [one.candidate.label for one, keep in zip(every, kept, strict=True) if not keep]

    # What each loses: a plan that a second call finds again, and its runs.
    plan = _plan_of(options, budget, log, front)
    trained = Training(options=options, log=log, plan=plan, budget=budget)
    decision = trained.until_decided(front)
    second = trained.at_second_batch(front, decision)

    # All of it as a table, a sentence and files.
    rows = rows_of_table(front, trained, options)
    print(f"\n{heading(log, plan, front)}\n")
    print(table(rows, columns_of(plan, options.target)))
    for line in notes(log, plan, trained, dropped):
        print(line)
    advice = advised(front, decision, trained, second, options)
    print(f"\n{advice}")
    leave(options, {"": rows}, drawn_first=1, as_a="which_mode_of_log")
    _leave_config(options, front, decision, trained)
    return rows, advice


# The log, the workload, and the plan.


def _log_of(options: Any) -> Log:
    from runtime.engines.open import source_of  # late: a second

    typed = typed_values(options.set)
    for name, values in typed.items():
        if len(values) > 1:
            raise Refused("set", f"gives {name} {len(values)} values; which-mode takes one of each")
    (line,) = _lines(options, [], {}).values()
    source = source_of(line.config)
    facts = source.provenance()
    speed = measured_speed(replace(line.config, batch=typed.get("batch", [128])[0]))
    log = Log(config=line.config, facts=facts, speed=speed)
    print(facts)
    if words := without_time_order(log):
        print(words)
    return log


def without_time_order(log: Log) -> str:
    """What is not known of a log whose order is not that of time, in a sentence; "" elsewhere."""
    split = log.facts.schema.get("split", {})
    drawn = not log.facts.schema or split.get("random_seed") is not None
    if not drawn and not log.config.data.shuffle:
        return ""
    return (
        "its samples are not in time order: late rows cost most where young ids come in bursts, and"
        " of that nothing is known here; the gaps are those of shuffled samples"
    )


def _lines(options: Any, cells: Iterable[Cell], over: Mapping[str, Any]) -> dict[Cell, Line]:
    """A line of training for sync and for each late cell; ``over``: options over all others."""
    exact = Cell(rows_late=0, dense_late=0)
    lines: list[dict[str, Any]] = [{"name": exact.name, "sync.mode": "sync"}]
    for cell in cells:
        late = {"sync.tau": cell.rows_late, "sync.dense_lag": cell.dense_late}
        lines.append({"name": cell.name, "sync.mode": "hybrid", **late})
    typed = typed_values(options.set)
    typed = {"data.name": [options.data]} | typed | {k: [v] for k, v in over.items()}
    study = read_study({"versus": exact.name, "line": lines}, options.config, typed)
    return dict(zip([exact, *cells], study.lines, strict=True))


def _workload_of(options: Any, log: Log) -> str:
    """The name of the workload's file: what the user gives, or what is counted in log and model."""
    if options.workload is not None:
        return str(options.workload)
    counted_ = derive_workload(
        log.config,
        scale=options.scale,
        batch_per_rank=options.batch_per_rank,
        dense_flops=options.dense_flops,
    )
    path = options.write_workload or options.out / "workload.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((workload_text(counted_) + "\n").encode())
    print(
        f"workload: {counted_.rows:,.0f} rows, {counted_.dense_params:,.0f} dense weights,"
        f" {counted_.batch_per_rank:,} samples of a GPU in a step; {path}"
    )
    return str(path)


def _say_plan(options: Any, budget: Budget, log: Log, chosen: Sequence[Candidate]) -> None:
    """What will run, with its minutes, before any of it runs."""
    scenario = sweep.scenario_of(chosen[0].point, 1)
    ranks = scenario.cluster.ranks
    simulate_s = len(chosen) * ranks * MOST_STEPS * 0.4e-3 / options.jobs + 2
    cells = [
        Cell(
            rows_late=(one.point.tau or 0)
            if one.point.mode.has_barrier
            else ((one.point.tau or 0) + 1) * ranks - 1,
            dense_late=0 if one.point.mode.has_barrier else ranks - 1,
        )
        for one in chosen
    ]
    plan = planned(cells, log.samples, scenario.batch, budget.first_look_samples(log), MOST_CELLS)
    runs = 2 * (1 + len(plan.cells))
    train_s = budget.wall_s(runs, log, plan.samples)
    print(
        f"plan: {len(chosen)} simulations, about {_time(simulate_s)}; {runs} runs of"
        f" {plan.samples:,} samples, about {_time(train_s)}; further seeds and a second batch in"
        f" what is left of {options.minutes:g} minutes; results in {options.out}"
    )


def _time(seconds: float) -> str:
    return f"{seconds / 60:.2g} min" if seconds >= 60 else f"{max(1, seconds):.0f} s"


def _simulate(options: Any, chosen: Sequence[Candidate], workload: str) -> list[Simulated]:
    work = {
        label_of(one.point, rows_of(workload), HALF_WIDTH): partial(
            sweep.evaluate, one.point, half_width=HALF_WIDTH, most_steps=MOST_STEPS
        )
        for one in chosen
    }
    rows = ResultCache(options.out / "points.jsonl").fill(work, "simulations", options.jobs)
    return simulated(chosen, rows)


def _plan_of(options: Any, budget: Budget, log: Log, front: Sequence[Simulated]) -> Plan:
    """What the budget holds; of a second call with the same options what the first one found, so
    that it goes on with its points."""
    cells = [one.cell for one in front]
    batch = int(front[0].row["batch"])
    told = ResultCache(options.out / "plan.jsonl")
    label = json.dumps(
        [log.facts.digest, options.minutes, batch, [c.name for c in cells], list(options.set)]
    )
    if label in told:
        most = float(told[label])
    else:
        most = budget.first_look_samples(log)
        told.add(label, most)
    plan = planned(cells, log.samples, batch, most, MOST_CELLS)
    if plan.too_late and not (plan.cells or plan.no_time):
        least = plan.too_late[0]
        raise ValueError(
            f"the log has {log.samples:,} training samples, and the least late mode misses"
            f" {least.late} updates: with {samples_for(least):,} samples or more it would have 20"
            " updates for each; give a longer log"
        )
    typed = typed_values(options.set)
    return replace(plan, batch=typed["batch"][0]) if "batch" in typed else plan


# What is trained.


@dataclass(slots=True)
class Training:
    """The runs of a plan, and their gaps."""

    options: Any
    log: Log
    plan: Plan
    budget: Budget

    def lines(self, batch: int) -> dict[Cell, Line]:
        """Sync and every cell of the plan, on its window, at a batch."""
        window = self.plan.samples
        updates = max(1, window // batch)
        over: dict[str, Any] = {
            "batch": batch,
            "data.skip_rows": max(0, self.log.samples - window),
            "evaluation.evaluate_every_steps": max(1, updates // SNAPSHOTS),
        }
        return _lines(self.options, self.plan.cells, over)

    def train(self, cells: Iterable[Cell], seeds: int, batch: int | None = None) -> None:
        """Train sync and cells, as far as it is not done."""
        lines = self.lines(batch or self.plan.batch)
        asked = [lines[cell] for cell in dict.fromkeys([*lines][:1] + list(cells))]
        points = [point for of_line in points_of(asked, seeds) for point in of_line]
        run_points(points, self.options.out, self.options.jobs, self.plan.samples)

    def runs(self, cell: Cell, batch: int | None = None) -> list[Run]:
        """Those that are done."""
        line = self.lines(batch or self.plan.batch)[cell]
        return finished(self._points(line), self.options.out)

    def _points(self, line: Line) -> list[Point]:
        return points_of([line], LOOKS[-1])[0]

    def gap(self, cell: Cell, batch: int | None = None) -> Interval | None:
        """Test AUC minus sync's, over the seeds that both have; None of what is not trained."""
        if cell.is_exact or cell not in self.plan.cells:
            return None
        sync = self.runs(Cell(rows_late=0, dense_late=0), batch)
        late = self.runs(cell, batch)
        if not late or not sync:
            return None
        return gap_over_seeds(late, sync, first_task(late[0]), self.options.out)

    def entries(self, front: Sequence[Simulated]) -> list[Entry]:
        """The modes as the decision takes them."""
        gaps = {one.cell: self.gap(one.cell) for one in front}
        return [
            Entry(
                name=one.candidate.label,
                gain=one.gain,
                gap=gaps[one.cell],
                trained=one.cell.is_exact or gaps[one.cell] is not None,
            )
            for one in front
        ]

    def until_decided(self, front: Sequence[Simulated]) -> Decision:
        """Two seeds of every cell; then more of the two that the decision lies between, while they
        may tell and the budget holds them."""
        comparisons = len(self.plan.cells)
        self.train(self.plan.cells, LOOKS[0])
        by_name = {one.candidate.label: one.cell for one in front}
        while True:
            decision = decide(self.entries(front), 1e-3 * self.options.tolerance, comparisons)
            if decision.binds != "seeds" or decision.seeds > LOOKS[-1]:
                return decision

            # The next look at the two; their seeds so far are kept.
            between = {by_name[name] for name in (decision.best, decision.rival)}
            late = [cell for cell in between if not cell.is_exact]
            now = self.seeds_of(by_name[decision.rival])
            look = next(look for look in LOOKS if look > now)
            runs = (look - now) * (1 + len(late))
            if not self.budget.holds(runs + 4, self.log, self.plan.samples):
                return decision
            self.train(late, look)

    def seeds_of(self, cell: Cell) -> int:
        """Paired seeds that a cell has."""
        gap = self.gap(cell)
        return 0 if gap is None else gap.n

    def at_second_batch(
        self, front: Sequence[Simulated], decision: Decision
    ) -> tuple[int, Interval] | None:
        """The gap of the mode that is best at a batch four times as large; None where its rows are
        exact, where the cluster's own batch is trained, or where the budget does not hold it."""
        cell = next(one.cell for one in front if one.candidate.label == decision.best)
        batch = SECOND_BATCH * self.plan.batch
        of_cluster = int(front[0].row["batch"])
        if cell.is_exact or self.plan.batch >= of_cluster or batch > self.plan.samples // 2:
            return None
        if not self.budget.holds(4, self.log, self.plan.samples) and not self.gap(cell, batch):
            return None
        self.train([cell], LOOKS[0], batch)
        gap = self.gap(cell, batch)
        return None if gap is None else (batch, gap)


# The answer.


def rows_of_table(
    front: Sequence[Simulated], trained: Training, options: Any
) -> list[dict[str, Any]]:
    """A row a mode: what it gains and loses, and its way to a share of sync's climb."""
    reached = _ways(front, trained, options.target)
    rows = []
    for one in front:
        gap = trained.gap(one.cell)
        usd = one.usd_per_billion
        gap = gap if gap is not None else Interval(math.nan, math.nan, 0)
        if one.cell.is_exact:
            gap = Interval(0.0, 0.0, 0)
        way = reached.get(one.candidate.label, {})
        hours = way.get("seconds", math.nan) / 3600
        point = one.candidate.point
        rows.append(
            {
                "mode": one.candidate.label,
                "tau": point.tau if point.mode.reads_late_rows else None,
                "workers": one.row["workers"],
                "servers": one.row["servers"],
                **_ends("samples_per_s", one.rate),
                **_ends("times_sync", one.times_sync),
                **_ends("usd_per_billion_samples", usd),
                "rows_missed_mean": one.rows_late,
                "rows_late": one.cell.rows_late,
                "dense_late": one.cell.dense_late,
                "batch": trained.plan.batch,
                "samples": trained.plan.samples,
                "seeds": gap.n,
                "gap": gap.mean,
                "gap_half_width_95": gap.half_width,
                "seeds_error": gap.seeds_error,
                "rows_error": gap.rows_error,
                "hours_to_target": hours,
                "usd_to_target": hours * one.usd_per_hour,
                "reached": way.get("reached", math.nan),
                "binds": one.row["binds"],
                "empty": _why_empty(one.cell, trained),
            }
        )
    return rows


def _ends(name: str, figure: Range) -> dict[str, float]:
    return {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}


def _why_empty(cell: Cell, trained: Training) -> str:
    """Why a cell has no gap, in words; "" where it has one."""
    plan = trained.plan
    if cell in plan.too_late:
        return f"needs {samples_for(cell):,} samples"
    if cell in plan.no_time:
        most = max(samples_for(cell), plan.samples)
        return f"{_time(trained.budget.wall_s(2, trained.log, most))} more"
    return ""


def _ways(
    front: Sequence[Simulated], trained: Training, share: float
) -> dict[str, Mapping[str, Any]]:
    """By mode, when a share of sync's climb from 0.5 is reached: an update of the log takes as long
    as one of the cluster."""
    snapshots = []
    reference = ""
    for one in front:
        if one.cell not in (*trained.plan.cells, Cell(rows_late=0, dense_late=0)):
            continue
        if one.candidate.point.mode is Mode.SYNC and not reference:
            reference = one.candidate.label
        step_s = one.row["batch"] / one.row["samples_per_s"]
        runs = trained.runs(one.cell)
        task = first_task(runs[0])
        for record in curve_records(runs, trained.options.out):
            if record["task"] == task and record["auc"] is not None:
                updates = record["samples"] / trained.plan.batch
                second = updates * step_s
                samples = updates * one.row["batch"]
                at = record["seed"], second, samples, record["auc"]
                snapshots.append((one.candidate.label, *at))
    return {line["mode"]: line for line in target_lines(snapshots, reference, [share])}


def heading(log: Log, plan: Plan, front: Sequence[Simulated]) -> str:
    """What the table is of."""
    ranks = front[0].row["ranks"]
    window = f"the last {plan.samples:,} of {log.samples:,} training samples"
    if plan.samples == log.samples:
        window = f"{log.samples:,} training samples"
    return (
        f"{ranks} GPUs, {front[0].row['batch']:,} samples an update there; trained here on"
        f" {window} at {plan.batch:,} an update"
    )


def columns_of(plan: Plan, share: float) -> dict[str, Column]:
    """The columns of the answer's table."""
    return {
        "mode": "{mode}",
        "samples/s": lambda row: _range(row, "samples_per_s", 1e-3, ".4g", " k"),
        "$ a billion": lambda row: _range(row, "usd_per_billion_samples", 1, ",.0f", ""),
        "rows late": lambda row: f"{row['rows_missed_mean']:.1f}",
        f"AUC gap at batch {plan.batch:,} [1e-3]": _gap_cell,
        f"time to {share:g}": lambda row: _time_cell(row["hours_to_target"]),
        f"$ to {share:g}": lambda row: _number(row["usd_to_target"], ",.3g"),
    }


def _time_cell(hours: float) -> str:
    return "-" if math.isnan(hours) else lasting(3600 * hours)


def _range(row: Mapping[str, Any], name: str, scale: float, spec: str, unit: str) -> str:
    low, high = (scale * row[f"{name}_{end}"] for end in ("low", "high"))
    return "?" if math.isnan(low) else f"{low:{spec}} to {high:{spec}}{unit}"


def _number(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else f"{value:{spec}}"


def _gap_cell(row: Mapping[str, Any]) -> str:
    """The gap with its interval; that of exact rows is none, and an empty cell says why."""
    if row["empty"]:
        return f"({row['empty']})"
    if not row["rows_late"] and not row["dense_late"]:
        return "0"
    if not row["seeds"]:
        return "-"
    dense = f"/{row['dense_late']}" if row["dense_late"] else ""
    gap = f"{1e3 * row['gap']:+.1f} ± {1e3 * row['gap_half_width_95']:.1f}"
    return f"{gap} at {row['rows_late']}{dense}"


def notes(log: Log, plan: Plan, trained: Training, dropped: Sequence[str]) -> list[str]:
    """What a reader must know beside the table."""
    lines = []
    if dropped:
        lines.append(
            f"left out, since another is as fast, as cheap and as little late: {', '.join(dropped)}"
        )
    if plan.cells:
        latest = plan.cells[-1]
        share = 100 * latest.late * plan.batch / plan.samples
        lines.append(
            f"gap: test AUC minus sync's, with all rows late by the mean, rounded up (at R/D: rows"
            f" and dense weights); the first {share:.1f} % of the updates are less late than"
            f" {latest.late}"
        )
    lines.append(
        f"time and $ to {trained.options.target:g} of sync's climb from an AUC of 0.5, an update"
        " here taking as long as one of the cluster"
    )
    if plan.samples < log.samples:
        lines.append(
            f"the budget of {trained.options.minutes:g} minutes holds the last {plan.samples:,}"
            " samples; --minutes gives more"
        )
    return lines


def advised(
    front: Sequence[Simulated],
    decision: Decision,
    trained: Training,
    second: tuple[int, Interval] | None,
    options: Any,
) -> str:
    """The advice as a sentence, with what it rests on; or what keeps anybody from giving one."""
    by_name = {one.candidate.label: one for one in front}
    best = by_name[decision.best]
    open_question = ""
    if decision.binds:
        rival = by_name[decision.rival]
        open_question = _what_would_tell(rival, decision, trained, options)
        if best.gain.low <= 1:
            between = f"{best.candidate.name} and {rival.candidate.name}"
            return (
                f"Not decided between {between}: {open_question} Until then {best.candidate.name}."
            )

    # What another batch says, where it says something else.
    gap = trained.gap(best.cell)
    if gap is not None and second is not None and _differs(gap, second[1], options.tolerance):
        needed = samples_for(best.cell, int(best.row["batch"]))
        return (
            f"Not decided: the log is {needed / trained.log.samples:,.1f} times too short for this"
            f" cluster's batch. {best.candidate.name} changes the AUC by {_words(gap)} at batch"
            f" {trained.plan.batch:,} and by {_words(second[1])} at {second[0]:,}."
        )

    # What it rests on.
    if best.candidate.point.mode is Mode.SYNC:
        return f"Take {best.candidate.name}: no other mode is surely cheaper without a loss."
    loses = "its rows are exact"
    if gap is not None:
        also = f" and by {_words(second[1])} at {second[0]:,}" if second else ""
        loses = f"changes the AUC by {_words(gap)} at batch {trained.plan.batch:,}{also}"
    further = f" Open is {open_question}" if open_question else ""
    return (
        f"Take {best.candidate.name}: with {counted(best.row['workers'], 'worker host')} and"
        f" {counted(best.row['servers'], 'server host')} it has {best.times_sync:.1f} times sync's"
        f" samples/s, and {loses}.{further}"
    )


def _differs(first: Interval, second: Interval, tolerance: float) -> bool:
    """Whether a second batch says another thing than the first: another sign, or twice as much, by
    more than the tolerance."""
    apart = abs(first.mean - second.mean) > 1e-3 * tolerance
    turned = first.mean * second.mean < 0
    return apart and (turned or abs(second.mean) > 2 * abs(first.mean))


def _words(gap: Interval) -> str:
    return f"{1e3 * gap.mean:+.1f} ± {1e3 * gap.half_width:.1f} thousandths"


def _what_would_tell(rival: Simulated, decision: Decision, trained: Training, options: Any) -> str:
    """What would tell whether a mode that may be better loses more than the tolerance."""
    gap = trained.gap(rival.cell)
    name = rival.candidate.name
    said = name if gap is None else f"{name}, which changes the AUC by {_words(gap)}"
    if decision.binds == "seeds" and decision.seeds <= LOOKS[-1]:
        runs = 2 * max(0, decision.seeds - trained.seeds_of(rival.cell))
        wall_s = trained.budget.wall_s(runs, trained.log, trained.plan.samples)
        return (
            f"{said}: seeds bind. {decision.seeds} would tell, about {_time(wall_s)} more"
            " (--minutes)."
        )
    if decision.binds == "seeds":
        return (
            f"{said}: seeds bind, and more than {LOOKS[-1]} are not trained. {decision.seeds} would"
            " tell, or a longer log, or a larger --tolerance."
        )
    if decision.binds == "users":
        return (
            f"{said}: test users bind, and no further seed helps. {decision.users_times:,.1f} times"
            f" as many test users would tell, or a larger --tolerance than {options.tolerance:g}."
        )
    return (
        f"{said}: the simulator binds, by {decision.constant or 'its constants'}. Measure it on the"
        " cluster's machines with `persia-runtime profile`."
    )


def _leave_config(
    options: Any, front: Sequence[Simulated], decision: Decision, trained: Training
) -> None:
    """Write what trains the mode that is advised, and print the line that does it."""
    best = next(one for one in front if one.candidate.label == decision.best)
    point = best.candidate.point
    lines = trained.lines(trained.plan.batch)
    config = lines[Cell(rows_late=0, dense_late=0)].config
    tau = {"tau": point.tau} if point.mode.reads_late_rows else {}
    config = replace(
        config,
        sync=replace(config.sync, mode=point.mode, **tau),
        data=replace(config.data, skip_rows=0),
        evaluation=replace(config.evaluation, evaluate_every_steps=None),
    )
    path = write_config(Line(name="advised", config=config), options.out)
    trust = f" --model.name {config.model.name}" if ":" in config.model.name else ""
    print(f"train it: persia-runtime train --config {path}{trust}")
