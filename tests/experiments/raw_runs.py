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

Key = tuple[str, str, int]
"""Mode, tau as a CSV has it, seed."""


@dataclass(frozen=True)
class RawRun:
    folder: Path
    mode: str
    tau: str
    seed: int
    executor: str
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

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]


def raw_runs(
    root: Path, prefix: str = "", only: Callable[[dict], bool] = lambda config: True
) -> dict[Key, RawRun]:
    """The finished runs of the constant-lag executor (or another) below ``root``; ``only``: of
    such a config."""
    found = {}
    for path in root.glob(f"{prefix}*/summary.json"):
        if not only(json.loads(path.with_name("config.json").read_text())):
            continue
        told = json.loads(path.read_text())
        with np.load(path.with_name("predictions.npz")) as arrays:
            run = RawRun(
                path.parent, told["mode"], str(told["tau"]), told["seed"], told["executor"],
                arrays["labels"].astype(int), arrays["predictions"],
                next(iter(told["tasks"].values())),
            )  # fmt: skip
        key = (run.mode, run.tau, run.seed)
        if prefix or run.executor != "concurrent":
            assert key not in found, f"two runs of {key}"
            found[key] = run
    return found


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


def check_gap_table(rows: list[dict[str, str]], runs: dict[Key, RawRun]) -> None:
    """Every figure of a table of gaps, computed anew from run folders; seeds draw test samples."""
    seeds = sorted({seed for _, _, seed in runs})
    for row in rows:
        own = [runs[row["mode"], row["tau"], seed] for seed in seeds]
        check_gap_line(row, own, [runs["sync", "0", seed] for seed in seeds])


def check_gap_line(row: dict[str, str], own: list[RawRun], sync: list[RawRun]) -> None:
    aucs, others = ([run.auc() for run in part] for part in (own, sync))
    assert int(row["seeds"]) == len(own)
    close(row["test_auc"], np.mean(aucs))
    close(row["log_loss"], np.mean([run.log_loss() for run in own]))
    if aucs == others:
        assert float(row["gap_to_sync"]) == 0.0
        return
    mean, half = paired(aucs, others)
    close(row["gap_to_sync"], mean)
    close(row["gap_to_sync_half_width_95"], half)


def close(told: str, right: float, rel: float = 1e-9, abs: float = 1e-15) -> None:
    assert float(told) == pytest.approx(right, rel=rel, abs=abs)
