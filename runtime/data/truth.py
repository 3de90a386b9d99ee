"""The planted truth: what a click depends on, as a pure function of (seed, field, id).

Nothing is stored for an id, so there may be 10**13 of them. The logit of a sample is

    bias + gain * (sum of field effects + sum of pair effects + sum of dense effects)

An id's effect is uniform with mean 0 and variance 1. The effect of a pair of fields is the product
of one sign of each id: over ids of equal popularity it averages out, so a linear model sees little
of it.

Shape letters: B samples, F fields, N ids, D dense features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtime.data.ids import mix64

LARGEST_GAIN = 10.0
"""Standard deviation of a logit; beyond it a click is certain or impossible."""
LARGEST_EXPONENT = 10.0
"""Of a Zipf law; with it all but a thousandth of the draws are the first id."""
_ROOT12 = np.sqrt(12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticField:
    """One id field of the stream."""

    name: str
    values: int
    """Distinct ids."""
    exponent: float = 1.1
    """Of the Zipf law of popularity."""
    weight: float = 1.0
    """Of the field's effects in the logit, before normalisation; the mean over a bag."""
    max_length: int = 1
    """A bag holds 1 to this many ids, each length equally likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
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
    dense: int = 0
    """Number of dense features, standard normal."""
    dense_weight: float = 0.5
    """Of each dense feature in the logit."""
    click_rate: float = 0.25
    """Mean of the label."""
    gain: float = 1.2
    """Standard deviation of the logit: it fixes the best reachable AUC."""
    seed: int = 1
    source: str = "unset"
    """Where the numbers come from, and which of them are assumed."""

    def __post_init__(self) -> None:
        if not 0 < self.click_rate < 1:
            raise ValueError(f"click_rate must be in (0, 1), got {self.click_rate}")
        if not 0 < self.gain <= LARGEST_GAIN:
            raise ValueError(f"gain must be > 0 and at most {LARGEST_GAIN:g}, got {self.gain}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be 0 to 2**63 - 1, got {self.seed}")
        if self.dense < 0 or not self.fields:
            raise ValueError(f"a recipe needs fields and dense >= 0, got dense {self.dense}")
        names = {f.name for f in self.fields}
        for pair in self.pairs:
            unknown = {pair.first, pair.second} - names
            if unknown:
                raise ValueError(f"pair of unknown fields {sorted(unknown)}; known: {names}")
        weights = [f.weight for f in self.fields] + [p.weight for p in self.pairs]
        if not np.isfinite([*weights, self.dense_weight]).all():
            raise ValueError(f"weights must be finite, got {weights} and {self.dense_weight}")
        for field in self.fields:
            if not 0 <= field.exponent <= LARGEST_EXPONENT:
                raise ValueError(
                    f"field {field.name}: exponent must be 0 to {LARGEST_EXPONENT:g},"
                    f" got {field.exponent}"
                )
            if not 1 <= field.values < 2**53 or field.max_length < 1:
                raise ValueError(
                    f"field {field.name}: values must be 1 to 2**53 and max_length >= 1, "
                    f"got {field.values} and {field.max_length}"
                )

    @property
    def distinct_ids(self) -> int:
        """Over all fields."""
        return sum(f.values for f in self.fields)


def raw_score(
    recipe: Recipe, ids: list[np.ndarray], lengths: list[np.ndarray | None], dense: np.ndarray
) -> np.ndarray:
    """float64 [B] sums of effects, not yet normalised; ``ids`` [N] of each field carry its tag."""
    score = np.full(len(dense), 0.0)
    signs: dict[str, np.ndarray] = {}
    paired = {name for pair in recipe.pairs for name in (pair.first, pair.second)}
    for field, field_ids, field_lengths in zip(recipe.fields, ids, lengths, strict=True):
        hashes = mix64(field_ids ^ np.uint64(_key(recipe.seed)))
        effects = _effect(hashes)
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


def _key(seed: int) -> int:
    return int(mix64(np.array([seed], np.uint64))[0])


def _effect(hashes: np.ndarray) -> np.ndarray:
    """Uniform numbers with mean 0 and variance 1 from the top 53 bits."""
    effects: np.ndarray = ((hashes >> np.uint64(11)) * 2.0**-53 - 0.5) * _ROOT12
    return effects
