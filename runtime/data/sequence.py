"""Several files of one shape as one table: a pattern's files in the order of their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.data.errors import DataError
from runtime.data.source import Part
from runtime.data.table import Rows, TableFile

WILD = "*?["
"""What makes a file's name a pattern."""


@dataclass(slots=True, kw_only=True)
class FileSequence:
    """Files one after another, each perhaps a part of its own; at least one."""

    files: tuple[tuple[TableFile, Part | None], ...]

    @property
    def path(self) -> Path:
        """The first file, which stands for all where one is named."""
        return self.files[0][0].path

    @property
    def rows_skipped(self) -> int:
        """Lines that the last stream has left out so far."""
        return sum(file.rows_skipped for file, _ in self.files)

    def column_names(self) -> tuple[str, ...]:
        """Of the first file; each of the others must have the columns that are read."""
        return self.files[0][0].column_names()

    def count_rows(self) -> int:
        """Rows of all files; reads text files once."""
        return sum(file.count_rows() for file, _ in self.files)

    def stream(self, names: Sequence[str]) -> Iterator[Rows]:
        """The named columns of all rows, file after file."""
        for file, _ in self.files:
            file.check_columns(names)  # of all, before the first row
        before = 0
        for file, part in self.files:
            last = 0
            for rows in file.stream(names):
                last = int(rows.numbers[-1])
                yield replace(rows, rows_before=before, part=part)
            before += last


def is_pattern(name: str) -> bool:
    """Whether a name stands for several files.

    >>> is_pattern("part-*.csv.gz"), is_pattern("train.csv")
    (True, False)
    """
    return any(sign in name for sign in WILD)


def matching(folder: Path, name: str) -> list[Path]:
    """The file, or the pattern's files in the order of their names; DataError where none is."""
    if not is_pattern(name):
        return [folder / name]
    try:
        found = sorted(path for path in folder.glob(name) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{name!r} is no pattern of files in {folder}: {error}") from error
    if not found:
        raise DataError(f"no file in {folder} matches {name!r}\n  correct the pattern")
    return found
