"""Gaps to sync in the published AUC curves: at the end, over the last points, along the run.

The curves were read off plots; `auc_curves.csv` has the error of each reading and its plot. On the
public sets sync is XDL's, so a gap of Persia's hybrid is of two systems, not of two modes alone. No
seeds were published, so no gap here has an interval, only the error of reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np

from experiments.published.descriptions import number, read_csv

CURVES = Path(__file__).with_name("auc_curves.csv")
ROUGH = 0.003
"""A gap that is read less exactly than this is not asked for the largest one: steep starts."""
LAST = 5
SYNC_OF = {
    "taobao-ad": ("XDL", "sync"),
    "avazu-ad": ("XDL", "sync"),
    "criteo-ad": ("XDL", "sync"),
    "kwai-video": ("Persia", "sync"),
}
"""The published synchronous curve of a set: system and mode."""

Key = tuple[str, str, str]
"""Data set, system, mode."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One published line, in order of steps."""

    step: np.ndarray
    """int64 [n]: dense updates."""
    samples: np.ndarray
    """float64 [n]: NaN where the plot does not tell them."""
    auc: np.ndarray
    """float64 [n]."""
    reading_error: np.ndarray
    """float64 [n]: of each AUC, as a bound."""


@dataclass(frozen=True, slots=True)
class PublishedGap:
    """One curve minus that of sync, at the steps that both have."""

    step: np.ndarray
    """int64 [n]."""
    samples: np.ndarray
    """float64 [n]."""
    gap: np.ndarray
    """float64 [n]: in AUC; below 0 where the curve is below sync."""
    reading_error: np.ndarray
    """float64 [n]: both readings' together."""
    reaches_the_end: bool
    """Whether sync is plotted as far as the curve is."""

    @property
    def at_end(self) -> float:
        """At the last step; NaN where sync is not plotted so far."""
        return float(self.gap[-1]) if self.reaches_the_end else nan

    @property
    def mean_of_last(self) -> float:
        """Over the last five points; NaN where sync is not plotted so far."""
        return float(self.gap[-LAST:].mean()) if self.reaches_the_end else nan

    @property
    def largest(self) -> float:
        """The lowest gap behind the start, without points that are read too roughly."""
        told = self._told
        return float(self.gap[told].min()) if told.any() else nan

    @property
    def largest_at_step(self) -> int:
        """The step of the lowest gap; -1 where no point tells."""
        told = np.flatnonzero(self._told)
        return int(self.step[told[self.gap[told].argmin()]]) if len(told) else -1

    @property
    def error_at_end(self) -> float:
        """How far reading the plot may have moved the gap at the end."""
        return float(self.reading_error[-1]) if self.reaches_the_end else nan

    def at_samples(self, samples: float) -> float:
        """After so many training samples, linear between points; NaN outside the curve."""
        known = np.isfinite(self.samples)
        if not known.any():
            return nan
        found = np.interp(samples, self.samples[known], self.gap[known], left=nan, right=nan)
        return float(found)

    @property
    def _told(self) -> np.ndarray:
        told: np.ndarray = (self.step > 0) & (self.reading_error <= ROUGH)
        return told


def published_curves(path: Path = CURVES) -> dict[Key, Curve]:
    """All curves of the file.

    Raises ValueError naming the file where it is missing or a cell is no number.
    """
    lines: dict[Key, list[tuple[float, ...]]] = {}
    for line in read_csv(path, "published AUC curves"):
        key = line["data_set"], line["system"], line["mode"]
        point = (
            number(line, "step"), number(line, "samples", nan), number(line, "auc"),
            number(line, "reading_error"),
        )  # fmt: skip
        lines.setdefault(key, []).append(point)
    found = {}
    for key, points in lines.items():
        step, samples, auc, error = np.array(sorted(points)).T
        found[key] = Curve(step.astype(np.int64), samples, auc, error)
    return found


def gap_to_sync(curves: Mapping[Key, Curve], data_set: str, system: str, mode: str) -> PublishedGap:
    """One curve against the published sync of its set.

    Raises ValueError naming the curve where it is not published, with those that are.
    """
    if data_set not in SYNC_OF:
        raise ValueError(f"data_set must be one of {', '.join(SYNC_OF)}, got {data_set!r}")
    if (data_set, system, mode) not in curves:
        there = ", ".join(" ".join(key) for key in curves)
        raise ValueError(f"no curve {data_set} {system} {mode} is published; there are: {there}")
    own, sync = curves[data_set, system, mode], curves[(data_set, *SYNC_OF[data_set])]
    step, of_own, of_sync = np.intersect1d(own.step, sync.step, return_indices=True)
    return PublishedGap(
        step,
        own.samples[of_own],
        own.auc[of_own] - sync.auc[of_sync],
        own.reading_error[of_own] + sync.reading_error[of_sync],
        bool(len(step)) and step[-1] == own.step[-1],
    )


def all_gaps(curves: Mapping[Key, Curve]) -> dict[Key, PublishedGap]:
    """The gap of every curve that is not itself a set's sync."""
    return {
        key: gap_to_sync(curves, *key) for key in curves if key[1:] != SYNC_OF.get(key[0], key[1:])
    }
