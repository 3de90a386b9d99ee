"""The one rule by which a claim is judged: an interval that was found against the range claimed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.paper.record import Table
from experiments.statistics import half_width_of

Word = Literal["supported", "contradicted", "more seeds", "none possible", "not decided"]

RULE = (
    "A claim is a range, and is judged twice: against the paper's own plots, and by independent"
    " evidence here. Supported: the whole interval lies inside the range. Contradicted: the whole"
    " interval lies outside. Needs n more seeds: they overlap, and with so many the interval would"
    " lie on one side if its mean stayed. No independent evidence possible: it says why; what the"
    " simulator's constants were fitted to neither supports nor contradicts. A claim of several"
    " parts is contradicted when one of them is, and supported when all are. One of many intervals"
    " misses its value by chance, so intervals over seeds contradict only where they still do when"
    " widened for their number (Bonferroni). A claim of every data set needs three data sets for"
    " support."
)
"""How claims are judged, for the reader of the report."""
LEAST_DATA_SETS = 3
"""Data sets that support a claim of every data set; the paper's text has four, its plots three."""
MOST_SEEDS = 10_000
"""The most seeds that anybody would run."""
READING = "the plot cannot be read exactly enough, and the interval crosses the end of the range"
FITTED = "constants of the simulator were fitted to these very bars"
PREDICTED = (
    "a prediction from the same authors' other bars tests the simulator, not the measurement"
)
REASONS = ("", FITTED, PREDICTED)
"""Why a number is no evidence, the weaker reason last: a ratio of both is a prediction."""
TEST_ROWS = (
    "more seeds cannot decide it, because the error of these test samples alone crosses the limit"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word, with the number or the reason that belongs to it; "not decided" is of plots alone."""

    word: Word
    seeds: int = 0
    """Further seeds that a decision needs, of "more seeds"."""
    why: str = ""
    """The reason, of "none possible" and "not decided"."""

    def __str__(self) -> str:
        return {
            "more seeds": f"needs {self.seeds} more seeds",
            "none possible": f"no independent evidence possible: {self.why}",
            "not decided": f"not decided by the plots: {self.why}",
        }.get(self.word, self.word)

    @property
    def short(self) -> str:
        """The verdict without its reason, which the page has."""
        return str(self).partition(":")[0]

    @property
    def kind(self) -> str:
        """One word, for marks and colours."""
        return self.word if self.word in ("supported", "contradicted") else "undecided"


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

    def distance(self, value: float) -> float:
        """The distance from a value to the nearer end."""
        return min(abs(value - self.low), abs(value - self.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A number with its interval, and where it comes from."""

    label: str
    """Data set, task and setting, or series."""
    value: float
    low: float
    """NaN where one seed or point gives no interval."""
    high: float
    n: int | None = None
    """Seeds; None where the interval is no matter of seeds."""
    seeds_error: float = math.nan
    """Standard error of the value that comes from seeds."""
    rows_error: float = 0.0
    """What test samples add to it, which no seed takes away."""
    no_evidence: str = ""
    """Why the number is no evidence; "" where it is."""
    data: str = ""
    """Data set; empty where the number is of none."""

    @classmethod
    def around(cls, value: float, half_width: float, **more: Any) -> Finding:
        """A number with a symmetric interval."""
        return cls(value=value, low=value - half_width, high=value + half_width, **more)

    def over(self, other: Finding, label: str, times: float = 1.0) -> Finding:
        """The ratio of two positive numbers over ``times``, by the ends of both intervals."""
        return Finding(
            label=label,
            value=self.value / other.value / times,
            low=self.low / other.high / times,
            high=self.high / other.low / times if other.low > 0 else math.inf,
            n=self.n,
            # Of numbers that are no evidence for several reasons the least of them counts.
            no_evidence=max(self.no_evidence, other.no_evidence, key=REASONS.index),
            data=self.data,
        )

    def minus(self, other: Finding, label: str) -> Finding:
        """The difference of two numbers whose intervals are the error of reading them."""
        ends = {"low": self.low - other.high, "high": self.high - other.low}
        return Finding(label=label, value=self.value - other.value, data=self.data, **ends)

    def minus_apart(self, other: Finding, label: str) -> Finding:
        """The difference of two gaps as if they shared neither seeds nor test samples: too wide an
        interval where they do."""
        seeds = min(self.n or 2, other.n or 2)
        of_seeds = self._variances[0] + other._variances[0]
        of_rows = self._variances[1] + other._variances[1]
        return Finding.around(
            self.value - other.value,
            half_width_of(of_seeds, of_rows, seeds),
            label=label,
            n=seeds,
            seeds_error=math.sqrt(of_seeds),
            rows_error=math.sqrt(of_rows),
            data=self.data,
        )

    @property
    def _variances(self) -> tuple[float, float]:
        """Variances of the value: what comes from seeds, and what test samples add.

        Where they are not known (a ratio, or runs without predictions) the interval is over its two
        seeds or more alone.
        """
        if math.isnan(self.seeds_error):
            return ((self.high - self.low) / 2 / half_width_of(1.0, 0.0, self.n or 2)) ** 2, 0.0
        rows_error = 0.0 if math.isnan(self.rows_error) else self.rows_error
        return self.seeds_error**2, rows_error**2

    def widened(self, family: int) -> Range:
        """The interval that holds with 95 % in all of ``family`` such intervals at once."""
        if self.n is None or self.n < 2 or family == 1:
            return Range(self.low, self.high)
        alone = half_width_of(*self._variances, self.n, 0.95)
        among_family = half_width_of(*self._variances, self.n, 1 - 0.05 / family)
        ratio = among_family / alone if alone else 1.0
        ends = (self.value + ratio * (end - self.value) for end in (self.low, self.high))
        return Range(*ends)

    def seeds_until(self, claimed: Range) -> Verdict:
        """How many more seeds would bring the interval to one side, the mean and spread as now."""
        # Seeds help only where the interval is a matter of seeds; two are needed for any.
        if self.n is None:
            return Verdict("none possible", why=READING)
        if self.n < 2 or math.isnan(self.low):
            return Verdict("more seeds", seeds=max(1, 2 - self.n))

        # With more seeds their part of the variance shrinks, that of the test samples stays.
        distance = claimed.distance(self.value)
        of_seeds, of_rows = self._variances
        of_one = self.n * of_seeds

        def decides(seeds: int) -> bool:
            return half_width_of(of_one / seeds, of_rows, seeds) <= distance

        # Where so many decide, any more do: the least is found by bisection.
        enough = bisect_left(range(MOST_SEEDS), True, lo=self.n + 1, key=decides)
        if enough >= MOST_SEEDS:
            return Verdict("none possible", why=TEST_ROWS)
        return Verdict("more seeds", seeds=enough - self.n)


def judged(claimed: Range, finding: Finding, family: int = 1) -> Verdict:
    """The rule, for one number among ``family`` that are judged together.

    >>> str(judged(Range(-0.001, math.inf), Finding(label="", value=0.0, low=-2e-4, high=2e-4)))
    'supported'
    """
    if finding.no_evidence:
        return Verdict("none possible", why=finding.no_evidence)
    if math.isnan(finding.low) or math.isnan(finding.high):
        return finding.seeds_until(claimed)
    if not claimed.meets(finding.widened(family)):
        return Verdict("contradicted")
    if claimed.holds(Range(finding.low, finding.high)):
        return Verdict("supported")
    return finding.seeds_until(claimed)


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """The rule, for the parts of a claim."""
    by_part = list(verdicts) or [Verdict("none possible", why="no table yet")]
    worst = min((v.word for v in by_part), key=WORST_FIRST.index)
    deciding = [v for v in by_part if v.word == worst]
    why = "; ".join(dict.fromkeys(v.why for v in deciding))
    return Verdict(worst, seeds=max(v.seeds for v in deciding), why=why)


WORST_FIRST: tuple[Word, ...] = ("contradicted", "none possible", "more seeds", "supported")
"""Words in the order in which they decide: a claim is as good as the worst of its parts."""


@dataclass(frozen=True, slots=True)
class Part:
    """One number of a claim: the range that the text claims, and the findings for it."""

    label: str
    claimed: Range
    plots: tuple[Finding, ...]
    """Findings by the paper's own plots."""
    evidence: tuple[Finding, ...]
    """Findings by independent evidence here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim, judged."""

    key: str
    says: str
    """The claim, after the paper's text."""
    rule: str
    """The range that the text is taken to claim."""
    parts: tuple[Part, ...]
    unit: str = ""
    scale: float = 1.0
    """Factor of shown numbers: 1e3 for thousandths of AUC."""
    tables: tuple[Table, ...] = field(default=())
    """Tables that the findings were computed from."""
    note: str = ""
    of_every_data_set: bool = False
    """Whether it is of every data set: one may contradict it, but not support it."""
    none_possible: str = ""
    """Why nothing here could be evidence, whatever was measured."""

    @property
    def verdict(self) -> Verdict:
        """The verdict by independent evidence here."""
        if self.none_possible:
            return Verdict("none possible", why=self.none_possible)
        return self._together("evidence", "its tables lack it" if self.tables else "no table yet")

    @property
    def plots_verdict(self) -> Verdict:
        """The verdict by the paper's own plots."""
        verdict = self._together("plots", "none of them shows it")
        is_open = verdict.word == "none possible"
        return Verdict("not decided", why=verdict.why) if is_open else verdict

    @property
    def sources(self) -> str:
        """Where the tables come from: "this run", or since when they are stored."""
        return "; ".join(dict.fromkeys(t.source for t in self.tables)) or "no table yet"

    def verdict_of(self, part: Part, finding: Finding) -> Verdict:
        """One number of a part, judged as one of all that the claim has."""
        everything = [one for part in self.parts for one in (*part.evidence, *part.plots)]
        family = sum(one.n is not None for one in everything)
        return judged(part.claimed, finding, max(1, family))

    def _together(self, kind: Literal["plots", "evidence"], nothing: str) -> Verdict:
        # Every number of every part is judged; a part without any is not decidable.
        verdicts = []
        empty = []
        data_sets = set()
        for part in self.parts:
            findings: tuple[Finding, ...] = getattr(part, kind)
            verdicts += [self.verdict_of(part, finding) for finding in findings]
            data_sets |= {finding.data for finding in findings}
            if not findings:
                empty.append(Verdict("none possible", why=nothing))
        verdict = together([*verdicts, *empty])

        # A claim of every data set needs several of them for support.
        if self.of_every_data_set and verdict.word == "supported":
            missing = LEAST_DATA_SETS - len(data_sets)
            if missing > 0:
                why = f"it is of every data set, and {missing} more would be needed for support"
                return Verdict("none possible", why=why)
        return verdict


def distinct_tables(tables: Sequence[Table | None]) -> tuple[Table, ...]:
    """The tables that are there, each once."""
    present = [t for t in tables if t is not None]
    return tuple({id(t): t for t in present}.values())
