"""A source of batches that reads a table through a schema, chunk by chunk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from runtime.data.batch import Batch, Layout, interleave
from runtime.data.convert import Values, absent_share, column_values, zero_or_one
from runtime.data.errors import DataError, regular_file
from runtime.data.ids import tag
from runtime.data.joined import Table, main_files, open_table
from runtime.data.rows import Rows
from runtime.data.same_data import document
from runtime.data.schema import Schema
from runtime.data.source import Part, Provenance
from runtime.data.split import CODES, UNPLACED, Placer, Totals


@dataclass(slots=True)
class Census:
    """Rows of each part by label; rows with a bad label or split value are left out."""

    labels: tuple[str, ...]
    counts: dict[Part, np.ndarray] = field(default_factory=dict)
    """int64 [T, 2] of each part: rows with label 0 and with label 1."""
    bad_rows: int = 0
    """Rows whose label or split value breaks its rule; the stream says which."""
    placed: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(CODES, 0))
    """Rows of each part, those with a bad label among them, without any limit."""

    def __post_init__(self) -> None:
        self.counts = {part: np.zeros((len(self.labels), 2), np.int64) for part in CODES}

    def rows(self, part: Part) -> int:
        """Rows of a part."""
        return int(self.counts[part][0].sum())

    def check(self, where: str, split: str) -> None:
        """Raise when the train or the test part is empty, or has one class of a label."""
        for part in ("train", "test"):
            if not self.rows(part):
                raise DataError(
                    f"{where}: the {part} part is empty ({self.bad_rows} bad rows skipped)\n"
                    f"  the split is: {split}; correct it, or the rows"
                )
            for label, (zeros, ones) in zip(self.labels, self.counts[part].tolist(), strict=True):
                if not zeros or not ones:
                    raise DataError(
                        f"{where}: the {part} part holds one class of column {label}: {zeros:,}"
                        f" rows of 0 and {ones:,} of 1, and a task needs both\n"
                        f"  the split is: {split}; correct it, or leave the label out"
                    )


def take_census(schema: Schema, table: Table, placer: Placer, train_rows: int | None) -> Census:
    """Read the labels and the split's column once; ``train_rows`` limits the training part."""
    census = Census(schema.labels)
    columns = dict.fromkeys(schema.labels)
    if schema.split.column is not None:
        columns[schema.split.column] = None
    for rows in table.stream(tuple(columns)):
        codes = placer.place(rows)
        values = [zero_or_one(rows.table.column(name), schema.missing) for name in schema.labels]
        good = (codes != UNPLACED) & ~np.any([v.bad for v in values], axis=0)
        census.bad_rows += int((~good).sum())
        for part, code in CODES.items():
            census.placed[part] += int((codes == code).sum())
            mine = np.flatnonzero(good & (codes == code))
            if part == "train" and train_rows is not None:
                mine = mine[: train_rows - census.rows(part)]
            for place, value in enumerate(values):
                census.counts[part][place] += np.bincount(value.data[mine].astype(int), minlength=2)
    return census


@dataclass(frozen=True, slots=True)
class _Read:
    """What a stream of one part has left out so far."""

    skipped: int
    outside: int
    """Broken lines, and rows without a usable split value: of no part."""
    row: int | None
    """The last row of the file that was read; None: all of them."""

    @property
    def how_far(self) -> str:
        """How much of the file that is."""
        return "whole file read" if self.row is None else f"file read up to row {self.row:,}"


@dataclass(slots=True, kw_only=True)
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
    _totals: Totals | None = None
    _census: Census | None = None
    _absent: dict[str, float] | None = None

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

    def main_files(self) -> list[Path]:
        """All files of samples; DataError where a pattern has none."""
        return [path for path, _ in main_files(self.schema, self.folder)]

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
            skipped = self._read[part].skipped
            raise DataError(
                f"{self.path}: the {part} part is empty ({skipped} bad rows skipped)\n"
                f"  the split is: {self.schema.split}; correct it, or the rows"
            )

    def turns(self, part: Part, own: int, of: int) -> Iterator[Batch]:
        """Chunks number ``own``, ``own + of``, ... of one part, all without a limit, some perhaps
        empty: only these are converted, so that several readers can share the work."""
        table = open_table(self.schema, self.folder, skip_bad_rows=self.skip_bad_rows)
        placer = Placer(self.schema.split, self._count(), self.schema.missing)
        skipped = unplaced = number = 0
        for rows in table.stream(self.schema.read_columns):
            codes = placer.place(rows)
            lost = np.flatnonzero(codes == UNPLACED)
            if len(lost):
                unplaced += len(lost)
                self._refuse(
                    rows, int(lost[0]), str(self.schema.split.column), self.schema.split.rule
                )
            mine = np.flatnonzero(codes == CODES[part])
            batch = None
            if len(mine):
                if number % of == own:
                    batch = self._convert(rows.take(mine))
                    skipped += len(mine) - batch.size
                number += 1
            last = int(rows.places[-1])
            self.note_left_out(part, skipped, unplaced + table.rows_skipped, last)
            if batch is not None:
                yield batch
        self.note_left_out(part, skipped, unplaced + table.rows_skipped)

    def provenance(self) -> Provenance:
        """Name, checksum and split; bad rows of what was streamed so far."""
        census = self.census()
        sums = self.checksums()
        joined = hashlib.sha256("".join(sums).encode()).hexdigest()
        words, train_rows = str(self.schema.split), census.placed["train"]
        outside = max((read.outside for read in self._read.values()), default=0)
        inside = {part: read.skipped for part, read in self._read.items() if read.skipped}
        where = [f"{n:,} of {p} ({self._read[p].how_far})" for p, n in inside.items()]
        where += [f"{outside:,} of no part"] if outside else []
        return Provenance(
            name=self.schema.name,
            sha256=sums[0] if len(sums) == 1 else joined,
            split=words if self.rows is None else f"{words}; of train the first {self.rows} rows",
            schema=document(self.schema),
            train_rows=train_rows if self.rows is None else min(train_rows, self.rows),
            test_rows=census.placed["test"],
            rows_skipped=sum(inside.values()) + outside,
            skipped_where=", ".join(where),
            private=self.is_private,
            absent=self._absent_values(),
        )

    @property
    def is_private(self) -> bool:
        """Whether a file of it may be read by its owner alone."""
        files = [*self.main_files(), *(self.folder / join.file for join in self.schema.joins)]
        return any(not regular_file(path).st_mode & 0o044 for path in files)

    def _absent_values(self) -> dict[str, float]:
        """Shares of absent values in the first rows of the files, of columns that have any."""
        if self._absent is None:
            columns = [c.name for c in self.schema.columns]
            columns += [c.with_column for c in self.schema.columns if c.with_column is not None]
            table = open_table(self.schema, self.folder, skip_bad_rows=self.skip_bad_rows)
            first = next(iter(table.stream(tuple(dict.fromkeys(columns)))))
            missing = self.schema.missing
            found = {
                c: absent_share(first.table.column(c), missing) for c in first.table.schema.names
            }
            self._absent = {name: share for name, share in found.items() if share}
        return self._absent

    def checksums(self) -> list[str]:
        """SHA-256 of the main file, or of each where there are several, then of each joined one."""
        joined = [self.folder / join.file for join in self.schema.joins]
        main = self.main_files()
        stats = [(path, regular_file(path)) for path in (*main, *joined)]
        found = [_digests(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        known = self.schema.md5
        if known and len(known) != len(main):
            raise DataError(f"md5 of {self.schema.name} names {len(known)} files, not {len(main)}")
        for path, digests, md5 in zip(main, found, known, strict=False):
            if digests.md5 != md5:
                raise DataError(
                    f"{path} has md5 {digests.md5}, that of {self.schema.name} is {md5}: it is"
                    " other data\n  fetch it again, or describe it by a schema of your own"
                )
        return [digests.sha256 for digests in found]

    def census(self) -> Census:
        """Rows of each part by label, counted once; DataError where a part cannot be used."""
        if self._census is None:
            table = open_table(self.schema, self.folder, skip_bad_rows=self.skip_bad_rows)
            placer = Placer(self.schema.split, self._count(), self.schema.missing)
            found = take_census(self.schema, table, placer, self.rows)
            if self.skip_bad_rows or not found.bad_rows:  # else the stream says which row is bad
                found.check(str(self.path), str(self.schema.split))
                self._census = found
            return found
        return self._census

    def left_out(self, part: Part) -> tuple[int, int, int | None]:
        """Bad rows of a part, rows of no part, and the last row that was read (None: all)."""
        found = self._read.get(part, _Read(0, 0, 0))
        return found.skipped, found.outside, found.row

    def note_left_out(self, part: Part, skipped: int, outside: int, row: int | None = None) -> None:
        """Keep what the longest stream of a part has left out; a shorter one adds nothing."""
        before = self._read.get(part)
        if before is None or row is None or (before.row is not None and row > before.row):
            self._read[part] = _Read(skipped, outside, row)

    def placed(self) -> np.ndarray:
        """int8, the code of the part of each row of all files, in their order (`split.CODES`)."""
        return np.concatenate([np.empty(0, np.int8), *self._codes(self._count())])

    def _codes(self, totals: Totals) -> Iterator[np.ndarray]:
        table = open_table(self.schema, self.folder, skip_bad_rows=self.skip_bad_rows)
        placer = Placer(self.schema.split, totals, self.schema.missing)
        for rows in table.stream((self.schema.split.column or self.schema.labels[0],)):
            yield placer.place(rows).astype(np.int8)

    def _count(self) -> Totals:
        """Count what the split needs, once; most splits need nothing."""
        split = self.schema.split
        if self._totals is None:
            by_place = split.test_fraction is not None and split.random_seed is None
            table = open_table(self.schema, self.folder, skip_bad_rows=self.skip_bad_rows)
            totals = Totals(rows=table.count_rows() if by_place else 0)
            if split.validation_fraction:
                train = sum(int((codes != CODES["test"]).sum()) for codes in self._codes(totals))
                asked = train if self.rows is None else min(train, self.rows)
                totals = Totals(rows=totals.rows, train_rows=asked)
            self._totals = totals
        return self._totals

    def _convert(self, rows: Rows) -> Batch:
        """The good rows of a chunk as a batch."""
        import pyarrow as pa

        schema = self.schema
        values: list[Values] = []
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
                first = int(np.flatnonzero(converted.bad)[0])
                self._refuse(rows, first, name, converted.rule)
                np.logical_and(good, ~converted.bad, out=good)
            return converted

        for column in schema.id_columns + schema.dense_columns:
            other = rows.table.column(column.with_column) if column.with_column else None
            array = rows.table.column(column.name)
            convert = partial(column_values, column, array, other, schema.missing)
            values.append(checked(column.name, convert))
        labels = [
            checked(name, partial(zero_or_one, rows.table.column(name), schema.missing)).data
            for name in schema.labels
        ]
        fields = values[: len(schema.id_columns)]
        dense = [v.data for v in values[len(schema.id_columns) :]]
        ids, offsets = interleave(
            [tag(n, v.data) for n, v in zip(schema.field_numbers, fields, strict=True)],
            [v.lengths for v in fields],
        )
        n_rows = len(good)
        batch = Batch(
            ids,
            offsets,
            np.stack(dense, 1).astype(np.float32) if dense else np.empty((n_rows, 0), np.float32),
            np.stack(labels, 1).astype(np.float32),
        )
        return batch if good.all() else batch.take(np.flatnonzero(good))

    def _refuse(self, rows: Rows, place: int, column: str, rule: str) -> None:
        """Raise for a bad value, unless bad rows are to be skipped."""
        if self.skip_bad_rows:
            return
        value = rows.table.column(column)[place].as_py()
        raise DataError(
            f"{rows.where(place)}, column {column}: {value!r}; {rule}\n"
            "  correct the row or the schema, or ask to skip bad rows"
            " (--data.skip-bad-rows; they are counted)"
        )


class _Digests(NamedTuple):
    sha256: str
    md5: str
    """What publishers of data sets give."""


@cache
def _digests(path: Path, size_bytes: int, modified_ns: int) -> _Digests:
    """The file's checksums; size and time make a changed file a new key of the cache."""
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
            md5.update(block)
    return _Digests(sha256.hexdigest(), md5.hexdigest())
