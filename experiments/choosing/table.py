"""The table of which-mode: what a mode gains on its cluster and loses on a log, as a CSV has it and
as a person reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.choosing.batch import EXACT, Cell, Plan, samples_for
from experiments.choosing.decision import LOOKS
from experiments.choosing.speeds import Simulated
from experiments.gaps import curve_records
from experiments.line_search import first_task
from experiments.options import REFERENCE
from experiments.statistics import Interval
from experiments.tables import Column
from experiments.targets import target_lines
from persia_sim.base.rules import counted
from persia_sim.cluster.memory import lasting
from persia_sim.presets.from_file import find_cluster
from persia_sim.report.ranges import Range

if TYPE_CHECKING:  # with it comes torch
    from experiments.choosing.training import Training


TARGET = 0.95
"""Share of sync's climb from an AUC of 0.5 to its end that counts as sync's AUC."""


def gains_of(one: Simulated) -> dict[str, Any]:
    """What is simulated of a mode: its hosts, its rate and dollars as ranges, and how late its rows
    are: a mean lookup (``rows_missed_mean``), and what is trained for it."""
    point = one.candidate.point
    return {
        "cluster": point.cluster,
        "workload": Path(point.workload).name,
        "mode": one.candidate.label,
        "tau": point.tau if point.mode.reads_late_rows else None,
        "ranks": one.row["ranks"],
        "workers": one.row["workers"],
        "servers": one.row["servers"],
        **_ends("samples_per_s", one.rate),
        **_ends("times_sync", one.times_sync),
        **_ends("usd_per_billion_samples", one.usd_per_billion),
        "usd_per_hour": one.usd_per_hour,
        "rows_missed_mean": one.rows_late,
        "rows_late": one.cell.rows_late,
        "dense_late": one.cell.dense_late,
        "binds": one.row["binds"],
    }


def _ends(name: str, figure: Range) -> dict[str, float]:
    return {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}


def rows_of_table(
    front: Sequence[Simulated], trained: Training, options: Any
) -> list[dict[str, Any]]:
    """A row a mode: what it gains and loses, and its way to a share of sync's climb."""
    reached = _ways(front, trained, TARGET)
    rows = []
    for one in front:
        none = Interval(math.nan, math.nan, 0)
        gap = Interval(0.0, 0.0, 0) if one.cell.is_exact else trained.gap(one.cell) or none
        shuffled = (trained.gap(one.cell, shuffled=True) if options.shuffled else None) or none
        way = reached.get(one.candidate.label, {})
        hours = way.get("seconds", math.nan) / 3600
        rows.append(
            {
                **gains_of(one),
                "batch": trained.plan.batch,
                "samples": trained.plan.samples,
                "seeds": gap.n,
                "gap": gap.mean,
                "gap_half_width_95": gap.half_width,
                "seeds_error": gap.seeds_error,
                "rows_error": gap.rows_error,
                "gap_shuffled": shuffled.mean,
                "gap_shuffled_half_width_95": shuffled.half_width,
                "hours_to_target": hours,
                "usd_to_target": hours * one.usd_per_hour,
                "reached": way.get("reached", math.nan),
                "empty": why_empty(one.cell, trained),
            }
        )
    return rows


def why_empty(cell: Cell, trained: Training) -> str:
    """Why a cell has no gap, in words; "" where it has one."""
    plan = trained.plan
    if cell in plan.too_late:
        return f"needs {samples_for(cell):,} samples"
    if cell in plan.no_time:
        most = max(samples_for(cell), plan.samples)
        return f"needs {waiting(trained.wall_s(2, most))} more"
    return ""


def _ways(
    front: Sequence[Simulated], trained: Training, share: float
) -> dict[str, Mapping[str, Any]]:
    """By mode, when a share of sync's climb from 0.5 is reached: an update of the log takes as long
    as one of the cluster."""
    snapshots = []
    reference = ""
    for one in front:
        if one.cell not in (*trained.plan.cells, EXACT):
            continue
        if one.candidate.point.mode is REFERENCE and not reference:
            reference = one.candidate.label
        step_s = one.row["batch"] / one.row["samples_per_s"]
        runs = trained.runs(one.cell)
        task = first_task(runs[0])
        for record in curve_records(runs, trained.options.out):
            if record["task"] == task and record["auc"] is not None:
                updates = record["samples"] / trained.plan.batch
                second = updates * step_s
                samples = updates * one.row["batch"]
                at = record["seed"], second, samples, record["auc"]
                snapshots.append((one.candidate.label, *at))
    return {line["mode"]: line for line in target_lines(snapshots, reference, [share])}


def waiting(seconds: float) -> str:
    """How long one waits, in words."""
    return f"{seconds / 60:.2g} min" if seconds >= 60 else f"{max(1, seconds):.0f} s"


def gap_in_words(gap: Interval) -> str:
    """A gap with its interval."""
    width = 1e3 * gap.half_width
    return f"{1e3 * gap.mean:+.1f} ± {width:.1f} thousandths ({counted(gap.n, 'seed')})"


def said_of_hosts(front: Sequence[Simulated]) -> str:
    """That modes have other numbers of CPU hosts than their cluster, and how to keep its own; ""
    where none has."""
    name = front[0].candidate.point.cluster
    cluster = find_cluster(name)[0]
    own = cluster.embedding_workers.hosts, cluster.servers.hosts
    if all((one.row["workers"], one.row["servers"]) == own for one in front):
        return ""
    return (
        "CPU hosts, workers + servers: so many as make the mode cheapest or fastest;"
        f" --hosts given keeps the {own[0]} + {own[1]} of {name}"
    )


GAINS: dict[str, Column] = {
    "mode": "{mode}",
    "CPU hosts": "{workers} + {servers}",
    "k samples/s": lambda row: _range(row, "samples_per_s", 1e-3),
    "$ for 10^9": lambda row: _range(row, "usd_per_billion_samples", 1),
    "rows late": lambda row: f"{row['rows_missed_mean']:.1f}",
}
"""The columns of what is simulated."""


def columns_of(plan: Plan, options: Any) -> dict[str, Column]:
    """The columns of the whole answer."""
    share = TARGET
    columns: dict[str, Column] = {
        **GAINS,
        f"AUC gap at batch {plan.batch:,} [1e-3]": _gap_cell,
        f"time to {share:g}": lambda row: _time_cell(row["hours_to_target"]),
        f"$ to {share:g}": lambda row: _number(row["usd_to_target"]),
    }
    if options.shuffled:
        columns[f"gap shuffled, {LOOKS[0]} seeds [1e-3]"] = _shuffled_cell
    return columns


def _time_cell(hours: float) -> str:
    return "-" if math.isnan(hours) else lasting(3600 * hours)


def _range(row: Mapping[str, Any], name: str, scale: float) -> str:
    low, high = (scale * row[f"{name}_{end}"] for end in ("low", "high"))
    return "?" if math.isnan(low) else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    """Two figures or more, whatever its size.

    >>> _number(0.0312), _number(4.26), _number(42.6), _number(12_345.6)
    ('0.031', '4.3', '43', '12,346')
    """
    if math.isnan(value):
        return "-"
    return f"{value:,.{max(0, 1 - math.floor(math.log10(value or 1)))}f}"


def _gap_cell(row: Mapping[str, Any]) -> str:
    """The gap with its interval; that of exact rows is none, and an empty cell says why."""
    if row["empty"]:
        return f"({row['empty']})"
    if not row["rows_late"] and not row["dense_late"]:
        return "0"
    if not row["seeds"]:
        return "-"
    dense = f"/{row['dense_late']}" if row["dense_late"] else ""
    gap = f"{1e3 * row['gap']:+.1f} ± {1e3 * row['gap_half_width_95']:.1f}"
    return f"{gap} at {row['rows_late']}{dense}, {row['seeds']} seeds"


def _shuffled_cell(row: Mapping[str, Any]) -> str:
    """The gap where the training samples of sync and of the mode come shuffled."""
    mean, half = row["gap_shuffled"], row["gap_shuffled_half_width_95"]
    return "-" if math.isnan(mean) else f"{1e3 * mean:+.1f} ± {1e3 * half:.1f}"
