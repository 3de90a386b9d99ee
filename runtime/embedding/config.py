"""What a table of rows is: its width, its optimiser, initial values; and what it can
do beside holding every row for ever: capacity, admission, hash stacks."""

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
from runtime.data.ids import VALUE_BITS


class CheckedByReaders(Checked):
    """Options that are also held against who reads them."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)
        refuse_unread(self)


MOST_ROUNDS = 64
_STACKS = ReadBy(lambda stack: stack.rounds > 0, "rounds >= 1")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HashStack(CheckedByReaders):
    """Each id becomes several rows of a small table, whose sum is its vector (the original's).

    Round r of a field uses its rows r * rows_per_round + hash_r(id) mod rows_per_round.
    """

    rounds: Annotated[int, Within(0, MOST_ROUNDS)] = 0
    """Rows an id is made of, at most 64; 0: no hash stack, an id is a row of its own."""
    rows_per_round: Annotated[int, Within(1, 2**VALUE_BITS), _STACKS] = 1 << 16
    """Rows of one round of one field, >= 1."""

    def __post_init__(self) -> None:
        CheckedByReaders.__post_init__(self)
        rule = f"must be so that rounds * rows_per_round is at most 2**{VALUE_BITS}"
        fits = self.rounds * self.rows_per_round <= 2**VALUE_BITS
        require(fits, "rows_per_round", self.rows_per_round, rule)


RowOptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "ftrl"]
InitialKind = Literal["uniform", "normal", "gamma", "poisson", "inverse_sqrt", "constant"]

MOST_DIM = 1 << 16
MOST_POISSON_RATE = 700.0
"""Above it exp(-rate) leaves the range in which the draw's product of uniforms can be compared."""
_MOST_STORED = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}
"""Largest finite numbers of the two (source: IEEE 754; bfloat16 has float32's exponent)."""


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


_SCALED = ReadBy(lambda t: t.initial != "inverse_sqrt", "an initial other than inverse_sqrt")
_OF_NORMAL = ReadBy(lambda table: table.initial == "normal", "initial normal")
_OF_GAMMA = ReadBy(lambda table: table.initial == "gamma", "initial gamma")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig(CheckedByReaders):
    """One table; rows are created when first looked up in training."""

    name: Annotated[str, GIVEN_ELSEWHERE] = "rows"
    """The table's name, which the data's schema gives."""
    dim: Annotated[int, Within(1, MOST_DIM)] = 8
    """Floats in a row, 1 to 65536."""
    optimizer: RowOptimizer = RowOptimizer()
    initial_scale: Annotated[float, _SCALED] = 0.01
    """Fresh rows are uniform in [-initial_scale, initial_scale); >= 0 (the original's 0.01)."""
    initial: str = "uniform"
    """normal: standard deviation initial_scale; gamma: scale initial_scale; poisson: rate
    initial_scale; inverse_sqrt: uniform within 1 / sqrt(dim); constant: initial_scale. Or a file,
    as vectors.parquet: rows of the ids in its column ``id`` (as an export has them), or of the
    values in a column of the data, begin with its ``vector``, all others uniform."""
    initial_mean: Annotated[float, _OF_NORMAL] = 0.0
    """normal: the mean."""
    initial_shape: Annotated[float, Within(0, math.inf, without="least"), _OF_GAMMA] = 1.0
    """gamma: the shape, > 0."""
    dtype: Annotated[Literal["float32", "float64"], GIVEN_ELSEWHERE] = "float32"
    """Type of values and state, which the run's precision gives."""
    storage: Literal["dtype", "float16", "bfloat16"] = "dtype"
    """16 bits halve the values' memory: rounded stochastically at every write, so that steps below
    the resolution still add up; computed in float32, state stays float32."""
    weight_bound: Annotated[float, _AT_LEAST_0] = 0.0
    """Every element is clamped to [-weight_bound, weight_bound] after a step; 0: no bound."""
    capacity: Capacity = field(default_factory=Capacity)
    """How many rows are kept."""
    admission: Admission = field(default_factory=Admission)
    """Which ids get a row."""
    hash_stack: HashStack = field(default_factory=HashStack)
    """Several rows of a small table for each id."""
    share_rows: bool = False
    """A feature group: equal values of different fields of this table are one row."""

    def __post_init__(self) -> None:
        CheckedByReaders.__post_init__(self)
        fits = self.storage == "dtype" or self.dtype == "float32"
        require(fits, "storage", self.storage, f"needs dtype float32, not {self.dtype}")
        self._check_initial()
        self._check_fits("weight_bound", self.weight_bound)
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
            goes = self.capacity.limited or self.capacity.expire_after_steps is not None
            for name, clashes in (
                ("capacity", goes),  # a row that goes would not come back with its vector
                ("hash_stack", self.hash_stack.rounds > 0),
                ("storage", self.storage != "dtype"),
            ):
                rule = f"is a file, and {name} cannot go with it; leave {name} out"
                require(not clashes, "initial", self.initial, rule)
        scale = self.initial_scale
        for name in ("initial_scale", "initial_mean", "initial_shape"):
            self._check_fits(name, getattr(self, name))
        if self.storage != "dtype":
            for name in ("initial_scale", "initial_mean"):
                value = getattr(self, name)
                most = _MOST_STORED[self.storage]
                rule = f"must be at most {most:.5g} in size, which storage {self.storage} holds"
                require(abs(value) <= most, name, value, rule, "lower it, or leave storage out")
        require(scale >= 0 or self.initial == "constant", "initial_scale", scale, "must be >= 0")
        if self.initial == "poisson":
            rule = f"must be a rate of at most {MOST_POISSON_RATE:g} with initial poisson"
            require(scale <= MOST_POISSON_RATE, "initial_scale", scale, rule)

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
