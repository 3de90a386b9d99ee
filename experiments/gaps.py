"""From run summaries to the table of AUC gaps, with intervals over paired seeds and test samples.

Two seeds of sync and of hybrid, trained and compared:

>>> from tempfile import TemporaryDirectory
>>> from experiments.points import Line, over_seeds
>>> from runtime.config import DataConfig, EvaluationConfig, SyncConfig, TrainConfig
>>> from runtime.run.record import run_into
>>> few = {"data": DataConfig(name="synthetic", rows=512), "batch": 64}
>>> few["evaluation"] = EvaluationConfig(test_rows=100)
>>> sync = TrainConfig(sync=SyncConfig(mode="sync"), **few)
>>> late = TrainConfig(sync=SyncConfig(mode="hybrid", tau=4), **few)
>>> lines = Line(name="sync", config=sync), Line(name="rows 4 late", config=late, versus=("sync",))
>>> with TemporaryDirectory() as folder:
...     root = Path(folder)
...     points = [over_seeds(line.slug, line.config, 2, decides="") for line in lines]
...     for point in points[0] + points[1]:
...         _ = run_into(point.folder(root), point.config)
...     rows = gap_table(lines, [finished(of_line, root) for of_line in points], "click", root)
>>> [(row["line"], row["rows_late"], row["seeds"]) for row in rows]
[('sync', 0, 2), ('rows 4 late', 4, 2)]
>>> rows[1]["gap_half_width_95"] > 0
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.points import Line, Point, Setting, stream_of_seeds
from experiments.statistics import Interval, contrast, t_interval
from experiments.tables import Column
from persia_sim.base.window import UpdatesMissed, updates_missed
from runtime.run.folder import Predictions, read_metrics, read_predictions, read_summary


@dataclass(frozen=True, slots=True)
class Run:
    """A finished point."""

    point: Point
    summary: dict[str, Any]

    @property
    def setting(self) -> Setting:
        """Mode and bound."""
        return self.summary["mode"], self.summary["tau"]

    @property
    def late(self) -> UpdatesMissed:
        """Updates that the run's reads miss under the constant lag."""
        sync = self.point.config.sync
        return updates_missed(sync.mode, sync.window, ranks=sync.ranks, dense_lag=sync.dense_lag)

    def auc(self, task: str, name: str = "auc") -> float:
        """Final test AUC, or another score by its name; NaN when it does not exist."""
        score = self.summary["tasks"][task][name]
        return math.nan if score is None else float(score)

    def predictions(self, root: Path) -> Predictions:
        """Labels and predictions of the run's test part. Raises ValueError where the file is not
        there, or damaged."""
        folder = self.point.folder(root)
        predictions = read_predictions(folder)
        if predictions is None:
            raise ValueError(
                f"{folder} has a summary and no predictions.npz; remove it to run anew"
            )
        return predictions


def finished(points: Sequence[Point], root: Path) -> list[Run]:
    """The runs of all points that have a summary."""
    summaries = ((point, read_summary(point.folder(root))) for point in points)
    return [Run(point, summary) for point, summary in summaries if summary is not None]


def gap_over_seeds(
    runs: Sequence[Run], reference: Sequence[Run], task: str, root: Path
) -> Interval:
    """Mean AUC of ``runs`` minus ``reference``, paired by seed, by the predictions in ``root``."""
    by_seed = [{run.summary["seed"]: run for run in side} for side in (reference, runs)]
    return contrast_over_seeds(by_seed, (-1, 1), task, root)


def contrast_over_seeds(
    runs: Sequence[Mapping[int, Run]], signs: Sequence[int], task: str, root: Path
) -> Interval:
    """Mean over seeds of a sum of AUCs of ``runs`` by seed, each taken with its sign of ``signs``;
    by the predictions in ``root``."""
    # Only seeds that every side has are compared.
    paired = [seed for seed in runs[-1] if all(seed in side for side in runs)]
    runs_of_seeds = [[side[seed] for side in runs] for seed in paired]

    gaps = [float(np.dot(signs, [run.auc(task) for run in group])) for group in runs_of_seeds]
    folders = [[run.point.folder(root) for run in group] for group in runs_of_seeds]
    column = list(next(iter(runs[-1].values())).summary["tasks"]).index(task)
    return paired_interval(gaps, folders, column, signs)


def paired_interval(
    gaps: Sequence[float],
    folders: Sequence[Sequence[Path]],
    task: int,
    signs: Sequence[int] = (-1, 1),
) -> Interval:
    """The interval of gaps of AUC, a seed each, between the runs in ``folders``: second minus
    first, or a sum with other ``signs``.

    Seeds that share their test samples: the interval is over seeds and over the samples, which come
    user by user. Where every seed has its own (`rows_error` is 0 then), seeds stand for both. Where
    a run kept no predictions, or they hold fewer than two of a label or users, it is over seeds
    alone (`rows_error` is NaN).

    >>> folders = [(Path("no/sync"), Path("no/hybrid"))] * 3
    >>> gap = paired_interval([-0.001, -0.002, -0.003], folders, task=0)
    >>> round(gap.mean, 4), round(gap.half_width, 4), gap.rows_error
    (-0.002, 0.0025, nan)
    """
    # Over seeds alone first: that is the answer where the test samples tell nothing.
    over_seeds = t_interval(gaps)
    if over_seeds.n < 2 or math.isnan(over_seeds.mean):
        return Interval(over_seeds.mean, math.nan, over_seeds.n)
    error = float(np.std(gaps, ddof=1)) / math.sqrt(over_seeds.n)

    # Without the predictions of every run the error of the test samples is not known.
    stored = [read_predictions(path) for folders_of_seed in folders for path in folders_of_seed]
    tests = [test.with_label(task) for test in stored if test is not None]
    if len(tests) < len(stored):
        return replace(over_seeds, seeds_error=error)

    # Seeds with test samples of their own vary by them already: nothing is added.
    if not all(np.array_equal(tests[0].labels, test.labels, equal_nan=True) for test in tests):
        return replace(over_seeds, seeds_error=error, rows_error=0.0)

    # A covariance needs two rows of either label, and two users.
    labels = tests[0].labels[:, task]
    groups = tests[0].groups
    users = labels if groups is None else np.unique(groups)
    if min((labels > 0.5).sum(), (labels <= 0.5).sum(), len(users)) < 2:
        return replace(over_seeds, seeds_error=error)

    # Shared test samples: both errors, from the scores of each side of the sum, seed by seed.
    scores = [test.predictions[:, task] for test in tests]
    by_side = [scores[side :: len(signs)] for side in range(len(signs))]
    both = contrast(labels, by_side, signs, groups, tests[0].weights)
    # The mean of the summaries, whose scores were not rounded to float32 before they were ranked.
    return replace(both, mean=over_seeds.mean)


def gap_table(
    lines: Sequence[Line],
    runs_of: Sequence[Sequence[Run]],
    task: str,
    root: Path,
    beside: str = "",
) -> list[dict[str, Any]]:
    """A row of the CSV for each line of a study: what is late in it, its scores, and its AUC minus
    that of the line that it is held against; a row for each of these where they are several.

    ``runs_of``: the runs of each line, a seed each. ``beside``: an option that makes groups; each
    gap has beside it by how much it differs from that at the option's first value.

    There is no speed in it: the samples/s of single runs are no comparison (one run of each, on a
    machine whose speed moves, and in async a batch per rank that is W times that of sync). The
    benches measure speeds, in turn and with intervals.
    """
    found = {(line.group, line.name): runs for line, runs in zip(lines, runs_of, strict=True)}
    rows = []
    each = [
        (line, runs, versus)
        for line, runs in zip(lines, runs_of, strict=True)
        for versus in line.versus or ("",)
    ]
    for line, runs, versus in each:
        held = found[line.group, versus] if versus else []
        gap = gap_over_seeds(runs, held, task, root) if held else _NO_GAP
        late = runs[0].late
        row = {
            "data": stream_of_seeds(line.config.data.name, line.config.seed),
            "group": line.group_name,
            "line": line.name,
            "mode": runs[0].setting[0],
            "tau": runs[0].setting[1],
            "rows_late": late.rows,
            "dense_late": late.dense,
            "row_lr": line.config.rows.optimizer.lr,
            "lr": line.config.model.lr,
            "ranks": runs[0].summary["ranks"],
            "task": task,
            "seeds": gap.n if held else len(runs),
            "auc": mean_auc(runs, task),
            "log_loss": float(np.mean([run.auc(task, "log_loss") for run in runs])),
            "versus": versus,
            **gap_columns(gap, "gap"),
        }
        if beside:
            difference = _beside_first(line, versus, lines, found, beside, task, root)
            row |= gap_columns(difference, "beside")
        rows.append(row)
    return rows


_NO_GAP = Interval(math.nan, math.nan, 0)


def _beside_first(
    line: Line,
    versus: str,
    lines: Sequence[Line],
    found: Mapping[Any, Sequence[Run]],
    beside: str,
    task: str,
    root: Path,
) -> Interval:
    """A line's gap minus that of its like at the first value of the option: a difference of two
    paired differences. None of the first itself, and of a line without a gap."""
    values = [value for one in lines for path, value in one.group if path == beside]
    first = tuple((path, values[0] if path == beside else value) for path, value in line.group)
    keys = (first, versus), (first, line.name), (line.group, versus)
    if not versus or first == line.group or any(key not in found for key in keys):
        return _NO_GAP
    sides = [*(found[key] for key in keys), found[line.group, line.name]]
    by_seed = [{run.summary["seed"]: run for run in side} for side in sides]
    return contrast_over_seeds(by_seed, (1, -1, -1, 1), task, root)


def mean_auc(runs: Sequence[Run], task: str) -> float:
    """Final test AUC over seeds."""
    return float(np.mean([run.auc(task) for run in runs]))


def curve_records(runs: Sequence[Run], root: Path) -> list[dict[str, Any]]:
    """All snapshots and final evaluations, one record per run, task and instant."""
    return [
        {
            "mode": run.setting[0],
            "tau": run.setting[1],
            "seed": run.summary["seed"],
            "samples": line.samples,
            "drained": line.drained,
            "task": task,
            "auc": scores["auc"],
            "log_loss": scores["log_loss"],
        }
        for run in runs
        for line in read_metrics(run.point.folder(root))
        for task, scores in line.tasks.items()
    ]


FOOTNOTE = """\
late: how many updates a batch misses with the executor constant_lag. ± is a 95 % interval over
seeds and test samples together, in which a user's samples count as one. Where each seed draws
synthetic data of its own, test samples among them, the interval is over seeds alone."""


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def columns_of(rows: Sequence[Mapping[str, Any]], part: str = "test") -> dict[str, Column]:
    """The columns of `gap_table` as a person reads them; ``part``: what the runs are judged on."""
    versus = {row["versus"] for row in rows if row["versus"]}
    gap = f"gap to {min(versus)}" if len(versus) == 1 else "gap"
    columns: dict[str, Column] = {
        "line": "{line}",
        "rows late": lambda row: _or_dash(row["rows_late"]),
        "dense late": lambda row: _or_dash(row["dense_late"]),
        f"{part} AUC": "{auc:.4f}",
        "log-loss": "{log_loss:.4f}",
    }
    if len(versus) > 1:
        columns["versus"] = lambda row: row["versus"] or "-"
    columns[f"{gap} [1e-3]"] = lambda row: gap_of(row) if row["versus"] else "-"
    if any("beside" in row for row in rows):
        columns["minus the first's [1e-3]"] = lambda row: gap_of(row, "beside")
    return columns


def gap_of(row: Mapping[str, Any], name: str = "gap") -> str:
    """A gap of a row of a CSV in thousandths of AUC."""
    return thousandths(Interval(row[name], row[f"{name}_half_width_95"], row["seeds"]))


def thousandths(gap: Interval) -> str:
    """A gap in thousandths of AUC with its interval; "-" where no seed has both runs, or one of
    them has no AUC.

    >>> thousandths(Interval(-0.00115, 0.00185, 2)), thousandths(Interval(math.nan, math.nan, 0))
    ('-1.15 ± 1.85', '-')
    """
    if gap.n == 0 or math.isnan(gap.mean):
        return "-"
    if math.isnan(gap.half_width):
        return f"{1e3 * gap.mean:+.2f} (1 seed)"
    return f"{1e3 * gap.mean:+.2f} ± {1e3 * gap.half_width:.2f}"


def gap_columns(gap: Interval, name: str = "gap_to_sync") -> dict[str, float]:
    """A gap in the columns of a CSV: its interval, and the two standard errors that make it.

    >>> list(gap_columns(Interval(-0.001, 0.002, 2), "gap_to_hybrid"))[:2]
    ['gap_to_hybrid', 'gap_to_hybrid_half_width_95']
    """
    prefix = "" if name == "gap_to_sync" else f"{name}_"
    return {
        name: gap.mean,
        f"{name}_half_width_95": gap.half_width,
        f"{prefix}seeds_error": gap.seeds_error,
        f"{prefix}rows_error": gap.rows_error,
    }
