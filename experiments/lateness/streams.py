"""The streams of the study of lateness, its cells, and the orders and windows that they come in."""

from __future__ import annotations

from dataclasses import dataclass

RANKS = 8
"""W, as in the demo."""
TIME, SHUFFLED = "time", "shuffled"
"""Orders of the training samples: the stream's own, or drawn by the seed."""
BUFFER = "buffer-"
"""An order, with the samples of the shuffle buffer behind it."""
TEST, VALIDATION = "test", "validation"
"""What a run is judged on: the test part, or the last tenth of its training samples (rates)."""
OWN, BY_TIME, BY_USER = "", "time", "user"
"""How a stream is cut into rows that train and rows that judge: as its schema says, at one instant,
or at the last fifth of each user's rows."""
APART = "none"
"""In place of a fresh field: each field has a table of its own, and none is fresh."""
ORIGINS = ("origin-1", "origin-2")
"""Windows of the training part on which a run is judged that trains on all rows before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Samples in one order, trained on by an MLP 256-128 over rows of width 8."""

    name: str
    seeds: int
    """Paired seeds of a final cell; of a drawn stream, draws."""
    source: str
    """Why it is in the study."""
    batch: int = 128
    """Samples of a dense update."""
    updates: int | None = None
    """Length of a run on a drawn stream, which has no end; else one pass."""
    last_rows: int | None = None
    """Train on the last rows of the training part only; None: on all."""
    starts: tuple[float, ...] = (0.0,)
    """Accumulators that the rows' Adagrad begins with, each with rates of its own."""
    buffers: tuple[int, ...] = ()
    """Samples of the shuffle buffers that are tried on it."""
    has_windows: bool = False
    """Whether it is judged on earlier windows, too."""
    long_updates: int | None = None
    """Updates of longer runs, where it has some."""
    other_split: str = OWN
    """`BY_TIME` or `BY_USER`, where its schema cuts it another way."""
    clock: str = ""
    """Column whose order is that of time, where its rows do not lie in it."""
    fresh_fields: tuple[str, ...] = ()
    """Fields that are fresh in turn while all others are late: the burstiest one by b(16) in time
    order, then the one with most rows of the others."""
    alias: str = ""
    """What its runs are stored under, where another stream has the same data."""

    @property
    def key(self) -> str:
        """What its runs are stored under."""
        return self.alias or self.name

    @property
    def is_drawn(self) -> bool:
        """Whether every seed has a truth, samples and test samples of its own."""
        return self.updates is not None


PERSIA_START = 0.01
"""Accumulator that PERSIA's Adagrad starts from (source: persia/embedding/optim.py)."""
STARTS = (PERSIA_START / RANKS**2, PERSIA_START)
"""Starts of Adagrad beside 0: PERSIA's at its own scale (it sums row gradients over ranks, so that
their squares are W² times as large), and the same number with gradients of the mean."""
BUFFERS = (2_048, 16_384, 131_072)

STREAMS = {
    stream.name: stream
    for stream in (
        Stream(
            name="movielens-latest-small-2016",
            seeds=8,
            buffers=BUFFERS,
            other_split=BY_TIME,
            clock="timestamp",
            fresh_fields=("user", "movie"),
            source="users come in bursts: a sitting is 150 films long",
        ),
        Stream(
            name="kuairand-pure-14d",
            seeds=6,
            starts=(0.0, 1e-8, *STARTS),
            buffers=BUFFERS,
            has_windows=True,
            other_split=BY_USER,
            fresh_fields=("user", "video"),
            source="the demo's",
        ),
        Stream(
            name="oulad-assessments",
            seeds=8,
            has_windows=True,
            other_split=BY_USER,
            fresh_fields=("student", "assessment"),
            source="assessments come in bursts",
        ),
        Stream(
            name="tennis",
            seeds=6,
            batch=512,
            last_rows=450_000,
            has_windows=True,
            fresh_fields=("tourney", "b_id"),
            source="the longest; its last rows, so that a run is as long as the others",
        ),
        Stream(
            name="synthetic:zipf-1.8",
            seeds=12,
            updates=2_500,
            starts=(0.0, 1e-7, *STARTS),
            long_updates=10_000,
            source="few ids take most lookups",
        ),
        Stream(
            name="synthetic:zipf-1.1",
            seeds=12,
            updates=2_500,
            source="lookups are spread over many ids",
        ),
    )
}
"""Name -> stream, in the order in which the study runs them."""
WHOLE_TENNIS = Stream(
    name="tennis",
    alias="tennis-whole",
    seeds=6,
    source="all of its training part, in updates of 128: a run of ten thousand",
)
"""The longest real run; of the second plan alone."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """How late a run is, in dense updates missed."""

    rows_late: int = 0
    dense_late: int = 0
    batch_factor: int = 1
    """Samples of a dense update over the stream's: 2 is the ruler that lateness is held against."""

    @property
    def label(self) -> str:
        """A part of labels and folders."""
        doubled = f"-batch-x{self.batch_factor}" if self.batch_factor > 1 else ""
        return f"rows-{self.rows_late}-dense-{self.dense_late}{doubled}"


SYNC = Cell()
ROWS_7, ROWS_16, ROWS_64 = (Cell(rows_late=rows) for rows in (7, 16, 64))
ROWS_1, ROWS_2, ROWS_4, ROWS_39 = (Cell(rows_late=rows) for rows in (1, 2, 4, 39))
DENSE_7 = Cell(dense_late=7)
ASYNC_0 = Cell(rows_late=7, dense_late=7)
"""Async with bound 0 on 8 ranks (law 16)."""
ASYNC_4 = Cell(rows_late=39, dense_late=7)
"""Async with bound 4 on 8 ranks."""
DOUBLED = Cell(batch_factor=2)

LATE = (ROWS_7, ROWS_16, ROWS_64, DENSE_7, ASYNC_0, ASYNC_4)
"""Cells that have rates of their own to look for."""
CELLS = (SYNC, *LATE, DOUBLED)
ORDER_CELLS = (SYNC, ROWS_7, ROWS_16, ROWS_64, ASYNC_0)
BUFFER_CELLS = (SYNC, ROWS_16)
START_CELLS = (SYNC, ROWS_7, ROWS_16, ASYNC_0)
WINDOW_CELLS = (SYNC, ROWS_7, ROWS_16, DENSE_7, ASYNC_0)
SHUFFLED_WINDOW_CELLS = (SYNC, ROWS_16)
LONG_CELLS = (SYNC, ROWS_16, ROWS_64)
TAU_CELLS = (SYNC, ROWS_1, ROWS_2, ROWS_4, ROWS_16, ROWS_39, ASYNC_4)
"""The lateness that one takes, and that of async beside rows alone as late."""
FRESH_CELLS = (ROWS_4, ROWS_16)
"""Those in which one field is fresh; all of them fresh is sync (law 19)."""
FEW_CELLS = (SYNC, ROWS_4, ROWS_16)
WHOLE_CELLS = (SYNC, ROWS_4, ROWS_16, ROWS_64, ASYNC_4)
PASSES = (2, 4)
