"""What a log is trained on for the answer: sync and late cells, within a budget of minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from experiments.choosing.batch import EXACT, Cell, Plan
from experiments.choosing.decision import LOOKS, Decision, Entry, decide
from experiments.choosing.speeds import Simulated
from experiments.gaps import Run, finished, gap_over_seeds
from experiments.line_search import at_rates, first_task
from experiments.option_values import typed_values
from experiments.points import Line, Point, points_of, require_auc
from experiments.search import Rates
from experiments.statistics import Interval
from experiments.study_file import read_study
from experiments.sweeping import START_S, Speed, measured_speed, run_points
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
    fields: tuple[str, ...]
    """Names of its id fields."""
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

    def wall_s(self, runs: int, log: Log, samples: int) -> float:
        """Seconds that so many runs take, as many at a time as may."""
        return math.ceil(runs / self.jobs) * log.run_s(samples)

    def first_look_samples(self, log: Log) -> float:
        """Samples that all runs of the first look may train together."""
        for_training_s = FIRST_LOOK * max(LEAST_S, self.left_s) * self.jobs
        runs = 2 * (1 + MOST_CELLS)
        return max(0.0, for_training_s - runs * log.run_s(0)) * log.speed.samples_per_s


def log_of(options: Any) -> Log:
    """The log that the options name, counted, and how fast it trains; prints what it is."""
    from runtime.executors.open import source_of  # late: a second

    typed = typed_values(options.set)
    (line,) = lines_of(options, [], {}).values()
    source = source_of(line.config)
    require_auc(source.layout, options.data)
    facts = source.provenance()
    speed = measured_speed(replace(line.config, batch=typed.get("batch", [128])[0]))
    fields = tuple(each.name for each in source.layout.fields)
    log = Log(config=line.config, facts=facts, fields=fields, speed=speed)
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


def lines_of(options: Any, cells: Iterable[Cell], over: Mapping[str, Any]) -> dict[Cell, Line]:
    """A line of training for sync and for each late cell; ``over``: options over all others."""
    lines: list[dict[str, Any]] = [{"name": EXACT.name, "sync.mode": "sync"}]
    for cell in cells:
        late = {"sync.tau": cell.rows_late, "sync.dense_lag": cell.dense_late}
        lines.append({"name": cell.name, "sync.mode": "hybrid", **late})
    typed = typed_values(options.set)
    typed = {"data.name": [options.data]} | typed | {k: [v] for k, v in over.items()}
    study = read_study({"versus": EXACT.name, "line": lines}, options.config, typed)
    return dict(zip([EXACT, *cells], study.lines, strict=True))


@dataclass(slots=True)
class Training:
    """The runs of a plan, and their gaps."""

    options: Any
    log: Log
    plan: Plan
    budget: Budget
    rates: Mapping[Cell, Rates] = field(default_factory=dict)
    """Learning rates that a search has chosen; others are as given."""
    times_planned: float = 1.0
    """Seconds that runs of this call took, over those of the plan."""

    def lines(self, batch: int, shuffled: bool = False) -> dict[Cell, Line]:
        """Sync and every cell of the plan, on its window, at a batch."""
        window = self.plan.samples
        updates = max(1, window // batch)
        over: dict[str, Any] = {
            "batch": batch,
            "data.skip_rows": max(0, self.log.samples - window),
            "evaluation.evaluate_every_steps": max(1, updates // SNAPSHOTS),
        }
        if shuffled:
            over["data.shuffle"] = True
        lines = lines_of(self.options, self.plan.cells, over)
        for cell, rates in self.rates.items():
            lines[cell] = replace(lines[cell], config=at_rates(lines[cell].config, rates))
        return lines

    def train(
        self, cells: Iterable[Cell], seeds: int, batch: int | None = None, shuffled: bool = False
    ) -> None:
        """Train sync and cells, as far as it is not done."""
        points = self.points(cells, seeds, batch, shuffled)
        missing = self.missing(points)
        began_s = time.monotonic()
        run_points(points, self.options.out, self.options.jobs, self.plan.samples)
        if missing and batch is None:  # a larger batch is faster
            planned_s = self.budget.wall_s(missing, self.log, self.plan.samples)
            self.times_planned = (time.monotonic() - began_s) / planned_s

    def missing(self, points: Iterable[Point]) -> int:
        """Those that are not done."""
        return sum(not point.is_done(self.options.out) for point in points)

    def wall_s(self, runs: int, samples: int | None = None) -> float:
        """Seconds that so many runs take, as slow as those of this call were; ``samples``: None for
        those of the plan."""
        planned_s = self.budget.wall_s(runs, self.log, samples or self.plan.samples)
        return self.times_planned * planned_s

    def points(
        self, cells: Iterable[Cell], seeds: int, batch: int | None = None, shuffled: bool = False
    ) -> list[Point]:
        """The runs of sync and of cells, done or not."""
        lines = self.lines(batch or self.plan.batch, shuffled)
        asked = [lines[cell] for cell in dict.fromkeys([*lines][:1] + list(cells))]
        return [point for of_line in points_of(asked, seeds) for point in of_line]

    def runs(self, cell: Cell, batch: int | None = None, shuffled: bool = False) -> list[Run]:
        """Those that are done."""
        line = self.lines(batch or self.plan.batch, shuffled)[cell]
        return finished(self._points(line), self.options.out)

    def _points(self, line: Line) -> list[Point]:
        return points_of([line], LOOKS[-1])[0]

    def gap(self, cell: Cell, batch: int | None = None, shuffled: bool = False) -> Interval | None:
        """Test AUC minus sync's, over the seeds that both have; None of what is not trained."""
        if cell.is_exact or cell not in self.plan.cells:
            return None
        sync = self.runs(EXACT, batch, shuffled)
        late = self.runs(cell, batch, shuffled)
        if not late or not sync:
            return None
        return gap_over_seeds(late, sync, first_task(late[0]), self.options.out)

    def score_of_sync(self, name: str) -> float:
        """A test score of sync by its name, the mean over its runs at the plan's batch."""
        runs = self.runs(EXACT)
        return fmean(run.auc(first_task(runs[0]), name) for run in runs)

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
            if self.wall_s(self.missing(self.points(late, look)) + 4) > self.budget.left_s:
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
        if self.wall_s(4) > self.budget.left_s and not self.gap(cell, batch):
            return None
        self.train([cell], LOOKS[0], batch)
        gap = self.gap(cell, batch)
        return None if gap is None else (batch, gap)
