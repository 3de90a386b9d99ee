"""Seconds, samples and dollars to a target AUC, per mode, with intervals and censoring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.crossings import (
    NO_SKILL,
    Crossing,
    Ratio,
    first_crossing,
    mean_of,
    paired_ratio,
    told,
)
from experiments.statistics import Interval
from experiments.tables import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """One seed's curve, by seconds and by samples."""

    seconds: Sequence[float]
    samples: Sequence[float]
    auc: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How long one mode takes to one AUC, over its seeds, beside the mode of reference."""

    mode: str
    share: float
    """Of the climb of the reference, from 0.5 to its mean AUC at the end."""
    auc: float
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


def targets(
    journeys: Mapping[str, Mapping[int, Journey]], reference: str, shares: Sequence[float]
) -> list[Target]:
    """Every mode's way to every share of the reference's climb; ``journeys``: mode -> seed -> way.

    A way's last AUC is that of the end of its run.
    """
    last = [way.auc[-1] for way in journeys[reference].values()]
    climb = float(np.mean(last)) - NO_SKILL
    found = []
    for share in shares:
        auc = NO_SKILL + share * climb
        by_s = {m: _ways(ways, "seconds", auc) for m, ways in journeys.items()}
        by_samples = {m: mean_of(_ways(ways, "samples", auc)).mean for m, ways in journeys.items()}
        for mode, own in by_s.items():
            both = own + by_s[reference]
            paired = journeys[mode].keys() == journeys[reference].keys()
            ratio = Ratio(math.nan, math.nan, math.nan, 0)
            if paired and all(crossing.reached for crossing in both):
                ratio = paired_ratio([c.at for c in own], [c.at for c in by_s[reference]])
            found.append(
                Target(
                    mode=mode,
                    share=share,
                    auc=auc,
                    crossings=own,
                    seconds=mean_of(own),
                    ratio=ratio,
                    samples=by_samples[mode],
                    reference_samples=by_samples[reference],
                )
            )
    return found


def _ways(ways: Mapping[int, Journey], axis: str, auc: float) -> tuple[Crossing, ...]:
    """The crossings of all seeds, in order of seed."""
    return tuple(
        first_crossing(getattr(ways[seed], axis), ways[seed].auc, auc) for seed in sorted(ways)
    )


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
A target is a share of sync's climb from 0.5 to its mean AUC at the end. A crossing is linear
between two snapshots (a run begins at 0 s with 0.5); ± and [] are 95 % t intervals over paired
seeds, the ratio's of its logarithm. $/M: dollars until the target for a million of the samples that
sync needs."""


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
                "-" if math.isnan(usd.mean) else _dollars(usd),
                "-" if math.isnan(usd.mean) else f"{t.usd_per_million(usd_per_hour):.3f}",
            ]
        )
    return aligned(header, cells)


def _dollars(usd: Interval) -> str:
    spread = "" if math.isnan(usd.half_width) else f" ± {usd.half_width:.2f}"
    return f"{usd.mean:.2f}{spread}"
