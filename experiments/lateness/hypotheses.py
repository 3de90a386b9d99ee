"""The six hypotheses of the first plan in docs/results/plan.md, judged from the stored runs.

A hypothesis is a set of statements that must all hold: the largest of their p-values counts for it,
the smallest times their number counts for its contrary, and Holm's correction runs over the six,
each direction by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.lateness.logs import LogFacts
from experiments.lateness.streams import (
    ASYNC_0,
    DENSE_7,
    ROWS_7,
    ROWS_16,
    SHUFFLED,
    TIME,
    Cell,
    Stream,
)
from experiments.lateness.table import LatenessStudy, Line, StreamSetting
from experiments.statistics import Interval

MARGIN = 1e-3
"""AUC that a loss must stay below to count as none (the plan)."""
LARGE = 2e-3
"""AUC that a loss must exceed where Adagrad starts far above the gradients (the plan)."""
S_SMALL = 0.1
S_LARGE = 3.0
RANK_CORRELATION = 0.8
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


def within(what: str, excess: Interval, limit: float) -> Statement:
    """That an excess is less than a limit either way."""
    under = below(what, excess, limit)
    over = above(what, excess, -limit)
    return Statement(
        what=what,
        value=under.value,
        low=under.low,
        high=under.high,
        asked=f"-{1e3 * limit:g} to {1e3 * limit:g}",
        p_holds=max(under.p_holds, over.p_holds),
        p_fails=min(1.0, 2 * min(under.p_fails, over.p_fails)),
        n=under.n,
    )


def rank_order(
    what: str,
    measure: Sequence[float],
    losses: Sequence[Interval],
    least: float = RANK_CORRELATION,
    absolute: bool = False,
) -> Statement:
    """That a measure orders losses: Spearman's correlation is at least ``least``.

    ``absolute``: it orders what lateness changes, be it a loss or a gain. Its p-values are shares
    of draws of the losses by their errors.
    """
    from scipy.stats import rankdata  # late: a second to import

    # Losses drawn anew by their errors: how often would the order hold?
    means = np.array([loss.mean for loss in losses])
    errors = np.array([loss.half_width / 1.96 for loss in losses])
    draw = np.random.default_rng(0)
    drawn = means + draw.normal(size=(RESAMPLES, len(means))) * errors
    # Spearman's correlation is Pearson's of ranks.
    values = np.vstack([means, drawn])
    ranks = rankdata(np.abs(values) if absolute else values, axis=1)
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


def loss_of(study: LatenessStudy, setting: StreamSetting, cell: Cell) -> Interval:
    """AUC of sync minus that of a cell, at the rates of the setting's rule."""
    return study.gap(study.terms(setting, cell, factor=-1.0))


def _plain(stream: Stream, **other: Any) -> StreamSetting:
    return StreamSetting(stream=stream, updates=stream.updates, **other)


def _real(study: LatenessStudy) -> list[Stream]:
    return [stream for stream in study.streams if not stream.is_drawn]


def order_hypothesis(study: LatenessStudy, logs: Mapping[tuple[str, str], LogFacts]) -> Hypothesis:
    """S0: what rows 16 late cost is a matter of the order of the data."""
    statements = []
    points = []
    missing = []
    beside = []
    for stream in _real(study):
        time = _plain(stream)
        mixed = _plain(stream, order=SHUFFLED)
        sync = study.search(stream).sync()
        # At sync's rates in both orders, so that nothing else differs.
        changes = [study.gap(study.terms(one, ROWS_16, sync, factor=-1.0)) for one in (time, mixed)]
        if min(change.n for change in changes) < stream.seeds:
            missing.append(stream.key)
        if min(change.n for change in changes) < 2:
            continue
        for order, change in zip((TIME, SHUFFLED), changes, strict=True):
            if (stream.key, order) in logs:
                points.append((logs[stream.key, order], change))
        if abs(changes[0].mean) <= changes[0].half_width:
            continue
        # Half of the change in time order, minus or plus the change when shuffled, with its sign.
        sign = math.copysign(1.0, changes[0].mean)
        terms = study.terms(time, ROWS_16, sync, factor=-0.5 * sign)
        for factor, words in ((1.0, "beyond"), (-1.0, "the other way beyond")):
            shuffled = study.terms(mixed, ROWS_16, sync, factor=factor * sign)
            left = study.gap(terms, shuffled)
            what = f"half of the change in time order, less the change {words} it when shuffled"
            statements.append(above(f"{stream.key}: {what}", left, 0.0))
    if len(points) >= 4:
        measured, losses = zip(*points, strict=True)
        what = f"rank correlation of b(16) and the loss, {len(points)} points"
        shares = [f.b_16 for f in measured]
        drifts = [f.drift_16 for f in measured]
        statements.append(rank_order(what, shares, losses))
        # The plan asks for drift; that lateness may help was not foreseen.
        for name, values in (("b(16)", shares), ("drift over 16 updates", drifts)):
            if any(map(math.isnan, values)):  # of a log whose drift nobody measured
                continue
            for change, absolute in (("the loss", False), ("the change either way", True)):
                if name != "b(16)" or absolute:
                    what = f"rank correlation of {name} and {change}, {len(points)} points"
                    beside.append(rank_order(what, values, losses, absolute=absolute))
    return Hypothesis(
        name="S0",
        says="what 16/0 changes shrinks to half or less when shuffled, and b(16) orders it",
        statements=statements,
        complete=not missing and len(points) == 2 * len(_real(study)),
        missing=", ".join(missing),
        beside=beside,
    )


def loss_hypothesis(study: LatenessStudy, name: str, cell: Cell, says: str) -> Hypothesis:
    """S1, S2: a cell loses less than the margin on every real stream."""
    losses = {s: loss_of(study, _plain(s), cell) for s in _real(study)}
    return Hypothesis(
        name=name,
        says=says,
        statements=[
            below(f"{stream.key}: loss of {_words(cell)}", loss, MARGIN)
            for stream, loss in losses.items()
            if loss.n >= 2
        ],
        complete=all(loss.n >= stream.seeds for stream, loss in losses.items()),
        missing=", ".join(s.key for s, loss in losses.items() if loss.n < s.seeds),
    )


def _words(cell: Cell) -> str:
    return f"{cell.rows_late}/{cell.dense_late}"


def sum_hypothesis(study: LatenessStudy) -> Hypothesis:
    """S3: late rows and late dense weights add up."""
    # The loss of both late, minus those of each alone, paired by seed on each real stream.
    excesses = {}
    for stream in _real(study):
        setting = _plain(stream)
        parts = [
            study.terms(setting, cell, factor=factor)
            for cell, factor in ((ASYNC_0, -1.0), (ROWS_7, 1.0), (DENSE_7, 1.0))
        ]
        excesses[stream] = study.gap(*parts)

    # A stream with one seed has no interval, and says nothing.
    return Hypothesis(
        name="S3",
        says="7/7 loses what 7/0 and 0/7 lose together, within 1.0",
        statements=[
            within(f"{stream.key}: loss of 7/7 beyond the sum", excess, MARGIN)
            for stream, excess in excesses.items()
            if excess.n >= 2
        ],
        complete=all(one.n >= stream.seeds for stream, one in excesses.items()),
        missing=", ".join(s.key for s, one in excesses.items() if one.n < s.seeds),
    )


def moderator_hypothesis(
    study: LatenessStudy, logs: Mapping[tuple[str, str], LogFacts]
) -> Hypothesis:
    """S4: the accumulator that Adagrad starts from, over the squared gradients, decides."""
    # Streams that were trained from several starts of the accumulator.
    statements = []
    missing = []
    for stream in (one for one in study.streams if len(one.starts) > 1):
        facts = logs.get((stream.key, TIME))
        settings = [_plain(stream, start=start) for start in stream.starts]
        losses = [loss_of(study, setting, ROWS_7) for setting in settings]
        if facts is None or min(loss.n for loss in losses) < stream.seeds:
            missing.append(stream.key)
        if facts is None or min(loss.n for loss in losses) < 2:
            continue

        # s, and the slope of the loss over log(s + 1) as one weighted sum of runs, so that it stays
        # paired.
        scales = np.array(stream.starts) / facts.mean_square_gradient
        x = np.log1p(scales)
        weights = (x - x.mean()) / np.square(x - x.mean()).sum()
        terms = [
            study.terms(setting, ROWS_7, factor=-float(weight))
            for setting, weight in zip(settings, weights, strict=True)
        ]
        what = f"{stream.key}: slope of the loss of 7/0 over log(s + 1)"
        statements.append(above(what, study.gap(*terms), 0.0))

        # Beside the slope what is claimed of its ends.
        for scale, loss in zip(scales, losses, strict=True):
            what = f"{stream.key}: loss of 7/0 at s = {scale:.3g}"
            if scale < S_SMALL:
                statements.append(below(what, loss, MARGIN))
            if scale > S_LARGE:
                statements.append(above(what, loss, LARGE))
    return Hypothesis(
        name="S4",
        says="the loss of 7/0 rises with s, is below 1.0 at s < 0.1 and above 2.0 at s > 3",
        statements=statements,
        complete=bool(statements) and not missing,
        missing=", ".join(missing),
    )


def drift_hypothesis(study: LatenessStudy, logs: Mapping[tuple[str, str], LogFacts]) -> Hypothesis:
    """S5: the drift of sync's rows orders the losses of 16 late rows over the data sets."""
    # The drift of sync's rows beside the loss, of each stream.
    points = []
    missing = []
    for stream in study.streams:
        loss = loss_of(study, _plain(stream), ROWS_16)
        facts = logs.get((stream.key, TIME))
        if facts is None or loss.n < stream.seeds:
            missing.append(stream.key)
        if facts is not None and not math.isnan(facts.drift_16) and loss.n >= 2:
            points.append((facts.drift_16, loss))

    # An order of fewer than four says nothing.
    statements = []
    if len(points) >= 4:
        drifts, losses = zip(*points, strict=True)
        what = f"rank correlation of sync's drift over 16 updates and the loss, {len(points)} sets"
        statements.append(rank_order(what, drifts, losses))
    return Hypothesis(
        name="S5",
        says="the drift of a sync run over 16 updates orders the losses of 16/0",
        statements=statements,
        complete=not missing,
        missing=", ".join(missing),
    )


def hypotheses(study: LatenessStudy, logs: Mapping[tuple[str, str], LogFacts]) -> list[Hypothesis]:
    """The six, in the plan's order."""
    return [
        order_hypothesis(study, logs),
        loss_hypothesis(
            study, "S1", ROWS_16, "rows 16 late lose less than 1.0 on every real stream"
        ),
        loss_hypothesis(
            study, "S2", DENSE_7, "dense weights 7 late lose less than 1.0 on every real stream"
        ),
        sum_hypothesis(study),
        moderator_hypothesis(study, logs),
        drift_hypothesis(study, logs),
    ]


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
