"""The decision between modes: what is best, how surely, and what binds where nobody can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from experiments.statistics import Interval, half_width_of
from persia_sim.report.ranges import Range

LOOKS = (2, 4, 8, 16)
"""Numbers of paired seeds at which the gaps are looked at; each look may end the training."""
ERROR = 0.05
"""Chance that any of all planned statements is wrong, over all looks."""
TIE = 0.03
"""Share by which gains may differ and count as equal: a simulated rate is as exact."""
MOST_SEEDS = 1_000
_EVEN = Range(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A mode on a cluster, as the decision sees it."""

    name: str
    gain: Range = _EVEN
    """Sync's dollars a sample over its own (seconds, where a price is not known): above 1 it is
    cheaper. The range is over what the simulator does not know."""
    gap: Interval | None = None
    """Test AUC minus sync's; None of a mode whose rows are exact, or that is not trained."""
    trained: bool = True
    """Whether its gap is known, or 0 by construction: False where its cell is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to take, or what keeps anybody from knowing."""

    best: str
    """The mode to take of those that surely lose no more than the tolerance: the best one, or until
    it is decided the one that is cheapest at the middle of its range."""
    rival: str = ""
    """A mode that may be better still, by its loss or by what the simulator does not know, while
    that is open; else ""."""
    binds: str = ""
    """What would decide: seeds, users or simulator; "" where it is decided."""
    seeds: int = 0
    """Paired seeds that would decide, if the gap stays what it is."""
    users_times: float = math.nan
    """So many times as many test users would decide, where no number of seeds does."""
    constant: str = ""
    """What the simulator does not know and the decision hangs on."""


def bounds_of(gap: Interval, comparisons: int) -> Range:
    """A gap with its ends, one-sided, so that with so many planned comparisons and all looks none
    of all statements is wrong with a chance of more than 5 %; infinitely wide of one seed.

    >>> wide = bounds_of(Interval(0.0, 0.1, 4, 0.001, 0.001), comparisons=3)
    >>> wide.low < -0.004 and wide.high == -wide.low
    True
    """
    half = _half(gap, gap.n, comparisons)
    return Range(gap.mean - half, gap.mean, gap.mean + half)


def _half(gap: Interval, seeds: int, comparisons: int) -> float:
    """Half the width by so many seeds, were each as far from the others as those that are there."""
    if gap.n < 2 or seeds < 2:
        return math.inf
    of_seeds = gap.seeds_error**2 * gap.n / seeds
    of_rows = 0.0 if math.isnan(gap.rows_error) else gap.rows_error**2
    if of_seeds + of_rows == 0:
        return 0.0
    return half_width_of(of_seeds, of_rows, seeds, 1 - 2 * _share(comparisons))


def _share(comparisons: int) -> float:
    """The chance of an error that one statement at one look may have (Bonferroni)."""
    return ERROR / (max(1, comparisons) * len(LOOKS))


def decide(entries: Sequence[Entry], tolerance: float, comparisons: int) -> Decision:
    """The cheapest mode, at the worst end of what the simulator does not know, of those whose gap
    surely lies above ``-tolerance``.

    ``entries``: one for sync, whose gain is 1, and the others, of which those that are not trained
    do not count; ``comparisons``: gaps that were planned. It is undecided where a mode that may or
    may not lose more would be better, and where a mode would be better at the middle of its range
    and not at its worst end. Of several, the one stands there of which seeds may tell. Where no
    mode is surely cheaper than sync, the one that is cheapest at its middle is taken until then.
    """
    entries = [entry for entry in entries if entry.trained]
    safe = [entry for entry in entries if is_safe(entry, tolerance, comparisons)]
    best = max(safe, key=lambda entry: entry.gain.low)
    is_sure = best.gain.low > 1
    until_then = best if is_sure else max(safe, key=lambda entry: entry.gain.value)

    # A mode whose loss is open, and which would be better if it were small.
    better = [e for e in entries if e not in safe and e.gain.low > best.gain.low]
    open_ = [e for e in better if e.gap and bounds_of(e.gap, comparisons).high >= -tolerance]
    if open_:
        by_gain = sorted(open_, key=lambda entry: -entry.gain.low)
        each = [_undecided(until_then, rival, tolerance, comparisons) for rival in by_gain]
        by_seeds = [one for one in each if 0 < one.seeds <= LOOKS[-1]]
        return (by_seeds or each)[0]

    # A mode that is as exact, and of which nobody knows whether it is the cheaper one.
    least = max(1.0, best.gain.value)
    unsure = [e for e in safe if e.gain.value > (1 + TIE) * least and e.gain.low < least]
    if unsure and not is_sure:
        inputs = until_then.gain.inputs
        constant = inputs[0].name if inputs else ""
        return Decision(best=until_then.name, rival=best.name, binds="simulator", constant=constant)
    return Decision(best=best.name)


def is_safe(entry: Entry, tolerance: float, comparisons: int) -> bool:
    """Whether a mode surely loses no more than the tolerance."""
    return entry.gap is None or bounds_of(entry.gap, comparisons).low > -tolerance


def _undecided(best: Entry, rival: Entry, tolerance: float, comparisons: int) -> Decision:
    """What would tell whether the rival loses more than the tolerance: so many seeds, were the mean
    to stay; else users, whose error no seed takes away."""
    gap = rival.gap
    assert gap is not None  # what is exact is safe
    distance = abs(gap.mean + tolerance)
    for seeds in range(gap.n + 1, MOST_SEEDS + 1):
        if _half(gap, seeds, comparisons) < distance:
            return Decision(best=best.name, rival=rival.name, binds="seeds", seeds=seeds)
    quantile = NormalDist().inv_cdf(1 - _share(comparisons))
    times = (quantile * gap.rows_error / distance) ** 2 if distance else math.inf
    return Decision(best=best.name, rival=rival.name, binds="users", users_times=times)
