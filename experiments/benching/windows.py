"""Interleaved windows: every candidate in turn, round after round, loaded windows refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.benching.machine_load import ForeignLoad
from experiments.statistics import t_interval


@dataclass(frozen=True, slots=True)
class Window:
    """One measurement of one candidate."""

    round: int
    name: str
    value: float
    """Of the candidate's own unit."""
    foreign_cores: float
    """Cores that other processes used meanwhile."""
    quiet: bool
    """Whether that was little enough for the window to count."""


def interleave(
    candidates: Mapping[str, Callable[[], float]],
    rounds: int,
    most_foreign_cores: float,
    tick: Callable[[], None] = lambda: None,
) -> list[Window]:
    """Measure all candidates once a round; a loaded window is repeated once, then kept as such."""
    windows = []
    for number in range(rounds):
        for name, measure in candidates.items():
            for _ in range(2):
                with ForeignLoad() as load:
                    value = measure()
                quiet = load.cores <= most_foreign_cores
                if quiet:
                    break
            windows.append(Window(number, name, value, load.cores, quiet))
            tick()
    return windows


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one candidate; over quiet windows where there are at least three, else over all."""

    median: float
    low: float
    high: float
    quiet: int
    windows: int
    foreign_cores: float
    """Median over the windows used."""

    @property
    def clean(self) -> bool:
        """Whether only quiet windows were used."""
        return self.quiet >= 3


def summarize(windows: Sequence[Window], name: str) -> Summary:
    """Median and extremes of one candidate."""
    own = [w for w in windows if w.name == name]
    quiet = [w for w in own if w.quiet]
    used = quiet if len(quiet) >= 3 else own
    values = [w.value for w in used]
    foreign = float(np.median([w.foreign_cores for w in used]))
    return Summary(
        float(np.median(values)), min(values), max(values), len(quiet), len(own), foreign
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two candidates over the rounds in which both windows count (paired)."""

    mean: float
    low: float
    high: float
    """Ends of the 95 % t interval of the mean logarithm."""
    pairs: int
    clean: bool


def verdict(ratio: Ratio, goal: float) -> str:
    """Whether a ratio reaches its goal: its whole interval does, or none of it, or neither.

    A loaded machine decides nothing.
    """
    found = "met" if ratio.low >= goal else "MISSED" if ratio.high < goal else "not decided"
    return found if ratio.clean else f"not decided, the machine was loaded (would be {found})"


def paired_ratio(windows: Sequence[Window], name: str, base: str) -> Ratio:
    """Geometric mean of ``name / base``; loaded pairs count only when quiet ones are too few."""
    by_key = {(w.round, w.name): w for w in windows}
    rounds = sorted({w.round for w in windows})
    pairs = [(by_key[r, name], by_key[r, base]) for r in rounds]
    quiet = [(a, b) for a, b in pairs if a.quiet and b.quiet]
    used = quiet if len(quiet) >= 3 else pairs
    interval = t_interval([math.log(a.value / b.value) for a, b in used])
    ends = interval.mean - interval.half_width, interval.mean + interval.half_width
    return Ratio(
        math.exp(interval.mean),
        math.exp(ends[0]),
        math.exp(ends[1]),
        len(used),
        len(quiet) >= 3,
    )
