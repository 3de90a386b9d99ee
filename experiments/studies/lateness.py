"""What late rows and late dense weights cost, at sync's rates and at their own: as planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, isnan
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments.gaps import Run, finished, mean_auc, of_sync
from experiments.lateness.streams import (
    GRID,
    RULER,
    STREAMS,
    SYNC,
    TUNING_SHARE,
    Cell,
    Rates,
    Stream,
    best_of,
    config_of,
    is_inside,
    stream_of,
    to_try,
)
from experiments.lateness.table import (
    Group,
    Key,
    delay_lines,
    drift_hypothesis_lines,
    gap_lines,
    hypothesis_lines,
)
from experiments.options import PairedSeeds, Parallel, Some
from experiments.points import Point, data_sha256, readable
from experiments.sweep import run_points
from experiments.tables import Column, drawn, table, write_csv
from persia_sim.words.schema import Within
from runtime.config import DataConfig

CELLS = (*GRID, *RULER)
TUNING_SEEDS = 2
DRIFT_PROBES = 8
"""Steps of the sync run at which the drift of its rows begins to be measured."""
CORE_S_PER_SAMPLE = 1 / 40_000
"""For the plan's estimate (source: runs of 320,000 samples, one core, 7 to 10 s, 2026-11-22)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Rows 0 to 64 and dense weights 0 to 7 updates late: gap, delay, and rates of their own."""

    streams: Some[str] = tuple(STREAMS)
    """Which ones, or the path of your own schema (.toml); real data that is not on this machine is
    left out, with a line."""
    seeds: PairedSeeds | None = None
    """Of each final cell, >= 2; else as planned, 20 of real streams and 12 of drawn ones. More
    seeds later add to what is there."""
    share: Annotated[int, Within(1, 1000)] = 1
    """Train on one in so many of a stream's samples, the first; for a quick look."""
    data_dir: Path | None = None
    """Folder with the real data; else PERSIA_DATA_DIR, else what `data get` downloaded."""

    def _check(self) -> None:
        for name in self.streams:
            stream_of(name)  # raises for unknown ones


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stream with one start of its rows' optimiser."""

    stream: Stream
    start: float
    train_rows: int
    options: Options
    tried: dict[Cell, dict[Rates, float]] = field(default_factory=dict)
    """Cell -> rates -> mean validation AUC."""
    checksums: dict[DataConfig, str] = field(default_factory=dict, repr=False)
    """Of the files behind a config, which are read once."""

    @property
    def name(self) -> str:
        """Part of its folders' names."""
        return f"{self.stream.label}-start-{self.start:g}"

    def points(self, cell: Cell, rates: Rates, seeds: Sequence[int], tuning: bool) -> list[Point]:
        """A run of the cell at these rates for each seed."""
        label = f"{self.name}-{'tuning-' if tuning else ''}{cell.label}"
        share = self.options.share * (TUNING_SHARE if tuning else 1)
        found = []
        for seed in seeds:
            config = config_of(
                self.stream, cell, rates, start=self.start, seed=seed, train_rows=self.train_rows,
                share=share, tuning=tuning, data_dir=self.options.data_dir,
            )  # fmt: skip
            if config.data not in self.checksums:
                self.checksums[config.data] = data_sha256(config)
            checksum = self.checksums[config.data]
            found.append(Point(label=f"{label}-seed{seed}", config=config, data_sha256=checksum))
        return found

    def samples(self, tuning: bool = False) -> int:
        """Of a run, for the plan and the progress bar."""
        whole = self.stream.passes * self.train_rows
        if self.stream.updates is not None:
            whole = self.stream.updates * self.stream.batch
        return whole // (self.options.share * (TUNING_SHARE if tuning else 1))


def run(options: Options) -> None:
    """Choose rates, train every cell, print tables and hypotheses, write CSVs and the figure."""
    jobs, told = find(options)
    for line in told:
        print(line)
    if not jobs:
        raise ValueError("streams must name one that is here; the synthetic ones always are")
    _print_costs(jobs, options)
    if options.dry_run:
        return
    tables: dict[str, list[dict[str, Any]]] = {}
    for number, job in enumerate(jobs, start=1):
        print(f"{job.name} ({number} of {len(jobs)})")
        tune(job, [SYNC])
        tune(job, [cell for cell in CELLS if cell != SYNC])
        group = train(job)
        of_stream = {
            "": gap_lines(group, options.out),
            "_rates": _rate_lines(job),
            "_delays": delay_lines(group, options.out),
            "_hypotheses": hypothesis_lines(group, options.out),
        }
        for end, lines in of_stream.items():
            tables.setdefault(end, []).extend(lines)
            if end in _COLUMNS_OF:
                print(f"\n{group.stream.name}, Adagrad from {group.start:g}, {group.task}")
                print(table(lines, _COLUMNS_OF[end]))
        together = drift_hypothesis_lines(tables[""])  # the CSVs hold the streams that are done
        paths = [
            write_csv(options.out / f"lateness{end}.csv",
                      [*lines, *(together if end == "_hypotheses" else [])])
            for end, lines in tables.items()
        ]  # fmt: skip
        figure = drawn(*paths[:3])
    print(f"\nall streams together\n{table(together, HYPOTHESES)}")
    print(f"\ntables: {options.out}/lateness*.csv\nfigure: {figure}")


def find(options: Options) -> tuple[list[Job], list[str]]:
    """The streams that are here, each start a job; and a line for each that is not."""
    chosen = [stream_of(name) for name in options.streams]
    if options.seeds is not None:
        chosen = [replace(stream, seeds=options.seeds) for stream in chosen]
    wanted = [DataConfig(name=s.name, dir=None if s.is_drawn else options.data_dir) for s in chosen]
    facts, missing = readable(wanted)
    return [
        Job(stream=s, start=start, train_rows=facts[s.name].train_rows or 0, options=options)
        for s in chosen
        if s.name in facts
        for start in s.starts
    ], missing


def tune(job: Job, cells: Sequence[Cell]) -> None:
    """Climb to every cell's own rates, all of them side by side, from those of sync."""
    options = job.options
    while asked := [(cell, rates) for cell in cells for rates in _wanted(job, cell)]:
        points = {one: job.points(*one, range(TUNING_SEEDS), True) for one in asked}
        everything = [point for own in points.values() for point in own]
        run_points(everything, options.out, options.jobs, job.samples(tuning=True))
        for cell, rates in asked:
            runs = finished(points[cell, rates], options.out)
            task = next(iter(runs[0].summary["tasks"]))
            job.tried.setdefault(cell, {})[rates] = mean_auc(runs, task)


def _wanted(job: Job, cell: Cell) -> list[Rates]:
    start = Rates() if cell == SYNC else best_of(job.tried[SYNC])
    has_line = cell.rows_late == 0 and cell.batch_factor == 1  # the figure's
    return to_try(job.tried.get(cell, {}), start, line=has_line)


def final_points(job: Job) -> Iterator[tuple[int, Key, Point]]:
    """Every final run, seed by seed, so that pairs are complete early."""
    of_sync = best_of(job.tried[SYNC])
    for seed in range(job.stream.seeds):
        for cell in CELLS:
            own = best_of(job.tried[cell])
            yield seed, (cell, "own"), job.points(cell, own, [seed], False)[0]
            if cell != SYNC:
                yield seed, (cell, "of sync"), job.points(cell, of_sync, [seed], False)[0]


def train(job: Job) -> Group:
    """All final runs of a stream."""
    wanted, options = list(final_points(job)), job.options
    run_points([p for _, _, p in wanted], options.out, options.jobs, job.samples())
    runs: dict[Key, dict[int, Run]] = {}
    for seed, key, point in wanted:
        for one in finished([point], options.out):
            runs.setdefault(key, {})[seed] = one
    rates = {cell: best_of(tried) for cell, tried in job.tried.items()}
    found = drift_of(runs[SYNC, "own"][0], options)
    return Group(stream=job.stream, start=job.start, rates=rates, runs=runs, drifts=found)


def drift_of(sync: Run, options: Options) -> dict[int, float]:
    """How far the rows of a sync run move, by updates: the mean over steps along it."""
    from experiments.staleness.drift import drifts  # late: torch

    updates = sorted({c.rows_late for c in CELLS if c.rows_late and not c.dense_late})
    label = f"{sync.point.folder(Path()).name}/{DRIFT_PROBES} probes, {updates} updates"
    wanted = {label: (sync.point.config, sync.summary["updates"])}
    found = drifts(wanted, DRIFT_PROBES, options.out, 1, updates)[label]
    return {n: float(np.mean([d["drift"] for d in found if d["updates"] == n])) for n in updates}


def _rate_lines(job: Job) -> list[dict[str, Any]]:
    return [
        {
            "data": job.stream.name,
            "optimizer_start": job.start,
            **asdict(cell),
            "row_lr": rates.row_lr,
            "lr": rates.lr,
            "seeds": TUNING_SEEDS,
            "validation_auc": auc,
            "chosen": rates == best_of(tried),
            "inside": is_inside(tried),
        }
        for cell, tried in job.tried.items()
        for rates, auc in sorted(tried.items())
    ]


COLUMNS: dict[str, Column] = {
    "rows late": "{rows_late}",
    "dense late": "{dense_late}",
    "batch": "{batch}",
    "rates": "{rates}",
    "row rate": "{row_lr:.3g}",
    "dense rate": "{lr:.3g}",
    "test AUC": "{test_auc:.4f}",
    "gap to sync [1e-3]": lambda line: of_sync(line) if line["gap_to_sync"] else "-",
    "error of seeds": lambda line: f"{1e3 * line['seeds_error']:.2f}",
    "of test rows": lambda line: (
        "in seeds" if line["redrawn"] else f"{1e3 * line['rows_error']:.2f}"
    ),
    "seeds": "{seeds} of {seeds_planned}",
}
"""Of the gaps of one stream, as a person reads them."""


def _span(low: float, high: float) -> str:
    """An interval, an end of which may be open."""
    if isfinite(low) and isfinite(high):
        return f"{low:.2g} to {high:.2g}"
    return f"> {low:.2g}" if isfinite(low) else f"< {high:.2g}" if isfinite(high) else "not known"


HYPOTHESES: dict[str, Column] = {
    "stream": "{data}",
    "start": lambda line: "-" if isnan(start := line["optimizer_start"]) else f"{start:g}",
    "hypothesis": "{hypothesis}",
    "what": "{what}",
    "found": lambda line: f"{found:.3g}" if isfinite(found := line["value"]) else "-",
    "95 %": lambda line: _span(line["low_95"], line["high_95"]),
    "asked": "{asked_low:g} to {asked_high:g}",
    "outcome": "{outcome}",
}
_COLUMNS_OF = {"": COLUMNS, "_hypotheses": HYPOTHESES}
"""How the tables look that are printed."""


def _print_costs(jobs: Sequence[Job], options: Options) -> None:
    """The plan with core-minutes; how many rates a climb tries is not known before."""
    total = 0.0
    for job in jobs:
        final = (2 * len(CELLS) - 1) * job.stream.seeds * job.samples()
        climbs = 6 * len(CELLS) * TUNING_SEEDS * job.samples(tuning=True)
        minutes = (final + climbs) * CORE_S_PER_SAMPLE / 60
        total += minutes
        print(
            f"  {job.stream.name}, Adagrad from {job.start:g}: {job.samples():,} samples a run,"
            f" {len(CELLS)} cells, {job.stream.seeds} seeds; about {minutes:.0f} core-minutes"
        )
    print(f"{total:.0f} core-minutes in all, {options.jobs} points at a time; in {options.out}")
