"""The streams of the study, its cells, and the training run of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.options import OneOf, hold
from persia_sim.words.vocabulary import Mode
from persia_sim.words.window import updates_missed
from runtime.config import DataConfig, EvaluationConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.embedding.config import RowOptimizer, TableConfig

RANKS = 8
"""W, as in the demo."""
SNAPSHOTS = 16
"""Evaluations along a run, equally far apart: every doubling of the run from its sixteenth on."""
TUNING_SHARE = 4
"""Rates are chosen on runs of a quarter of the length."""
VALIDATION_FRACTION = 0.1
"""Of the rows that a tuning run reads, the last; a drawn stream draws its validation rows."""
TEST_ROWS_OF_A_DRAW = 20_000
FIRST_DRAW, FIRST_TUNING_SEED = 100, 900
"""Draws and seeds that rates are chosen on come back in no final run."""
Part = Literal["test", "validation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Samples in one order, trained on by an MLP 256-128 over rows of width 8."""

    name: str
    seeds: int
    """Planned."""
    source: str
    """Where its numbers come from."""
    batch: int = 128
    """Samples of a dense update."""
    updates: int | None = None
    """Of a drawn stream, which has no end; else whole passes."""
    passes: int = 1
    shuffle: bool = False
    starts: tuple[float, ...] = (0.0,)
    """Accumulators that the rows' Adagrad begins with, a study of its own each."""

    @property
    def label(self) -> str:
        """Part of a folder's name."""
        return Path(self.name).stem if self.name.endswith(".toml") else self.name.replace(":", "-")

    @property
    def is_drawn(self) -> bool:
        """Whether every seed has a truth, samples and test rows of its own."""
        return self.updates is not None


STREAMS = {
    stream.name: stream
    for stream in (
        Stream(
            name="kuairand-pure-14d",
            seeds=20,
            starts=(0.0, 0.01),
            source="the demo's: time order, one pass",
        ),
        Stream(
            name="tennis",
            seeds=20,
            batch=512,
            source="time order, one pass; the largest set has the largest batch",
        ),
        Stream(
            name="nycflights13",
            seeds=20,
            passes=2,
            shuffle=True,
            source="random split; two passes, after which AUC still rises",
        ),
        *(
            Stream(
                name=f"synthetic:zipf-{exponent}",
                seeds=12,
                updates=10_000,
                starts=(0.0, 0.01) if exponent == "1.4" else (0.0,),
                source="choice: as long as the published runs",
            )
            for exponent in ("1.4", "1.1", "1.8")
        ),
    )
}
"""Name -> stream, in the order in which the study runs them."""


def stream_of(name: str) -> Stream:
    """The stream of a name, or the files of the reader's own schema, in their order, once.

    Raises ValueError for other names.
    """
    if name.endswith(".toml"):
        return Stream(name=name, seeds=5, source="the reader's own; as the demo's")
    hold("streams", name, OneOf(STREAMS, " or the path of a schema (.toml)"))
    return STREAMS[name]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """How late a run is, in dense updates missed."""

    rows_late: int = 0
    dense_late: int = 0
    batch_factor: int = 1
    """Samples of a dense update over the stream's: 2 is the ruler that lateness is held against."""

    @property
    def label(self) -> str:
        """Part of a folder's name."""
        doubled = f"-batch-x{self.batch_factor}" if self.batch_factor > 1 else ""
        return f"rows-{self.rows_late}-dense-{self.dense_late}{doubled}"


def cell_of_async(tau: int) -> Cell:
    """Where async lies, with ranks in turn (law 16)."""
    rows, dense = updates_missed(Mode.ASYNC, tau, ranks=RANKS)
    return Cell(rows_late=rows or 0, dense_late=dense or 0)


SYNC = Cell()
GRID = tuple(Cell(rows_late=r, dense_late=d) for d in (0, 1, 7) for r in (0, 7, 16, 64))
RULER = (
    Cell(rows_late=4),  # the bound that the commands take unless told
    cell_of_async(4),  # that of tau 0 lies on the grid
    Cell(batch_factor=2),
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rates:
    """A place on the grid of learning rates, in doublings of the measured baselines' rates."""

    row: int = 0
    dense: int = 0

    @property
    def row_lr(self) -> float:
        """Of the rows: row-wise Adagrad, 0.05 at 0 (source: baselines of the data sets)."""
        return 0.05 * 2.0**self.row

    @property
    def lr(self) -> float:
        """Of the dense weights: Adam, 1e-3 at 0 (source: as above)."""
        return 1e-3 * 2.0**self.dense

    def neighbours(self) -> list[Rates]:
        """One doubling or halving of one rate away."""
        steps = ((0, 1), (0, -1), (1, 0), (-1, 0))
        return [Rates(row=self.row + r, dense=self.dense + d) for r, d in steps]


def config_of(
    stream: Stream,
    cell: Cell,
    rates: Rates,
    *,
    start: float,
    seed: int,
    train_rows: int,
    share: int = 1,
    tuning: bool = False,
    data_dir: Path | None = None,
) -> TrainConfig:
    """The run of a cell. ``start``: accumulator of Adagrad at a row's first update; ``share``: the
    run reads one in so many of the stream's rows (``train_rows`` of one pass), the first;
    ``tuning``: judged on validation rows, with seeds and draws that no final run has."""
    own = (FIRST_TUNING_SEED if tuning else 0) + seed
    batch = stream.batch * cell.batch_factor
    steps = None if stream.updates is None else stream.updates // share // cell.batch_factor
    rows = train_rows // share if steps is None else steps * batch
    updates = steps if steps is not None else stream.passes * -(-rows // batch)
    validates = VALIDATION_FRACTION if tuning and not stream.is_drawn else None
    return TrainConfig(
        sync=SyncConfig(
            mode=Mode.HYBRID,  # with nothing late the bytes of sync (law 1)
            ranks=RANKS,
            tau=cell.rows_late,
            dense_lag=cell.dense_late,
        ),
        batch=batch,
        seed=own,
        steps=steps,
        data=DataConfig(
            name=f"{stream.name}:1:{FIRST_DRAW + own}" if stream.is_drawn else stream.name,
            dir=None if stream.is_drawn else data_dir,
            rows=None if steps is None and share == 1 else rows,
            passes=stream.passes,
            shuffle=stream.shuffle,
            validation_fraction=validates,
        ),
        model=ModelConfig(lr=rates.lr),
        rows=TableConfig(optimizer=RowOptimizer(lr=rates.row_lr, initial_accumulator=start)),
        evaluation=EvaluationConfig(
            part="validation" if tuning else "test",
            evaluate_every_steps=None if tuning else max(1, updates // SNAPSHOTS),
            test_rows=TEST_ROWS_OF_A_DRAW if stream.is_drawn else None,
        ),
    )


MOST_ROUNDS = 8
"""Of a climb: a doubling each; 256 times the rate it began with is no rate to look for."""
DENSE_LINE = tuple(range(-4, 3))
"""Dense rates that are tried in any case where the line itself is shown (in doublings)."""


def best_of(tried: Mapping[Rates, float]) -> Rates:
    """The rates with the highest validation AUC; a run that diverged (NaN) is none; of equals the
    one nearest to the baselines' rates.

    >>> best_of({Rates(): 0.7, Rates(dense=1): 0.7, Rates(row=1): math.nan})
    Rates(row=0, dense=0)
    """

    def order(rates: Rates) -> tuple[float, int]:
        auc = tried[rates]
        return (-math.inf if math.isnan(auc) else auc, -abs(rates.row) - abs(rates.dense))

    return max(tried, key=order)


def to_try(tried: Mapping[Rates, float], start: Rates, line: bool = False) -> list[Rates]:
    """What a climb wants to know next; nothing, once the best has four neighbours that are worse.

    So the grid widens by itself: the best is never at its edge, but for `MOST_ROUNDS`. ``line``:
    every dense rate of `DENSE_LINE` beside the start is tried first.
    """
    if not tried:
        dense = {start.dense, *((start.dense + k for k in DENSE_LINE) if line else ())}
        return [Rates(row=start.row, dense=place) for place in sorted(dense)]
    best = best_of(tried)
    if max(abs(best.row - start.row), abs(best.dense - start.dense)) >= MOST_ROUNDS:
        return []
    return [rates for rates in best.neighbours() if rates not in tried]


def is_inside(tried: Mapping[Rates, float]) -> bool:
    """Whether all four neighbours of the best were tried."""
    return all(rates in tried for rates in best_of(tried).neighbours())
