"""Which mode to take: for a log on a cluster (`experiments.choosing`); else, what each gains on
three clusters, and loses on stored streams.

Throughput and dollars are simulated. AUC and the updates to sync's AUC come from the stored runs of
the study of lateness, at the very lateness that a mode has under a constant lag; where it was not
trained the cell is empty. Every update takes as long as the simulated one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from experiments.choosing.speeds import label_of, usd_per_hour
from experiments.lateness.runs import FLUSHED, KEPT, Record, record_of
from experiments.lateness.streams import OWN, SHUFFLED, STREAMS, TAU_CELLS, TEST, TIME
from experiments.options import OneOf, Parallel, Some
from experiments.paper.record import STORED
from experiments.result_cache import ResultCache
from experiments.tables import Column, leave, table
from experiments.targets import target_lines
from paper_figs import SHORT
from persia_sim.base.command_line import Unset
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from persia_sim.base.window import UpdatesMissed, updates_missed
from persia_sim.cluster.memory import capacity
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import find_rows
from persia_sim.report import sweep

EXAMPLES = STORED.parents[1] / "examples"
LABELS = {
    "sync": (Mode.SYNC, None),
    "lookahead": (Mode.LOOKAHEAD, None),
    "hybrid, tau 4": (Mode.HYBRID, 4),
    "hybrid, tau 16": (Mode.HYBRID, 16),
    "async": (Mode.ASYNC, 4),
}
"""What is compared: the mode and its tau, by the words of the table."""
WITH_DATA = "only with --data"
"""The mark of options about a log."""
REAL = ("movielens-latest-small-2016", "kuairand-pure-14d", "oulad-assessments", "tennis")
"""The real streams of the study."""
HALF_WIDTH = 0.02
"""Relative 95 % half width of a rate at which a simulation ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Which mode to take for your log on your cluster: samples/s and dollars of each, and the AUC
    that it loses on the log. Without --data: the losses of stored streams on three clusters."""

    data: str | None = None
    """Your log: its schema (.toml), as clicks.toml, or a ready data set."""
    cluster: Annotated[str | None, Unset("gcp-100t; without --data examples/cluster.toml")] = None
    """Your cluster: cluster.toml as `persia-sim init` writes it, or a preset of the simulator."""
    workload: Annotated[
        str | None, Unset("counted in log and model; without --data examples/workload.toml")
    ] = None
    """What it trains: workload.toml as `persia-sim init` writes it, or a preset."""
    target: Annotated[float, Within(0.01, 1)] = 0.95
    """Share of sync's climb from an AUC of 0.5 to its end that counts as sync's AUC, as 0.95."""
    config: Annotated[Path | None, WITH_DATA] = None
    """Options of training from a file, as run.toml of `train --config`."""
    set: Annotated[tuple[str, ...], WITH_DATA] = ()
    """Options of training by their names in such a file, over it: model.lr=1e-3 rows.dim=16."""
    scale: Annotated[float, Within(1, 1e9), WITH_DATA] = 1.0
    """Of how many times as many samples the log is a cut: tables have the rows of all of them."""
    batch_per_rank: Annotated[int, Within(1, 65_535), WITH_DATA] = 2_048
    """Samples of a GPU in a step, on the cluster."""
    dense_flops: Annotated[float | None, Within(1, 1e18), WITH_DATA] = None
    """Operations of a sample's forward and backward pass, of a model of your own that torch cannot
    count."""
    hosts: Annotated[Literal["free", "given"], WITH_DATA] = "free"
    """free: as many embedding workers and servers for each mode as make it cheapest and fastest;
    given: as many as the cluster has."""
    minutes: Annotated[float, Within(0.1, 100_000), WITH_DATA] = 10.0
    """Minutes that all of it may take; a longer log is cut to its last window."""
    tolerance: Annotated[float, Within(0, 1000), WITH_DATA] = 1.0
    """Thousandths of AUC that a mode may lose and still be as good."""
    shuffled: Annotated[bool, WITH_DATA] = False
    """Train sync and every late mode on shuffled samples, too: what the order costs."""
    write_workload: Annotated[Path | None, WITH_DATA] = None
    """File for the counted workload; else workload.toml in the folder of the results."""
    json: Annotated[bool, WITH_DATA] = False
    """Print the answer as one JSON document on stdout, and all sentences on stderr."""
    streams: Some[Annotated[str, OneOf(REAL)]] = REAL
    """Streams of the stored study whose losses are shown without --data."""

    def _check(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for one in fields(self):
            of_log = WITH_DATA in getattr(kinds[one.name], "__metadata__", ())
            given = getattr(self, one.name) != one.default
            if of_log and given and self.data is None:
                raise Refused(one.name, "is about a log; add --data, as clicks.toml, or remove it")
        if self.data is not None and self.streams != REAL:
            raise Refused("streams", "are those of the stored study; remove it, or --data")


def run(options: Options) -> None:
    """The answer for a log; else simulate what is missing, put the stored study's losses beside it,
    print and write the table."""
    if options.data is not None:
        from experiments.choosing.answer import answered  # late: torch

        answered(options)
        return

    points = points_of(options)
    # Rows that the servers cannot hold end the command, before anything is simulated.
    labels = {}
    for key, point in points.items():
        scenario = sweep.scenario_of(point, 1)
        room = capacity(scenario.cluster, scenario.workload, find_rows(rows_of(point.workload)))
        room.refuse(scenario.cluster)
        labels[key] = label_of(point, rows_of(point.workload), HALF_WIDTH)
    if options.dry_run:
        time = options.duration(share=len(points) / len(points_of(Options())))
        print(f"{len(points)} simulations, {time}; results in {options.out}")
        for point in points.values():
            print(f"  {point.label}")
        return

    # Simulate every mode on every cluster.
    results = ResultCache(options.out / "points.jsonl")
    work = {
        labels[key]: partial(sweep.evaluate, point, half_width=HALF_WIDTH)
        for key, point in points.items()
    }
    filled = results.fill(work, "simulations", options.jobs)
    rates = dict(zip(points, filled, strict=True))

    # Beside each stands what the study measured at its lateness.
    stored = StoredStudy.read(STORED)
    lines = [
        line
        for cluster in dict.fromkeys(cluster for cluster, _ in points)
        for line in lines_of(cluster, rates, points, stored, options)
    ]
    for cluster in dict.fromkeys(line["cluster"] for line in lines):
        of_cluster = [line for line in lines if line["cluster"] == cluster]
        print(f"{cluster}; {of_cluster[0]['workload']}\n")
        print(f"{table(by_mode(of_cluster), gain_columns(options.streams))}\n")
    losses = loss_rows(lines)
    print("test AUC minus sync's, in thousandths, and the rows/dense updates missed there\n")
    print(f"{table(losses, loss_columns(options.streams))}\n")
    print(NOTE.format(share=f"{options.target:.0%}".replace("%", " %")))
    leave(options, {"": lines, "_windows": stored.windows(options.streams)}, drawn_first=2)


def points_of(options: Options) -> dict[tuple[str, str], sweep.Point]:
    """The points by the words of their cluster and of their mode."""
    theirs = options.cluster or str(EXAMPLES / "cluster.toml")
    trains = options.workload or str(EXAMPLES / "workload.toml")
    word = "yours" if options.cluster else "the example's"
    name = Path(theirs).name if theirs.endswith(".toml") else theirs
    clusters = {
        "paper: 64 V100, 100 CPU hosts": ("v100-paper", "kwai-video"),
        "one host of 8 H100, rows on CPU servers": ("h100-host", "kwai-video"),
        f"{word}: {name}": (theirs, trains),
    }
    return {
        (about, label): sweep.Point(cluster=cluster, workload=workload, mode=mode, tau=tau)
        for about, (cluster, workload) in clusters.items()
        for label, (mode, tau) in LABELS.items()
    }


# What the study of lateness measured.


@dataclass(frozen=True, slots=True)
class StoredStudy:
    """The study's gaps at sync's rates, and its runs."""

    gaps: Sequence[Mapping[str, str]]
    """Gaps on the test part; of a stream and an order all of one arithmetic."""
    in_windows: Sequence[Mapping[str, str]]
    """Gaps on the test part and on earlier windows."""
    runs: Sequence[Record]

    @classmethod
    def read(cls, folder: Path) -> StoredStudy:
        """The stored tables. Raises OSError where they are not there."""
        with (folder / "lateness.csv").open(newline="") as file:
            in_windows = [line for line in csv.DictReader(file) if _is_plain(line)]
        with (folder / "lateness_tau.csv").open(newline="") as file:
            of_taus = [line for line in csv.DictReader(file) if _is_usual(line)]
        with (folder / "lateness_runs.csv").open(newline="") as file:
            runs = [record_of(line) for line in csv.DictReader(file)]

        # The second plan's gaps, where they are all there; else those of the first, which knows
        # other lateness.
        whole = {
            key
            for key in {(line["data"], line["order"]) for line in of_taus}
            if {
                (int(line["rows_late"]), int(line["dense_late"]))
                for line in of_taus
                if (line["data"], line["order"]) == key and line["seeds"] == line["seeds_planned"]
            }
            >= {(cell.rows_late, cell.dense_late) for cell in TAU_CELLS}
        }
        gaps = [line | {"arithmetic": FLUSHED} for line in of_taus if _key(line) in whole]
        first = [line for line in in_windows if line["window"] == TEST]
        gaps += [line | {"arithmetic": KEPT} for line in first if _key(line) not in whole]
        return cls(gaps, in_windows, runs)

    def measured(self, stream: str, order: str, late: UpdatesMissed) -> Mapping[str, str] | None:
        """The gap that was measured at this very lateness; None where none was."""
        tasks = [line["task"] for line in self.gaps if line["data"] == stream]
        for line in self.gaps:
            if (line["data"], line["order"], line["task"]) == (stream, order, tasks[0]) and (
                (int(line["rows_late"]), int(line["dense_late"])) == late
            ):
                return line
        return None

    def windows(self, streams: Sequence[str]) -> list[dict[str, Any]]:
        """What rows 16 updates late change in each test window of the streams, in each order."""
        lines = []
        for stream in streams:
            tasks = [gap["task"] for gap in self.in_windows if gap["data"] == stream]
            for gap in self.in_windows:
                late = gap["rows_late"], gap["dense_late"]
                is_here = (gap["data"], gap["task"]) == (stream, tasks[0])
                if is_here and late == ("16", "0") and gap["order"] in (TIME, SHUFFLED):
                    columns = "data", "window", "order", "updates", "rows_late"
                    gaps = "gap_to_sync", "gap_to_sync_half_width_95"
                    lines.append(
                        {name: gap[name] for name in columns}
                        | {name: float(gap[name]) for name in gaps}
                    )
        return lines

    def curves(self, gap: Mapping[str, str]) -> list[Record]:
        """The runs behind a gap of the stream's own order, with AUC along the way."""
        wanted = gap["data"], gap["order"], TEST
        return [
            run
            for run in self.runs
            if (run.run.stream, run.run.order, run.run.window) == wanted
            and (run.run.rows_late, run.run.dense_late)
            == (int(gap["rows_late"]), int(gap["dense_late"]))
            and (run.run.row_lr, run.run.dense_lr) == (float(gap["row_lr"]), float(gap["lr"]))
            and (run.run.start, run.run.updates, run.run.batch) == (0.0, None, int(gap["batch"]))
            and (run.run.passes, run.run.split, run.run.arithmetic) == (1, OWN, gap["arithmetic"])
            and run.snapshots
        ]


def _is_plain(line: Mapping[str, str]) -> bool:
    """Whether a gap is of one pass, at sync's rates, with Adagrad from 0."""
    stream = STREAMS.get(line["data"])
    return (
        stream is not None
        and (line["rates"], line["redrawn"]) == ("of sync", "False")
        and float(line["optimizer_start"]) == 0
        and int(line["batch"]) == stream.batch
        and int(line["updates"]) != stream.long_updates
    )


def _is_usual(line: Mapping[str, str]) -> bool:
    """Whether a gap of the second plan is of one pass, and of the split of the schema."""
    return (line["passes"], line["split"]) == ("1", "own") and line["data"] in STREAMS


def _key(line: Mapping[str, str]) -> tuple[str, str]:
    return line["data"], line["order"]


# The table.


def lines_of(
    cluster: str,
    rates: Mapping[tuple[str, str], Mapping[str, Any]],
    points: Mapping[tuple[str, str], sweep.Point],
    stored: StoredStudy,
    options: Options,
) -> list[dict[str, Any]]:
    """The lines of a cluster: one for each mode and stream."""
    usd = usd_per_hour(sweep.scenario_of(points[cluster, "sync"], 1).cluster)
    ranks = rates[cluster, "sync"]["ranks"]
    workload = Path(points[cluster, "sync"].workload).name
    lines = []
    for stream in options.streams:
        gaps: dict[str, dict[str, Mapping[str, str] | None]] = {}
        snapshots: list[tuple[str, int, float, float, float]] = []
        for label, (mode, tau) in LABELS.items():
            # What was measured at the mode's lateness.
            rate = rates[cluster, label]
            late = updates_missed(mode, tau, ranks=ranks)
            gaps[label] = {
                order: stored.measured(stream, order, late) for order in (TIME, SHUFFLED)
            }

            # An update of the study takes as long as a simulated one.
            in_order = gaps[label][TIME]
            step_s = rate["batch"] / rate["samples_per_s"]
            snapshots += [
                (label, run.run.seed, updates * step_s, updates * rate["batch"], auc)
                for run in (stored.curves(in_order) if in_order else ())
                for updates, auc in run.snapshots.items()
            ]
        reached = {
            line["mode"]: line
            for line in target_lines(snapshots, "sync", [options.target], cluster, usd)
        }
        for label in LABELS:
            lines.append(
                {"cluster": cluster, "workload": workload, "mode": label}
                | _gain(rates, cluster, label, usd)
                | {"data": stream}
                | _late(LABELS[label], ranks)
                | _loss(gaps[label], reached.get(label))
            )
    return lines


def _gain(
    rates: Mapping[tuple[str, str], Mapping[str, Any]], cluster: str, label: str, usd: float
) -> dict[str, Any]:
    """The cells that are simulated: throughput, dollars, what binds, updates missed."""
    rate = rates[cluster, label]
    mode, _ = LABELS[label]
    return {
        "ranks": rate["ranks"],
        "batch": rate["batch"],
        "samples_per_s": rate["samples_per_s"],
        "relative_half_width_95": rate["relative_half_width_95"],
        "times_sync": rate["samples_per_s"] / rates[cluster, "sync"]["samples_per_s"],
        "usd_per_hour": usd or math.nan,
        "usd_per_billion_samples": (usd / 3600 / rate["samples_per_s"] * 1e9 if usd else math.nan),
        "binds": rate["binds"],
        "rows_missed_mean": sweep.updates_missed(rate),
        "dense_missed": 0 if mode.has_barrier else rate["ranks"] - 1,
    }


def _late(setting: tuple[Mode, int | None], ranks: int) -> dict[str, Any]:
    """What a batch of the mode misses under a constant lag."""
    late = updates_missed(*setting, ranks=ranks)
    return {"rows_late": late.rows, "dense_late": late.dense}


def _loss(
    gaps: Mapping[str, Mapping[str, str] | None], reached: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The cells that the study gives: gaps at the mode's lateness, and the way to sync's AUC; NaN
    where that was not trained."""
    cells: dict[str, Any] = {}
    for order, gap in gaps.items():
        for name in ("gap_to_sync", "gap_to_sync_half_width_95"):
            cells[f"{order}_{name}"] = math.nan if gap is None else float(gap[name])
    names = "target_share", "target_auc", "seeds", "reached", "seconds", "seconds_half_width_95"
    return cells | {name: math.nan if reached is None else reached[name] for name in names}


def by_mode(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Mapping[str, Any]]]:
    """A row for each mode, which has the line of each stream."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        rows.setdefault(line["mode"], {})[line["data"]] = line
    return list(rows.values())


def loss_rows(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each late mode and order, with a cell for each stream; clusters on which a mode
    is as late share a row."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (row for cluster in _by_cluster(lines) for row in by_mode(cluster)):
        for order, words in ((TIME, "time order"), (SHUFFLED, "shuffled")):
            cells = {stream: gap_cell(line, order) for stream, line in row.items()}
            mode = next(iter(row.values()))["mode"]
            if any(cell != EXACT for cell in cells.values()):
                rows[mode, words, *cells.values()] = {"mode": mode, "order": words} | cells
    return list(rows.values())


def _by_cluster(lines: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    by_cluster: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_cluster.setdefault(line["cluster"], []).append(line)
    return list(by_cluster.values())


EXACT = "-"
"""The cell of a mode that misses nothing."""


def gap_cell(line: Mapping[str, Any], order: str) -> str:
    """A gap in thousandths of AUC, and the lateness at which it was measured."""
    rows = line["rows_late"]
    dense = line["dense_late"]
    if not rows and not dense:
        return EXACT
    if math.isnan(line[f"{order}_gap_to_sync"]):
        return f"not trained at {rows}/{dense}"
    gap, half = (1e3 * line[f"{order}_gap_to_sync{end}"] for end in ("", "_half_width_95"))
    return f"{gap:+.1f} ± {half:.1f} at {rows}/{dense}"


def seconds_cell(line: Mapping[str, Any]) -> str:
    """Mean seconds to sync's AUC; of how many seeds, where some never reach it."""
    if math.isnan(line["seeds"]):
        return "?"
    if line["reached"] < line["seeds"]:
        return f"never, {line['seeds'] - line['reached']} of {line['seeds']}"
    return f"{line['seconds']:.3g}"


def dollars_cell(line: Mapping[str, Any]) -> str:
    """Dollars for a billion samples; unknown where a host has no price."""
    usd = line["usd_per_billion_samples"]
    return "?" if math.isnan(usd) else f"{usd:,.0f}"


def gain_columns(streams: Sequence[str]) -> dict[str, Column]:
    """The columns of a cluster's table: what is simulated, and seconds to sync's AUC by stream."""

    def cell(show: Any, stream: str = streams[0]) -> Column:
        return lambda row: show(row[stream])

    columns: dict[str, Column] = {
        "mode": cell(lambda line: line["mode"]),
        "samples/s": cell(lambda line: f"{line['samples_per_s']:,.0f}"),
        "of sync": cell(lambda line: f"{line['times_sync']:.2f}"),
        "$ a billion": cell(dollars_cell),
        "rows/dense missed": cell(
            lambda line: f"{line['rows_missed_mean']:.1f}/{line['dense_missed']}"
        ),
    }
    for stream in streams:
        columns[f"s to AUC, {SHORT.get(stream, stream)}"] = cell(seconds_cell, stream)
    return columns


def loss_columns(streams: Sequence[str]) -> dict[str, Column]:
    """The columns of the table of losses: a stream each."""
    cells: dict[str, Column] = {"mode": "{mode}", "order": "{order}"}
    for stream in streams:
        cells[SHORT.get(stream, stream)] = lambda row, stream=stream: row[stream]
    return cells


NOTE = """\
samples/s, $ and what lookups miss: simulated; dollars are list prices, the paper's machines cost
what the nearest ones for rent do. AUC, ± 95 %: the stored study of lateness, with rows and dense
weights as late as the mode has them where all ranks are equally fast. s to AUC: simulated seconds
until {share} of sync's climb from 0.5, the rows in time order, an update of the study taking as
long as one of the cluster."""
