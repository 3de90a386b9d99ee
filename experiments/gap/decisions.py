"""Which mode and bound for a given latency: the law of the window, and what the study measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.gap.skew import Skew

LATENCIES = (0.25, 1.0, 4.0, 16.0)
"""L / C: seconds of a lookup (or a push) over those of a step's computation, where the rows lie
(choices, from the same machine's memory to a busy network)."""
TOLERANCE = 1e-3
"""AUC that a mode may lose: a thousandth, which the literature calls noticeable online (source:
paper, whose claim for hybrid is 0.1 %)."""
Row = Mapping[str, Any]


def step_over_compute(mode: str, tau: int, latency: float) -> float:
    """Seconds of a step over its computation C, where a lookup and a push each take latency * C.

    Law 15: max(C, (2L + C) / (tau + 1)) in modes with a window, 2L + C in sync; without contention,
    and without what a barrier waits for.

    >>> step_over_compute("hybrid", 4, 4.0), step_over_compute("sync", 0, 4.0)
    (1.8, 9.0)
    """
    whole = 2 * latency + 1
    return whole if mode in ("sync", "lookahead") else max(1.0, whole / (tau + 1))


def decide(rows: Sequence[Row], latency: float, tolerance: float = TOLERANCE) -> tuple[Row, str]:
    """The line of the table to go by, and why.

    The fastest setting whose loss is known to be below ``tolerance`` (the lower end of the 95 %
    interval of its gap); of equally fast ones that with the smallest window, and hybrid before
    async, whose dense weights are late, too. Sync, where no late setting is known to be good enough
    or none is faster. ``rows``: one data set, task and kind of rates, with sync.
    """
    (sync,) = [row for row in rows if row["mode"] == "sync"]
    late = [row for row in rows if row["mode"] not in ("sync", "lookahead", "raw_hybrid")]
    good = [row for row in late if lower_end(row) >= -tolerance]
    ranked = sorted(
        [sync, *good],
        key=lambda r: (_step(r, latency), r["tau"], r["mode"] != "sync", r["mode"] != "hybrid"),
    )
    best = ranked[0]
    if best is not sync:
        faster = [row for row in late if _step(row, latency) < _step(best, latency)]
        why = f"fastest whose loss is below {tolerance:g} with 95 %"
        if faster:
            why += f"; {len(faster)} faster ones are not known to be"
        return best, why
    if any(_step(row, latency) < _step(sync, latency) for row in late):
        return sync, f"no faster mode is known to lose less than {tolerance:g}"
    return sync, "no late mode is faster by the law"


def lower_end(row: Row) -> float:
    """The largest loss that the interval of the gap allows; minus infinity without an interval."""
    end = row["gap_to_sync"] - row["gap_to_sync_half_width_95"]
    return -math.inf if math.isnan(end) else float(end)


def decision_table(
    rows: Sequence[Row], skews: Mapping[str, Skew], tolerance: float = TOLERANCE
) -> list[dict[str, Any]]:
    """A line per data set and latency, of the tuned rates where they were tuned; the first task."""
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == data]
        mine = [row for row in mine if row["task"] == mine[0]["task"]]
        rates = "tuned" if any(row["rates"] == "tuned" for row in mine) else "fixed"
        mine = [row for row in mine if row["rates"] == rates]
        for latency in LATENCIES:
            best, why = decide(mine, latency, tolerance)
            lines.append(_line(best, why, latency, skews[data]))
    return lines


def _line(best: Row, why: str, latency: float, skew: Skew) -> dict[str, Any]:
    step, sync = _step(best, latency), step_over_compute("sync", 0, latency)
    ahead = max(1, math.ceil(2 * latency + 1) - 1)
    return {
        "data": best["data"],
        "task": best["task"],
        "batch": best["batch"],
        "hot_share": skew.hot_share,
        "rows_of_the_step_before": skew.rows_of_the_step_before,
        "steps": best["steps"],
        "latency_over_compute": latency,
        "mode": best["mode"],
        "tau": best["tau"],
        "step_over_compute": step,
        "times_as_fast_as_sync": sync / step,
        "gap_to_sync": best["gap_to_sync"],
        "gap_to_sync_half_width_95": best["gap_to_sync_half_width_95"],
        "seeds": best["seeds"],
        "why": why,
        "exact_alternative": f"lookahead forwarded, ahead {ahead}: no loss (law 2), step C",
        "law": "step = max(C, (2L + C) / (tau + 1)); sync 2L + C",
        "evidence": (
            f"gap_study.csv: data={best['data']}, task={best['task']}, rates={best['rates']},"
            f" mode={best['mode']}, tau={best['tau']}"
        ),
    }


def _step(row: Row, latency: float) -> float:
    return step_over_compute(row["mode"], row["tau"], latency)
