"""One batch of samples, and the layout that says what its columns are; columns become batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self, cast

import numpy as np

from persia_sim.base.schema import Checked, Positive

Pooling = Literal["sum", "mean", "sqrtn", "sequence"]
"""How the rows of one field become its vector: their sum, mean, sum / sqrt(n), or the raw rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field(Checked):
    """One id field of a sample (a "slot" of the original)."""

    name: str
    pooling: Pooling = "sum"
    max_length: Positive = 1
    """Places L of a sequence; of a longer bag the first L are seen (a reader of files has cut it
    to its newest ids before). Only for ``pooling="sequence"``."""
    table: str = "rows"
    """The table that holds the field's rows; fields may share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a model and a store must know of a data set before they see any of it."""

    fields: tuple[Field, ...]
    dense: tuple[str, ...] = ()
    """Names of the numeric features."""
    tasks: tuple[str, ...] = ("label",)
    """Names of the behaviours to predict; one logit and one label each."""
    regression: tuple[str, ...] = ()
    """Tasks whose label is any number; the logit is the prediction."""
    optional: tuple[str, ...] = ()
    """Tasks that some samples have no label of."""
    weighted: bool = False
    """Whether a sample's weight stands behind its labels."""
    group: str | None = None
    """What groups the samples for GAUC, one a sample: a field, whose ids do (a user), or a column
    that is no feature (a query), of which `Batch.groups` has them."""
    absent_group: int | None = None
    """The low 56 bits of the id of `group` in a sample that has none: it is in no group."""

    def __post_init__(self) -> None:
        if not self.fields or not self.tasks:
            raise ValueError("a data set needs at least one id field and one task")
        names = [f.name for f in self.fields] + list(self.dense)
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"fields must have different names, got {doubled} twice")

    def groups(self, batch: Batch) -> np.ndarray | None:
        """uint64 [B], the id of ``group`` of each sample; None where samples have no group."""
        names = [field.name for field in self.fields]
        if self.group not in names:
            return None if self.group is None else batch.groups
        return batch.of_field(names.index(self.group), f"group {self.group}")


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as arrays; a *bag* is the ids of one field of one sample.

    Shape letters: B samples, F fields, N ids, D dense features, T tasks.
    """

    ids: np.ndarray
    """uint64 [N], sorted by (sample, field), in the order of the source within a bag."""
    offsets: np.ndarray | None
    """int64 [B * F + 1], where each bag starts; None when every bag holds exactly one id."""
    dense: np.ndarray
    """float32 [B, D]"""
    labels: np.ndarray
    """float32 [B, T], 0 or 1, of a regression any number, NaN for none of an optional task;
    [B, T + 1] with the samples' weights."""
    groups: np.ndarray | None = None
    """uint64 [B], the id of each sample's group where that is no field."""
    size: int = field(init=False)
    """B, the number of samples."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.labels))

    def refuse_unlike(self, layout: Layout) -> None:
        """Raise ValueError unless these can be samples of the layout, by types and shapes of the
        arrays; what somebody else has written is not read before."""
        columns = len(layout.tasks) + layout.weighted
        bags = self.size * len(layout.fields)
        expected = {
            "dense": (np.float32, (self.size, len(layout.dense))),
            "labels": (np.float32, (self.size, columns)),
            "ids": (np.uint64, (bags if self.offsets is None else self.ids.size,)),
            "offsets": (np.int64, (bags + 1,)),
            "groups": (np.uint64, (self.size,)),
        }
        for name, array in self.named().items():
            dtype, shape = expected[name]
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, not {dtype} {shape}")
        if self.offsets is not None:
            ends = self.offsets[0], self.offsets[-1]
            if ends != (0, len(self.ids)) or (np.diff(self.offsets) < 0).any():
                raise ValueError(f"offsets do not rise from 0 to {len(self.ids)} ids")

    def rows(self, start: int, stop: int) -> Self:
        """Samples ``start`` to ``stop`` (not included)."""
        fields = self._fields()
        if self.offsets is None:
            ids = self.ids[start * fields : stop * fields]
            offsets = None
        else:
            bounds = self.offsets[start * fields : stop * fields + 1]
            ids = self.ids[bounds[0] : bounds[-1]]
            offsets = bounds - bounds[0]
        groups = None if self.groups is None else self.groups[start:stop]
        return type(self)(ids, offsets, self.dense[start:stop], self.labels[start:stop], groups)

    def take(self, order: np.ndarray) -> Self:
        """Samples in another order (a permutation or a choice of sample numbers)."""
        fields = self._fields()
        ids, offsets = self._bags((order[:, None] * fields + np.arange(fields)).ravel())
        groups = None if self.groups is None else self.groups[order]
        return type(self)(ids, offsets, self.dense[order], self.labels[order], groups)

    def with_columns_of(self, other: Batch, fields: np.ndarray, dense: np.ndarray) -> Self:
        """These samples with some columns of others, one for one; ``fields`` bool [F] and ``dense``
        bool [D] say which. Labels and groups stay."""
        alike = replace(other, labels=self.labels, groups=self.groups)
        both = type(self).concat([self, cast(Self, alike)])
        sample = np.arange(self.size)[:, None] + self.size * fields
        ids, offsets = both._bags((sample * len(fields) + np.arange(len(fields))).ravel())
        features = np.where(dense, other.dense, self.dense)
        return type(self)(ids, offsets, features, self.labels, self.groups)

    def of_field(self, place: int, name: str = "the field") -> np.ndarray:
        """uint64 [B]: the one id that each sample has of a field; ValueError where one has another
        number of them."""
        width = self._fields()
        starts = np.arange(place, len(self.ids), width)
        if self.offsets is not None:
            starts = self.offsets[:-1][place::width]
            ends = self.offsets[1:][place::width]
            if (ends - starts != 1).any():
                raise ValueError(f"{name} must have exactly one id in every sample")
        result: np.ndarray = self.ids[starts]
        return result

    def _bags(self, bags: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The ids of these bags, in this order, and their offsets."""
        if self.offsets is None:
            return self.ids[bags], None
        lengths = self._bag_lengths()[bags]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        where = np.repeat(self.offsets[bags] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return self.ids[where], offsets

    def named(self) -> dict[str, np.ndarray]:
        """The arrays that it has, by their names."""
        names = ("ids", "offsets", "dense", "labels", "groups")
        arrays = {name: getattr(self, name) for name in names}
        return {name: array for name, array in arrays.items() if array is not None}

    def field_of_ids(self) -> np.ndarray:
        """int64 [N], the place of each id's field among those of a sample."""
        of_bags = np.tile(np.arange(self._fields()), self.size)
        return of_bags if self.offsets is None else np.repeat(of_bags, self._bag_lengths())

    def _bag_lengths(self) -> np.ndarray:
        return np.ones(len(self.ids), int) if self.offsets is None else np.diff(self.offsets)

    def _fields(self) -> int:
        bags = len(self.ids) if self.offsets is None else len(self.offsets) - 1
        return bags // self.size if self.size else 0

    @classmethod
    def concat(cls, parts: list[Self]) -> Self:
        """Several batches of the same layout as one."""
        if len(parts) == 1:
            return parts[0]
        ids = np.concatenate([p.ids for p in parts])
        dense = np.concatenate([p.dense for p in parts])
        labels = np.concatenate([p.labels for p in parts])
        grouped = [p.groups for p in parts if p.groups is not None]
        groups = np.concatenate(grouped) if grouped else None
        if all(p.offsets is None for p in parts):
            return cls(ids, None, dense, labels, groups)
        lengths = np.concatenate([p._bag_lengths() for p in parts])
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]), dense, labels, groups)


def interleave(
    ids: list[np.ndarray], lengths: list[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Sort the ids of F fields by (sample, field).

    ``ids``: uint64 [N] of each field, in sample order; ``lengths``: int64 [B], ids of each sample,
    or None when every sample has one. Returns the ids of a ``Batch`` and its offsets.
    """
    # Where every sample has one id a field, sorting is a transposition.
    lengths = [None if n is None or (n == 1).all() else n for n in lengths]
    if all(n is None for n in lengths):
        return np.stack(ids, axis=1).ravel(), None

    # Else offsets say where each (sample, field) begins, and each field writes its ids there.
    n_rows = len(ids[0]) if lengths[0] is None else len(lengths[0])
    lengths_BF = [np.ones(n_rows, np.int64) if n is None else n for n in lengths]
    offsets = np.concatenate([[0], np.cumsum(np.stack(lengths_BF, axis=1))])
    starts_BF = offsets[:-1].reshape(n_rows, len(ids))
    out = np.empty(offsets[-1], np.uint64)
    for place, (field_ids, field_lengths) in enumerate(zip(ids, lengths, strict=True)):
        where = starts_BF[:, place]
        if field_lengths is not None:
            within = np.arange(len(field_ids))
            within -= np.repeat(np.cumsum(field_lengths) - field_lengths, field_lengths)
            where = np.repeat(where, field_lengths) + within
        out[where] = field_ids
    return out, offsets
