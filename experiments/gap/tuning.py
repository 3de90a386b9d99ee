"""Rates per mode and bound, chosen on the validation part: a grid around the fixed rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gap.data_sets import FIXED, Found, Rates
from experiments.gaps import Run, Setting, finished
from experiments.paired import setting_point
from experiments.points import Point, data_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One pair of rates that is tried for a setting, with its points."""

    found: Found
    setting: Setting
    rates: Rates
    points: tuple[Point, ...]
    """One per seed, judged on the validation part."""


def grid(row_factors: Sequence[float], dense_factors: Sequence[float]) -> list[Rates]:
    """The fixed rates times each pair of factors.

    >>> [(rates.row_lr, rates.lr) for rates in grid([1, 2], [0.5])]
    [(0.05, 0.0005), (0.1, 0.0005)]
    """
    return [
        Rates(row_lr=FIXED.row_lr * row, lr=FIXED.lr * dense)
        for row, dense in itertools.product(row_factors, dense_factors)
    ]


def trials_of(
    found: Found,
    settings: Sequence[Setting],
    candidates: Sequence[Rates],
    seeds: Sequence[int],
    *,
    data_dir: Path | None,
    samples: int | None,
    test_rows: int | None,
) -> list[Trial]:
    """Every candidate for every setting: trained without the validation rows, judged on them."""
    trials = []
    checksum = ""
    for setting in settings:
        for rates in candidates:
            base = found.data.config(
                data_dir=data_dir,
                samples=samples,
                test_rows=test_rows,
                rates=rates,
                validate=True,
            )
            checksum = checksum or data_sha256(base)
            prefix = f"{found.data.label}-tuning-"
            points = tuple(setting_point(base, setting, s, checksum, prefix) for s in seeds)
            trials.append(Trial(found=found, setting=setting, rates=rates, points=points))
    return trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rates of a setting, and what they reached on the validation part."""

    rates: Rates
    validation_auc: float
    at_edge: bool
    """Whether a rate is the smallest or the largest that was tried of two or more: a wider grid
    might find a better one."""


def choose(trials: Sequence[Trial], task: str, root: Path) -> dict[Setting, Choice]:
    """Per setting the rates with the highest mean validation AUC of ``task``.

    Of equal ones the first of the grid. A setting all of whose trials have no AUC (they diverged)
    keeps the fixed rates.
    """
    chosen: dict[Setting, Choice] = {}
    for setting in dict.fromkeys(trial.setting for trial in trials):
        mine = [trial for trial in trials if trial.setting == setting]
        best: Choice | None = None
        for trial in mine:
            auc = validation_auc(finished(trial.points, root), task)
            if not math.isnan(auc) and (best is None or auc > best.validation_auc):
                edge = _at_edge(trial.rates, [other.rates for other in mine])
                best = Choice(rates=trial.rates, validation_auc=auc, at_edge=edge)
        chosen[setting] = best or Choice(rates=FIXED, validation_auc=math.nan, at_edge=True)
    return chosen


def validation_auc(runs: Sequence[Run], task: str) -> float:
    """Mean over the seeds; NaN where one has no AUC. Raises ValueError for a run on the test part:
    nothing may be chosen there."""
    for run in runs:
        if run.point.config.evaluation.part != "validation":
            raise ValueError(f"{run.point.label} was judged on the test part; tuning reads none")
    return float(np.mean([run.auc(task) for run in runs])) if runs else math.nan


def tuning_records(
    trials: Sequence[Trial], chosen: Mapping[Setting, Choice], task: str, root: Path
) -> list[dict[str, Any]]:
    """Every pair of rates that was tried, one line each."""
    records = []
    for trial in trials:
        runs = finished(trial.points, root)
        choice = chosen[trial.setting]
        is_chosen = trial.rates == choice.rates
        records.append(
            {
                "data": trial.found.data.name,
                "task": task,
                "mode": trial.setting[0],
                "tau": trial.setting[1],
                "row_lr": trial.rates.row_lr,
                "lr": trial.rates.lr,
                "seeds": len(runs),
                "validation_auc": validation_auc(runs, task),
                "validation_log_loss": (
                    float(np.mean([run.log_loss(task) for run in runs])) if runs else math.nan
                ),
                "chosen": is_chosen,
                "at_edge": is_chosen and choice.at_edge,
            }
        )
    return records


def _at_edge(rates: Rates, tried: Sequence[Rates]) -> bool:
    for name in ("row_lr", "lr"):
        values = {getattr(other, name) for other in tried}
        if len(values) > 1 and getattr(rates, name) in (min(values), max(values)):
            return True
    return False
