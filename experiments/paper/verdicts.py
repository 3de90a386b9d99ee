"""The one rule by which a claim is judged: an interval that was found against the range claimed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["supported", "contradicted", "undecided"]

RULE = (
    "A claim is a range. Supported: the whole interval found lies inside it. Contradicted: the"
    " whole interval lies outside. Undecided: they overlap, or the simulator's constants were"
    " fitted to the very points, so that agreement would be no evidence. A claim of several parts"
    " is contradicted when one of them is, and supported when all are."
)
"""For the reader of the report."""


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


def judged(claimed: Range, found: Found) -> Verdict:
    """The rule, for one number.

    >>> judged(Range(-0.001, math.inf), Found(label="", value=0.0, low=-2e-4, high=2e-4))
    'supported'
    """
    if math.isnan(found.low) or math.isnan(found.high):
        return "undecided"
    interval = Range(found.low, found.high)
    if not claimed.meets(interval):
        return "contradicted"
    return "supported" if claimed.holds(interval) and not found.fitted else "undecided"


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """The rule, for the parts of a claim; undecided where there is none."""
    known = list(verdicts)
    if "contradicted" in known:
        return "contradicted"
    return "supported" if known and set(known) == {"supported"} else "undecided"
