"""Which data, which network, and what it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from persia_sim.words.fields import check_fields
from runtime.config.options import above_zero, within

DenseOptimizer = Literal["adam", "sgd", "adagrad"]
MOST = 2**62
MOST_WIDTH = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which samples, in which order."""

    name: str = "kuairand-pure-14d"
    """A data set of `python -m runtime data list`, `synthetic`, `synthetic:PRESET`, or the path of
    a schema file (.toml)."""
    dir: Path | None = None
    """Folder with the real data sets; else PERSIA_DATA_DIR, else where `data get` put them."""
    rows: int | None = None
    """Read only the first rows of the training part (its validation rows among them)."""
    validation_fraction: float | None = None
    """Share of the training rows, the last of them, that validate instead of training, 0 to below
    1; None: as the data set's schema says. The synthetic stream has validation rows anyway."""
    passes: int = 1
    """Times the training part is read, >= 1. Click logs overfit their ids from the second on."""
    shuffle: bool = False
    """Permute the training samples with the seed; else the source's own order (time)."""
    skip_bad_rows: bool = False
    """Count and leave out rows that break the schema; else the first one ends the run."""
    keep: bool = True
    """Keep what was parsed of files in the user's cache folder, at most 4 GiB in all: the next run
    maps it into memory instead of parsing again."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        within(self, 1, MOST, "rows", "passes", prefix="data.")
        share = self.validation_fraction
        if share is not None and not 0 <= share < 1:
            raise ValueError(f"data.validation_fraction must be >= 0 and < 1, got {share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The dense network and its optimiser."""

    name: str = "ffnn"
    """ffnn, dlrm, deepfm, dcn, or package.module:Class for your own."""
    hidden: tuple[int, ...] = (256, 128)
    """Widths of the hidden layers; the paper's are 4096 2048 1024 512 256."""
    optimizer: DenseOptimizer = "adam"
    """torch's, without decay or momentum."""
    lr: float = 1e-3
    """Learning rate of the dense weights, > 0."""

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        above_zero(self, 1e6, "lr", prefix="model.")
        if not self.hidden or not all(1 <= width <= MOST_WIDTH for width in self.hidden):
            raise ValueError(
                f"model.hidden must be one or more widths of 1 to {MOST_WIDTH:,}, got {self.hidden}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When and on what the model is judged."""

    part: Literal["test", "validation"] = "test"
    """test: what no choice may look at. validation: the last training rows, on which rates and
    other options are chosen; the test part is not read then. They train in neither case."""
    evaluate_every_steps: int | None = None
    """Evaluate a snapshot on that part every so many times ``batch`` samples (for curves)."""
    test_rows: int | None = None
    """Evaluate on the first rows of that part only, >= 2."""

    def __post_init__(self) -> None:
        check_fields(self)
        within(self, 1, MOST, "evaluate_every_steps")
        within(self, 2, MOST, "test_rows")
