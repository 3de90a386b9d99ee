"""Checkpoints and crashes over long times: overhead in closed form and by random failures.

A run of days cannot be simulated batch by batch; between crashes it is stationary, so its goodput
is the throughput times (1 - overhead). Single crashes inside a run are `incidents.Crash`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, sqrt

import numpy as np

from persia_sim.model.incidents import Crash, Target
from persia_sim.model.noise import Purpose, stream
from persia_sim.words.rules import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What a crash costs."""

    mtbf_s: float
    """Mean time between crashes of the whole job (exponential), > 0."""
    checkpoint_s: float
    """Training stands still this long for a checkpoint, > 0."""
    back_s: float
    """Detection, restart and load after a crash, >= 0."""
    partial: bool = False
    """Only the crashed server goes back to its checkpoint and the others go on: no work is done
    twice, but the server's updates since then are lost. Else all go back."""

    def __post_init__(self) -> None:
        for field in ("mtbf_s", "checkpoint_s"):
            require(getattr(self, field) > 0, field, getattr(self, field), "must be > 0")
        require(self.back_s >= 0, "back_s", self.back_s, "must be >= 0")


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Young's first-order best time between checkpoints: sqrt(2 C M).

    >>> young_interval_s(50.0, 10_000.0)
    1000.0
    """
    return sqrt(2 * checkpoint_s * mtbf_s)


def overhead(recovery: Recovery, interval_s: float) -> float:
    """Wall time over useful time, minus one, at this much useful work between checkpoints.

    Full recovery, exponential failures (Daly's exact form): a segment of T + C is repeated until it
    passes whole, which takes M exp(R/M) (exp((T + C)/M) - 1). Partial: nothing is repeated.
    """
    require(interval_s > 0, "interval_s", interval_s, "must be > 0")
    mean, segment = recovery.mtbf_s, interval_s + recovery.checkpoint_s
    if recovery.partial:
        return segment / interval_s * (1 + recovery.back_s / mean) - 1
    wall = mean * np.exp(recovery.back_s / mean) * expm1(segment / mean)
    return float(wall / interval_s - 1)


def random_crashes(
    mtbf_s: float, until_s: float, ranks: int, back_s: float, seed: int
) -> tuple[Crash, ...]:
    """Crashes of random ranks at exponential distances, for a run of at most this long."""
    draws, found, now = stream(seed, Purpose.FAULT, 1), [], 0.0
    while (now := now + float(draws.exponential(mtbf_s))) < until_s:
        rank = int(draws.integers(ranks))
        found.append(
            Crash(target=Target.RANK, index=rank, at_s=now, detect_s=0.0, restart_s=back_s)
        )
    return tuple(found)


def best_interval_s(recovery: Recovery) -> float:
    """The interval of least overhead, by golden section; unbounded for partial recovery."""
    low, high = recovery.checkpoint_s / 100, 50 * recovery.mtbf_s
    ratio = (sqrt(5) - 1) / 2
    for _ in range(200):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if overhead(recovery, a) < overhead(recovery, b):
            high = b
        else:
            low = a
    return (low + high) / 2


def cpr_illustration() -> dict[str, float]:
    """CPR's two figures (8.3 % with full, about 0.6 % with partial recovery) from stated inputs.

    Assumed, not published: a crash every 28 h, 5 minutes for a checkpoint, 2 minutes to be back;
    full recovery checkpoints at its best interval, partial recovery every 20 h, because it only
    bounds the updates that a crash loses.
    """
    hour = 3600.0
    full = Recovery(mtbf_s=28 * hour, checkpoint_s=300.0, back_s=120.0)
    partial = Recovery(mtbf_s=28 * hour, checkpoint_s=300.0, back_s=120.0, partial=True)
    return {
        "full": overhead(full, best_interval_s(full)),
        "partial": overhead(partial, 20 * hour),
    }
