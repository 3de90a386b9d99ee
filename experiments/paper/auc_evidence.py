"""AUC gaps to sync at rates of each mode's own: of the study `lateness` or of the demo, and of the
published curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from experiments.paper.record import Row, Table
from experiments.paper.verdicts import Found
from experiments.statistics import half_width_of

MOST_ROWS_LATE = 16
"""Of hybrid: the lateness that the claims are held against; the original's default has 10 permits
a rank, so that a lookup misses about as many updates."""
ASYNC_LATE = ((7, 7), (39, 7))
"""Updates that rows and dense weights miss in async over 8 ranks, at tau 0 and 4."""


def at_own_rates(lookup: Any) -> tuple[Table | None, list[Row]]:
    """The gaps on real data at each setting's own rates: of `lateness`, or else of the demo.

    Of several batches the smallest, of several starts of the row optimiser the fast one.
    """
    found = lookup("lateness.csv")
    if found is not None:
        rows = [r for r in found.rows if r["rates"] == "own" and float(r["optimizer_start"]) == 0]
        rows = [r for r in rows if r["redrawn"] != "True"]
        least = {r["data"]: min(int(o["batch"]) for o in rows if o["data"] == r["data"])
                 for r in rows}  # fmt: skip
        return found, [r for r in rows if int(r["batch"]) == least[r["data"]]]
    found = lookup("demo.csv")
    if found is None:
        return None, []
    shared = next((r["lr"] for r in found.rows if r["mode"] == "sync"), "")
    own = [r for r in found.rows if not int(r["dense_late"]) or r["lr"] != shared]
    return found, [r for r in own if r["mode"] != "sync"]


def hybrid_gaps(rows: Sequence[Row]) -> tuple[Found, ...]:
    """Dense weights in time, rows as late as was measured up to `MOST_ROWS_LATE`: a gap a task."""
    found = []
    for own in _by_task(rows):
        late = [r for r in own if r["dense_late"] == "0"]
        late = [r for r in late if 0 < int(r["rows_late"]) <= MOST_ROWS_LATE]
        if late:
            found.append(_gap(max(late, key=lambda r: int(r["rows_late"]))))
    return tuple(found)


def async_gaps(rows: Sequence[Row]) -> tuple[Found, ...]:
    """Rows and dense weights both as late as in async."""
    return tuple(_gap(row) for row in rows if _late(row) in ASYNC_LATE)


def kept_by_hybrid(rows: Sequence[Row]) -> tuple[Found, ...]:
    """Hybrid minus async, with rows in hybrid as late or later: what late dense weights cost.

    Both gaps subtract the same sync, so they move together; the interval is that of two independent
    ones, which is too wide.
    """
    found = []
    for own in _by_task(rows):
        hybrid = [r for r in own if r["dense_late"] == "0"]
        for late in (r for r in own if _late(r) in ASYNC_LATE):
            later = [r for r in hybrid if int(r["rows_late"]) >= int(late["rows_late"])]
            if later:
                found.append(_difference(min(later, key=lambda r: int(r["rows_late"])), late))
    return tuple(found)


def _by_task(rows: Sequence[Row]) -> list[list[Row]]:
    keys = dict.fromkeys((r["data"], r["task"]) for r in rows)
    return [[r for r in rows if (r["data"], r["task"]) == key] for key in keys]


def _late(row: Row) -> tuple[int, int]:
    return int(row["rows_late"]), int(row["dense_late"])


def _said(row: Row) -> str:
    return f"{row['rows_late']} / {row['dense_late']}"


def _gap(row: Row) -> Found:
    value, half = float(row["gap_to_sync"]), _number(row["gap_to_sync_half_width_95"])
    return Found(
        label=f"{row['data']}, {row['task']}, {_said(row)} updates late",
        value=value,
        low=value - half,
        high=value + half,
        n=int(row["seeds"]),
        seeds_error=_number(row["seeds_error"]),
        rows_error=_number(row["rows_error"]),
        data=row["data"],
    )


def _difference(hybrid: Row, late: Row) -> Found:
    one, other = _gap(hybrid), _gap(late)
    n = min(one.n or 0, other.n or 0)
    seeds, rows = (math.hypot(getattr(one, e), getattr(other, e)) for e in
                   ("seeds_error", "rows_error"))  # fmt: skip
    value = one.value - other.value
    half = half_width_of(seeds**2, rows**2, n) if n > 1 else math.nan
    return Found(
        label=f"{hybrid['data']}, {hybrid['task']}, {_said(hybrid)} minus {_said(late)}",
        value=value,
        low=value - half,
        high=value + half,
        n=n,
        seeds_error=seeds,
        rows_error=rows,
        data=hybrid["data"],
    )


def plotted_auc_gaps(mode: str) -> tuple[Found, ...]:
    """At the end of every published curve of a mode; the interval is the error of reading."""
    from experiments.published.auc_gaps import all_gaps, published_curves  # late: numpy

    found = []
    for (data, system, own_mode), gap in all_gaps(published_curves()).items():
        if own_mode != mode or system == "PaddlePaddle" or math.isnan(gap.at_end):
            continue
        end, error = gap.at_end, gap.error_at_end
        label = f"{data}, {system}, at the end"
        found.append(Found(label=label, value=end, low=end - error, high=end + error, data=data))
    return tuple(found)


def plotted_kept_by_hybrid() -> tuple[Found, ...]:
    """Persia's hybrid minus XDL's async at the end of the published curves."""
    late = {f.data: f for f in plotted_auc_gaps("async")}
    return tuple(
        Found(
            label=f"{f.data}, Persia hybrid minus XDL async",
            value=f.value - other.value,
            low=f.low - other.high,
            high=f.high - other.low,
            data=f.data,
        )
        for f in plotted_auc_gaps("hybrid")
        if (other := late.get(f.data)) is not None
    )


def _number(cell: str) -> float:
    return float(cell) if cell else math.nan
