"""What a log is trained on for the answer: sync and late cells, within a budget of minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from experiments.choosing.batch import EXACT, Cell, Plan
from experiments.choosing.decision import LOOKS, Decision, Entry, decide
from experiments.choosing.speeds import Simulated
from experiments.gaps import Run, finished, gap_over_seeds
from experiments.line_search import at_rates, first_task
from experiments.option_values import typed_values
from experiments.options import REFERENCE
from experiments.points import Line, Point, points_of, require_auc
from experiments.search import Rates
from experiments.statistics import Interval
from experiments.study_file import read_study
from experiments.sweeping import START_S, Speed, measured_speed, run_points
from runtime.config import TrainConfig
from runtime.data.source import Provenance, Source

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
ENDS_S = 5.0
"""Kept for the table and its figure (source: 10 s at a load of 9 on two cores, 2026-11-30)."""
UNTRAINED = 0.9
"""Share of a field's ids in the test part from which on its rows judge nothing."""
TESTED = 1 << 17
"""Samples of the test part whose ids are held for that."""
LEAST_S = 5.0
"""Seconds of training that a budget is taken to hold at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is trained on, and how."""

    config: TrainConfig
    """Sync on the whole log, as options and files have it."""
    facts: Provenance
    speed: Speed
    unseen: Mapping[str, float]
    """By id field, the share of its ids in the test part that no training sample has."""

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
    times_planned: float = 1.0
    """Seconds that the last run of this call took, over those of the plan."""

    @property
    def left_s(self) -> float:
        """Seconds that are left for training."""
        return self.total_s - ENDS_S - (time.monotonic() - self.began_s)

    def wall_s(self, runs: int, log: Log, samples: int) -> float:
        """Seconds that so many runs take, as many at a time as may, as slow as the last one was."""
        return self.times_planned * math.ceil(runs / self.jobs) * log.run_s(samples)

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
    log = Log(config=line.config, facts=facts, speed=speed, unseen=_unseen(source))
    print(facts)
    if words := without_time_order(log):
        print(words)
    return log


def _unseen(source: Source) -> dict[str, float]:
    """By field, the share of its ids in the first samples of the test part that no training sample
    has. Those ids are held alone, however long the log is."""
    from runtime.describe_command import ids_by_field  # late: torch

    # The ids of as many test samples as are held.
    asked: dict[str, list[np.ndarray]] = {each.name: [] for each in source.layout.fields}
    samples = 0
    for part in source.chunks("test"):
        for name, (ids, _) in ids_by_field(part, source.layout).items():
            asked[name].append(ids)
        samples += part.size
        if samples >= TESTED:
            break
    of_test = {name: np.concatenate([np.empty(0, np.uint64), *ids]) for name, ids in asked.items()}
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *of_test.values()]))
    if not known.size:
        return dict.fromkeys(asked, 0.0)

    # Which of them any training sample has.
    is_trained = np.zeros(len(known), bool)
    for part in source.chunks("train"):
        place = np.searchsorted(known, part.ids).clip(max=len(known) - 1)
        is_trained[place[known[place] == part.ids]] = True
    new = {name: ~is_trained[np.searchsorted(known, ids)] for name, ids in of_test.items()}
    return {name: float(each.mean()) if each.size else 0.0 for name, each in new.items()}


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
    left_out: tuple[Cell, ...] = ()
    """Cells of the plan that the budget did not hold in the end."""

    def lines(self, batch: int, shuffled: bool = False) -> dict[Cell, Line]:
        """Sync and every cell of the plan, on its window, at a batch."""
        updates = max(1, self.plan.samples // batch)
        over: dict[str, Any] = {
            "batch": batch,
            "data.skip_rows": max(0, self.log.samples - self.plan.samples),
            "evaluation.evaluate_every_steps": max(1, updates // SNAPSHOTS),
            **({"data.shuffle": True} if shuffled else {}),
        }
        lines = lines_of(self.options, self.plan.cells, over)
        for cell in lines.keys() & self.rates:
            config = at_rates(lines[cell].config, self.rates[cell])
            lines[cell] = replace(lines[cell], config=config)
        return lines

    def train(
        self, cells: Iterable[Cell], seeds: int, batch: int | None = None, shuffled: bool = False
    ) -> None:
        """Train sync and cells, as far as it is not done and, in time order, the budget holds it by
        what the last run took."""
        began_s: dict[str, float] = {}

        def begins(point: Point) -> bool:
            # Both seeds of a first look begin, or none; sync's always, since all rests on them.
            runs = 1
            if point.config.seed < LOOKS[0]:
                goes_on = point.config.seed > 0 or point.config.sync.mode is REFERENCE
                runs = 0 if goes_on or shuffled else LOOKS[0]
            began_s[point.label] = time.monotonic()
            return not runs or self.wall_s(runs) <= self.budget.left_s

        def ends(point: Point) -> None:
            if point.label in began_s and batch is None:  # a larger batch is faster
                run_s = time.monotonic() - began_s[point.label]
                self.budget.times_planned = run_s / self.log.run_s(self.plan.samples)

        points = self.points(cells, seeds, batch, shuffled)
        out, jobs = self.options.out, self.options.jobs
        run_points(points, out, jobs, self.plan.samples, ends, begins=begins)

    def missing(self, points: Iterable[Point]) -> int:
        """Those that are not done."""
        return sum(not point.is_done(self.options.out) for point in points)

    def wall_s(self, runs: int, samples: int | None = None) -> float:
        """Seconds that so many runs take; ``samples``: None for those of the plan."""
        return self.budget.wall_s(runs, self.log, samples or self.plan.samples)

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
        return finished(points_of([line], LOOKS[-1])[0], self.options.out)

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
        result = []
        for one in front:
            gap = self.gap(one.cell)
            known = one.cell.is_exact or gap is not None
            result.append(Entry(name=one.candidate.label, gain=one.gain, gap=gap, trained=known))
        return result

    def until_decided(self, front: Sequence[Simulated]) -> Decision:
        """Two seeds of every cell; then more of the two that the decision lies between, while they
        may tell and the budget holds them."""
        comparisons = len(self.plan.cells)
        self.train(self.plan.cells, LOOKS[0])
        self.left_out = tuple(cell for cell in self.plan.cells if not self.runs(cell))
        trained = tuple(cell for cell in self.plan.cells if cell not in self.left_out)
        no_time = self.left_out + self.plan.no_time
        self.plan = replace(self.plan, cells=trained, no_time=no_time)
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

    def at_second_batch(self, best: Simulated) -> tuple[int, Interval] | None:
        """The gap of the best mode at a batch four times as large; None where its rows are
        exact, where the cluster's own batch is trained, or where the budget does not hold it."""
        cell, of_cluster = best.cell, int(best.row["batch"])
        batch = SECOND_BATCH * self.plan.batch
        if cell.is_exact or self.plan.batch >= of_cluster or batch > self.plan.samples // 2:
            return None
        if self.wall_s(4) > self.budget.left_s and not self.gap(cell, batch):
            return None
        self.train([cell], LOOKS[0], batch)
        gap = self.gap(cell, batch)
        return None if gap is None else (batch, gap)
