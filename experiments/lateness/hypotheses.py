"""How a hypothesis of docs/results/plan.md is judged.

It is a set of statements that must all hold: the largest of their p-values counts for it, the
smallest times their number counts for its contrary, and Holm's correction runs over all hypotheses
of the plan, each direction by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.lateness.table import Line
from experiments.statistics import Interval

RANK_CORRELATION = 0.8
"""That a measure must reach to order losses (the plan)."""
LEVEL = 0.05
RESAMPLES = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One of the things that a hypothesis says, with its interval and two p-values.

    A small ``p_holds`` establishes the statement, a small ``p_fails`` its contrary.
    """

    what: str
    value: float
    low: float
    high: float
    asked: str
    p_holds: float
    p_fails: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A name of the plan, its statements, and whether all that it needs has run."""

    name: str
    says: str
    statements: Sequence[Statement]
    complete: bool = True
    missing: str = ""
    beside: Sequence[Statement] = ()
    """What is told beside it and counts for no outcome."""

    @property
    def p_holds(self) -> float:
        """The p value of all statements at once."""
        return max((s.p_holds for s in self.statements), default=1.0) if self.complete else 1.0

    @property
    def p_fails(self) -> float:
        """The p value of the contrary of one of the statements."""
        least = min((s.p_fails for s in self.statements), default=1.0)
        return min(1.0, least * max(1, len(self.statements)))


def _t_share(mean: float, limit: float, interval: Interval) -> float:
    """The chance of an estimate as far below ``limit`` as this mean is, were the truth there."""
    from scipy.special import stdtr  # late, as in `statistics`

    rows = 0.0 if math.isnan(interval.rows_error) else interval.rows_error
    variance = interval.seeds_error**2 + rows**2
    if variance == 0:
        return float(mean >= limit)
    freedom = (interval.n - 1) * (variance / max(interval.seeds_error**2, 1e-30)) ** 2
    return float(stdtr(min(freedom, 1e9), (mean - limit) / math.sqrt(variance)))


def below(what: str, loss: Interval, limit: float) -> Statement:
    """That a loss is less than a limit."""
    known = loss.n >= 2 and not math.isnan(loss.mean)
    p = _t_share(loss.mean, limit, loss) if known else 1.0
    return Statement(
        what=what,
        value=loss.mean,
        low=loss.mean - loss.half_width,
        high=loss.mean + loss.half_width,
        asked=f"< {1e3 * limit:g}",
        p_holds=p,
        p_fails=1 - p if known else 1.0,
        n=loss.n,
    )


def above(what: str, loss: Interval, limit: float) -> Statement:
    """That a loss is more than a limit."""
    other = below(what, loss, limit)
    return Statement(
        what=what,
        value=other.value,
        low=other.low,
        high=other.high,
        asked=f"> {1e3 * limit:g}",
        p_holds=other.p_fails,
        p_fails=other.p_holds,
        n=other.n,
    )


def rank_order(
    what: str,
    measure: Sequence[float],
    losses: Sequence[Interval],
    least: float = RANK_CORRELATION,
) -> Statement:
    """That a measure orders losses: Spearman's correlation is at least ``least``.

    Its p-values are shares of draws of the losses by their errors.
    """
    from scipy.stats import rankdata  # late: a second to import

    # Losses drawn anew by their errors: how often would the order hold?
    means = np.array([loss.mean for loss in losses])
    errors = np.array([loss.half_width / 1.96 for loss in losses])
    draw = np.random.default_rng(0)
    drawn = means + draw.normal(size=(RESAMPLES, len(means))) * errors
    # Spearman's correlation is Pearson's of ranks.
    values = np.vstack([means, drawn])
    ranks = rankdata(values, axis=1)
    measured = rankdata(measure)
    centred = ranks - ranks.mean(1, keepdims=True)
    mine = measured - measured.mean()
    scale = np.sqrt(np.square(centred).sum(1) * np.square(mine).sum())
    value, *rhos = (centred @ mine) / np.where(scale > 0, scale, np.inf)  # equals have no order
    rhos = np.array(rhos)

    # The share of draws that reach the bound, and the middle 95 % of the correlation.
    reached = float((rhos >= least - 1e-9).mean())
    low, high = np.quantile(rhos, [0.025, 0.975])
    return Statement(
        what=what,
        value=float(value),
        low=float(low),
        high=float(high),
        asked=f">= {least:g}",
        p_holds=1 - reached,
        p_fails=reached,
        n=len(means),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values with Holm's correction (Scand. J. Stat. 6, 1979), in their order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    count = len(p_values)
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, number in enumerate(sorted(range(count), key=lambda k: p_values[k])):
        largest = max(largest, min(1.0, (count - place) * p_values[number]))
        adjusted[number] = largest
    return adjusted


def hypothesis_lines(every: Sequence[Hypothesis]) -> list[Line]:
    """A line for each hypothesis of a plan with its outcome, and one for each of its statements."""
    # All hypotheses are judged together (Holm), so that one in twenty does not hold by chance.
    holds = holm([one.p_holds for one in every])
    fails = holm([one.p_fails for one in every])
    lines: list[Line] = []
    for one, p_holds, p_fails in zip(every, holds, fails, strict=True):
        outcome = "holds" if p_holds < LEVEL else "fails" if p_fails < LEVEL else "open"
        lines.append(
            {
                "hypothesis": one.name,
                "what": one.says,
                "value": math.nan,
                "low_95": math.nan,
                "high_95": math.nan,
                "asked": "",
                "p_holds": p_holds,
                "p_fails": p_fails,
                "outcome": outcome,
                "n": len(one.statements),
                "missing": one.missing,
            }
        )

        # Under each its statements, as they were asked.
        named = [(one.name, part) for part in one.statements]
        named += [(f"{one.name}, beside", part) for part in one.beside]
        lines += [
            {
                "hypothesis": name,
                "what": part.what,
                "value": part.value,
                "low_95": part.low,
                "high_95": part.high,
                "asked": part.asked,
                "p_holds": part.p_holds,
                "p_fails": part.p_fails,
                "outcome": "",
                "n": part.n,
                "missing": "",
            }
            for name, part in named
        ]
    return lines
