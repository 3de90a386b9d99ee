"""The synthetic click stream: unlimited samples whose best reachable AUC is known.

The truth is planted: what a click depends on is a pure function of (seed, field, id). Nothing is
stored for an id, so there may be 10**13 of them. The logit of a sample is

    bias + gain * (sum of field effects + sum of pair effects + sum of dense effects)

An id's effect is uniform with mean 0 and variance 1. The effect of a pair of fields is the product
of one sign of each id: over ids of equal popularity it averages out, so a linear model sees little
of it.

Shape letters: B samples, F fields, N ids, D dense features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from typing import Annotated, Any, cast

import numpy as np

from persia_sim.base.schema import Checked, Count, Positive, Within, check_fields, parse
from runtime.data.batch import Batch, Field, Layout, interleave
from runtime.data.ids import mix64, scatter56, tag, zipf_ranks
from runtime.data.source import Part, Provenance
from runtime.files import table_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticField(Checked):
    """One id field of the stream."""

    name: str
    values: Annotated[int, Within(1, 2**53 - 1)]
    """Distinct ids."""
    exponent: Annotated[float, Within(0, 10)] = 1.1
    """Exponent of the Zipf law of popularity; with 10 all but a thousandth of the draws are the
    first id."""
    weight: float = 1.0
    """Weight of the field's effects in the logit, before normalisation; the mean over a bag."""
    max_length: Positive = 1
    """A bag holds 1 to this many ids, each length equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Checked):
    """Two fields that act together."""

    first: str
    second: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A synthetic click stream, whole: two equal recipes give the same samples."""

    name: str
    fields: tuple[SyntheticField, ...]
    pairs: tuple[Pair, ...] = ()
    dense: Count = 0
    """Number of dense features, standard normal."""
    dense_weight: float = 0.5
    """Weight of each dense feature in the logit."""
    click_rate: Annotated[float, Within(0, 1, without="both")] = 0.25
    """Mean of the label."""
    gain: Annotated[float, Within(0, 10, without="least")] = 1.2
    """Standard deviation of the logit: it fixes the best reachable AUC. Beyond 10 a click is sure
    or impossible."""
    seed: Annotated[int, Within(0, 2**63 - 1)] = 1
    source: str = "unset"
    """Where the numbers come from, and which of them are assumed."""

    def __post_init__(self) -> None:
        check_fields(self)
        names = {f.name for f in self.fields}
        if not names:
            raise ValueError("a recipe needs fields, got none")
        for pair in self.pairs:
            unknown = {pair.first, pair.second} - names
            if unknown:
                raise ValueError(f"pair of unknown fields {sorted(unknown)}; known: {names}")

    @property
    def distinct_ids(self) -> int:
        """Over all fields."""
        return sum(f.values for f in self.fields)


SMALLEST_FIELD = 4
"""Distinct ids of a shape's smallest field (assumed)."""
LARGEST_SCALE = 1e6
"""Largest scale of a shape; a field's ids must stay below 2**53, which the largest shapes reach
before this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is known of a workload, of which `synthetic.toml` has some."""

    fields: int
    distinct_ids: int
    click_rate: float
    source: str
    dense: int = 0
    multi: int = 0
    """So many fields, the last ones, hold bags of 1 to 8 ids."""
    exponent: float = 1.1

    def recipe(self, name: str, scale: float) -> Recipe:
        """A recipe of this shape with ``scale`` times its distinct ids."""
        if not 0 < scale <= LARGEST_SCALE:  # NaN is not
            raise ValueError(
                f"scale must be > 0 and at most {LARGEST_SCALE:g}, got {scale};"
                " 1 is the size of the real workload"
            )

        # Few large fields and many small ones, as in click logs; the last ones hold several ids.
        sizes = _field_sizes(round(self.distinct_ids * scale), self.fields)
        last = self.fields - 1

        # Two pairs of fields act together: without interactions an embedding would have little to
        # learn.
        return Recipe(
            name=name if scale == 1.0 else f"{name}:{scale:g}",
            fields=tuple(
                SyntheticField(
                    name=f"c{n}",
                    values=size,
                    exponent=self.exponent,
                    weight=1.0 if size < 1_000_000 else 0.5,
                    max_length=8 if n > last - self.multi else 1,
                )
                for n, size in enumerate(sizes)
            ),
            pairs=(
                Pair(first=f"c{last}", second=f"c{last - 1}", weight=1.5),
                Pair(first=f"c{last - 2}", second=f"c{self.fields // 2}", weight=1.5),
            ),
            dense=self.dense,
            click_rate=self.click_rate,
            source=self.source,
        )


def _field_sizes(total: int, fields: int) -> list[int]:
    """Distinct ids of each field, largest first: a geometric series that sums to ``total``."""
    total = max(total, fields * SMALLEST_FIELD)
    low = 1.0
    high = (total / SMALLEST_FIELD) ** (1 / (fields - 1))
    for _ in range(200):
        ratio = (low + high) / 2
        above = sum(SMALLEST_FIELD * ratio**n for n in range(fields)) > total
        low, high = (low, ratio) if above else (ratio, high)
    sizes = [int(SMALLEST_FIELD * low**n) for n in range(fields)]
    sizes[-1] += total - sum(sizes)
    return sizes[::-1]


def presets() -> dict[str, dict[str, Any]]:
    """What `synthetic.toml` says of each recipe, by name."""
    return table_beside(__file__)


def recipe(name: str, scale: float = 1.0, draw: int = 1) -> Recipe:
    """A recipe by name; a shape with ``scale`` times its distinct ids.

    Another ``draw`` is another truth, other samples and other test samples of the same description.
    """
    if name != "default":
        made = parse(Shape, presets()[name], name).recipe(name, scale)
    elif scale == 1.0:
        made = parse(Recipe, {"name": name, **presets()[name]}, name)
    else:
        raise ValueError(f"the default recipe has one size, got scale {scale}; scale a shape")
    return replace(made, seed=draw)


def raw_score(
    recipe: Recipe, ids: list[np.ndarray], lengths: list[np.ndarray | None], dense: np.ndarray
) -> np.ndarray:
    """float64 [B] sums of effects, not yet normalised; ``ids`` [N] of each field carry its tag."""
    score = np.full(len(dense), 0.0)
    signs: dict[str, np.ndarray] = {}
    key = mix64(np.array([recipe.seed], np.uint64))
    paired = {name for pair in recipe.pairs for name in (pair.first, pair.second)}
    for field, field_ids, field_lengths in zip(recipe.fields, ids, lengths, strict=True):
        hashes = mix64(field_ids ^ key)
        # Of the top 53 bits: uniform, with mean 0 and variance 1.
        effects = ((hashes >> np.uint64(11)) * 2.0**-53 - 0.5) * np.sqrt(12.0)
        if field_lengths is None:
            score += field.weight * effects
        else:
            starts = np.cumsum(field_lengths) - field_lengths
            score += field.weight * (np.add.reduceat(effects, starts) / field_lengths)
            hashes = hashes[starts]  # the first id of a bag stands for it in a pair
        if field.name in paired:
            signs[field.name] = 1.0 - 2.0 * (hashes & np.uint64(1))
    for pair in recipe.pairs:
        score += pair.weight * signs[pair.first] * signs[pair.second]
    if recipe.dense:
        directions = 1.0 - 2.0 * (np.arange(recipe.dense) % 2)
        score += recipe.dense_weight * (dense @ directions)
    return score


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
        return self.turns(part, 0, 1)

    def turns(self, part: Part, turn: int, of: int) -> Iterator[Batch]:
        """Chunks number ``turn``, ``own + of``, ... of one part; the others are not drawn."""
        return (batch for batch, _ in self.chunks_with_truth(part, turn, of))

    def left_out(self, part: Part) -> tuple[int, int, int | None]:
        """Nothing is bad here."""
        return 0, 0, None

    def note_left_out(self, part: Part, skipped: int, outside: int, row: int | None) -> None:
        """Nothing is bad here."""

    def chunks_with_truth(
        self, part: Part, turn: int = 0, of: int = 1
    ) -> Iterator[tuple[Batch, np.ndarray]]:
        """Samples, and float64 [B] the true probability of a click of each."""
        left = self.train_rows if part == "train" else self.test_rows
        bias, factor = _line_of(self.recipe)
        for number in count(turn, of):
            rows = CHUNK_ROWS if left is None else min(CHUNK_ROWS, left - number * CHUNK_ROWS)
            if rows <= 0:
                return
            features, score, uniform = self._draw(part, number)
            probability = _sigmoid(bias + factor * score)
            labels = (uniform < probability).astype(np.float32)[:, None]
            yield Batch(*features, labels).rows(0, rows), probability[:rows]

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


@cache  # it takes longer than a chunk, and a process opens a stream several times
def _line_of(recipe: Recipe) -> tuple[float, float]:
    """Bias and factor that turn a raw score into a logit of the wanted rate and deviation."""
    source = SyntheticSource(recipe=recipe)
    score = np.concatenate(
        [source._draw("calibration", k)[1] for k in range(CALIBRATION_ROWS // CHUNK_ROWS)]
    )
    factor = recipe.gain / score.std()
    low = -40.0
    high = 40.0
    scaled = factor * (score - score.mean())
    for _ in range(50):
        middle = (low + high) / 2
        above = _sigmoid(scaled + middle).mean() > recipe.click_rate
        low, high = (low, middle) if above else (middle, high)
    return float(low - factor * score.mean()), float(factor)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return cast(np.ndarray, 1.0 / (1.0 + np.exp(-x)))
