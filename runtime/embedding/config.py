"""What a table of rows is: its width, its optimiser, its initial values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RowOptimizerKind = Literal["sgd", "adagrad", "adagrad_row", "adam"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptimizer:
    """The optimiser that the servers apply to rows (torch's formulas, see `optimizers`)."""

    kind: RowOptimizerKind = "adagrad_row"
    """sgd; adagrad with one accumulator per element, or one per row (mean square); adam."""
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

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"row learning rate must be > 0, got {self.lr}")
        if self.initial_accumulator < 0:
            raise ValueError(f"initial_accumulator must be >= 0, got {self.initial_accumulator}")
        if self.initial_accumulator > 0 and not self.kind.startswith("adagrad"):
            raise ValueError(f"initial_accumulator is not used by {self.kind}; remove it")
        if self.eps <= 0:
            raise ValueError(f"eps must be > 0, got {self.eps}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    def state_floats(self, dim: int) -> int:
        """Floats of optimiser state beside a row of ``dim`` values."""
        per_kind = {"sgd": 0, "adagrad": dim, "adagrad_row": 1, "adam": 2 * dim}
        return per_kind[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """One table; rows are created when first looked up in training."""

    name: str = "rows"
    dim: int = 8
    """Floats in a row, >= 1."""
    optimizer: RowOptimizer = RowOptimizer()
    initial_scale: float = 0.01
    """Fresh rows are uniform in [-initial_scale, initial_scale); >= 0 (the original's 0.01)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of values and state; float64 is for checking laws."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"dim must be >= 1, got {self.dim}")
        if self.initial_scale < 0:
            raise ValueError(f"initial_scale must be >= 0, got {self.initial_scale}")
