"""The small schema that turns a table of any shape into batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.data.batch import Field, Layout, Pooling
from runtime.data.ids import MAX_FIELDS

Kind = Literal["categorical", "bucket", "multi", "sequence", "numeric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the source and what becomes of it."""

    name: str
    kind: Kind = "categorical"
    """categorical: one id. bucket: a number, one id per step of a logarithmic scale. multi: a list
    of ids, pooled. sequence: a list of ids, kept in order. numeric: a dense feature."""
    separator: str = ","
    """Between the ids of a multi or sequence column that is stored as text."""
    pooling: Pooling = "sum"
    """Of a multi column."""
    max_length: int = 10
    """Ids kept of a sequence column."""
    buckets_per_e: float = 3.0
    """Of a bucket column: the id is sign(x) * floor(buckets_per_e * ln(1 + |x|))."""
    log: bool = True
    """Of a numeric column: the feature is sign(x) * ln(1 + |x|), else x."""
    table: str = "rows"
    """The table that holds the rows; columns may share one (and then share ids, see `group`)."""
    group: str | None = None
    """Columns of one group share ids and rows (sender and receiver, player A and player B)."""
    with_column: str | None = None
    """A second column whose value is joined to this one's before hashing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which rows train and which test: by a column's value, at random, or by place."""

    column: str | None = None
    """The column that decides: rows below ``test_from`` train, the others test."""
    test_from: int | str | None = None
    """First test value of ``column`` (numbers compare as numbers); for text: the test value."""
    test_fraction: float | None = None
    """Share of the rows that test, when no column decides."""
    random_seed: int | None = None
    """With ``test_fraction``: draw rows at random (numpy default_rng(seed).random() < fraction);
    None takes the last rows of the file."""
    validation_fraction: float = 0.0
    """Share of the training rows, the last of them, kept for validation."""

    def __post_init__(self) -> None:
        by_column = self.column is not None and self.test_from is not None
        if by_column == (self.test_fraction is not None):
            raise ValueError("a split needs either column and test_from, or test_fraction")
        for name in ("test_fraction", "validation_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A data set: which files, which columns, which labels, which split."""

    name: str
    columns: tuple[Column, ...]
    labels: tuple[str, ...] = ("label",)
    """Columns of 0 and 1, one task each."""
    split: Split
    missing: tuple[str, ...] = ("", "?")
    """Texts that mean "no value"; a missing categorical value has an id of its own."""
    delimiter: str = ","
    """Of a CSV file."""
    header: tuple[str, ...] | None = None
    """Column names of a CSV file that has no header line."""

    def __post_init__(self) -> None:
        if len(self.layout.fields) > MAX_FIELDS:
            raise ValueError(
                f"at most {MAX_FIELDS} id columns fit, {self.name} has {len(self.layout.fields)}"
            )

    @property
    def id_columns(self) -> tuple[Column, ...]:
        """The columns that become ids, in the order of the fields."""
        return tuple(c for c in self.columns if c.kind != "numeric")

    @property
    def dense_columns(self) -> tuple[Column, ...]:
        """The columns that become dense features."""
        return tuple(c for c in self.columns if c.kind == "numeric")

    @property
    def layout(self) -> Layout:
        """What the model and the store see."""
        return Layout(
            fields=tuple(
                Field(
                    name=c.name,
                    pooling="sequence" if c.kind == "sequence" else c.pooling,
                    max_length=c.max_length if c.kind == "sequence" else 1,
                    table=c.table,
                )
                for c in self.id_columns
            ),
            dense=tuple(c.name for c in self.dense_columns),
            tasks=self.labels,
        )
