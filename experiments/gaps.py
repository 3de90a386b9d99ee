"""From run summaries to the table of AUC gaps, with intervals over paired seeds and test rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.points import Point, Setting
from experiments.statistics import Interval, contrast, t_interval
from experiments.tables import Column
from persia_sim.words.window import UpdatesMissed, updates_missed
from runtime.run.folder import Predictions, read_metrics, read_predictions, read_summary

K = TypeVar("K")


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
        """Updates that its reads miss under the constant lag."""
        sync = self.point.config.sync
        return updates_missed(sync.mode, sync.window, ranks=sync.ranks, dense_lag=sync.dense_lag)

    def auc(self, task: str, name: str = "auc") -> float:
        """Final test AUC, or another score by its name; NaN when it does not exist."""
        found = self.summary["tasks"][task][name]
        return math.nan if found is None else float(found)

    def predictions(self, root: Path) -> Predictions:
        """Labels and predictions of its test part. Raises ValueError where the file is not there,
        or damaged."""
        folder = self.point.folder(root)
        if (found := read_predictions(folder)) is None:
            raise ValueError(
                f"{folder} has a summary and no predictions.npz; remove it to run anew"
            )
        return found


def finished(points: Sequence[Point], root: Path) -> list[Run]:
    """All points that have a summary."""
    found = ((p, read_summary(p.folder(root))) for p in points)
    return [Run(p, s) for p, s in found if s is not None]


def gap_over_seeds(
    runs: Sequence[Run], reference: Sequence[Run], task: str, root: Path
) -> Interval:
    """Mean AUC of ``runs`` minus ``reference``, paired by seed, by the predictions in ``root``."""
    found = [{run.summary["seed"]: run for run in own} for own in (reference, runs)]
    return contrast_over_seeds(found, (-1, 1), task, root)


def contrast_over_seeds(
    runs: Sequence[Mapping[int, Run]], signs: Sequence[int], task: str, root: Path
) -> Interval:
    """The same of any sum of AUCs, of runs by seed, which a ``sign`` each adds or takes away."""
    paired = [seed for seed in runs[-1] if all(seed in own for own in runs)]
    of_seeds = [[own[seed] for own in runs] for seed in paired]
    gaps = [float(np.dot(signs, [run.auc(task) for run in own])) for own in of_seeds]
    folders = [[run.point.folder(root) for run in of_seed] for of_seed in of_seeds]
    number = list(next(iter(runs[-1].values())).summary["tasks"]).index(task)
    return paired_interval(gaps, folders, number, signs)


def paired_interval(
    gaps: Sequence[float],
    folders: Sequence[Sequence[Path]],
    task: int,
    signs: Sequence[int] = (-1, 1),
) -> Interval:
    """Of gaps of AUC, a seed each, between the runs in ``folders``: second minus first, or a sum
    with other ``signs``.

    Seeds that share their test rows: the interval is over seeds and over the rows, which come user
    by user. Where every seed has its own (`rows_error` is 0 then), seeds stand for both. Where a
    run kept no predictions, or they hold fewer than two rows of a label or users, it is over seeds
    alone (`rows_error` is NaN).
    """
    found = t_interval(gaps)
    if found.n < 2 or math.isnan(found.mean):
        return Interval(found.mean, math.nan, found.n)
    error = float(np.std(gaps, ddof=1)) / math.sqrt(found.n)
    read = [read_predictions(path) for of_seed in folders for path in of_seed]
    kept = [one for one in read if one is not None]
    if len(kept) < len(read):
        return replace(found, seeds_error=error)
    if not all(np.array_equal(kept[0].labels, one.labels) for one in kept):
        return replace(found, seeds_error=error, rows_error=0.0)
    labels, groups, weights = kept[0].labels[:, task], kept[0].groups, kept[0].weights
    users = labels if groups is None else np.unique(groups)
    if min((labels > 0.5).sum(), (labels <= 0.5).sum(), len(users)) < 2:
        return replace(found, seeds_error=error)
    scores = [one.predictions[:, task] for one in kept]
    by_run = [scores[number :: len(signs)] for number in range(len(signs))]
    both = contrast(labels, by_run, signs, groups, weights)
    # The mean of the summaries, whose scores were not rounded to float32 before they were ranked.
    return replace(both, mean=found.mean)


def gap_table(runs: Sequence[Run], task: str, root: Path) -> list[dict[str, Any]]:
    """A line of the CSV per mode, bound, dense lag and dense rate, in the order of the runs.

    There is no speed in it: the samples/s of single runs are no comparison (one run of each, on a
    machine whose speed moves, and in async a batch per rank that is W times that of sync). The
    benches measure speeds, in turn and with intervals.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        key = (*run.setting, run.late, run.point.config.model.lr)
        groups.setdefault(key, []).append(run)
    sync: Sequence[Run] = next((own for own in groups.values() if own[0].setting[0] == "sync"), ())
    hybrids = {
        late.rows: own
        for (mode, _, late, _), own in groups.items()
        if (mode, late.dense) == ("hybrid", 0) and late.rows
    }
    return [
        {
            "mode": mode,
            "tau": tau,
            "rows_late": late.rows,
            "dense_late": late.dense,
            "lr": lr,
            "ranks": own[0].summary["ranks"],
            "task": task,
            **means_and_gap(own, sync, task, root),
            **columns_beside(late, hybrids, partial(gap_over_seeds, own, task=task, root=root)),
        }
        for (mode, tau, late, lr), own in groups.items()
    ]


def columns_beside(
    late: tuple[int | None, int | None], hybrids: Mapping[int, K], gap_to: Callable[[K], Interval]
) -> dict[str, Any]:
    """Of a setting whose rows and dense weights are both ``late``: its gap to hybrid, of
    ``hybrids`` by the lateness of their rows the one with rows as late, else the next later."""
    missed, dense = late
    rows = min((n for n in hybrids if missed and dense and n >= missed), default=None)
    gap = Interval(math.nan, math.nan, 0) if rows is None else gap_to(hybrids[rows])
    return {"hybrid_rows_late": rows, **gap_columns(gap, "gap_to_hybrid")}


def means_and_gap(
    own: Sequence[Run], sync: Sequence[Run], task: str, root: Path
) -> dict[str, float]:
    """What a line of the CSV says of a setting's runs: seeds, scores, the gap to sync."""
    gap = gap_over_seeds(own, sync, task, root)
    return {
        "seeds": gap.n,
        "test_auc": mean_auc(own, task),
        **gap_columns(gap),
        "log_loss": float(np.mean([run.auc(task, "log_loss") for run in own])),
    }


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
late: updates that a batch misses, under the executor lag. ± is 95 % over seeds and test rows
together (a user's rows as one); where each seed has a stream and rows of its own, over seeds."""


def of_sync(line: Mapping[str, Any], name: str = "gap_to_sync") -> str:
    """A gap of a line of a CSV in thousandths of AUC."""
    return thousandths(Interval(line[name], line[f"{name}_half_width_95"], line["seeds"]))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


COLUMNS: dict[str, Column] = {
    "mode": "{mode}",
    "tau": lambda line: "-" if line["mode"] in ("sync", "lookahead") else str(line["tau"]),
    "rows late": lambda line: _or_dash(line["rows_late"]),
    "dense late": lambda line: _or_dash(line["dense_late"]),
    "dense rate": "{lr:g}",
    "test AUC": "{test_auc:.4f}",
    "gap to sync [1e-3]": lambda line: "-" if line["mode"] == "sync" else of_sync(line),
    "log-loss": "{log_loss:.4f}",
}
"""Of `gap_table` as a person reads it."""


def thousandths(gap: Interval) -> str:
    """A gap in thousandths of AUC with its interval; "-" where no seed has both runs, or one of
    them has no AUC."""
    if gap.n == 0 or math.isnan(gap.mean):
        return "-"
    if math.isnan(gap.half_width):
        return f"{1e3 * gap.mean:+.2f} (1 seed)"
    return f"{1e3 * gap.mean:+.2f} ± {1e3 * gap.half_width:.2f}"


def gap_columns(gap: Interval, name: str = "gap_to_sync") -> dict[str, float]:
    """A gap in the columns of a CSV: its interval, and the two standard errors that make it."""
    prefix = "" if name == "gap_to_sync" else f"{name}_"
    return {
        name: gap.mean,
        f"{name}_half_width_95": gap.half_width,
        f"{prefix}seeds_error": gap.seeds_error,
        f"{prefix}rows_error": gap.rows_error,
    }
