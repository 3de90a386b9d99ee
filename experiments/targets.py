"""Seconds, samples and dollars to a target AUC, per mode, with intervals and censoring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from experiments.statistics import Interval, Ratio, paired_ratio, t_interval
from experiments.tables import Column

NO_SKILL = 0.5
"""AUC of a model that has learned nothing: where every curve begins, at 0."""


class Crossing(NamedTuple):
    """Where one curve reaches a target."""

    at: float
    """Place on the curve's axis; where the target is not reached, the end of the curve."""
    reached: bool
    """Whether it is reached; else the crossing lies beyond ``at``, or there is none."""


def first_crossing(at: Sequence[float], auc: Sequence[float], target: float) -> Crossing:
    """The first crossing of a curve of snapshots, in order of ``at`` (>= 0).

    Linear between the last snapshot before it and the first that is at or above the target; the
    curve begins at 0 with an AUC of 0.5. Of several snapshots at one instant the last one counts.

    >>> first_crossing([10, 20], [0.5, 0.75], 0.625)
    Crossing(at=15.0, reached=True)
    >>> first_crossing([10, 20], [0.6, 0.7], 0.75)
    Crossing(at=20.0, reached=False)
    """
    curve = {0.0: NO_SKILL} | {float(x): y for x, y in zip(at, auc, strict=True)}
    for (left, low), (right, high) in pairwise(curve.items()):
        if high >= target:
            share = 0.0 if low >= target else (target - low) / (high - low)
            return Crossing(left + share * (right - left), True)
    return Crossing(max(curve), False)


Snapshot = tuple[str, int, float, float, float]
"""Mode, seed, second, samples, AUC."""
Curve = list[tuple[float, ...]]
"""Second, samples and AUC of one run's snapshots, in order; the last are those of its end."""
UNKNOWN = Ratio(math.nan, math.nan, math.nan, 0, True)


def target_lines(
    snapshots: Iterable[Snapshot],
    reference: str,
    shares: Sequence[float],
    cluster: str = "",
    usd_per_hour: float = 0.0,
) -> list[dict[str, Any]]:
    """A line of the CSV for each share of the reference's climb from 0.5 and each mode.

    Each seed has the goal of the reference's run of that seed, since each may have streams of its
    own. What is not known is NaN: means where a seed never reaches its goal, the ratio to the
    reference where a seed of either does not or their seeds differ, dollars of a cluster without a
    price. Dollars for a million are of the samples that the *reference* needs, so that a mode that
    needs more of them for the same AUC is dearer at the same throughput.
    """
    # The snapshots of each mode and seed are a curve.
    curves: dict[str, dict[int, Curve]] = {}
    for mode, seed, *point in snapshots:
        curves.setdefault(mode, {}).setdefault(seed, []).append(tuple(point))
    per_s = usd_per_hour / 3600 if usd_per_hour > 0 else math.nan

    lines = []
    for share in shares:
        # Each seed's goal is a share of the way that the reference climbs with that seed.
        goals = {
            seed: NO_SKILL + share * (curve[-1][-1] - NO_SKILL)
            for seed, curve in curves[reference].items()
        }

        # Where every curve crosses its goal, in seconds and in samples.
        seconds_of = {mode: _crossings(by_seed, 0, goals) for mode, by_seed in curves.items()}
        samples_of = {
            mode: _mean(_crossings(by_seed, 1, goals)).mean for mode, by_seed in curves.items()
        }

        for mode, crossings in seconds_of.items():
            base = seconds_of[reference]
            seconds = _mean(crossings)
            usd = per_s * seconds.mean

            # A ratio needs every seed of both sides at its goal.
            paired = curves[mode].keys() == curves[reference].keys()
            ratio = UNKNOWN
            if paired and all(crossing.reached for crossing in crossings + base):
                ratio = paired_ratio([c.at for c in crossings], [c.at for c in base])

            # Seeds that do not reach their goal were watched for this long at least.
            unreached_s = [c.at for c in crossings if not c.reached]
            lines.append(
                {
                    "cluster": cluster,
                    "mode": mode,
                    "target_share": share,
                    "target_auc": float(np.mean(list(goals.values()))),
                    "seeds": len(crossings),
                    "reached": sum(c.reached for c in crossings),
                    "seconds": seconds.mean,
                    "seconds_half_width_95": seconds.half_width,
                    "not_before_s": min(unreached_s, default=math.nan),
                    "ratio_to_sync": ratio.mean,
                    "ratio_to_sync_low_95": ratio.low,
                    "ratio_to_sync_high_95": ratio.high,
                    "samples": samples_of[mode],
                    "usd_per_hour": usd_per_hour,
                    "usd": usd,
                    "usd_half_width_95": per_s * seconds.half_width,
                    "usd_per_million_samples_of_sync": 1e6 * usd / samples_of[reference],
                }
            )
    return lines


def _crossings(
    curves: Mapping[int, Curve], axis: int, goals: Mapping[int, float]
) -> list[Crossing]:
    """The crossings of all seeds, in their order; one without a goal never reaches it."""
    crossings = []
    for seed, curve in sorted(curves.items()):
        columns = [*zip(*curve, strict=True)]
        goal = goals.get(seed, math.nan)
        crossings.append(first_crossing(columns[axis], columns[-1], goal))
    return crossings


def _mean(crossings: Sequence[Crossing]) -> Interval:
    if all(c.reached for c in crossings):
        return t_interval([c.at for c in crossings])
    return Interval(math.nan, math.nan, len(crossings))


FOOTNOTE = """\
A target is a share of the way from 0.5 to the AUC at which sync's run of the same seed ends. The
table has its mean over seeds. Between two snapshots AUC is taken as linear, and a run begins at 0 s
with 0.5. ± and [] are 95 % t intervals over paired seeds; that of a ratio is of its logarithm. $/M:
the dollars until the target, for each million of the samples that sync needs for it."""


def _seconds(line: Mapping[str, Any]) -> str:
    """Mean with interval, or how many seeds never reached their goal and how long they were
    watched."""
    late = line["seeds"] - line["reached"]
    if late:
        least_s = line["not_before_s"]
        return f"not reached by {late} of {line['seeds']} seeds, > {least_s:.1f} s"
    return _with_spread(line, "seconds", 1)


def _with_spread(line: Mapping[str, Any], name: str, digits: int) -> str:
    half = line[f"{name}_half_width_95"]
    spread = "" if math.isnan(half) else f" ± {half:.{digits}f}"
    return f"{line[name]:.{digits}f}{spread}"


def _ratio(line: Mapping[str, Any]) -> str:
    mean, low, high = (line[f"ratio_to_sync{end}"] for end in ("", "_low_95", "_high_95"))
    return "-" if math.isnan(mean) else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


COLUMNS: dict[str, Column] = {
    "mode": "{mode}",
    "target": "{target_share:.0%}",
    "AUC": "{target_auc:.4f}",
    "simulated s": _seconds,
    "times sync's [95 %]": _ratio,
    "$": lambda line: "-" if math.isnan(line["usd"]) else _with_spread(line, "usd", 2),
    "$/M": lambda line: (
        "-" if math.isnan(line["usd"]) else f"{line['usd_per_million_samples_of_sync']:.3f}"
    ),
}
"""Columns of `target_lines` as a person reads them."""
