"""From run summaries to the table of AUC gaps, with intervals over paired seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.points import Point
from experiments.statistics import Interval, t_interval
from runtime.run.folder import PREDICTIONS, Predictions, read_predictions, read_summary
from runtime.run.metrics import read_metrics

Setting = tuple[str, int | None]
"""Mode and bound tau."""
SYNC: Setting = ("sync", 0)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished point."""

    point: Point
    summary: dict[str, Any]

    @property
    def setting(self) -> Setting:
        """Mode and bound."""
        return self.summary["mode"], self.summary["tau"]

    def auc(self, task: str) -> float:
        """Final test AUC; NaN when it does not exist."""
        return self._figure(task, "auc")

    def log_loss(self, task: str) -> float:
        """Final test log-loss; NaN when it does not exist."""
        return self._figure(task, "log_loss")

    def predictions(self, root: Path) -> Predictions:
        """Labels and predictions of its test part. Raises ValueError where the file is not there,
        or damaged."""
        folder = self.point.folder(root)
        found = read_predictions(folder)
        if found is None:
            raise ValueError(f"{folder} has a summary and no {PREDICTIONS}; remove it to run anew")
        return found

    def _figure(self, task: str, name: str) -> float:
        found = self.summary["tasks"][task][name]
        return math.nan if found is None else float(found)


def finished(points: Sequence[Point], root: Path) -> list[Run]:
    """All points that have a summary."""
    found = ((p, read_summary(p.folder(root))) for p in points)
    return [Run(p, s) for p, s in found if s is not None]


@dataclass(frozen=True, slots=True)
class GapRow:
    """One line of the table: a setting, over its seeds."""

    mode: str
    tau: int | None
    ranks: int
    task: str
    auc: Interval
    gap_to_sync: Interval
    """Paired by seed: this setting minus sync."""
    gap_to_tau_0: Interval
    """Paired by seed: this setting minus the same mode at tau = 0."""
    log_loss: float
    staleness_mean_steps: float
    staleness_max_steps: int
    thread_staleness: tuple[float, int] | None
    """Mean and maximum steps missed in the concurrent executor; None where it was not run."""


def gap_table(lag_runs: Sequence[Run], thread_runs: Sequence[Run], task: str) -> list[GapRow]:
    """One row per setting, in the order in which the points were given.

    There is no speed in it: the samples/s of single runs are no comparison (one run of each, on a
    machine whose speed moves, and in async a batch per rank that is W times that of sync). The
    benches measure speeds, in turn and with intervals.
    """
    by_setting: dict[Setting, dict[int, Run]] = {}
    for run in lag_runs:
        by_setting.setdefault(run.setting, {})[run.summary["seed"]] = run
    rows = []
    for (mode, tau), runs in by_setting.items():
        # tau = 0 of a merged hybrid without a dense lag is sync in its bytes (law 1); else it is a
        # run of its own.
        equals_sync = mode in ("hybrid", "raw_hybrid") and _merges(runs)
        own_zero = by_setting.get(SYNC if equals_sync else (mode, 0), {})
        threads = [r.summary for r in thread_runs if r.setting == (mode, tau)]
        stale = [r.summary["staleness"] for r in runs.values()]
        rows.append(
            GapRow(
                mode,
                tau,
                next(iter(runs.values())).summary["ranks"],
                task,
                t_interval([r.auc(task) for r in runs.values()]),
                _paired(runs, by_setting.get(SYNC, {}), task),
                _paired(runs, own_zero, task),
                float(np.mean([r.log_loss(task) for r in runs.values()])),
                float(np.mean([s["mean_steps"] for s in stale])),
                max(int(s["max_steps"]) for s in stale),
                _observed(threads),
            )
        )
    return rows


def _observed(threads: Sequence[dict[str, Any]]) -> tuple[float, int] | None:
    found = [summary["staleness"] for summary in threads]
    if not found:
        return None
    mean = float(np.mean([s["mean_steps"] for s in found]))
    return mean, max(int(s["max_steps"]) for s in found)


def _merges(runs: dict[int, Run]) -> bool:
    found = [run.point.config.sync for run in runs.values()]
    return all(sync.merges and not sync.dense_lag for sync in found)


def _paired(runs: dict[int, Run], reference: dict[int, Run], task: str) -> Interval:
    shared = sorted(set(runs) & set(reference))
    return t_interval([runs[s].auc(task) - reference[s].auc(task) for s in shared])


def curve_records(runs: Sequence[Run], root: Path) -> list[dict[str, Any]]:
    """All snapshots and final evaluations, one record per run, task and instant."""
    records = []
    for run in runs:
        for line in read_metrics(run.point.folder(root)):
            for task, scores in line.tasks.items():
                records.append(
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
                )
    return records


def table_cells(rows: Sequence[GapRow]) -> tuple[list[str], list[list[str]]]:
    """Header and cells as a person reads them; gaps in thousandths of AUC."""
    header = [
        "mode", "tau", "test AUC", "gap to sync [1e-3]", "gap to own tau 0 [1e-3]", "log-loss",
        "stale steps (lag)",
    ]  # fmt: skip
    ran_threads = any(row.thread_staleness for row in rows)
    if ran_threads:
        header.append("(threads)")
    cells = [
        [
            row.mode,
            "-" if row.mode in ("sync", "lookahead") else str(row.tau),
            f"{row.auc.mean:.4f}",
            "-" if row.mode == "sync" else thousandths(row.gap_to_sync),
            "-" if row.mode == "sync" or row.tau == 0 else thousandths(row.gap_to_tau_0),
            f"{row.log_loss:.4f}",
            _stale((row.staleness_mean_steps, row.staleness_max_steps)),
            *([_stale(row.thread_staleness)] if ran_threads else []),
        ]
        for row in rows
    ]
    return header, cells


def _stale(mean_and_most: tuple[float, int] | None) -> str:
    return "-" if mean_and_most is None else "{:.2f} / {}".format(*mean_and_most)


def thousandths(gap: Interval) -> str:
    """A gap in thousandths of AUC with its interval; "-" where no seed has both runs."""
    if gap.n == 0:
        return "-"
    if math.isnan(gap.half_width):
        return f"{1e3 * gap.mean:+.2f} (1 seed)"
    return f"{1e3 * gap.mean:+.2f} ± {1e3 * gap.half_width:.2f}"


def record(row: GapRow) -> dict[str, Any]:
    """One line of the CSV; what threads did stands in it where threads ran."""
    line = {
        "mode": row.mode,
        "tau": row.tau,
        "ranks": row.ranks,
        "task": row.task,
        "seeds": row.auc.n,
        "test_auc": row.auc.mean,
        "test_auc_half_width_95": row.auc.half_width,
        "gap_to_sync": row.gap_to_sync.mean,
        "gap_to_sync_half_width_95": row.gap_to_sync.half_width,
        "gap_to_tau_0": row.gap_to_tau_0.mean,
        "gap_to_tau_0_half_width_95": row.gap_to_tau_0.half_width,
        "log_loss": row.log_loss,
        "staleness_mean_steps": row.staleness_mean_steps,
        "staleness_max_steps": row.staleness_max_steps,
    }
    if row.thread_staleness is not None:
        mean, most = row.thread_staleness
        line |= {"concurrent_staleness_mean_steps": mean, "concurrent_staleness_max_steps": most}
    return line
