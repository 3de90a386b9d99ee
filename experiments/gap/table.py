"""The table of the gap: every score of every setting over its seeds, paired with its references."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.gap.data_sets import Found
from experiments.gap.tuning import Choice
from experiments.gaps import SYNC, Run, Setting
from experiments.statistics import Interval, delong, t_interval

RatesName = Literal["fixed", "tuned"]
LEVELS = ("gauc", "log_loss", "normalized_entropy", "calibration")
"""Scores beside AUC; one that an older summary does not hold is not known."""
GAPS = ("gauc", "log_loss")
"""Those whose difference to sync is told with its interval, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished runs of one data set at one kind of rates."""

    found: Found
    rates: RatesName
    runs: Mapping[Setting, Mapping[int, Run]]
    """Setting -> seed -> run."""
    choices: Mapping[Setting, Choice]
    """What was tuned; empty at the fixed rates."""


def group_of(
    found: Found, rates: RatesName, runs: Sequence[Run], choices: Mapping[Setting, Choice]
) -> Group:
    """Runs by setting and seed."""
    by_setting: dict[Setting, dict[int, Run]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, {})[run.summary["seed"]] = run
    return Group(found=found, rates=rates, runs=by_setting, choices=choices)


def gap_rows(group: Group, task: str, root: Path) -> list[dict[str, Any]]:
    """A line of the CSV per setting; gaps are this setting minus its reference, seed by seed."""
    rows = []
    for setting, runs in group.runs.items():
        config = next(iter(runs.values())).point.config
        gap = paired(runs, group.runs.get(SYNC, {}), task, "auc")
        own = paired(runs, group.runs.get(tau_0_of(setting), {}), task, "auc")
        aucs = [score_of(run, task, "auc") for run in runs.values()]
        choice = group.choices.get(setting)
        row: dict[str, Any] = {
            "data": group.found.data.name,
            "task": task,
            "rates": group.rates,
            "mode": setting[0],
            "tau": setting[1],
            "ranks": config.sync.ranks,
            "batch": config.batch,
            "steps": group.found.steps,
            "row_lr": config.rows.optimizer.lr,
            "lr": config.model.lr,
            "seeds": len(runs),
            "gap_to_sync": gap.mean,
            "gap_to_sync_half_width_95": gap.half_width,
            "gap_to_tau_0": own.mean,
            "gap_to_tau_0_half_width_95": own.half_width,
            "test_auc": float(np.mean(aucs)),
            "test_auc_half_width_95": t_interval(aucs).half_width,
            "test_auc_seed_sd": float(np.std(aucs, ddof=1)) if len(aucs) > 1 else math.nan,
            "delong_p_seed_0": delong_p(runs, group.runs.get(SYNC, {}), task, root),
        }
        for name in LEVELS:
            row[name] = float(np.mean([score_of(run, task, name) for run in runs.values()]))
        for name in GAPS:
            difference = paired(runs, group.runs.get(SYNC, {}), task, name)
            row[f"{name}_gap_to_sync"] = difference.mean
            row[f"{name}_gap_to_sync_half_width_95"] = difference.half_width
        stale = [run.summary["staleness"] for run in runs.values()]
        row["staleness_mean_steps"] = float(np.mean([s["mean_steps"] for s in stale]))
        row["staleness_max_steps"] = max(int(s["max_steps"]) for s in stale)
        row["validation_auc"] = math.nan if choice is None else choice.validation_auc
        row["rates_at_edge"] = "" if choice is None else choice.at_edge
        rows.append(row)
    return rows


def tau_0_of(setting: Setting) -> Setting:
    """The same mode without late rows: of hybrid that is sync (law 1), of async a run of its own.

    >>> tau_0_of(("hybrid", 4)), tau_0_of(("async", 4))
    (('sync', 0), ('async', 0))
    """
    mode, _ = setting
    return SYNC if mode in ("sync", "lookahead", "raw_hybrid", "hybrid") else (mode, 0)


def score_of(run: Run, task: str, name: str) -> float:
    """A score of a run; NaN where it does not exist, or the summary is older than the score."""
    found = run.summary["tasks"][task].get(name)
    return math.nan if found is None else float(found)


def paired(runs: Mapping[int, Run], reference: Mapping[int, Run], task: str, name: str) -> Interval:
    """Mean difference over the seeds that both have, with its 95 % t interval."""
    shared = sorted(set(runs) & set(reference))
    return t_interval(
        [score_of(runs[s], task, name) - score_of(reference[s], task, name) for s in shared]
    )


def delong_p(runs: Mapping[int, Run], reference: Mapping[int, Run], task: str, root: Path) -> float:
    """DeLong's two-sided p of equal AUCs of seed 0's two models on other test rows; NaN without
    both, or where an AUC does not exist."""
    if 0 not in runs or 0 not in reference or runs[0] is reference[0]:
        return math.nan
    number = list(runs[0].summary["tasks"]).index(task)
    scores, labels = [], np.empty(0)
    for run in (runs[0], reference[0]):
        if math.isnan(score_of(run, task, "auc")):
            return math.nan
        with np.load(run.point.folder(root) / "predictions.npz") as arrays:
            labels = arrays["labels"][:, number]
            scores.append(arrays["predictions"][:, number])
    return delong(labels, scores[0], scores[1]).p_value


def too_wide(rows: Sequence[Mapping[str, Any]], widest: float) -> list[Setting]:
    """Settings whose gap to sync is known less well than ``widest``."""
    return [(row["mode"], row["tau"]) for row in rows if row["gap_to_sync_half_width_95"] > widest]


def differing(pairs: Sequence[tuple[Run, Run]], task: str) -> list[str]:
    """A line for each of two runs that must be equal and are not; compared by AUC and log-loss."""
    return [
        f"{one.point.label} has {name} {score_of(one, task, name)!r}, but {other.point.label}"
        f" {score_of(other, task, name)!r}: they must be equal by law"
        for one, other in pairs
        for name in ("auc", "log_loss")
        if score_of(one, task, name) != score_of(other, task, name)
    ]
