"""What a table of rows is: its width, its optimiser, initial values; and what it can
do beside holding every row for ever: capacity, admission."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal, get_args

import numpy as np

from persia_sim.base.command_line import GIVEN_ELSEWHERE
from persia_sim.base.rules import require
from persia_sim.base.schema import (
    Checked,
    Positive,
    ReadBy,
    Within,
    check_fields,
    refuse_unread,
)


class CheckedByReaders(Checked):
    """Options that are also held against who reads them."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unread(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity(CheckedByReaders):
    """How many rows a table keeps, over all its shards. Exactly the least recently used one goes.

    A row that goes loses its optimiser state; when its id comes back it starts from its initial
    value (law 10). Gradients that were on their way to it are dropped and counted.
    """

    rows: Positive | None = None
    """Most rows, >= 1, each with 35 bytes beside values and state; None: no limit."""
    expire_after_steps: Annotated[int | None, Within(1, 2**32 - 1)] = None
    """A row not looked up in training for more than this many steps starts afresh; None: never."""

    @property
    def limited(self) -> bool:
        """Whether rows are evicted."""
        return self.rows is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(CheckedByReaders):
    """Which ids get a row at a training lookup; the others are read as their initial value."""

    probability: Annotated[float, Within(0, 1, without="least")] = 1.0
    """p of one sighting, in (0, 1], by a draw that is a function of (seed, table, id, step): an id
    seen k times is in with probability 1 - (1 - p)**k, as in the original. 1: every id."""


RowOptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "ftrl"]
InitialKind = Literal["uniform", "normal", "constant"]

MOST_DIM = 1 << 16


def _of_kinds(*kinds: RowOptimizerKind) -> ReadBy:
    return ReadBy(lambda optimizer: optimizer.kind in kinds, f"kind {', '.join(kinds)}")


_ADAM: tuple[RowOptimizerKind, ...] = ("adam", "rowwise_adam")
_ADAGRAD: tuple[RowOptimizerKind, ...] = ("adagrad", "rowwise_adagrad")
_OF_ADAGRAD = _of_kinds(*_ADAGRAD)
_OF_FTRL = _of_kinds("ftrl")
_RATE = Within(0, 1e6, without="least")
_AT_LEAST_0 = Within(0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer(CheckedByReaders):
    """The optimiser that the servers apply to rows (torch's formulas, see `optimizers`)."""

    kind: RowOptimizerKind = "rowwise_adagrad"
    """sgd; adagrad with one accumulator per element, or one per row (mean square); adam, with one
    mean square per element, or one per row, and the run's count of steps, as torch's SparseAdam:
    both with torch's constants; FTRL-proximal (McMahan et al. 2013), whose rows start
    from their initial values."""
    lr: Annotated[float, _RATE] = 0.05
    """Learning rate, > 0."""
    initial_accumulator: Annotated[float, _AT_LEAST_0, _OF_ADAGRAD] = 0.0
    """Adagrad's accumulator of a fresh row, >= 0. 0 moves fresh rows fast; the original's 0.01
    starts slowly, which is where staleness hurts most."""
    l1: Annotated[float, _AT_LEAST_0, _OF_FTRL] = 0.0
    """ftrl: weight of the absolute values, >= 0; rows with little signal become exactly 0. Costs
    one float per element."""
    l2: Annotated[float, _AT_LEAST_0, _OF_FTRL] = 0.0
    """ftrl: weight of the squares, >= 0."""

    @property
    def epsilon(self) -> float:
        """What adagrad and adam add to the square root of the accumulator: torch's own for each."""
        return 1e-8 if self.kind in _ADAM else 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig(CheckedByReaders):
    """One table; rows are created when first looked up in training."""

    name: Annotated[str, GIVEN_ELSEWHERE] = "rows"
    """The table's name, which the data's schema gives."""
    dim: Annotated[int, Within(1, MOST_DIM)] = 8
    """Floats in a row, 1 to 65536."""
    optimizer: RowOptimizer = RowOptimizer()
    initial_scale: float = 0.01
    """Fresh rows are uniform in [-initial_scale, initial_scale); >= 0 (the original's 0.01)."""
    initial: str = "uniform"
    """normal: standard deviation initial_scale; constant: initial_scale. Or a file,
    as vectors.parquet: rows of the ids in its column ``id`` (as an export has them), or of the
    values in a column of the data, begin with its ``vector``, all others uniform."""
    dtype: Annotated[Literal["float32", "float64"], GIVEN_ELSEWHERE] = "float32"
    """Type of values and state, which the run's precision gives."""
    capacity: Capacity = field(default_factory=Capacity)
    """How many rows are kept."""
    admission: Admission = field(default_factory=Admission)
    """Which ids get a row."""

    def __post_init__(self) -> None:
        CheckedByReaders.__post_init__(self)
        self._check_initial()
        for option in fields(self.optimizer):
            value = getattr(self.optimizer, option.name)
            if isinstance(value, float):
                or_zero = "" if option.name == "lr" else "0 or "
                self._check_fits(f"optimizer.{option.name}", value, or_zero)

    @property
    def initial_file(self) -> bool:
        """Whether rows begin with vectors of a file."""
        return self.initial.endswith(".parquet")

    def _check_initial(self) -> None:
        known = get_args(InitialKind)
        rule = f"must be {', '.join(known)}, or a file that ends in .parquet"
        require(self.initial_file or self.initial in known, "initial", self.initial, rule)
        if self.initial_file:
            # A row that goes would not come back with its vector.
            goes = self.capacity.limited or self.capacity.expire_after_steps is not None
            rule = "is a file, and capacity cannot go with it; leave capacity out"
            require(not goes, "initial", self.initial, rule)
        scale = self.initial_scale
        self._check_fits("initial_scale", scale)
        require(scale >= 0 or self.initial == "constant", "initial_scale", scale, "must be >= 0")

    def _check_fits(self, name: str, value: float, or_zero: str = "0 or ") -> None:
        """Neither infinite nor zero once it is rounded to ``dtype``, but for 0 itself."""
        limits = np.finfo(self.dtype)
        size = abs(value)
        least = float(limits.smallest_subnormal)
        most = float(limits.max)
        rule = (
            f"must be {or_zero}between {least:.1g} and {most:.1g} in size, which {self.dtype} holds"
        )
        require(size == 0 or least <= size <= most, name, value, rule)

    @property
    def depends_on_lookup_order(self) -> bool:
        """Whether the order of two lookups of one step decides which rows there are."""
        return self.capacity.limited or self.admission.probability < 1
