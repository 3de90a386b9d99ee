"""The one rule by which a claim is judged: an interval that was found against the range claimed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from experiments.statistics import half_width_ratio

Verdict = Literal["supported", "contradicted", "undecided"]

RULE = (
    "A claim is a range. Supported: the whole interval found lies inside it. Contradicted: the"
    " whole interval lies outside. Undecided: they overlap, or the simulator's constants were"
    " fitted to the very points, so that agreement would be no evidence. A claim of several parts"
    " is contradicted when one of them is, and supported when all are. One of many intervals misses"
    " its value by chance, so intervals over seeds contradict only where they still do when widened"
    " for their number (Bonferroni). A claim of every data set needs three data sets for support."
)
"""For the reader of the report."""
LEAST_DATA_SETS = 3
"""That support a claim of every data set; the paper's text has four, its plots three."""


@dataclass(frozen=True, slots=True)
class Range:
    """A closed range of numbers; either end may be infinite."""

    low: float
    high: float

    def holds(self, other: Range) -> bool:
        """Whether the other lies wholly inside."""
        return self.low <= other.low and other.high <= self.high

    def meets(self, other: Range) -> bool:
        """Whether there is a number in both."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A number with its interval, and where it comes from."""

    label: str
    """Data set, task and setting, or series."""
    value: float
    low: float
    """NaN where one seed or point gives no interval."""
    high: float
    n: int | None = None
    """Seeds; None where the interval is no matter of seeds."""
    fitted: bool = False
    """Constants were fitted to these very points."""
    data: str = ""
    """Data set; empty where the number is of none."""

    def widened(self, family: int) -> Range:
        """The interval that holds with 95 % in all of ``family`` such intervals at once."""
        if self.n is None or self.n < 2 or family == 1:
            return Range(self.low, self.high)
        ratio = half_width_ratio(self.n, family)
        return Range(
            self.value - ratio * (self.value - self.low),
            self.value + ratio * (self.high - self.value),
        )


def judged(claimed: Range, found: Found, family: int = 1) -> Verdict:
    """The rule, for one number among ``family`` that are judged together.

    >>> judged(Range(-0.001, math.inf), Found(label="", value=0.0, low=-2e-4, high=2e-4))
    'supported'
    """
    if math.isnan(found.low) or math.isnan(found.high):
        return "undecided"
    if not claimed.meets(found.widened(family)):
        return "contradicted"
    inside = claimed.holds(Range(found.low, found.high))
    return "supported" if inside and not found.fitted else "undecided"


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """The rule, for the parts of a claim; undecided where there is none."""
    known = list(verdicts)
    if "contradicted" in known:
        return "contradicted"
    return "supported" if known and set(known) == {"supported"} else "undecided"
