"""When a curve first reaches a target: between two snapshots, or not within the run (censored)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics import Interval, t_interval

NO_SKILL = 0.5
"""AUC of a model that has learned nothing: where every curve begins, at 0."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one curve reaches a target."""

    at: float
    """On the curve's axis; where it is not reached, the end of the curve."""
    reached: bool
    """Else the crossing lies beyond ``at``, or there is none."""


def first_crossing(at: Sequence[float], auc: Sequence[float], target: float) -> Crossing:
    """The first crossing of a curve of snapshots, in order of ``at`` (>= 0).

    Linear between the last snapshot before it and the first that is at or above the target; the
    curve begins at 0 with an AUC of 0.5. Of several snapshots at one instant the last one counts.

    >>> first_crossing([10, 20], [0.5, 0.75], 0.625)
    Crossing(at=15.0, reached=True)
    >>> first_crossing([10, 20], [0.6, 0.7], 0.75)
    Crossing(at=20.0, reached=False)
    """
    instants, aucs = [0.0], [NO_SKILL]
    for x, y in zip(at, auc, strict=True):
        if x == instants[-1]:
            aucs[-1] = y
        else:
            instants.append(float(x))
            aucs.append(y)
    for left in range(len(aucs) - 1):
        low, high = aucs[left], aucs[left + 1]
        if high >= target:
            share = 0.0 if low >= target else (target - low) / (high - low)
            return Crossing(instants[left] + share * (instants[left + 1] - instants[left]), True)
    return Crossing(instants[-1], False)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of paired ratios with its 95 % t interval, on the scale of logarithms.

    All NaN where a value is not > 0.
    """

    mean: float
    low: float
    high: float
    """NaN, as ``low``, with fewer than two pairs."""
    n: int


def paired_ratio(own: Sequence[float], reference: Sequence[float]) -> Ratio:
    """The ratio own / reference over pairs.

    >>> paired_ratio([2.0, 2.0], [4.0, 4.0])
    Ratio(mean=0.5, low=0.5, high=0.5, n=2)
    """
    if min(*own, *reference, math.inf) <= 0:
        return Ratio(math.nan, math.nan, math.nan, len(own))
    logs = t_interval(np.log(np.asarray(own) / np.asarray(reference)).tolist())
    ends = (logs.mean, logs.mean - logs.half_width, logs.mean + logs.half_width)
    mean, low, high = (float(np.exp(x)) for x in ends)
    return Ratio(mean, low, high, logs.n)


def mean_of(crossings: Sequence[Crossing]) -> Interval:
    """Mean and interval where every curve reaches the target; else NaN, being unknown."""
    if all(c.reached for c in crossings):
        return t_interval([c.at for c in crossings])
    return Interval(math.nan, math.nan, len(crossings))


def told(crossings: Sequence[Crossing], unit: str = "s") -> str:
    """Mean with interval, or how many never reached it and how long they were watched.

    >>> told([Crossing(1.0, True), Crossing(4.0, False)])
    'not reached by 1 of 2 seeds, > 4.0 s'
    """
    late = [c.at for c in crossings if not c.reached]
    if late:
        return f"not reached by {len(late)} of {len(crossings)} seeds, > {min(late):.1f} {unit}"
    found = mean_of(crossings)
    spread = "" if math.isnan(found.half_width) else f" ± {found.half_width:.1f}"
    return f"{found.mean:.1f}{spread}"
