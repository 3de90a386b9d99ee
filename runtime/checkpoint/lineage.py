"""Which rows trained a model, or any model that it was started from, whatever files are called.

A checkpoint keeps two things of them. Of each run in the line, its own first: the digests of its
files, the split that placed their rows, and how many samples it read. Files of such a digest are
placed by that split again, which gives the very rows. And of the whole line a sketch of the rows
(`runtime.data.fingerprints`), by which they are known in files of any other content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.schema import Count, parse
from runtime.config import TrainConfig
from runtime.data.files import content_of, files_of
from runtime.data.fingerprints import NO_ROWS, RowSet, alike, shares_stretches
from runtime.data.rows import Rows
from runtime.data.schema import Schema
from runtime.data.source import (
    SHUFFLE_WINDOW,
    FileRows,
    Part,
    Source,
    held_in_buffer,
    shuffled_order,
)
from runtime.data.split import CODES, Placer, Split
from runtime.data.table import file_of, header_of

MOST_RUNS, MOST_FILES = 1000, 10_000
"""In the line of a model; of those before, the sketch alone knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One run in the line of a model, and what it read of which files."""

    run: str = ""
    """Its folder, as it was named then."""
    samples: Count = 0
    """Samples of its stream, all passes in a row."""
    skipped: Count = 0
    """Bad rows of the training part that were left out on the way."""
    files: list[FileRows] = field(default_factory=list)
    """In their order; none where its data were no files."""
    joined: list[str] = field(default_factory=list)
    """The digests of joined files."""
    split: dict[str, Any] = field(default_factory=dict)
    """What placed the rows of the files, as the document of the schema has it."""
    missing: list[str] = field(default_factory=list)
    """The schema's texts that mean "no value"."""
    header: list[str] | None = None
    """The schema's names of columns, where no line of the files has them."""
    train_rows: Count = 0
    """Rows that one pass reads."""
    shuffle: bool = False
    shuffle_buffer: Count = 0
    """Samples of its shuffle buffer: 0 without one."""
    seed: int = 0

    def split_here(self, now: CurrentFiles) -> Split | None:
        """Its split where files are read as they are now; None where the column that decides is not
        there, or has another content. Without the validation part, which takes the last rows.

        Of text without a header line, columns have the names that a schema gives them.
        """
        split = replace(parse(Split, self.split, self.run), validation_fraction=0.0)
        column = split.column
        if column is not None and column in (self.header or ()) and now.header:
            place = (self.header or []).index(column)
            column = now.header[place] if place < len(now.header) else ""
        if column is None:
            return split
        in_files = column in now.columns
        in_joined = column in now.joined_columns
        is_there = in_files != in_joined and (in_files or self.joined == now.joined)
        return replace(split, column=column) if is_there else None

    @property
    def _last(self) -> int:
        """Training samples of all files behind which none was read: bad rows that were left out
        stand before it, too, and what a shuffle buffer has taken in."""
        validates = self.split.get("validation_fraction")
        most = self.train_rows if validates else sum(file["trains"] for file in self.files)
        held = self.shuffle_buffer if self.samples else 0
        good = min(self.samples + held, self.train_rows)
        return min(good + self.skipped, most)

    def read(self, places: np.ndarray) -> np.ndarray:
        """bool [n], whether training samples were read, by their places among those of all files,
        counted from 1. Where bad rows were left out, all of a shuffled window counts, and all that
        a shuffle buffer has taken in."""
        # In the file's order, what is read is a beginning.
        result: np.ndarray = places <= self._last
        if self.samples >= self.train_rows:
            return result

        # Through a shuffle buffer: all that went in, but for what it still held.
        if self.shuffle_buffer and not self.skipped:
            of_buffer = self.train_rows, self.samples, self.shuffle_buffer, self.seed
            return result & ~np.isin(places, held_in_buffer(*of_buffer) + 1)
        if not self.shuffle:
            return result

        # Shuffled in windows: whole ones, and the drawn rows of the one that was begun.
        whole, first = divmod(self.samples, SHUFFLE_WINDOW)
        start = whole * SHUFFLE_WINDOW
        size = min(SHUFFLE_WINDOW, self.train_rows - start)
        if self.skipped:
            result = places <= min(start + size + self.skipped, self.train_rows)
            return result
        drawn = np.zeros(size + 1, bool)
        drawn[shuffled_order(self.seed, 0, whole, size)[:first]] = True
        result = (places <= start) | drawn[np.clip(places - 1 - start, -1, size)]
        return result

    def has_apart(self, part: Part, now: Origin) -> bool:
        """Whether none of the rows that it read is of this part now, as the same split places the
        rows of the same files: what has trained is no test, and no validation."""
        contents = [file["sha256"] for file in self.files]
        return (
            (self.files, self.joined, self.split) == (now.files, now.joined, now.split)
            and (self.missing, self.header) == (now.missing, now.header)
            and len(set(contents)) == len(contents)  # else a copy of one that trains may test
            and (part == "test" or self.train_rows == now.train_rows)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentFiles:
    """How files are read now."""

    contents: Mapping[Path, str]
    """The digest of each file."""
    columns: Sequence[str]
    """Columns of the files of samples."""
    header: Sequence[str] | None
    joined: Sequence[str] = ()
    """The digests of joined files."""
    joined_columns: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """All runs in the line of a model."""

    origins: list[Origin] = field(default_factory=list)
    """The last one first, which is the checkpoint's own run; none in a checkpoint that was written
    before lineages were kept."""
    unknown: list[str] = field(default_factory=list)
    """Checkpoints in the line of which nobody knows what trained them: they are of a time before
    lineages were kept."""
    in_part: bool = False
    """Whether the sketch has a share of the rows only: loaders gave other ones to other processes,
    or the run went on from a checkpoint that had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What is known of the rows that judge a model."""

    rows: int = 0
    """That judge."""
    trained: int = 0
    """Samples that trained it, or a model that it was started from."""
    alike: int = 0
    """Rows that hold what a row held that trained; more than ``trained`` where rows of few
    values meet each other by chance. So they do in the parts of one split, too, and none is told
    there."""
    about: bool = False
    """Whether ``trained`` is an estimate, as sketches were full."""
    at_least: bool = False
    """Whether there may be more, as the sketch has a share of the rows only."""
    unknown: Sequence[str] = ()
    """Checkpoints in the line of which nobody knows what trained them."""

    @property
    def count(self) -> int | None:
        """Samples that trained; None where there is none that is known, and nobody knows all."""
        return None if self.unknown and not self.trained else self.trained

    @property
    def amount(self) -> str:
        """How many trained, in words.

        >>> Overlap(trained=1000).amount, Overlap(trained=5, about=True).amount
        ('1,000', 'about 5')
        """
        sure = "at least " if self.at_least else "about " if self.about else ""
        return f"{sure}{self.trained:,}"

    def sentences(self) -> list[str]:
        """Warnings about it, but of the samples that trained."""
        if not self.unknown:
            return []
        names = ", ".join(self.unknown)
        return [
            f"nobody knows which rows trained {names}, of an older version: that none of them"
            " judges is not sure"
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOn:
    """The samples that trained a model: its line, and the sketch of all of them."""

    lineage: Lineage = field(default_factory=Lineage)
    rows: RowSet = NO_ROWS

    def overlap(self, source: Source, part: Part, rows: int | None, judged: RowSet) -> Overlap:
        """What it shares with a part, or its first ``rows``; ``judged`` is the sketch of these.

        There is none with what is no data set of files: a generator draws its parts apart, and a
        source of the user's own says itself what they are.
        """
        # Only rows of files can be known again.
        files = files_of(source)
        if files is None:
            return Overlap(rows=judged.size, unknown=self.lineage.unknown)

        # Which of today's files the models were trained on, and where their rows lie in them.
        now = origin_of(source)
        schema = files.schema
        columns, of_joined = files.column_names()
        here = CurrentFiles(
            contents=dict(zip(files.main_files, (f["sha256"] for f in now.files), strict=True)),
            columns=columns,
            header=schema.header,
            joined=now.joined,
            joined_columns=of_joined,
        )
        others = [origin for origin in self.lineage.origins if not origin.has_apart(part, now)]
        placings = _placings(others, here)

        # Count the rows that judge and that any of them has read; then those that only look the
        # same.
        first = schema.labels[0] if schema.split.column is None else schema.split.column
        stream = files.placed_rows(_columns(first, placings)) if placings else ()
        masks = ((placed, codes == CODES[part]) for placed, codes in stream)
        overlap = self._overlap(_count(placings, masks, rows), judged)
        return overlap if others else replace(overlap, alike=overlap.trained)

    def overlap_of_file(self, schema: Schema, file: Path, judged: RowSet) -> Overlap:
        """What it shares with all rows of a file, of which ``judged`` is the sketch."""
        header = header_of(schema, file)
        table = file_of(schema, file, header=header)
        here = CurrentFiles(
            contents={file: content_of(file)}, columns=table.column_names(), header=header
        )
        placings = _placings(self.lineage.origins, here)
        stream = table.stream(_columns(schema.feature_columns[0], placings)) if placings else ()
        masks = ((rows, np.ones(len(rows.numbers), bool)) for rows in stream)
        return self._overlap(_count(placings, masks, None), judged)

    def _overlap(self, placed: int, judged: RowSet) -> Overlap:
        """Rows that are known by their place, and by what they hold, or by the order in which they
        stand, where these are more than meet by chance."""
        by_content = alike(judged, self.rows, placed)
        in_order = shares_stretches(judged, self.rows, placed)
        by_rows = by_content.rows if by_content.rows - placed > by_content.by_chance else 0
        is_more = max(by_rows, in_order) > placed
        return Overlap(
            rows=judged.size,
            trained=max(placed, by_rows or in_order),
            alike=max(by_content.rows, placed),
            about=is_more and not (by_rows and judged.knows_all and self.rows.knows_all),
            at_least=is_more and self.lineage.in_part,
            unknown=self.lineage.unknown,
        )


# By place.


@dataclass(slots=True)
class _Placing:
    """A file that is looked at, as an origin placed its rows."""

    origin: Origin
    file: FileRows
    placer: Placer
    rows_before: int
    seen: int
    """Training samples that came before."""

    def trained(self, rows: Rows) -> np.ndarray:
        """bool [B], which of the next rows of the file it read."""
        as_then = replace(rows, rows_before=self.rows_before, part=self.file["part"])
        trains = self.placer.place(as_then) == CODES["train"]
        places = self.seen + np.cumsum(trains)
        self.seen += int(trains.sum())
        result: np.ndarray = trains & self.origin.read(places)
        return result


def _placings(origins: Iterable[Origin], here: CurrentFiles) -> dict[Path, list[_Placing]]:
    """How each origin placed the rows of a file, without files that none read. One whose split
    cannot be made again is left to the sketch."""
    result: dict[Path, list[_Placing]] = {}
    for origin in origins:
        split = origin.split_here(here) if origin.files else None
        if split is None or split.by_group or split.leave_one_out:  # whose column nobody kept
            continue
        total = sum(file["rows"] for file in origin.files)
        rows_before = seen = 0
        for file in origin.files:
            for path in [p for p, sha256 in here.contents.items() if sha256 == file["sha256"]]:
                placer = Placer(split, origin.missing, total)
                placer.begin_behind(rows_before)
                placing = _Placing(origin, file, placer, rows_before, seen)
                result.setdefault(path, []).append(placing)
            rows_before += file["rows"]
            seen += file["trains"]
    return result


def _columns(first: str, placings: Mapping[Path, list[_Placing]]) -> tuple[str, ...]:
    """The column that is read, and those that decide the splits of origins."""
    splits = (placing.placer.split for of_file in placings.values() for placing in of_file)
    return tuple(dict.fromkeys((first, *(split.column for split in splits if split.column))))


def _count(
    placings: Mapping[Path, list[_Placing]],
    stream: Iterable[tuple[Rows, np.ndarray]],
    most: int | None,
) -> int:
    """How many of the first ``rows`` rows that judge (None: all) any origin has read.

    ``stream``: all rows of all files in their order, and which of them judge.
    """
    count = 0
    left = most
    for rows, judges in stream:
        if left is not None:
            judges = judges & (np.cumsum(judges) <= left)
            left -= int(judges.sum())
        trained = np.zeros(len(judges), bool)
        for placing in placings.get(rows.path, ()):
            trained |= placing.trained(rows)
        count += int((judges & trained).sum())
        if left == 0:
            break
    return count


# Of a run that trains.


def origin_of(source: Source) -> Origin:
    """Data as they are now, of a run that has read nothing yet."""
    files = files_of(source)
    now = source.provenance()
    return Origin(
        skipped=0 if files is None else files.left_out("train")[0],
        files=now.files,
        joined=now.joined,
        split=now.schema.get("split", {}),
        missing=now.schema.get("missing", []),
        header=now.schema.get("header"),
        train_rows=now.train_rows or 0,
    )


@dataclass(slots=True)
class RunLineage:
    """The line of a run that trains: itself, and what it was started from."""

    source: Source | None
    """None: nobody asks what trained it."""
    config: TrainConfig
    run: str
    """Its folder."""
    before: TrainedOn = field(default_factory=TrainedOn)
    """What trained the model that it began with."""

    def lineage(self, samples: int, *, in_part: bool) -> Lineage:
        """Up to so many samples of its own stream; ``in_part``: its sketch has a share of them."""
        if self.source is None:
            return Lineage()
        data = self.config.data
        origin = replace(
            origin_of(self.source),
            run=self.run,
            samples=samples,
            shuffle=data.shuffle,
            shuffle_buffer=data.shuffle_buffer or 0,
            seed=self.config.seed,
        )

        # What is left out before a window counts as read: the window's order is not kept here.
        if data.skip_rows and samples:
            is_shuffled = data.shuffle or data.shuffle_buffer is not None
            read = origin.train_rows if is_shuffled else samples + data.skip_rows
            origin = replace(origin, samples=read, shuffle=False, shuffle_buffer=0)
        known = self.before.lineage
        origins = _newest([origin, *known.origins])
        return replace(known, origins=origins, in_part=in_part or known.in_part)

    def trained(self, samples: int, of_run: RowSet, *, in_part: bool) -> TrainedOn:
        """All rows so far, ``of_run`` those of this run."""
        lineage = self.lineage(samples, in_part=in_part)
        return TrainedOn(lineage=lineage, rows=of_run.behind(self.before.rows))


def _newest(origins: Sequence[Origin]) -> list[Origin]:
    """So many as a checkpoint keeps, with the files of as many as fit: it does not grow for ever
    where each day's model begins with that of the day before."""
    result: list[Origin] = []
    files = 0
    for origin in origins[:MOST_RUNS]:
        files += len(origin.files)
        fits = files <= MOST_FILES or not result  # its own files are its data, however many
        result.append(origin if fits else replace(origin, files=[]))
    return result
