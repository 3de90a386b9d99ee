"""One run of the study: what decides it, the training run that it is, and the line it leaves.

The line of a run and the sums that intervals need are appended to two CSV files; a run whose hash
stands there is done. The hash is of the fields of `StudyRun` and of the data, under names that
no option of a training run decides, so that renaming one makes no run anew. Files of two machines
are merged by writing one behind the other.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lateness.streams import (
    APART,
    BUFFER,
    ORIGINS,
    OWN,
    RANKS,
    SHUFFLED,
    TEST,
    TIME,
    VALIDATION,
    Cell,
    Stream,
)
from experiments.options import STUDIED
from experiments.statistics import cluster_sums, placements
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig
from runtime.run.folder import Predictions

SNAPSHOTS, SNAPSHOTS_OF_REAL = 16, 4
"""Evaluations along a final run in time order, equally far apart; fewer on real streams, where no
delay is measured and test parts are large."""
VALIDATION_FRACTION = 0.1
"""Share of the training samples, the last ones, on which rates are chosen; a drawn stream draws
such rows."""
WINDOW_SHARE = 6
"""A window is one in so many of the training samples."""
TEST_ROWS_OF_A_DRAW = 20_000
FIRST_DRAW, FIRST_TUNING_SEED = 100, 900
"""Draws and seeds that rates are chosen on come back in no final run."""
TUNING_SEEDS = 3
USER_GROUPS = 256
"""Groups that test users are dealt into: an interval needs a sum for each, not for each user. The
standard error that they give is known to one part in sqrt(2 * 256)."""
KEPT, FLUSHED = "denormals", "flushed"
"""Arithmetic of a run: the first runs of the study computed with denormals, all others take them as
zero. A gap never mixes the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """All that decides one run, but for the data's checksum."""

    stream: str
    """`Stream.key`."""
    order: str = TIME
    window: str = TEST
    """What it is judged on: `TEST`, `VALIDATION` or one of `ORIGINS`."""
    start: float = 0.0
    """Accumulator that the rows' Adagrad begins with."""
    rows_late: int
    dense_late: int
    batch: int
    """Samples of a dense update."""
    row_lr: float
    dense_lr: float
    seed: int
    updates: int | None = None
    """Updates of a drawn stream; None: its passes."""
    passes: int = 1
    """Over the training samples, in the same order each time."""
    split: str = OWN
    """How the stream is cut, where it is not as its schema says."""
    arithmetic: str = FLUSHED
    """What becomes of denormals."""
    fresh: str = ""
    """The field whose rows are fresh, or `APART`; each field has a table of its own then. Empty:
    tables are as the schema has them."""
    without: str = ""
    """The field that the model does not see, of those that have tables of their own."""

    @property
    def label(self) -> str:
        """What a person calls it."""
        cell = f"rows-{self.rows_late}-dense-{self.dense_late}-batch-{self.batch}"
        start = f"start-{self.start:g}-" if self.start else ""
        long = f"-{self.updates}-updates" if self.updates else ""
        passes = f"-{self.passes}-passes" if self.passes > 1 else ""
        split = f"-by-{self.split}" if self.split else ""
        split += f"-fresh-{self.fresh}" if self.fresh else ""
        split += f"-without-{self.without}" if self.without else ""
        stream = self.stream.replace(":", "-") + split
        return f"{stream}-{self.order}-{self.window}-{start}{cell}{long}{passes}-seed{self.seed}"

    def hash(self, data_sha256: str) -> str:
        """Hash of all that decides the result."""
        # What came later counts only where it is not as it was in the first runs.
        decides = {**asdict(self), "data": data_sha256}
        first = {"passes": 1, "split": OWN, "arithmetic": KEPT, "fresh": "", "without": ""}
        for name, usual in first.items():
            if decides[name] == usual:
                del decides[name]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class StreamData:
    """What is known of a stream's data on this machine."""

    name: str
    """What a training run calls it: a ready schema, or the path of one."""
    sha256: str
    """Checksum of the files and of the schema as it is written; of a drawn stream, of its
    recipe."""
    train_rows: int
    folder: Path | None = None
    """Where ready data sets lie, if the user said so."""


def run_of(
    stream: Stream, cell: Cell, row_lr: float, dense_lr: float, seed: int, **other: Any
) -> StudyRun:
    """The run of a cell at these rates; ``other``: fields in which it is not the usual one."""
    length = other.pop("updates", stream.updates)
    return StudyRun(
        stream=stream.key,
        rows_late=cell.rows_late,
        dense_late=cell.dense_late,
        batch=stream.batch * cell.batch_factor,
        row_lr=row_lr,
        dense_lr=dense_lr,
        seed=seed,
        updates=None if length is None else length // cell.batch_factor,
        **other,
    )


def samples_of(run: StudyRun, train_rows: int) -> int:
    """Samples that a run trains on."""
    if run.updates is not None:
        return run.updates * run.batch
    if run.window in ORIGINS:
        return _end_of(run.window, train_rows) - train_rows // WINDOW_SHARE
    share = 1 - VALIDATION_FRACTION * (run.window == VALIDATION)
    return run.passes * round(train_rows * share)


def _end_of(window: str, train_rows: int) -> int:
    """Training samples up to the end of a window."""
    later = len(ORIGINS) - 1 - ORIGINS.index(window)
    return train_rows - later * (train_rows // WINDOW_SHARE)


def config_of(run: StudyRun, data: StreamData) -> TrainConfig:
    """The run's training, by hybrid, which with nothing late has the bytes of sync (law 1)."""
    # Which rows train, and which judge.
    drawn = run.updates is not None
    rows = None
    validation_fraction = None
    if drawn:
        rows = samples_of(run, data.train_rows)
    elif run.window == VALIDATION:
        validation_fraction = VALIDATION_FRACTION
    elif run.window in ORIGINS:
        rows = _end_of(run.window, data.train_rows)
        validation_fraction = data.train_rows // WINDOW_SHARE / rows

    # Curves are of final runs in time order.
    updates = -(-samples_of(run, data.train_rows) // run.batch)
    has_curve = run.window == TEST and run.order == TIME
    snapshots = SNAPSHOTS if drawn else SNAPSHOTS_OF_REAL
    buffer = int(run.order.removeprefix(BUFFER)) if run.order.startswith(BUFFER) else None
    return TrainConfig(
        sync=SyncConfig(
            mode=STUDIED,
            ranks=RANKS,
            tau=run.rows_late,
            dense_lag=run.dense_late,
            fresh=() if run.fresh in ("", APART) else (run.fresh,),
        ),
        batch=run.batch,
        seed=run.seed,
        steps=run.updates,
        data=DataConfig(
            name=f"{data.name}:1:{FIRST_DRAW + run.seed}" if drawn else data.name,
            dir=data.folder,
            rows=rows,
            epochs=run.passes,
            shuffle=run.order == SHUFFLED,
            shuffle_buffer=buffer,
            validation_fraction=validation_fraction,
        ),
        model=ModelConfig(lr=run.dense_lr),
        rows=TableConfig(optimizer=RowOptimizer(lr=run.row_lr, initial_accumulator=run.start)),
        evaluation=EvaluationConfig(
            eval_split="test" if run.window == TEST else "validation",
            evaluate_every_steps=max(1, updates // snapshots) if has_curve else None,
            test_rows=TEST_ROWS_OF_A_DRAW if drawn else None,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished run: a line of the CSV."""

    hash: str
    run: StudyRun
    trained_updates: int
    train_samples: int
    test_rows: int
    auc: Mapping[str, float]
    """By task; NaN of a run that diverged."""
    log_loss: Mapping[str, float]
    snapshots: Mapping[int, float]
    """AUC of the first task by updates, pushes on their way not applied."""
    commit: str
    machine: str

    @property
    def task(self) -> str:
        """The first task: rates are chosen on it."""
        return next(iter(self.auc))


_LAST = ["fresh", "without"]
"""Columns that came last, behind those of the record."""
_OF_RUN = [field.name for field in fields(StudyRun) if field.name not in _LAST]
_OF_RECORD = [
    "trained_updates",
    "train_samples",
    "test_rows",
    "auc",
    "log_loss",
    "snapshots",
    "commit",
    "machine",
]
HEADER = ["hash", *_OF_RUN, *_OF_RECORD, *_LAST]
USER_HEADER = ["hash", "task", "groups", "sums"]


def _pairs(values: Mapping[Any, float]) -> str:
    return ";".join(f"{key}={value:.9g}" for key, value in values.items())


def _from_pairs(text: str) -> dict[str, float]:
    pairs = (pair.rpartition("=") for pair in text.split(";") if pair)
    return {key: float(value) for key, _, value in pairs}


def line_of(record: Record) -> list[str]:
    """The cells of a record's line, in the order of `HEADER`."""
    run = asdict(record.run)
    cells = ["" if run[name] is None else f"{run[name]}" for name in _OF_RUN]
    counts = [record.trained_updates, record.train_samples, record.test_rows]
    curves = [_pairs(record.auc), _pairs(record.log_loss), _pairs(record.snapshots)]
    about = [record.commit, record.machine, record.run.fresh, record.run.without]
    return [record.hash, *cells, *map(str, counts), *curves, *about]


def record_of(line: Mapping[str, str]) -> Record:
    """A line of the CSV, read back. Raises ValueError or KeyError for what is none."""
    # What identifies the run, then what came of it.
    run = StudyRun(
        **{name: line[name] for name in ("stream", "order", "window")},
        **{name: float(line[name]) for name in ("start", "row_lr", "dense_lr")},
        **{
            name: int(line[name]) for name in ("rows_late", "dense_late", "batch", "seed", "passes")
        },
        **{name: line[name] for name in ("split", "arithmetic", *_LAST)},
        updates=int(line["updates"]) if line["updates"] else None,
    )
    return Record(
        hash=line["hash"],
        run=run,
        trained_updates=int(line["trained_updates"]),
        train_samples=int(line["train_samples"]),
        test_rows=int(line["test_rows"]),
        auc=_from_pairs(line["auc"]),
        log_loss=_from_pairs(line["log_loss"]),
        snapshots={int(key): value for key, value in _from_pairs(line["snapshots"]).items()},
        commit=line["commit"],
        machine=line["machine"],
    )


def group_sums(predictions: Predictions, task: int) -> np.ndarray:
    """float64 [groups], in thousandths of AUC: what each group of test users adds to the AUC above
    its mean. `experiments.statistics.contrast_of_sums` makes intervals of them.

    Users (test samples where users are not known) are dealt into `USER_GROUPS` groups by a draw
    that depends on their number alone, so runs that share their test samples share their groups.
    """
    predictions = predictions.with_label(task)
    labels = predictions.labels[:, task]
    users = predictions.groups
    if users is None:
        users = np.arange(len(labels))
    _, owner = np.unique(users, return_inverse=True)
    count = int(owner.max()) + 1
    dealt = np.random.default_rng(0).permutation(count) % min(USER_GROUPS, count)
    shares = placements(labels, predictions.predictions[:, task], predictions.weights)
    return 1e3 * cluster_sums(labels, shares[None], dealt[owner])[0]


def _without_rates(run: StudyRun) -> StudyRun:
    return replace(run, row_lr=0.0, dense_lr=0.0, seed=0)


class RunsFile:
    """The finished runs of the study by hash, and the group sums of those that have some."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.users_path = path.with_name(path.name.replace("_runs", "_users"))
        if self.users_path == path:
            raise ValueError(f"runs {path} must have _runs in its name, as lateness_runs.csv")
        self.records: dict[str, Record] = {}
        self.by_run: dict[StudyRun, Record] = {}
        """Where the data changed, the record of the newest line."""
        self._of_cell: dict[StudyRun, list[StudyRun]] = {}
        self._kept: set[str] = set()
        """Keys of streams whose first runs computed with denormals."""
        self._sums: dict[tuple[str, str], str] = {}
        for line in lines_of(path, HEADER):
            record = self.records.setdefault(line["hash"], record_of(line))
            self._index(record)
        for line in lines_of(self.users_path, USER_HEADER):
            self._sums.setdefault((line["hash"], line["task"]), line["sums"])

    def __contains__(self, hash_: str) -> bool:
        return hash_ in self.records

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def arithmetic_of(self, stream: Stream) -> str:
        """That of the stream's runs of the first plan: the one that they were begun with."""
        return KEPT if stream.key in self._kept else FLUSHED

    def sums(self, hash_: str, task: str) -> np.ndarray | None:
        """Group sums [groups] of a run; None of one whose seed has test samples of its own."""
        text = self._sums.get((hash_, task))
        if text is None:
            return None
        return np.frombuffer(base64.b64decode(text), np.float16).astype(np.float64)

    def add(self, record: Record, sums: Mapping[str, np.ndarray]) -> None:
        """Append a run; it is on disk when this returns. Its line is written last: it decides."""
        for task, values in sums.items():
            text = base64.b64encode(values.astype(np.float16).tobytes()).decode()
            append_line(self.users_path, USER_HEADER, [record.hash, task, str(len(values)), text])
            self._sums[record.hash, task] = text
        append_line(self.path, HEADER, line_of(record))
        self.records[record.hash] = record
        self._index(record)

    def _index(self, record: Record) -> None:
        if record.run.arithmetic == KEPT:
            self._kept.add(record.run.stream)
        runs = self._of_cell.setdefault(_without_rates(record.run), [])
        if record.run not in self.by_run:
            runs.append(record.run)
        self.by_run[record.run] = record

    def like(self, run: StudyRun) -> list[Record]:
        """The records of all runs that differ from this one in rates and seed alone."""
        return [self.by_run[one] for one in self._of_cell.get(_without_rates(run), ())]


def lines_of(path: Path, header: Sequence[str]) -> Iterable[dict[str, str]]:
    """Whole lines of a file that grew by lines, or by other such files behind it."""
    if not path.is_file():
        return
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]  # a kill may have cut the last line
    for cells in csv.reader(io.StringIO(whole)):
        if len(cells) == len(header) and cells != list(header):
            yield dict(zip(header, cells, strict=True))


def append_line(path: Path, header: Sequence[str], cells: Sequence[str]) -> None:
    """Add one line, behind a header where the file is new; a last line that was cut is ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.is_file() or not path.stat().st_size:
        writer.writerow(header)
    writer.writerow(cells)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(text.getvalue().encode())
        file.flush()
        os.fsync(file.fileno())


def record_from(
    run: StudyRun,
    hash_: str,
    summary: Mapping[str, Any],
    snapshots: Mapping[int, float],
    test_rows: int,
    environment: Mapping[str, Any],
) -> Record:
    """What a finished training run leaves in the study's file; a score that does not exist is
    NaN."""

    # A score that does not exist is NaN: the CSV has no other word for it.
    def scores(name: str) -> dict[str, float]:
        by_task = {task: scores[name] for task, scores in summary["tasks"].items()}
        return {task: math.nan if score is None else score for task, score in by_task.items()}

    # With the commit, and a plus where files were changed.
    changed = "+" if environment["modified"] else ""
    return Record(
        hash=hash_,
        run=run,
        trained_updates=summary["updates"],
        train_samples=summary["samples"],
        test_rows=test_rows,
        auc=scores("auc"),
        log_loss=scores("log_loss"),
        snapshots=snapshots,
        commit=f"{str(environment['commit'])[:9]}{changed}",
        machine=f"{environment['cpu']}",
    )
