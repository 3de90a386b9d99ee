"""The synthetic click stream: unlimited samples whose best reachable AUC is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count

import numpy as np

from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import tag
from runtime.data.interleave import interleave
from runtime.data.source import Part, Provenance
from runtime.data.truth import Recipe, raw_score
from runtime.data.zipf import scatter56, zipf_ranks

CHUNK_ROWS = 16_384
"""Samples drawn at once; part of what a seed means."""
CALIBRATION_ROWS = 65_536
"""Samples that fix bias and gain: the click rate is met to about 0.2 points."""
_STREAMS: dict[Part | str, int] = {"train": 0, "validation": 1, "test": 2, "calibration": 3}
VERSION = 1
"""Counted up when the same recipe gives other samples."""


@dataclass(frozen=True, kw_only=True)
class SyntheticSource:
    """Samples of a recipe. Chunk k of a part is a function of (recipe, part, k) alone."""

    recipe: Recipe
    train_rows: int | None = None
    """Samples of the training part; None: it never ends."""
    test_rows: int = 100_000
    """Samples of the validation part and of the test part, each."""

    def __post_init__(self) -> None:
        if self.train_rows is not None and self.train_rows < 1:
            raise ValueError(f"train_rows must be >= 1, got {self.train_rows}; None has no end")
        if self.test_rows < 1:
            raise ValueError(f"test_rows must be >= 1, got {self.test_rows}")

    @property
    def layout(self) -> Layout:
        """Fields, dense features and the one task."""
        return Layout(
            fields=tuple(
                Field(name=f.name, pooling="mean" if f.max_length > 1 else "sum")
                for f in self.recipe.fields
            ),
            dense=tuple(f"x{n}" for n in range(self.recipe.dense)),
            tasks=("click",),
        )

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The samples of one part; of an endless training part if ``train_rows`` is None."""
        for batch, _ in self.chunks_with_truth(part):
            yield batch

    def turns(self, part: Part, own: int, of: int) -> Iterator[Batch]:
        """Chunks number ``own``, ``own + of``, ... of one part; the others are not drawn."""
        left = self.train_rows if part == "train" else self.test_rows
        for number in count(own, of):
            rows = CHUNK_ROWS if left is None else min(CHUNK_ROWS, left - number * CHUNK_ROWS)
            if rows <= 0:
                return
            yield self._chunk(part, number)[0].rows(0, rows)

    def left_out(self, part: Part) -> tuple[int, int, int | None]:
        """Nothing is bad here."""
        return 0, 0, None

    def note_left_out(self, part: Part, skipped: int, outside: int, row: int | None) -> None:
        """Nothing is bad here."""

    def chunks_with_truth(self, part: Part) -> Iterator[tuple[Batch, np.ndarray]]:
        """Samples, and float64 [B] the true probability of a click of each."""
        left = self.train_rows if part == "train" else self.test_rows
        for number in count():
            if left is not None and left <= 0:
                return
            rows = CHUNK_ROWS if left is None else min(CHUNK_ROWS, left)
            batch, probability = self._chunk(part, number)
            yield batch.rows(0, rows), probability[:rows]
            left = None if left is None else left - rows

    def true_probabilities(self, part: Part) -> np.ndarray:
        """float64 [rows]: scored with these, a finite part gives its best reachable AUC."""
        return np.concatenate([truth for _, truth in self.chunks_with_truth(part)])

    def provenance(self) -> Provenance:
        """The recipe's checksum."""
        settings = {**asdict(self.recipe), "version": VERSION, "chunk_rows": CHUNK_ROWS}
        text = json.dumps(settings, sort_keys=True)
        return Provenance(
            name=f"synthetic:{self.recipe.name}",
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            split=f"independent draws, seed {self.recipe.seed}: train "
            f"{self.train_rows or 'without end'}, test {self.test_rows} samples",
        )

    @cached_property
    def _line(self) -> tuple[float, float]:
        """Bias and factor that turn a raw score into a logit of the wanted rate and deviation."""
        score = np.concatenate(
            [self._draw("calibration", k)[1] for k in range(CALIBRATION_ROWS // CHUNK_ROWS)]
        )
        factor = self.recipe.gain / score.std()
        low, high = -40.0, 40.0
        scaled = factor * (score - score.mean())
        for _ in range(50):
            middle = (low + high) / 2
            above = _sigmoid(scaled + middle).mean() > self.recipe.click_rate
            low, high = (low, middle) if above else (middle, high)
        return float(low - factor * score.mean()), float(factor)

    def _chunk(self, part: Part, number: int) -> tuple[Batch, np.ndarray]:
        bias, factor = self._line
        unlabelled, score, uniform = self._draw(part, number)
        probability = _sigmoid(bias + factor * score)
        labels = (uniform < probability).astype(np.float32)[:, None]
        ids, offsets, dense = unlabelled
        return Batch(ids, offsets, dense, labels), probability

    def _draw(
        self, part: Part | str, number: int
    ) -> tuple[tuple[np.ndarray, np.ndarray | None, np.ndarray], np.ndarray, np.ndarray]:
        """Ids, offsets and dense features of one chunk; raw scores [B]; uniform numbers [B]."""
        generator = np.random.default_rng([self.recipe.seed, _STREAMS[part], number])
        ids: list[np.ndarray] = []
        lengths: list[np.ndarray | None] = []
        for place, field in enumerate(self.recipe.fields):
            bag = None
            if field.max_length > 1:
                bag = generator.integers(1, field.max_length + 1, CHUNK_ROWS)
            size = CHUNK_ROWS if bag is None else int(bag.sum())
            ranks = zipf_ranks(generator, size, field.values, field.exponent)
            ids.append(tag(place, scatter56(ranks)))
            lengths.append(bag)
        dense = generator.standard_normal((CHUNK_ROWS, self.recipe.dense), np.float32)
        score = raw_score(self.recipe, ids, lengths, dense)
        return (*interleave(ids, lengths), dense), score, generator.random(CHUNK_ROWS)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = 1.0 / (1.0 + np.exp(-x))
    return y
