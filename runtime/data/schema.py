"""The small schema that turns a table of any shape into batches, and its TOML file.

name = "mine"
file = "clicks.csv"                        # relative to this file; parquet, CSV, also .gz;
                                           # or a pattern: "day-*.parquet", day-9 before day-10
labels = ["clicked"]
regression = ["watch_s"]                   # labels that are numbers; else they are 0 and 1
optional = ["bought"]                      # labels that some rows lack: absent ones count nothing
weight = "importance"                      # how much each sample counts; may be left out
group = "user"                             # GAUC by this column of ids; may be left out
split = { column = "day", test_from = 7 }  # or test_from = 2024-05-01, a date;
                                           # or { column = "part", test_equals = "test" };
                                           # or { test_fraction = 0.2, random_seed = 1 };
                                           # or { leave_one_out = "test_only", column = "time" };
                                           # or { test_file = "test.csv",
                                           #      validation_file = "valid.csv" }
line_breaks = true                         # quoted values hold some; else leave it out
like = "other.toml"                        # whose keys stand where they are not given here

columns = [
    "user", "item",                        # categories: a name is enough
    { name = "tags", kind = "multi" },     # or a table a column: [[columns]]
]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from persia_sim.base.files import parsed
from persia_sim.base.schema import Checked, Within, check_fields, notes_of, parse
from runtime.data.batch import Field, Layout, Pooling
from runtime.data.errors import DataError, regular_file
from runtime.data.formats import Format
from runtime.data.ids import MAX_FIELDS, MISSING, VALUE_MASK
from runtime.data.split import Split

Kind = Literal["categorical", "bucket", "multi", "sequence", "numeric"]


class _OptionOf(NamedTuple):
    """An option of a column: the kinds that read it, and its default there."""

    kinds: tuple[Kind, ...]
    default: Any = None


_LIST = ("multi", "sequence")
_ONE_ID = ("categorical",)
_IDS: tuple[Kind, ...] = ("categorical", "bucket", "multi", "sequence")
_POSITIVE = Within(1, 2**63 - 1)
LARGEST_FEATURE = (2 - 2**-23) * 2.0**127
"""The largest float32, as dense features are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the source and what becomes of it.

    An option that the column's kind does not read must be left out; one that it reads has its
    default filled in.
    """

    name: str
    kind: Kind = "categorical"
    """categorical: one id. bucket: a number, one id per step of a logarithmic scale. multi: a list
    of ids, pooled. sequence: a list of ids, kept in order. numeric: a dense feature."""
    separator: Annotated[str | None, _OptionOf(_LIST, ",")] = None
    """What stands between the ids of a multi or sequence column that are stored as text. Default
    ","."""
    pooling: Annotated[Pooling | None, _OptionOf(("multi",), "sum")] = None
    """How the rows of a multi column are pooled: sum (default), mean or sqrtn."""
    max_length: Annotated[int | None, Within(1, 10_000), _OptionOf(("sequence",), 10)] = None
    """How many ids of a sequence column are kept, the last ones of the list (the newest, where a
    history is written in the order of time). 1 to 10,000, default 10."""
    buckets_per_e: Annotated[float | None, Within(0.01, 1e6), _OptionOf(("bucket",), 3.0)] = None
    """Buckets of a bucket column for each factor e: the id is sign(x) * floor(buckets_per_e *
    ln(1 + abs(x))). Default 3."""
    log: Annotated[bool | None, _OptionOf(("numeric",), True)] = None
    """Whether a numeric column's feature is sign(x) * ln(1 + abs(x)) (default), else x."""
    fill: Annotated[float | None, _OptionOf(("numeric",))] = None
    """What an absent entry of a numeric column becomes (before ``log``); None makes an absent
    entry a bad row."""
    modulo: Annotated[int | None, _POSITIVE, _OptionOf(_ONE_ID)] = None
    """Keep the remainder of a categorical column's whole numbers (yymmddhh -> hour with 100)."""
    table: Annotated[str | None, _OptionOf(_IDS, "rows")] = None
    """The table that holds the rows of a column of ids; columns may share one (and then share
    ids, see `group`). Default "rows"."""
    group: Annotated[str | None, _OptionOf(_IDS)] = None
    """Columns of one group share ids and rows (sender and receiver, player A and player B)."""
    with_column: Annotated[str | None, _OptionOf(_ONE_ID)] = None
    """A second column whose value is joined to that of this categorical column."""

    def __post_init__(self) -> None:
        # The value of each option, before who reads it.
        if self.pooling == "sequence":
            raise ValueError(f"column {self.name}: write kind='sequence', not pooling='sequence'")
        try:
            check_fields(self)
        except ValueError as error:
            raise ValueError(f"column {self.name!r}: {error}") from error

        # Options of other kinds are refused, those of this kind have their defaults.
        for option, (kinds, default) in notes_of(Column, _OptionOf).items():
            value = getattr(self, option)
            if self.kind in kinds and value is None:
                object.__setattr__(self, option, default)
            elif self.kind not in kinds and value is not None:
                raise ValueError(
                    f"{option} is for columns of kind {' or '.join(kinds)}, column {self.name} is"
                    f" {self.kind}: remove {option} = {value!r}, or change the kind"
                )

        # What must hold between two options.
        if self.fill is not None:
            filled = math.log1p(abs(self.fill)) if self.log else abs(self.fill)
            if not filled <= LARGEST_FEATURE:
                raise ValueError(
                    f"fill of column {self.name} must be a finite number that float32 can hold,"
                    f" got {self.fill}"
                )
        for option in ("separator", "table"):
            if getattr(self, option) == "":
                raise ValueError(f"{option} of column {self.name} is empty; give it a text")
        if self.with_column == self.name:
            raise ValueError(f"with_column of column {self.name} is the column itself; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Checked):
    """A small table whose columns are added to the rows of the main file; it is held in memory."""

    file: str
    left: str
    """Key column of the main file."""
    right: str
    """Key column of the small table, one row a key. A row without a match gets "no value"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnItems(Checked):
    """Samples with drawn items beside each training sample; they train in the same update, and do
    not count in ``batch``, ``steps`` and ``rows``."""

    items: str
    """A table with a row an item and its columns of the schema, the item's own first."""
    count: Annotated[int, Within(1, 1000)] = 1
    """How many are drawn beside each sample, uniformly and never its own item, by the run's seed:
    others each time that it is read. Their labels are 0."""


UNGUESSED = "?"
"""What stands for the name of a label that nobody could guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A data set: which files, which columns, which labels, which split."""

    name: str
    columns: tuple[Column, ...]
    labels: tuple[str, ...] = ("label",)
    """Columns of 0 and 1, one task each; both values in both parts. See `regression`."""
    regression: tuple[str, ...] | None = None
    """Labels that are numbers, such as a time: learned by their squared error."""
    optional: tuple[str, ...] | None = None
    """Labels that some rows lack, as the sale of what was not clicked: an absent one (see
    `missing`) counts nothing, neither in the loss nor in the scores."""
    weight: str | None = None
    """A column of numbers >= 0: what each sample counts in the loss and in the scores."""
    tasks: tuple[str, ...] | None = None
    """Names of the tasks, when the label columns should not give them."""
    split: Split
    file: str = "data.parquet"
    """The main file: parquet when it ends in .parquet, else delimited text (also .gz). Or its URL,
    as s3://bucket/clicks.parquet, which is copied into the user's cache."""
    folder: str | None = None
    """Folder of the files below the data directory; None: the name of the data set."""
    group: str | None = None
    """The column whose values group the samples for GAUC, such as the user or the query, one of
    `columns` or not: a score of the test part, nothing that is learned. (A column's own `group` is
    rows that columns share.)"""
    joins: tuple[Join, ...] = ()
    negatives: DrawnItems | None = None
    """Items that are drawn for training as if they had been shown and not clicked; then a label may
    be 1 in all rows."""
    missing: tuple[str, ...] = ("", "?")
    """Texts that mean "no value", as do the numbers that they write ("-1"); a missing categorical
    value has an id of its own."""
    delimiter: str | None = None
    """What stands between the values of text files: one ASCII character. Default ","."""
    header: tuple[str, ...] | None = None
    """Column names of a text file that has no header line."""
    line_breaks: bool = False
    """Whether quoted values of text files may hold line breaks. Else a quote that is left open
    at the end of its line is a bad row, because it would swallow those behind it."""
    format: Format | None = None
    """Format of text files that another library writes: recbole (atomic files) or libsvm;
    see `runtime.data.formats` for the names of their columns."""
    quotes: bool | None = None
    """Whether quotes enclose values in text files. Default true; false where a quote is a
    character like any other, as in titles between tabs."""
    md5: tuple[str, ...] = ()
    """Checksums of the files of samples, in the order train, validation, test: other files are
    refused, being another split. None: any will do."""

    def __post_init__(self) -> None:
        check_fields(self)
        for mistake in chain(self._of_names(), self._of_columns(), self._of_text()):
            raise ValueError(mistake)

    def _of_names(self) -> Iterator[str]:
        """No label is a feature, decides the split, or stands there twice."""
        # Names are there, and different.
        for key in ("name", "file"):
            if not getattr(self, key):
                yield f"{key} is empty; give it a text"
        if not self.labels:
            yield "labels is empty; name a column of 0 and 1 for each task"
        if UNGUESSED in self.labels:
            yield (
                f"labels holds {UNGUESSED!r}, as `data schema` writes where no column holds 0 and"
                " 1; name the column that is learned, in regression, too, if it holds other numbers"
            )
        for key in ("labels", "regression", "optional", "tasks"):
            if doubled := _doubled(getattr(self, key) or ()):
                yield f"{key} must be different, got {doubled[0]!r} twice"
        if self.tasks is not None and len(self.tasks) != len(self.labels):
            yield (
                f"{self.name} has {len(self.labels)} labels and {len(self.tasks)} tasks: name one"
                " task a label, or leave tasks out"
            )

        if self.negatives is not None and self.regression:
            yield "negatives have labels of 0, and regression names numbers; leave out one"

        # What is said of labels is said of labels.
        for key in ("regression", "optional"):
            if strange := sorted(set(getattr(self, key) or ()) - set(self.labels)):
                yield f"{key} names {strange[0]!r}, which is no label; add it to labels"

        # An answer among the questions is the worst mistake of all: the model would read it.
        read = {c.name for c in self.columns} | {c.with_column for c in self.columns}
        if leaked := sorted(set(self.labels) & read):
            yield f"{self.name}: {leaked} are labels, leave them out of the columns"
        if self.weight is not None and self.weight in read | set(self.labels):
            yield f"weight {self.weight!r} is a column or a label, too; leave it out there"
        if self.split.column in self.labels:
            yield (
                f"split by column {self.split.column!r}, which is a label: each part would hold"
                " one class; split by another column, or with test_fraction"
            )
        if self.split.test_equals in self.missing:
            yield (
                f"test_equals = {self.split.test_equals!r} is one of the texts that mean"
                f" 'no value' ({self.missing}); take it out of missing"
            )

        # A checksum that can be none.
        for md5 in self.md5:
            if len(md5) != 32 or set(md5) - set("0123456789abcdef"):
                yield f"md5 must be texts of 32 small hexadecimal digits, got {md5!r}"

    def _of_columns(self) -> Iterator[str]:
        """Some are ids; a group of columns has two or more, in one table; a sample has one."""
        # The testbed is about rows: a model without ids has none.
        if not self.id_columns:
            yield (
                f"columns has {len(self.columns)} of numbers and none of ids, and a model has one"
                " at least: add a categorical, bucket, multi or sequence column"
            )

        # Scores by group need one group a sample.
        lists = [c.name for c in self.columns if c.kind in ("multi", "sequence")]
        if self.group in (*lists, *self.judging_columns):
            yield (
                f"group must be a column of one value a sample and no label, got {self.group!r}; it"
                " need not be one of columns"
            )
        by_groups = {"by_group": self.split.by_group, "leave_one_out": self.split.leave_one_out}
        for key in (key for key, given in by_groups.items() if given and self.group is None):
            yield f"{key} splits by the schema's group, and there is none: name it"
        if len(self.layout.fields) > MAX_FIELDS:  # which refuses two columns of one name, too
            yield f"at most {MAX_FIELDS} id columns fit, {self.name} has {len(self.id_columns)}"

        # A group shares its rows, so it is of several columns of one table.
        for name in dict.fromkeys(c.group for c in self.columns if c.group is not None):
            members = [c for c in self.columns if c.group == name]
            tables = sorted({str(c.table) for c in members})
            if len(tables) > 1:
                yield f"columns of group {name} share rows, got tables {tables}"
            if len(members) == 1:
                yield (
                    f"group {name} has one column, {members[0].name}: a group is shared by two or"
                    " more; correct its name, or remove it"
                )

    def _of_text(self) -> Iterator[str]:
        """``delimiter`` and ``header`` are of text files, and can be read as such."""
        # Of parquet, which says all this itself.
        if all(is_parquet(file) for file in (self.file, *(join.file for join in self.joins))):
            if self.delimiter is not None:
                yield "delimiter is for text files, parquet has none; remove it"
            if self.line_breaks:
                yield "line_breaks is for text files, parquet has no lines; remove it"
            if self.quotes is not None:
                yield "quotes is for text files, parquet encloses no value; remove it"
            if self.format is not None:
                yield f"format {self.format} is for text files; remove it"
        if self.format is not None:
            of_text = ("delimiter", "header", "quotes")
            given = [key for key in of_text if getattr(self, key) is not None]
            if given or self.line_breaks:
                key = given[0] if given else "line_breaks"
                yield f"{key} is of delimited text, and format is {self.format}; remove it"
            if self.format != "recbole" and self.joins:
                yield f"joins need columns with keys, which {self.format} has not; remove them"
        if self.line_breaks and self.quotes is False:
            yield "line_breaks are inside quotes, and quotes is false; remove one of them"

        # The delimiter must be one that pyarrow can look for.
        mark = "," if self.delimiter is None else self.delimiter
        if len(mark) != 1 or not mark.isascii() or mark in '"\r\n\0':
            yield f"delimiter must be one ASCII character, no quote and no line end, got {mark!r}"
        if self.header is not None and is_parquet(self.file):
            yield "header is for text files, parquet has its own names; remove it"
        elif self.header is not None and (not self.header or _doubled(self.header)):
            names = f"{_doubled(self.header)[0]!r} twice" if self.header else "none"
            yield f"header must name each column differently, got {names}"

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
    def feature_columns(self) -> tuple[str, ...]:
        """Every column that a model reads, each once."""
        joined = (c.with_column for c in self.columns if c.with_column is not None)
        return tuple(dict.fromkeys((*(c.name for c in self.columns), *joined)))

    @property
    def read_columns(self) -> tuple[str, ...]:
        """Every column that must be read, each once."""
        group = () if self.group is None else (self.group,)
        return tuple(dict.fromkeys((*self.feature_columns, *self.placing_columns, *group)))

    @property
    def group_column(self) -> Column | None:
        """The column of groups where it is no feature that is an id."""
        if self.group is None or self.group in [c.name for c in self.id_columns]:
            return None
        return Column(name=self.group)

    @property
    def judging_columns(self) -> tuple[str, ...]:
        """What `Batch.labels` holds: the labels, and behind them the weight."""
        return self.labels if self.weight is None else (*self.labels, self.weight)

    @property
    def placing_columns(self) -> tuple[str, ...]:
        """The labels and the weight, and the column that decides the split."""
        by_group = self.split.by_group or self.split.leave_one_out
        decides = (self.split.column, self.group if by_group else None)
        return (*self.judging_columns, *(name for name in decides if name is not None))

    def _tasks_of(self, labels: tuple[str, ...] | None) -> tuple[str, ...]:
        """The names of these labels' tasks, in the order of the tasks."""
        pairs = zip(self.tasks or self.labels, self.labels, strict=False)
        return tuple(task for task, label in pairs if label in (labels or ()))

    @property
    def layout(self) -> Layout:
        """What the model and the store see."""
        # Fields by name, pooling and table; then what is no id.
        return Layout(
            fields=tuple(
                Field(
                    name=c.name,
                    pooling="sequence" if c.kind == "sequence" else c.pooling or "sum",
                    max_length=c.max_length or 1,
                    table=c.table or "rows",
                )
                for c in self.id_columns
            ),
            dense=tuple(c.name for c in self.dense_columns),
            tasks=self.tasks or self.labels,
            regression=self._tasks_of(self.regression),
            optional=self._tasks_of(self.optional),
            weighted=self.weight is not None,
            group=self.group,
            absent_group=None if self.group is None else int(MISSING & VALUE_MASK),
        )


def _doubled(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def is_parquet(name: str) -> bool:
    """Whether a file's name says parquet; else it is delimited text."""
    return name.endswith((".parquet", ".pq"))


DECIDES_NOTHING = {
    "name": "how results call the data",
    "folder": "where files lie, whose bytes are summed",
    "md5": "which bytes files must have, which are summed",
}
"""Keys of a schema that change no sample, and why."""


def document(schema: Schema) -> dict[str, Any]:
    """Every key that decides what the files mean, as plain JSON without those that are None; a key
    that is added to a schema is one of them.

    >>> columns = (Column(name="a"),)
    >>> found = document(Schema(name="mine", columns=columns, split=Split(test_fraction=0.5)))
    >>> found["columns"], found["split"]["test_fraction"]
    ([{'name': 'a', 'kind': 'categorical', 'table': 'rows'}], 0.5)
    """
    content: dict[str, Any] = _plain(asdict(schema))
    return {key: value for key, value in content.items() if key not in DECIDES_NOTHING}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value


LARGEST_SCHEMA_BYTES = 1 << 20
"""A thousand columns take a tenth of it; whatever is larger is no schema."""


def read_schema(path: Path) -> tuple[Schema, Path]:
    """The schema, and the folder its data files are relative to."""
    try:
        keys = schema_keys(path)
        if "folder" in keys:
            raise ValueError(
                f"{path}: folder is not read in a schema file: file is relative to its place"
            )
        return parse(Schema, keys, str(path)), path.parent
    except ValueError as error:
        raise DataError(str(error)) from error


def schema_keys(path: Path, *, likes: bool = True) -> dict[str, Any]:
    """What a schema file says, and what that one says which it is ``like``, unless it says so
    itself; ValueError for what cannot be read."""
    try:
        # A schema is small: who names the data in its place is told so.
        size_bytes = regular_file(path).st_size
    except DataError as error:
        raise DataError(f"cannot read the schema {path}: {error}") from error
    if size_bytes > LARGEST_SCHEMA_BYTES:
        raise DataError(
            f"{path} has {size_bytes:,} bytes, a schema at most {LARGEST_SCHEMA_BYTES:,}:"
            " is it the data itself? Name the schema that describes it"
        )

    # Short forms, then what it takes over from the one that it is like.
    keys: dict[str, Any] = parsed(path.read_bytes(), path, toml=True)
    if isinstance(columns := keys.get("columns"), list):  # a name is enough
        keys["columns"] = [{"name": c} if isinstance(c, str) else c for c in columns]
    if "like" not in keys:
        return keys
    other = keys.pop("like")
    if not likes or not isinstance(other, str):
        raise DataError(
            f"{path}: like must be the name of a schema file that is like no other, got {other!r}"
        )
    return schema_keys(path.parent / other, likes=False) | keys
