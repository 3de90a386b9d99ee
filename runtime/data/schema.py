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
    fill: float | None = None
    """Of a numeric column: the value of an absent entry; None makes an absent entry a bad row."""
    max_id: int | None = None
    """Of a categorical column: values must be whole numbers from 0 to this; None: any value."""
    modulo: int | None = None
    """Of a categorical column of whole numbers: keep the remainder (yymmddhh -> hour with 100)."""
    table: str = "rows"
    """The table that holds the rows; columns may share one (and then share ids, see `group`)."""
    group: str | None = None
    """Columns of one group share ids and rows (sender and receiver, player A and player B)."""
    with_column: str | None = None
    """Of a categorical column: a second column whose value is joined to this one's."""

    def __post_init__(self) -> None:
        for name in ("max_length", "buckets_per_e", "max_id", "modulo"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} of column {self.name} must be > 0, got {value}")
        for name in ("max_id", "modulo", "with_column"):
            if getattr(self, name) is not None and self.kind != "categorical":
                raise ValueError(
                    f"{name} is for categorical columns, column {self.name} is {self.kind}"
                )
        if self.fill is not None and self.kind != "numeric":
            raise ValueError(f"fill is for numeric columns, column {self.name} is {self.kind}")
        if self.pooling == "sequence":
            raise ValueError(f"column {self.name}: write kind='sequence', not pooling='sequence'")


def named(names: str) -> tuple[Column, ...]:
    """Categorical columns by their names, which blanks separate."""
    return tuple(Column(name=name) for name in names.split())


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

    def __str__(self) -> str:
        """The split in words.

        >>> print(Split(column="date", test_from=20220505, validation_fraction=0.1))
        train date < 20220505, test the others; validation: the last 0.1 of train
        """
        if isinstance(self.test_from, str):
            words = f"test {self.column} == {self.test_from}, train the others"
        elif self.test_from is not None:
            words = f"train {self.column} < {self.test_from}, test the others"
        elif self.random_seed is not None:
            words = f"test a random {self.test_fraction} of the rows, seed {self.random_seed}"
        else:
            words = f"test the last {self.test_fraction} of the rows"
        if self.validation_fraction:
            words += f"; validation: the last {self.validation_fraction} of train"
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A small table whose columns are added to the rows of the main file; it is held in memory."""

    file: str
    left: str
    """Key column of the main file."""
    right: str
    """Key column of the small table, one row a key. A row without a match gets "no value"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A data set: which files, which columns, which labels, which split."""

    name: str
    columns: tuple[Column, ...]
    labels: tuple[str, ...] = ("label",)
    """Columns of 0 and 1, one task each."""
    tasks: tuple[str, ...] | None = None
    """Names of the tasks, when the label columns should not give them."""
    split: Split
    file: str = "data.parquet"
    """The main file: parquet when it ends in .parquet, else delimited text (also .gz)."""
    folder: str | None = None
    """Folder of the files below the data directory; None: the name of the data set."""
    joins: tuple[Join, ...] = ()
    missing: tuple[str, ...] = ("", "?")
    """Texts that mean "no value"; a missing categorical value has an id of its own."""
    delimiter: str = ","
    """Of a text file."""
    header: tuple[str, ...] | None = None
    """Column names of a text file that has no header line."""

    def __post_init__(self) -> None:
        if len(self.layout.fields) > MAX_FIELDS:
            raise ValueError(
                f"at most {MAX_FIELDS} id columns fit, {self.name} has {len(self.layout.fields)}"
            )
        leaked = sorted(set(self.labels) & {c.name for c in self.columns})
        if leaked:
            raise ValueError(f"{self.name}: {leaked} are labels, leave them out of the columns")
        if self.tasks is not None and len(self.tasks) != len(self.labels):
            raise ValueError(f"{self.name} has {len(self.labels)} labels, got tasks {self.tasks}")
        for name in {c.group for c in self.columns if c.group is not None}:
            tables = {c.table for c in self.columns if c.group == name}
            if len(tables) > 1:
                raise ValueError(f"columns of group {name} share rows, got tables {sorted(tables)}")

    @property
    def id_columns(self) -> tuple[Column, ...]:
        """The columns that become ids, in the order of the fields."""
        return tuple(c for c in self.columns if c.kind != "numeric")

    @property
    def dense_columns(self) -> tuple[Column, ...]:
        """The columns that become dense features."""
        return tuple(c for c in self.columns if c.kind == "numeric")

    @property
    def field_numbers(self) -> tuple[int, ...]:
        """What stands in the top bits of each id column's ids; one number for a group."""
        groups = [c.group if c.group is not None else c for c in self.id_columns]
        return tuple(groups.index(group) for group in groups)

    @property
    def read_columns(self) -> tuple[str, ...]:
        """Every column that must be read, each once."""
        names = [c.name for c in self.columns]
        names += [c.with_column for c in self.columns if c.with_column is not None]
        names += self.labels
        names += [self.split.column] if self.split.column is not None else []
        return tuple(dict.fromkeys(names))

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
            tasks=self.tasks or self.labels,
        )
