"""What late rows and dense weights cost, and when: the study that docs/results/plan.md plans."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

from experiments.gaps import gap_of
from experiments.lateness.data import config_of_data, data_of, fields_of, tables_apart
from experiments.lateness.hypotheses import hypothesis_lines
from experiments.lateness.logs import add_counts, counts_hash, facts_of_fields, read_counts
from experiments.lateness.parts import PARTS
from experiments.lateness.runs import (
    KEPT,
    Record,
    RunsFile,
    StreamData,
    StudyRun,
    config_of,
    group_sums,
    record_from,
    run_of,
    samples_of,
)
from experiments.lateness.second_plan import (
    field_lines,
    fresh_lines,
    second_hypotheses,
    tau_lines,
)
from experiments.lateness.streams import STREAMS, SYNC, WHOLE_TENNIS, Stream
from experiments.lateness.table import LatenessStudy, gap_lines
from experiments.options import OneOf, PairedSeeds, Parallel, Some, hold
from experiments.points import Point, readable
from experiments.sweeping import START_S, Whole, run_points
from experiments.tables import Column, drawn, table, write_csv
from runtime.run.folder import environment, read_metrics, read_predictions, read_summary

CORE_S_PER_SAMPLE = 1 / 40_000
"""For the plan's estimate (source: runs of 167,000 samples on one core, 4 s, 2026-11-27)."""
STORED_RUNS = Path("docs/results/lateness_runs.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """AUC lost by late rows and dense weights: by order of the data, start of Adagrad, stream."""

    streams: Some[str] = tuple(STREAMS)
    """Which ones; real data that is not on this machine is left out, with a line."""
    parts: Some[str] = tuple(PARTS)
    """Which parts of the plan, in its order."""
    seeds: PairedSeeds | None = None
    """Paired seeds of each final cell, >= 2; else as planned. More seeds later add to what is
    there."""
    runs: Path | None = None
    """File, as lateness_runs.csv, that holds a line for each finished run, and gets one; else
    docs/results/lateness_runs.csv in a checkout, and elsewhere in the folder of results."""
    train: bool = True
    """Train what is missing; else derive the tables from the runs that are there."""
    data_dir: Path | None = None
    """Folder with the real data, as ~/data; else PERSIA_DATA_DIR, else what `data get`
    downloaded."""

    def _check(self) -> None:
        for name in self.streams:
            hold("streams", name, OneOf(STREAMS))
        for part in self.parts:
            hold("parts", part, OneOf(PARTS))

    @property
    def runs_file(self) -> Path:
        """Where finished runs are kept."""
        is_checkout = STORED_RUNS.parent.is_dir()
        return self.runs or (STORED_RUNS if is_checkout else self.out / STORED_RUNS.name)


@dataclass(kw_only=True)
class Laboratory:
    """Trains the study's runs on this machine, each once, and keeps what they leave."""

    file: RunsFile
    options: Options
    data: dict[tuple[str, str, bool, str], StreamData] = field(default_factory=dict)
    """By the stream's key, how it is cut, whether each field has a table of its own, and the field
    that is left out."""
    plans_only: bool = False
    planned: dict[str, int] = field(default_factory=dict)
    """Hash -> samples of runs that a plan wants and that are not done."""
    whole: Whole = field(default_factory=lambda: Whole(0))
    """The runs of all parts, for one bar."""

    def train(self, runs: Sequence[StudyRun], what: str) -> None:
        """Train those of the runs that are not done; each is kept as it ends."""
        # Runs go by the hash of all that decides them: what is stored is not trained again.
        wanted = {run.hash(self._data(run).sha256): run for run in runs}
        missing = {hash_: run for hash_, run in wanted.items() if hash_ not in self.file}
        if self.plans_only:
            self.planned |= {
                h: samples_of(run, self._data(run).train_rows) for h, run in missing.items()
            }
            return
        if not missing:
            return
        if kept := [run.label for run in missing.values() if run.arithmetic == KEPT]:
            raise ValueError(
                f"{kept[0]} and {len(kept) - 1} others go with runs of {self.file.path} that"
                " computed with denormals, which no run does any more; name another file (--runs)"
            )

        # Train the missing ones.
        print(f"  {what}: {len(missing)} of {len(wanted)} runs to train", flush=True)
        points = {}
        for hash_, run in missing.items():
            config = config_of(run, self._data(run))
            point = Point(label=run.label, config=config, data_sha256=hash_)
            points[point.folder(self.options.out)] = (hash_, run, point)

        # Each result is stored as its run ends, so that a killed study loses one.
        def keep(point: Point) -> None:
            hash_, run, _ = points[point.folder(self.options.out)]
            self._keep(hash_, run, point.folder(self.options.out))

        samples = max(samples_of(run, self._data(run).train_rows) for run in missing.values())
        run_points(
            [point for _, _, point in points.values()],
            self.options.out,
            self.options.jobs,
            samples,
            keep,
            self.whole,
        )

    def fields(self, stream: Stream) -> Sequence[str]:
        """The stream's fields, each counted in the log where that is not done."""
        run = run_of(stream, SYNC, 0.1, 1e-3, 0)
        data = self._data(run)
        names = fields_of(data)
        path = counts_beside(self.file.path)
        digest = counts_hash(data, run.batch)
        if not self.plans_only and all(one.data != digest for one in read_counts(path)):
            print(f"  {stream.key}: bursts of {len(names)} fields", flush=True)
            add_counts(path, facts_of_fields(stream.key, config_of(run, data), digest))
        return names

    def _data(self, run: StudyRun) -> StreamData:
        """What the run trains on."""
        key = run.stream, run.split, bool(run.fresh), run.without
        if key not in self.data:
            is_whole = run.stream == WHOLE_TENNIS.key
            stream = WHOLE_TENNIS if is_whole else STREAMS[run.stream]
            self.data[key] = data_of(stream, self.options, run.split)
            if run.fresh:
                self.data[key] = tables_apart(self.data[key], self.options, run.without)
        return self.data[key]

    def _keep(self, hash_: str, run: StudyRun, folder: Path) -> None:
        """Write down what a finished run leaves, and remove its folder."""
        summary = read_summary(folder)
        predictions = read_predictions(folder)
        if summary is None or predictions is None:
            raise ValueError(f"{folder} has no summary or no predictions; remove it to run anew")
        lines = [line for line in read_metrics(folder) if not line.drained]
        task = next(iter(summary["tasks"]))
        aucs = {line.updates: line.tasks[task]["auc"] for line in lines}
        snapshots = {updates: auc for updates, auc in aucs.items() if auc is not None}
        record = record_from(run, hash_, summary, snapshots, len(predictions.labels), environment())
        self.file.add(record, {} if run.updates else _sums_of(record, predictions))
        shutil.rmtree(folder)


def _sums_of(record: Record, predictions: object) -> dict[str, object]:
    return {
        name: group_sums(predictions, number)
        for number, name in enumerate(record.auc)
        if record.auc[name] == record.auc[name]
    }


def counts_beside(runs: Path) -> Path:
    """The file of what was counted of the fields of logs, beside that of runs."""
    return runs.with_name(runs.name.replace("_runs", "_counts"))


def run(options: Options) -> None:
    """Train what is missing of the chosen parts, part by part; then derive tables and figure."""
    # From stored runs alone.
    if not options.train:
        chosen = [STREAMS[name] for name in options.streams]
        report(RunsFile(options.runs_file), chosen, options)
        return

    # Which streams are here.
    streams, missing = find(options)
    for line in missing:
        print(line)
    if not streams:
        raise ValueError("streams must name one that is here; the synthetic ones always are")

    # What would be trained; then part by part, since later parts choose by earlier ones.
    file = RunsFile(options.runs_file)
    planner = Laboratory(file=file, options=options, plans_only=True)
    expected = print_plan(streams, planner)
    if options.dry_run:
        return
    laboratory = Laboratory(file=file, options=options, data=planner.data, whole=Whole(expected))
    for name in options.parts:
        for stream in streams:
            print(f"{name}, {stream.key}", flush=True)
            PARTS[name](laboratory, stream)
    print(f"runs: {file.path}, {len(file.records):,} in all\n")
    report(file, list(STREAMS.values()), options)


def report(file: RunsFile, streams: Sequence[Stream], options: Options) -> None:
    """Derive every table from the runs' file, print those that a person reads, draw the figure."""
    derived = tables_of(file, streams)
    for end, columns in PRINTED.items():
        if derived.get(end):
            print(f"{table(derived[end], columns)}\n")
    if not derived[""]:
        print(f"no pairs of runs in {file.path} yet, and so no tables")
        return
    paths = [
        write_csv(options.out / f"lateness{end}.csv", lines)
        for end, lines in derived.items()
        if lines
    ]
    print(f"tables: {options.out}/lateness*.csv")
    print(f"figure: {drawn(paths[0])}")


def tables_of(file: RunsFile, streams: Sequence[Stream]) -> dict[str, list[dict[str, Any]]]:
    """Every table of the study, by the end of its name, from the stored runs alone."""
    study = LatenessStudy(file, streams)
    counts = read_counts(counts_beside(file.path))
    return {
        "": gap_lines(study),
        "_hypotheses": hypothesis_lines(second_hypotheses(study, counts)),
        "_tau": tau_lines(study),
        "_fresh": fresh_lines(study),
        "_fields": field_lines(study, counts),
    }


COLUMNS: dict[str, Column] = {
    "stream": "{data}",
    "order": "{order}",
    "judged on": "{window}",
    "Adagrad from": "{optimizer_start:.3g}",
    "task": "{task}",
    "rows late": "{rows_late}",
    "dense late": "{dense_late}",
    "batch": "{batch}",
    "updates": "{updates:,}",
    "rates": "{rates}",
    "row rate": "{row_lr:.3g}",
    "dense rate": "{lr:.3g}",
    "test AUC": "{test_auc:.4f}",
    "gap to sync [1e-3]": lambda line: gap_of(line, "gap_to_sync") if line["gap_to_sync"] else "-",
    "seeds": "{seeds} of {seeds_planned}",
}
"""The gaps as a person reads them."""
TAU_COLUMNS: dict[str, Column] = {
    "stream": "{data}",
    "order": "{order}",
    "passes": "{passes}",
    "split": "{split}",
    "task": "{task}",
    "rows late": "{rows_late}",
    "dense late": "{dense_late}",
    "updates": "{updates:,}",
    "test AUC": "{test_auc:.4f}",
    "gap to sync [1e-3]": lambda line: gap_of(line, "gap_to_sync") if line["gap_to_sync"] else "-",
    "seeds": "{seeds} of {seeds_planned}",
}
"""What the tau that one takes costs, by order, passes and split."""


FIELD_COLUMNS: dict[str, Column] = {
    "stream": "{data}",
    "field": "{field}",
    "b(4)": "{b_4:.3f}",
    "misses half": "{missed_half_16:.3f}",
    "worth [1e-3]": lambda line: gap_of(line, "worth"),
    "given back [1e-3]": lambda line: gap_of(line, "given_back"),
    "seeds": "{seeds} of {seeds_planned}",
}
"""What each field fresh gives back, beside what was foreseen of it."""
FRESH_COLUMNS: dict[str, Column] = {
    "stream": "{data}",
    "task": "{task}",
    "fresh": "{fresh}",
    "rows late": "{rows_late}",
    "test AUC": "{test_auc:.4f}",
    "gap to sync [1e-3]": lambda line: gap_of(line, "gap_to_sync"),
    "all late [1e-3]": lambda line: gap_of(line, "gap_of_all_late"),
    "given back": "{given_back:.2f}",
    "seeds": "{seeds} of {seeds_planned}",
}
"""What a fresh field gives back of what late rows lose."""


def _span(line: Mapping[str, Any]) -> str:
    """An interval; a loss in thousandths, a rank correlation and a count of streams as they are.

    >>> _span({"what": "streams of 4 on which ...", "value": 2.0, "low_95": float("nan")})
    '2'
    """
    if isnan(line["value"]):
        return ""
    if isnan(line["low_95"]):
        return f"{line['value']:.0f}"
    scale = 1.0 if "correlation" in line["what"] else 1e3
    return (
        f"{scale * line['value']:.2f} [{scale * line['low_95']:.2f}, {scale * line['high_95']:.2f}]"
    )


HYPOTHESES: dict[str, Column] = {
    "": "{hypothesis}",
    "what": "{what}",
    "measured [1e-3], 95 %": _span,
    "asked": "{asked}",
    "p, holds": "{p_holds:.3f}",
    "p, fails": "{p_fails:.3f}",
    "outcome": "{outcome}",
    "not run yet": "{missing}",
}


PRINTED: dict[str, dict[str, Column]] = {
    "": COLUMNS,
    "_tau": TAU_COLUMNS,
    "_fresh": FRESH_COLUMNS,
    "_fields": FIELD_COLUMNS,
    "_hypotheses": HYPOTHESES,
}
"""Tables that a person reads, by the ends of their names."""


def find(options: Options) -> tuple[list[Stream], list[str]]:
    """The streams that are here, and a line for each that is not."""
    chosen = [STREAMS[name] for name in options.streams]
    if options.seeds is not None:
        chosen = [replace(stream, seeds=options.seeds) for stream in chosen]
    facts, missing = readable(config_of_data(stream, options) for stream in chosen)
    return [stream for stream in chosen if stream.name in facts], missing


def print_plan(streams: Sequence[Stream], planner: Laboratory) -> int:
    """Print the parts with the runs that they lack and core-minutes, evaluations not counted;
    returns how many runs that are."""
    file = planner.file
    options = planner.options
    print(f"{len(file.records):,} runs in {file.path}; to train, as far as can be told before:")
    before = 0
    for name in options.parts:
        for stream in streams:
            PARTS[name](planner, stream)
        runs = len(planner.planned)
        print(f"  {name:<8} {runs - before:>5} runs")
        before = runs
    samples = sum(planner.planned.values())
    minutes = (samples * CORE_S_PER_SAMPLE + START_S * len(planner.planned)) / 60
    print(
        f"  in all   {before:>5} runs, about {minutes:.0f} core-minutes, {options.jobs} at a time"
    )
    return before
