"""The small schema that turns a table of any shape into batches."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.data.batch import Field, Layout
from runtime.data.column import Column
from runtime.data.ids import MAX_FIELDS
from runtime.data.split import Split
from runtime.data.table import is_parquet
from runtime.data.typed import check_types

__all__ = ["Column", "Join", "Schema", "Split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A small table whose columns are added to the rows of the main file; it is held in memory."""

    file: str
    left: str
    """Key column of the main file."""
    right: str
    """Key column of the small table, one row a key. A row without a match gets "no value"."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A data set: which files, which columns, which labels, which split."""

    name: str
    columns: tuple[Column, ...]
    labels: tuple[str, ...] = ("label",)
    """Columns of 0 and 1, one task each; both values in both parts."""
    tasks: tuple[str, ...] | None = None
    """Names of the tasks, when the label columns should not give them."""
    split: Split
    file: str = "data.parquet"
    """The main file: parquet when it ends in .parquet, else delimited text (also .gz)."""
    folder: str | None = None
    """Folder of the files below the data directory; None: the name of the data set."""
    group: str | None = None
    """The column of ids whose values group the samples for GAUC, such as the user's: a score of the
    test part, nothing that is learned. (A column's own `group` is rows that columns share.)"""
    joins: tuple[Join, ...] = ()
    missing: tuple[str, ...] = ("", "?")
    """Texts that mean "no value"; a missing categorical value has an id of its own."""
    delimiter: str | None = None
    """Of text files: one ASCII character. Default ","."""
    header: tuple[str, ...] | None = None
    """Column names of a text file that has no header line."""
    line_breaks: bool = False
    """Of text files: quoted values may hold line breaks. Else a quote that is left open at the end
    of its line is a bad row, because it would swallow those behind it."""
    md5: tuple[str, ...] = ()
    """Checksums of the files of samples, in the order train, validation, test: other files are
    refused, being another split. None: any will do."""

    def __post_init__(self) -> None:
        check_types(self)
        for key in ("name", "file"):
            if not getattr(self, key):
                raise ValueError(f"{key} is empty; give it a text")
        if not self.labels:
            raise ValueError("labels is empty; name a column of 0 and 1 for each task")
        if not self.id_columns:
            raise ValueError(
                f"columns has {len(self.columns)} of numbers and none of ids, and a model has one"
                " at least: add a categorical, bucket, multi or sequence column"
            )
        self._check_group()
        if wrong := [
            sum for sum in self.md5 if len(sum) != 32 or set(sum) - set("0123456789abcdef")
        ]:
            raise ValueError(f"md5 must be texts of 32 small hexadecimal digits, got {wrong[0]!r}")
        if len(self.layout.fields) > MAX_FIELDS:
            raise ValueError(
                f"at most {MAX_FIELDS} id columns fit, {self.name} has {len(self.layout.fields)}"
            )
        self._check_labels()
        self._check_text_options()
        self._check_groups()

    def _check_labels(self) -> None:
        """No label is a feature, decides the split, or stands there twice."""
        for key in ("labels", "tasks"):
            names = getattr(self, key) or ()
            doubled = sorted({name for name in names if names.count(name) > 1})
            if doubled:
                raise ValueError(f"{key} must be different, got {doubled[0]!r} twice")
        if self.tasks is not None and len(self.tasks) != len(self.labels):
            raise ValueError(
                f"{self.name} has {len(self.labels)} labels and {len(self.tasks)} tasks: name one"
                " task a label, or leave tasks out"
            )
        read = {c.name for c in self.columns} | {c.with_column for c in self.columns}
        leaked = sorted(set(self.labels) & read)
        if leaked:
            raise ValueError(f"{self.name}: {leaked} are labels, leave them out of the columns")
        if self.split.column in self.labels:
            raise ValueError(
                f"split by column {self.split.column!r}, which is a label: each part would hold"
                " one class; split by another column, or with test_fraction"
            )
        if self.split.test_equals in self.missing:
            raise ValueError(
                f"test_equals = {self.split.test_equals!r} is one of the texts that mean"
                f" 'no value' ({self.missing}); take it out of missing"
            )

    def _check_text_options(self) -> None:
        """``delimiter`` and ``header`` are of text files, and can be read as such."""
        files = [self.file, *(join.file for join in self.joins)]
        if self.delimiter is not None and all(is_parquet(file) for file in files):
            raise ValueError("delimiter is for text files, parquet has none; remove it")
        if self.line_breaks and all(is_parquet(file) for file in files):
            raise ValueError("line_breaks is for text files, parquet has no lines; remove it")
        delimiter = "," if self.delimiter is None else self.delimiter
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0':
            raise ValueError(
                f"delimiter must be one ASCII character, no quote and no line end,"
                f" got {delimiter!r}"
            )
        if self.header is None:
            return
        if is_parquet(self.file):
            raise ValueError("header is for text files, parquet has its own names; remove it")
        doubled = sorted({name for name in self.header if self.header.count(name) > 1})
        if doubled or not self.header:
            found = f"{doubled[0]!r} twice" if doubled else "none"
            raise ValueError(f"header must name each column differently, got {found}")

    def _check_groups(self) -> None:
        """A group has two columns or more, in one table."""
        for name in {c.group for c in self.columns if c.group is not None}:
            members = [c for c in self.columns if c.group == name]
            tables = {c.table for c in members}
            if len(tables) > 1:
                raise ValueError(
                    f"columns of group {name} share rows, got tables {sorted(map(str, tables))}"
                )
            if len(members) == 1:
                raise ValueError(
                    f"group {name} has one column, {members[0].name}: a group is shared by two or"
                    " more; correct its name, or remove it"
                )

    def _check_group(self) -> None:
        """The group of a sample is one id that it has anyway."""
        single = [c.name for c in self.columns if c.kind in ("categorical", "bucket")]
        if self.group is not None and self.group not in single:
            raise ValueError(
                f"group must be a column of one id a sample (categorical or bucket), got"
                f" {self.group!r}; {self.name} has {', '.join(single) or 'none'}"
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
                    pooling="sequence" if c.kind == "sequence" else c.pooling or "sum",
                    max_length=c.max_length or 1,
                    table=c.table or "rows",
                )
                for c in self.id_columns
            ),
            dense=tuple(c.name for c in self.dense_columns),
            tasks=self.tasks or self.labels,
            group=self.group,
        )
