"""Run folders read without the studies' own code: scores from predictions, by scikit-learn."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score

from experiments.paper.record import read_rows


@dataclass(frozen=True)
class RawRun:
    labels: np.ndarray
    predictions: np.ndarray
    told: dict[str, float]
    """Scores of the first task in its summary."""

    def auc(self) -> float:
        """The summary's, which agrees with that of the predictions.

        These are kept as float32, which makes or breaks a few ties among some ten thousand pairs.
        """
        right = roc_auc_score(self.labels[:, 0], self.predictions[:, 0])
        assert self.told["auc"] == pytest.approx(right, abs=1e-4)
        return self.told["auc"]

    def log_loss(self) -> float:
        right = log_loss(self.labels[:, 0], self.predictions[:, 0].astype(float))
        assert self.told["log_loss"] == pytest.approx(right, rel=1e-6)
        return self.told["log_loss"]


def raw_runs(root: Path, prefix: str) -> list[RawRun]:
    """The finished runs of folders that begin so, a seed each, in the order of their seeds."""
    found = {}
    for path in root.glob(f"{prefix}*/summary.json"):
        told = json.loads(path.read_text())
        with np.load(path.with_name("predictions.npz")) as arrays:
            labels, predictions = arrays["labels"].astype(int), arrays["predictions"]
        assert told["seed"] not in found, f"two runs of seed {told['seed']}"
        scores = next(iter(told["tasks"].values()))
        found[told["seed"]] = RawRun(labels, predictions, scores)
    return [found[seed] for seed in sorted(found)]


def printed_by(run: Callable[..., object], *given: object) -> str:
    """What it prints."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        run(*given)
    return told.getvalue()


read_csv = read_rows
"""The lines of a table, as strings."""


def paired(first: list[float], second: list[float]) -> tuple[float, float]:
    """Mean difference and half width of its 95 % interval, by scipy's paired t test."""
    ends = stats.ttest_rel(first, second).confidence_interval(0.95)
    return float(np.mean(first) - np.mean(second)), (ends.high - ends.low) / 2


def close(told: str, right: float, rel: float = 1e-9, abs: float = 1e-15) -> None:
    assert float(told) == pytest.approx(right, rel=rel, abs=abs)
