"""Seconds, samples and dollars to a target AUC, per mode, with intervals and censoring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.statistics import Interval, t_interval
from experiments.tables import aligned

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
    return _with_spread(mean_of(crossings), 1)


def _with_spread(found: Interval, digits: int) -> str:
    spread = "" if math.isnan(found.half_width) else f" ± {found.half_width:.{digits}f}"
    return f"{found.mean:.{digits}f}{spread}"


class Journey(NamedTuple):
    """One seed's curve, by seconds and by samples."""

    seconds: Sequence[float]
    samples: Sequence[float]
    auc: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How long one mode takes to one AUC, over its seeds, beside the mode of reference."""

    mode: str
    share: float
    """Of the climb of the reference's run of the same seed, from 0.5 to its AUC at the end."""
    auc: float
    """Mean over the reference's seeds: each has its own, since each may have streams of its own."""
    crossings: tuple[Crossing, ...]
    """In seconds, a seed each."""
    seconds: Interval
    """NaN where a seed does not reach it."""
    ratio: Ratio
    """Seconds over those of the reference, paired by seed; NaN where a seed of either is late."""
    samples: float
    """Mean; NaN as ``seconds``."""
    reference_samples: float
    """The same of the reference: what the price of a sample is told for."""

    @property
    def reached(self) -> int:
        """Seeds that reach it."""
        return sum(c.reached for c in self.crossings)

    @property
    def not_before(self) -> float:
        """The least that a seed that does not reach it was watched; NaN where all do."""
        return min((c.at for c in self.crossings if not c.reached), default=math.nan)

    def usd(self, usd_per_hour: float) -> Interval:
        """Price of the cluster until the target; NaN where it has no price or is not reached."""
        per_s = usd_per_hour / 3600 if usd_per_hour > 0 else math.nan
        found = self.seconds
        return Interval(per_s * found.mean, per_s * found.half_width, found.n)

    def usd_per_million(self, usd_per_hour: float) -> float:
        """Price until the target for a million of the samples that the *reference* needs to it.

        So a mode that needs more samples for the same AUC is dearer at the same throughput.
        """
        return 1e6 * self.usd(usd_per_hour).mean / self.reference_samples


def journeys(
    snapshots: Iterable[tuple[str, int, float, float, float]],
) -> dict[str, dict[int, Journey]]:
    """Mode -> seed -> way, of snapshots in order: mode, seed, second, samples, AUC."""
    found: dict[str, dict[int, list[tuple[float, ...]]]] = {}
    for mode, seed, *point in snapshots:
        found.setdefault(mode, {}).setdefault(seed, []).append(tuple(point))
    return {
        mode: {seed: Journey(*zip(*points, strict=True)) for seed, points in seeds.items()}
        for mode, seeds in found.items()
    }


def targets(
    ways_of: Mapping[str, Mapping[int, Journey]], reference: str, shares: Sequence[float]
) -> list[Target]:
    """Every mode's way to every share of the reference's climb; ``ways_of``: mode -> seed -> way.

    A way's last AUC is that of the end of its run.
    """
    found = []
    for share in shares:
        goals = {
            seed: NO_SKILL + share * (way.auc[-1] - NO_SKILL)
            for seed, way in ways_of[reference].items()
        }
        auc = float(np.mean(list(goals.values())))
        by_s = {m: _ways(ways, "seconds", goals) for m, ways in ways_of.items()}
        by_samples = {m: mean_of(_ways(ways, "samples", goals)).mean for m, ways in ways_of.items()}
        for mode, own in by_s.items():
            both = own + by_s[reference]
            paired = ways_of[mode].keys() == ways_of[reference].keys()
            ratio = Ratio(math.nan, math.nan, math.nan, 0)
            if paired and all(crossing.reached for crossing in both):
                ratio = paired_ratio([c.at for c in own], [c.at for c in by_s[reference]])
            found.append(
                Target(
                    mode=mode,
                    share=share,
                    auc=auc,
                    crossings=tuple(own),
                    seconds=mean_of(own),
                    ratio=ratio,
                    samples=by_samples[mode],
                    reference_samples=by_samples[reference],
                )
            )
    return found


def _ways(ways: Mapping[int, Journey], axis: str, goals: Mapping[int, float]) -> list[Crossing]:
    """The crossings of all seeds, in order of seed; one without a goal never reaches it."""
    return [
        first_crossing(getattr(way, axis), way.auc, goals.get(seed, math.nan))
        for seed, way in sorted(ways.items())
    ]


def target_record(target: Target, cluster: str, usd_per_hour: float) -> dict[str, Any]:
    """One line of the CSV; NaN where a seed does not reach it, or the cluster has no price."""
    usd = target.usd(usd_per_hour)
    return {
        "cluster": cluster,
        "mode": target.mode,
        "target_share": target.share,
        "target_auc": target.auc,
        "seeds": len(target.crossings),
        "reached": target.reached,
        "seconds": target.seconds.mean,
        "seconds_half_width_95": target.seconds.half_width,
        "not_before_s": target.not_before,
        "ratio_to_sync": target.ratio.mean,
        "ratio_to_sync_low_95": target.ratio.low,
        "ratio_to_sync_high_95": target.ratio.high,
        "samples": target.samples,
        "usd_per_hour": usd_per_hour,
        "usd": usd.mean,
        "usd_half_width_95": usd.half_width,
        "usd_per_million_samples_of_sync": target.usd_per_million(usd_per_hour),
    }


FOOTNOTE = """\
A target is a share of the climb of sync's run of the same seed, from 0.5 to its AUC at the end; its
mean is told. A crossing is linear between two snapshots (a run begins at 0 s with 0.5). ± and []
are 95 % t intervals over paired seeds, the ratio's of its logarithm. $/M: dollars until the target
for a million of the samples that sync needs."""


def target_table(found: Sequence[Target], usd_per_hour: float) -> str:
    """The same for a terminal; the first line of a target is that of the reference."""
    header = ["mode", "target", "AUC", "simulated s", "times sync's [95 %]", "$", "$/M"]
    cells = []
    for t in found:
        usd, ratio = t.usd(usd_per_hour), t.ratio
        spread = f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        cells.append(
            [
                t.mode,
                f"{t.share:.0%}",
                f"{t.auc:.4f}",
                told(t.crossings),
                "-" if math.isnan(ratio.mean) else spread,
                "-" if math.isnan(usd.mean) else _with_spread(usd, 2),
                "-" if math.isnan(usd.mean) else f"{t.usd_per_million(usd_per_hour):.3f}",
            ]
        )
    return aligned(header, cells)
