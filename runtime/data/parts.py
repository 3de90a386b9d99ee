"""Which row belongs to which part: the split, decided row by row as the file streams by."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from runtime.data.arrow_arrays import distinct, plain
from runtime.data.ordering import Threshold, at_least
from runtime.data.source import Part
from runtime.data.split import Split
from runtime.data.table import Rows

CODES: dict[Part, int] = {"train": 0, "validation": 1, "test": 2}
UNPLACED = -1
"""Code of a row whose split column holds no usable value."""
NOT_READ = 3
"""Code of a training row behind those that were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts that a split by place needs before the stream starts."""

    rows: int = 0
    """Rows of the file; needed by a split that tests the last ones."""
    train_rows: int = 0
    """Rows that train or validate, as many as were asked for; needed when there is a validation
    part."""


@dataclass(slots=True)
class Placer:
    """Gives each row of one stream its part; call ``place`` once for each chunk, in order."""

    split: Split
    totals: Totals
    missing: Collection[str]
    _train_seen: int = 0
    _generator: np.random.Generator | None = None
    _drawn: int = 0
    _threshold: Threshold | None = field(init=False)

    def __post_init__(self) -> None:
        self._threshold = self.split.threshold

    def place(self, rows: Rows) -> np.ndarray:
        """int64 [B] codes of the rows' parts."""
        in_test, unusable = self._in_test(rows)
        codes = np.where(in_test, CODES["test"], CODES["train"])
        codes[unusable] = UNPLACED
        if rows.part == "validation":
            codes[:] = CODES["validation"]
        if self.split.validation_fraction:
            train = codes == CODES["train"]
            order = self._train_seen + np.cumsum(train)  # 1 for the first training row
            kept = self.totals.train_rows * (1 - self.split.validation_fraction)
            codes[train & (order > round(kept))] = CODES["validation"]
            codes[train & (order > self.totals.train_rows)] = NOT_READ
            self._train_seen = int(order[-1])
        return codes

    def _in_test(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """bool [B], whether each row tests; bool [B], whether its split column is unusable."""
        split = self.split
        none_unusable = np.zeros(len(rows.numbers), bool)
        if rows.part is not None:
            return np.full(len(rows.numbers), rows.part == "test"), none_unusable
        if split.column is not None:
            array = rows.table.column(split.column)
            threshold = self._threshold
            if threshold is not None:
                return at_least(array, threshold, self.missing)
            texts, which = distinct(plain(array))
            unusable = [text in self.missing for text in map(str, texts)]
            equal = [str(text) == split.test_equals for text in texts]
            return np.array([*equal, False])[which], np.array([*unusable, True])[which]
        assert split.test_fraction is not None  # the split's own check
        if split.random_seed is None:
            last = round(self.totals.rows * (1 - split.test_fraction))
            return rows.places > last, none_unusable
        return self._draws(rows.places) < split.test_fraction, none_unusable

    def _draws(self, numbers: np.ndarray) -> np.ndarray:
        """Draw k of the seed's sequence for the row with number k, rows left out included."""
        if self._generator is None:
            self._generator = np.random.default_rng(self.split.random_seed)
        draws = self._generator.random(int(numbers[-1]) - self._drawn)
        first, self._drawn = self._drawn, int(numbers[-1])
        mine: np.ndarray = draws[numbers - 1 - first]
        return mine
