"""Drift as a predictor of the gap: one factor, fitted on the synthetic sets, tested on the others.

Lines are those of the study's table: a data set and a bound each, ``part`` "fit" or "test".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.statistics import Interval, t_interval

PREDICTORS = ("relative", "predictions")
"""Fields of `drift.Drift` by which a gap is predicted."""


def predicted(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each line with the gap that its drift tells, by one factor fitted on the synthetic sets.

    gap = -c * drift, least squares through the origin: no drift, no gap. The naive predictors know
    no drift: the mean gap of the synthetic sets at this bound, and no gap at all.
    """
    fit = [line for line in lines if line["part"] == "fit"]
    done = []
    for line in lines:
        told = dict(line)
        for name in PREDICTORS:
            drift = np.array([f[name] for f in fit])
            gap = np.array([f["gap_to_sync"] for f in fit])
            factor = float(drift @ gap / (drift @ drift)) if drift.any() else math.nan
            told[f"factor_{name}"] = factor
            told[f"predicted_{name}"] = factor * line[name]
        same = [f["gap_to_sync"] for f in fit if f["tau"] == line["tau"]]
        told["predicted_mean"] = float(np.mean(same)) if same else math.nan
        done.append(told)
    return done


def errors(lines: Sequence[dict[str, Any]]) -> dict[str, Interval]:
    """Mean absolute error of each predictor over the data sets that were not fitted."""
    test = [line for line in lines if line["part"] == "test"]
    predictors = {**{n: f"predicted_{n}" for n in PREDICTORS}, "mean gap": "predicted_mean"}
    found = {
        name: t_interval([abs(line[key] - line["gap_to_sync"]) for line in test])
        for name, key in predictors.items()
    }
    return found | {"no gap": t_interval([abs(line["gap_to_sync"]) for line in test])}
