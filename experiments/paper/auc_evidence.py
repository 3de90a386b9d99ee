"""AUC gaps to sync: out of the tables of studies, and out of the published curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.paper.evidence import Row, Table
from experiments.paper.verdicts import Found
from persia_sim.words.vocabulary import DEFAULT_TAU

LEAST_STEPS = 1_000
"""Dense updates of a run whose end may be judged; the published runs had 5,000 to 10,800."""


def long_runs(found: Table | None) -> Table | None:
    """The lines of a table of gaps that are of runs of some length; None where there is none."""
    if found is None:
        return None
    rows = [row for row in found.rows if int(row["steps"]) >= LEAST_STEPS]
    return replace(found, rows=rows) if rows else None


def auc_gaps(rows: Sequence[Row], mode: str, tau: int = DEFAULT_TAU) -> tuple[Found, ...]:
    """The gap to sync of a mode at the default bound, for every data set and task of a table."""
    chosen = [row for row in rows if row["mode"] == mode and row["tau"] == str(tau)]
    return tuple(_gap(row) for row in chosen)


def _gap(row: Row) -> Found:
    value, half = float(row["gap_to_sync"]), _number(row["gap_to_sync_half_width_95"])
    data = row.get("data") or "synthetic"
    rates = f", {row['rates']} rates" if "rates" in row else ""
    return Found(
        label=f"{data}, {row['task']}, tau {row['tau']}{rates}",
        value=value,
        low=value - half,
        high=value + half,
        n=int(row["seeds"]),
        data=data,
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


def _number(cell: str) -> float:
    return float(cell) if cell else math.nan
