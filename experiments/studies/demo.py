"""The main job: what late rows cost, and what late dense weights cost, on real clicks if any."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.gaps import COLUMNS, FOOTNOTE, gap_table
from experiments.options import PairedSeeds, Parallel, Samples
from experiments.points import SYNTHETIC, Point, data_sha256, with_seed
from experiments.sweep import trained
from experiments.tables import leave, table
from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig

SYNC_RATE = ModelConfig().lr
RATE_OF_ASYNC = {0: 2.5e-4, 4: SYNC_RATE}
"""Dense rate of async by its bound tau, by the rule of the study of lateness: sync's, unless
another gains more than two standard errors on validation samples (source: TUNING, stored as
`tune.csv`)."""
TUNING = (
    "persia-experiments tune --data.name kuairand-pure-14d --modes async --taus 0 4"
    " --no-search-sync"
)
"""Command that chose the rates, on the last tenth of the training samples, around sync's here."""
RANKS = 8


@dataclass(frozen=True, slots=True)
class ModeAtRate:
    """A line of the table: a mode, how late it may be, and its dense rate."""

    sync: SyncConfig
    lr: float = SYNC_RATE

    @property
    def label(self) -> str:
        """The start of its points' labels."""
        lag = f"-dense{self.sync.dense_lag}" if self.sync.dense_lag else ""
        return f"{self.sync.mode}-tau{self.sync.window}{lag}-lr{self.lr:g}"


def _late(mode: Mode, tau: int, dense_lag: int = 0) -> SyncConfig:
    return SyncConfig(mode=mode, ranks=RANKS, tau=tau, dense_lag=dense_lag)


ASYNC_MISSES = RANKS - 1
"""Updates that async misses at tau 0, of rows as of dense weights: each alone is a line, too."""
SETTINGS = (
    ModeAtRate(SyncConfig(ranks=RANKS)),
    *(ModeAtRate(_late(Mode.HYBRID, tau)) for tau in (4, ASYNC_MISSES, 16, 64)),
    ModeAtRate(_late(Mode.HYBRID, 0, dense_lag=ASYNC_MISSES)),
    ModeAtRate(_late(Mode.ASYNC, 0)),
    *(ModeAtRate(_late(Mode.ASYNC, tau), lr) for tau, lr in RATE_OF_ASYNC.items()),
)
REAL_DATA = "kuairand-pure-14d"
BATCH = 128
SYNTHETIC_STEPS = 1300  # as many as one pass over the real data has
LEAST_TEST_ROWS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Rows late alone, dense weights late alone, and both: 8 ranks, paired seeds, table, figure."""

    data_dir: Path | None = None
    """Folder with the real data, as ~/data; else PERSIA_DATA_DIR, else what `data get`
    downloaded."""
    seeds: PairedSeeds = 5
    """Paired seeds, >= 2."""
    samples: Samples | None = None
    """Train on the first samples only and test on as many (2,000 at least), for a quick look; else
    one pass, and the whole test part."""


def run(options: Options) -> None:
    """Train all points, then print the table and where the figure lies."""
    # Train what is missing; a dry run ends with the plan.
    data = find_data(options.data_dir)
    runs_of = trained({data: plan(data, options)}, options)
    if runs_of is None:
        return
    runs = runs_of[data]

    # The screen shows the first task, the CSV has all of them.
    tasks = list(runs[0].summary["tasks"])
    tables = {task: gap_table(runs, task, options.out) for task in tasks}
    print(
        f"\n{data.name}, {tasks[0]}, W = {RANKS}, {BATCH} samples a dense update,"
        f" {options.seeds} paired seeds"
    )
    print(table(tables[tasks[0]], COLUMNS))
    print(FOOTNOTE)
    lines = [{"data": data.name, **line} for of_task in tables.values() for line in of_task]
    leave(options, {"": lines}, drawn_first=1)


def find_data(data_dir: Path | None) -> DataConfig:
    """The real clicks where they are found, else the synthetic stream, with a line that says so."""
    from runtime.data.catalogue import DATA_DIR_VARIABLE
    from runtime.data.errors import DataError
    from runtime.data.open import open_source

    # A folder that the user named must hold them.
    try:
        open_source(REAL_DATA, data_dir=data_dir)
        return DataConfig(name=REAL_DATA, dir=data_dir)
    except DataError as error:
        if data_dir is not None or DATA_DIR_VARIABLE in os.environ:
            raise ValueError(str(error)) from None

    # Without one the demo runs all the same.
    print(
        "no real data found: using the synthetic stream; for real clicks run"
        f" `persia-runtime data get {REAL_DATA}` or set PERSIA_DATA_DIR"
    )
    return DataConfig(name=SYNTHETIC)


def one_pass(data: DataConfig, batch: int, samples: int | None) -> TrainConfig:
    """A run of one pass, or of the first ``samples``, then tested on as many (2,000 at least)."""
    steps = SYNTHETIC_STEPS if data.name == SYNTHETIC else None
    test_rows = None
    if samples is not None:
        steps = max(1, samples // batch)
        test_rows = max(LEAST_TEST_ROWS, samples)
    return TrainConfig(
        batch=batch, data=data, steps=steps, evaluation=EvaluationConfig(test_rows=test_rows)
    )


def plan(data: DataConfig, options: Options) -> list[Point]:
    """The points, seed by seed, so that pairs are complete early."""
    points = []
    for seed in range(options.seeds):
        base = with_seed(one_pass(data, BATCH, options.samples), seed)
        checksum = data_sha256(base)
        for setting in SETTINGS:
            model = replace(base.model, lr=setting.lr)
            config = replace(base, sync=setting.sync, model=model)
            label = f"{setting.label}-seed{seed}"
            points.append(Point(label=label, config=config, data_sha256=checksum))
    return points
