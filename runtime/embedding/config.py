"""What a table of rows is: its width, its optimiser, its initial values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from runtime.embedding.features import Admission, Capacity, HashStack
from runtime.embedding.schedule import Schedule

RowOptimizerKind = Literal["sgd", "adagrad", "adagrad_row", "adam", "adam_row", "ftrl"]
InitialKind = Literal["uniform", "normal", "gamma", "poisson", "inverse_sqrt", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer:
    """The optimiser that the servers apply to rows (torch's formulas, see `optimizers`)."""

    kind: RowOptimizerKind = "adagrad_row"
    """sgd; adagrad with one accumulator per element, or one per row (mean square); adam, with one
    mean square per element, or one per row; FTRL-proximal (McMahan et al. 2013)."""
    lr: float = 0.05
    """Learning rate, > 0."""
    initial_accumulator: float = 0.0
    """Adagrad's accumulator of a fresh row, >= 0. 0 moves fresh rows fast; the original's 0.01
    starts slowly, which is where staleness hurts most."""
    eps: float = 1e-10
    """Added to the square root of the accumulator (adam: use 1e-8), > 0."""
    beta1: float = 0.9
    """Adam's decay of the mean, in [0, 1)."""
    beta2: float = 0.999
    """Adam's decay of the mean square, in [0, 1)."""
    bias_correction: Literal["global", "row"] = "global"
    """Adam's step count: of the run (equal to torch's SparseAdam), or of each row's own updates."""
    weight_decay: float = 0.0
    """sgd: pull towards 0, >= 0; lazily, only at the steps that touch the row."""
    momentum: float = 0.0
    """sgd: share of the last step kept, in [0, 1); lazily too. Costs one float per element."""
    l1: float = 0.0
    """ftrl: weight of the absolute values, >= 0; rows with little signal become exactly 0."""
    l2: float = 0.0
    """ftrl: weight of the squares, >= 0."""
    ftrl_beta: float = 1.0
    """ftrl: smooths the first steps, >= 0."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate as a function of the step."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"row learning rate must be > 0, got {self.lr}")
        if self.initial_accumulator < 0:
            raise ValueError(f"initial_accumulator must be >= 0, got {self.initial_accumulator}")
        if self.initial_accumulator > 0 and not self.kind.startswith("adagrad"):
            raise ValueError(f"initial_accumulator is not used by {self.kind}; remove it")
        if self.eps <= 0:
            raise ValueError(f"eps must be > 0, got {self.eps}")
        for name, default in _ADAM_DEFAULTS.items():
            value = getattr(self, name)
            if name != "bias_correction" and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
            if value != default and not self.kind.startswith("adam"):
                raise ValueError(f"{name} is not used by {self.kind}; remove it, or choose adam")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        for name, kind in _ONLY_FOR.items():
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
            if value and self.kind != kind:
                raise ValueError(f"{name} is not used by {self.kind}; remove it, or choose {kind}")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return self.lr * self.schedule.factor(step)

    def state_floats(self, dim: int) -> int:
        """Floats of optimiser state beside a row of ``dim`` values."""
        per_kind = {
            "sgd": dim if self.momentum else 0,
            "adagrad": dim,
            "adagrad_row": 1,
            "adam": 2 * dim,
            "adam_row": dim + 1,
            "ftrl": 2 * dim,
        }
        return per_kind[self.kind]


_ADAM_DEFAULTS = {"beta1": 0.9, "beta2": 0.999, "bias_correction": "global"}
_ONLY_FOR = {"weight_decay": "sgd", "momentum": "sgd", "l1": "ftrl", "l2": "ftrl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """One table; rows are created when first looked up in training."""

    name: str = "rows"
    dim: int = 8
    """Floats in a row, >= 1."""
    optimizer: RowOptimizer = RowOptimizer()
    initial_scale: float = 0.01
    """Fresh rows are uniform in [-initial_scale, initial_scale); >= 0 (the original's 0.01)."""
    initial: InitialKind = "uniform"
    """normal: standard deviation initial_scale; gamma: scale initial_scale; poisson: rate
    initial_scale; inverse_sqrt: uniform within 1 / sqrt(dim); constant: initial_scale."""
    initial_mean: float = 0.0
    """normal: the mean."""
    initial_shape: float = 1.0
    """gamma: the shape, > 0."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of values and state; float64 is for checking laws."""
    storage: Literal["dtype", "float16", "bfloat16"] = "dtype"
    """16 bits halve the values' memory: rounded stochastically at every write, so that steps below
    the resolution still add up; computed in float32, state stays float32."""
    weight_bound: float = 0.0
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
        if self.storage != "dtype" and self.dtype != "float32":
            raise ValueError(f"storage {self.storage} needs dtype float32, got {self.dtype}")
        if self.weight_bound < 0:
            raise ValueError(f"weight_bound must be >= 0, got {self.weight_bound}")
        if self.initial_shape <= 0:
            raise ValueError(f"initial_shape must be > 0, got {self.initial_shape}")
        if self.dim < 1:
            raise ValueError(f"dim must be >= 1, got {self.dim}")
        if self.initial_scale < 0 and self.initial != "constant":
            raise ValueError(f"initial_scale must be >= 0, got {self.initial_scale}")
