"""A source of batches that reads a table through a schema, chunk by chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.data.batch import Batch, Layout, interleave
from runtime.data.convert import Values, column_values, label_values
from runtime.data.errors import DataError, matching, regular_file
from runtime.data.ids import tag
from runtime.data.rows import Rows, absent_share, why_bad
from runtime.data.schema import Schema, document
from runtime.data.source import FileRows, Part, Provenance, Source, parsed_by
from runtime.data.split import CODES, UNPLACED, LeftOut, Placer, left_out
from runtime.data.table import Table, main_files, open_table


@dataclass(slots=True)
class Census:
    """Rows of each part by label; rows with a bad label, weight or split value are left out."""

    labels: tuple[str, ...]
    numbers: frozenset[str] = frozenset()
    """Labels that may be any number, so that there are no classes to count: all rows are 0."""
    optional: frozenset[str] = frozenset()
    """Labels that the test part may lack altogether."""
    counts: dict[Part, np.ndarray] = field(init=False)
    """int64 [T, 2] of each part: rows with label 0 and with label 1; rows without it are none."""
    good_rows: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(CODES, 0))
    """Rows of each part that are used, within the limit of the training part."""
    bad_rows: int = 0
    """Rows whose label or split value breaks its rule; the stream says which."""
    placed: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(CODES, 0))
    """Rows of each part, those with a bad label among them, without any limit."""
    files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Rows of each file, and those that train before a validation part or a limit takes some."""

    def __post_init__(self) -> None:
        self.counts = {part: np.zeros((len(self.labels), 2), np.int64) for part in CODES}

    def add_of_file(self, rows: Rows, codes: np.ndarray) -> None:
        """Count a chunk of a file."""
        trains = self.files.get(rows.path, (0, 0))[1]
        if rows.part in (None, "train"):
            trains += int((~np.isin(codes, (CODES["test"], UNPLACED))).sum())
        self.files[rows.path] = int(rows.numbers[-1]), trains

    def add(self, values: list[Values], codes: np.ndarray, train_rows: int | None) -> None:
        """Count a chunk: its labels, the codes of its parts, and what limits the training part."""
        good = (codes != UNPLACED) & ~np.any([v.bad for v in values], axis=0)
        self.bad_rows += int((~good).sum())
        for part, code in CODES.items():
            self.placed[part] += int((codes == code).sum())
            mine = np.flatnonzero(good & (codes == code))
            if part == "train" and train_rows is not None:
                mine = mine[: train_rows - self.good_rows[part]]
            self.good_rows[part] += len(mine)
            for place, value in enumerate(values):
                known = value.data[mine][~np.isnan(value.data[mine])]
                classes = known * (self.labels[place] not in self.numbers)
                self.counts[part][place] += np.bincount(classes.astype(int), minlength=2)

    def check(self, where: str, split: str, *, one_class: bool) -> None:
        """Raise when the train or the test part is empty, or has one class of a label, unless it
        may."""
        for part in ("train", "test"):
            if not self.good_rows[part]:
                raise _empty(part, where, self.bad_rows, split)
            for label, (zeros, ones) in zip(self.labels, self.counts[part].tolist(), strict=True):
                if not zeros and not ones and part == "test" and label in self.optional:
                    continue  # what was trained may be judged by the other labels
                if not zeros and not ones:
                    raise DataError(
                        f"{where}: no row of the {part} part has a value of label {label}\n"
                        f"  the split is: {split}; correct it, or leave the label out"
                    )
                if label not in self.numbers and (not zeros or not ones) and not one_class:
                    raise DataError(
                        f"{where}: the {part} part holds one class of column {label}: {zeros:,}"
                        f" rows of 0 and {ones:,} of 1, and a task needs both\n"
                        f"  the split is: {split}; correct it, or leave the label out"
                    )


def _empty(part: str, where: str, bad_rows: int, split: str) -> DataError:
    return DataError(
        f"{where}: the {part} part is empty ({bad_rows} bad rows skipped)\n"
        f"  the split is: {split}; correct it, or the rows"
    )


class _Read(NamedTuple):
    """What a stream of one part has left out so far."""

    skipped: int = 0
    outside: int = 0
    """Broken lines, and rows without a usable split value: of no part."""
    row: int | None = 0
    """The last row of the file that was read; None: all of them."""


@dataclass(kw_only=True)
class FileSource:
    """A data set on disk. Streams it anew for every call of ``chunks``; nothing is kept."""

    schema: Schema
    folder: Path
    """Where the schema's files lie."""
    rows: int | None = None
    """At most this many rows of the training part, the first good ones; None: all. With a
    validation part they are split into both."""
    skip_bad_rows: bool = False
    """Count bad rows and leave them out; else the first one is an error."""
    _read: dict[Part, _Read] = field(default_factory=dict)
    _census: Census | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be >= 1, got {self.rows}; None reads all of them")

    @property
    def layout(self) -> Layout:
        """Fields, dense features and tasks."""
        return self.schema.layout

    @property
    def path(self) -> Path:
        """The main file, or the pattern of its name."""
        return self.folder / self.schema.file

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The samples of one part in the file's own order."""
        self.census()
        limit = self.rows if part == "train" else None
        given = 0
        for batch in self.turns(part, 0, 1):
            if limit is not None and given + batch.size > limit:
                batch = batch.rows(0, limit - given)
            given += batch.size
            if batch.size:
                yield batch
            if given == limit:
                return
        if not given and part != "validation":
            raise _empty(part, str(self.path), self._read[part].skipped, str(self.schema.split))

    def turns(self, part: Part, turn: int, of: int) -> Iterator[Batch]:
        """Chunks number ``turn``, ``turn + of``, ... of one part, all without a limit, some perhaps
        empty: only these are converted, so that several readers can share the work."""
        # Rows that belong to no part are refused or counted, whoever has this turn.
        split = self.schema.split
        table = self._table()
        refuse = None if self.skip_bad_rows else refuse_row
        skipped = unplaced = number = 0
        for rows, codes in self.placed_rows(table=table):
            lost = np.flatnonzero(codes == UNPLACED)
            if len(lost):
                unplaced += len(lost)
                if refuse is not None:
                    refuse(rows, int(lost[0]), str(split.column), split.rule, self.schema.missing)

            # Only chunks of this turn are converted: that is the work that readers share.
            mine = np.flatnonzero(codes == CODES[part])
            batch = None
            if len(mine):
                if number % of == turn:
                    batch = batch_of(self.schema, rows.take(mine), refuse)
                    skipped += len(mine) - batch.size
                number += 1

            # How far it was read stands in the provenance, also when nobody reads on.
            last = int(rows.places[-1])
            self.note_left_out(part, skipped, unplaced + len(table.skipped), last)
            if batch is not None:
                yield batch
        self.note_left_out(part, skipped, unplaced + len(table.skipped))

    def provenance(self) -> Provenance:
        """Name, checksum and split; bad rows of what was streamed so far."""
        # What was left out so far, and how far that is known.
        census = self.census()
        words = str(self.schema.split)
        train_rows = census.placed["train"]
        outside = max((read.outside for read in self._read.values()), default=0)
        inside = {p: self._read[p] for p in CODES if p in self._read and self._read[p].skipped}
        where = []
        for part, (skipped, _, row) in inside.items():
            far = "whole file read" if row is None else f"file read up to row {row:,}"
            where.append(f"{skipped:,} of {part} ({far})")
        where += [f"{outside:,} of no part"] if outside else []

        # A run on the first rows is on other data, and says so.
        if self.schema.negatives is not None:
            drawn = self.schema.negatives
            words += f"; {drawn.count} drawn of {drawn.items} beside each that trains"
        if self.rows is not None:
            words += f"; of train the first {self.rows} samples"
            train_rows = min(train_rows, self.rows)
        return Provenance(
            name=self.schema.name,
            sha256=self.sha256,
            split=words,
            schema=document(self.schema),
            train_rows=train_rows,
            test_rows=census.placed["test"],
            rows_skipped=sum(read.skipped for read in inside.values()) + outside,
            skipped_where=", ".join(where),
            private=self.is_private,
            absent=self._absent,
            files=self._files(census),
            joined=[content_of(path) for path in self._joined_files()],
        )

    def _files(self, census: Census) -> list[FileRows]:
        """The files of samples, as those of another schema are compared with them."""
        return [
            FileRows(sha256=content_of(path), part=part, rows=rows, trains=trains)
            for path, part in main_files(self.schema, self.folder).items()
            for rows, trains in [census.files.get(path, (0, 0))]
        ]

    @property
    def main_files(self) -> tuple[Path, ...]:
        """The files of samples, in their order."""
        return tuple(main_files(self.schema, self.folder))

    def column_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The columns of the files of samples, and those of joined tables."""
        table = self._table()
        joined = (name for _, side in table.sides for name in side.column_names())
        return table.files[0].column_names(), tuple(joined)

    @property
    def is_private(self) -> bool:
        """Whether a file of it may be read by its owner alone."""
        return any(not regular_file(path).st_mode & 0o044 for path in self._all_files())

    @property
    def sha256(self) -> str:
        """Checksum of all files; where they decide the parts, of these, too."""
        sums = self.checksums()
        return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()

    def checksums(self) -> list[str]:
        """SHA-256 of the main file, or of each where there are several, then of each joined one;
        with its part, where files decide that."""
        main = main_files(self.schema, self.folder)
        known = self.schema.md5
        if known and len(known) != len(main):
            raise DataError(f"md5 of {self.schema.name} names {len(known)} files, not {len(main)}")
        for path, md5 in zip(main, known, strict=False):
            if (digest := _digest(path, "md5")) != md5:
                raise DataError(
                    f"{path} has md5 {digest}, that of {self.schema.name} is {md5}: it is other"
                    " data\n  fetch it again, or describe it by a schema of your own"
                )
        every = [(main.get(path), _digest(path, "sha256")) for path in self._all_files()]
        return [f"{part} {sha256}" if part else sha256 for part, sha256 in every]

    def census(self) -> Census:
        """Rows of each part by label, counted once; DataError where a part cannot be used."""
        if self._census is not None:
            return self._census
        schema = self.schema
        names = self.schema.judging_columns
        numbers = frozenset({*(schema.regression or ()), *names[len(schema.labels) :]})
        census = Census(names, numbers, frozenset(schema.optional or ()))
        for rows, codes in self.placed_rows(schema.placing_columns):
            values = [label_values(schema, name, rows.table.column(name)) for name in names]
            census.add(values, codes, self.rows)
            census.add_of_file(rows, codes)
        if self.skip_bad_rows or not census.bad_rows:  # else the stream says which row is bad
            one_class = schema.negatives is not None
            census.check(str(self.path), str(schema.split), one_class=one_class)
            self._census = census
        return census

    def left_out(self, part: Part) -> tuple[int, int, int | None]:
        """Bad rows of a part, rows of no part, and the last row that was read (None: all)."""
        return self._read.get(part, _Read())

    def note_left_out(self, part: Part, skipped: int, outside: int, row: int | None = None) -> None:
        """Keep what the longest stream of a part has left out; a shorter one adds nothing."""
        before = self._read.get(part)
        if before is None or row is None or (before.row is not None and row > before.row):
            self._read[part] = _Read(skipped, outside, row)

    def _all_files(self) -> list[Path]:
        return [*main_files(self.schema, self.folder), *self._joined_files()]

    def _joined_files(self) -> list[Path]:
        joined = [join.file for join in self.schema.joins]
        drawn = [] if self.schema.negatives is None else [self.schema.negatives.items]
        return [matching(self.folder, name)[0] for name in (*joined, *drawn)]

    def _table(self) -> Table:
        return open_table(self.schema, self.folder, skip_bad_rows=self.skip_bad_rows)

    def placed_rows(
        self,
        names: tuple[str, ...] | None = None,
        table: Table | None = None,
        counts: tuple[int, int] | None = None,
    ) -> Iterator[tuple[Rows, np.ndarray]]:
        """The named columns of all rows (None: all that are read), and the codes of their parts."""
        schema = self.schema
        counted = counts or self._counts
        placer = Placer(schema.split, schema.missing, *counted, schema.group, self._left_out)
        for rows in (table or self._table()).stream(names or schema.read_columns):
            yield rows, placer.place(rows)

    def placed(self, counts: tuple[int, int] | None = None) -> dict[Path, np.ndarray]:
        """File -> int8, the code of the part of each row (`split.CODES`); all in their order."""
        schema = self.schema
        names = (schema.placing_columns[-1],)  # what decides, else a label
        codes_of: dict[Path, list[np.ndarray]] = {}
        for rows, codes in self.placed_rows(names, counts=counts):
            codes_of.setdefault(rows.path, []).append(codes.astype(np.int8))
        return {path: np.concatenate(codes) for path, codes in codes_of.items()}

    @cached_property
    def _left_out(self) -> LeftOut | None:
        """The rows that the split leaves out of each group; None where it does not."""
        schema, split = self.schema, self.schema.split
        if split.leave_one_out is None or schema.group is None:
            return None
        names = (schema.group, *([] if split.column is None else [split.column]))
        return left_out(split, schema.missing, schema.group, self._table().stream(names))

    @cached_property
    def _counts(self) -> tuple[int, int]:
        """Rows, and those that train or validate, where the split needs them."""
        split = self.schema.split
        by_place = split.test_fraction is not None and split.random_seed is None
        rows = self._table().count_rows() if by_place else 0
        if not split.validation_fraction:
            return rows, 0
        others = (CODES["test"], UNPLACED)
        placed = self.placed((rows, 0)).values()
        train = sum(int((~np.isin(codes, others)).sum()) for codes in placed)
        return rows, train if self.rows is None else min(train, self.rows)

    @cached_property
    def _absent(self) -> dict[str, float]:
        """Shares of absent values in the first rows of the files, of columns that have any."""
        names = self.schema.feature_columns
        first = next(iter(self._table().stream(names))).table
        result = {name: absent_share(first.column(name), self.schema.missing) for name in names}
        return {name: share for name, share in result.items() if share}


def files_of(source: Source) -> FileSource | None:
    """The files that a source reads, by way of kept parts, of loaders or itself; None of others."""
    inner = parsed_by(source)
    return inner if isinstance(inner, FileSource) else None


Refuse = Callable[[Rows, int, str, str, Collection[str]], None]
"""Given rows, a place among them, the column, the rule that it breaks, and the schema's missing."""


def refuse_row(rows: Rows, place: int, column: str, rule: str, missing: Collection[str]) -> None:
    """Raise DataError for a bad value."""
    array = rows.table.column(column)
    raise DataError(
        f"{rows.path}, row {rows.numbers[place]}, column {column}: {array[place].as_py()!r};"
        f" {why_bad(rule, array, place, missing)}\n"
        "  correct the row or the schema; train and evaluate can skip bad rows"
        " (--data.skip-bad-rows; they are counted)"
    )


def batch_of(schema: Schema, rows: Rows, refuse: Refuse | None, *, labelled: bool = True) -> Batch:
    """The rows as a batch; ``refuse`` is told of the first bad one of a column, None: all bad ones
    are left out. Not ``labelled``: the columns of the labels are not looked at."""
    import pyarrow as pa

    # Convert column by column; a row is good when all of its values are.
    missing = schema.missing
    good = np.ones(len(rows.numbers), bool)

    def checked(name: str, convert: Callable[[], Values]) -> Values:
        try:
            converted = convert()
        except pa.ArrowException as error:
            raise DataError(
                f"{rows.path}: column {name} of type {rows.table.column(name).type} does not "
                f"fit the schema: {error}\n  correct the column's kind, or the file"
            ) from error
        if converted.bad.any():
            if refuse is not None:
                refuse(rows, int(np.flatnonzero(converted.bad)[0]), name, converted.rule, missing)
            np.logical_and(good, ~converted.bad, out=good)
        return converted

    def of(name: str | None) -> Any:
        return None if name is None else rows.table.column(name)

    # Features first, in the order of the schema, then the labels.
    values = [
        checked(c.name, partial(column_values, c, of(c.name), of(c.with_column), missing))
        for c in schema.id_columns + schema.dense_columns
    ]
    label_names = schema.judging_columns if labelled else ()
    labels = [checked(name, partial(label_values, schema, name, of(name))) for name in label_names]

    # The group of a sample, where it is no feature.
    groups = None
    if labelled and (group := schema.group_column) is not None:
        found = checked(group.name, partial(column_values, group, of(group.name), None, missing))
        groups = tag(0, found.data)  # they meet each other alone

    # Ids of all fields by sample; without bad rows nothing is copied again.
    n_fields = len(schema.id_columns)
    ids, offsets = interleave(
        [tag(n, v.data) for n, v in zip(schema.field_numbers, values[:n_fields], strict=True)],
        [v.lengths for v in values[:n_fields]],
    )
    dense = _float32(values[n_fields:], len(good))
    batch = Batch(ids, offsets, dense, _float32(labels, len(good)), groups)
    return batch if good.all() else batch.take(np.flatnonzero(good))


def _float32(columns: list[Values], n_rows: int) -> np.ndarray:
    """float32 [B, len(columns)]; ``n_rows`` is B where there is no column."""
    if not columns:
        return np.empty((n_rows, 0), np.float32)
    return np.stack([column.data for column in columns], 1).astype(np.float32)


def content_of(path: Path) -> str:
    """A file by the SHA-256 of its bytes, which is found once."""
    return _digest(path, "sha256")


def _digest(path: Path, kind: str) -> str:
    status = regular_file(path)
    return _digest_at(path, kind, status.st_size, status.st_mtime_ns)


@cache
def _digest_at(path: Path, kind: str, size_bytes: int, modified_ns: int) -> str:
    """The file's checksum; size and time make a changed file a new key of the cache."""
    of_kind = partial(hashlib.new, kind, usedforsecurity=False)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, of_kind).hexdigest()
