"""What a piece of the report leaves: its tables, where claims find them, what is stored."""

from __future__ import annotations

import csv
import hashlib
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.catalogue import PIECES, Study
from experiments.tables import write_csv
from persia_sim.base.files import read_document, read_regular
from persia_sim.base.schema import parse
from runtime.run.folder import environment, write_json

FILE = "piece.json"
STORED = Path(__file__).resolve().parents[2] / "docs" / "results"
"""Folder of the stored tables, of a checkout."""
PICTURES = STORED.parents[1] / "paper_figs" / "out"
INDEX = "index.csv"
"""File beside the stored tables that says what made each of them."""
COLUMNS = ("file", "command", "date", "machine", "commit", "sha256")

Row = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """One run of a piece, written beside its tables."""

    arguments: list[str]
    """Arguments of the command, but for `--out`."""
    commit: str
    machine: str
    date: str
    """When it ended, in UTC."""
    seconds: float
    sha256: dict[str, str]
    """Checksums of its tables by file name."""

    @property
    def day(self) -> str:
        """The date without the time of day."""
        return self.date[:10]


def command(study: str, arguments: Sequence[str]) -> str:
    """The command as a person types it."""
    return shlex.join(["persia-experiments", study, *arguments])


def folder_of(piece: Study, out: Path) -> Path:
    """The folder of a piece in that of a report."""
    return out / piece.name


def checksums(piece: Study, folder: Path) -> dict[str, str]:
    """SHA-256 of a piece's tables. Raises OSError naming one that is not there."""
    return {name: sha256(folder / name) for name in piece.csv}


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(read_regular(path)).hexdigest()


def write_record(
    piece: Study, folder: Path, arguments: Sequence[str], seconds: float
) -> PieceRecord:
    """Write down that a piece has been run."""
    # The machine and the commit, in words.
    about = environment()
    memory = about.get("memory_bytes")
    gib = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) else ""
    changed = " and changed files" if about.get("modified") else ""

    # The checksums tie the record to these very tables.
    record = PieceRecord(
        arguments=list(arguments),
        commit=f"{str(about['commit'])[:10]}{changed}" if about.get("commit") else "unknown",
        machine=f"{about.get('cpu')}, {about.get('cores')} cores{gib}",
        date=str(about["started"]),
        seconds=seconds,
        sha256=checksums(piece, folder),
    )
    write_json(folder / FILE, asdict(record))
    return record


def valid_record(piece: Study, out: Path) -> PieceRecord | None:
    """The record of a piece; None where there is none, or where its tables are others by now."""
    folder = folder_of(piece, out)
    try:
        document = read_document(folder / FILE)
        record = parse(PieceRecord, document, str(folder / FILE), others=True)
        return record if record.sha256 == checksums(piece, folder) else None
    except (OSError, ValueError):
        return None


def is_done(piece: Study, out: Path, arguments: Sequence[str]) -> bool:
    """Whether a piece has been run with these arguments, and its tables are still the same."""
    record = valid_record(piece, out)
    return record is not None and record.arguments == list(arguments)


@dataclass(frozen=True, slots=True)
class Table:
    """The lines of a CSV that claims are judged by, and where it lies."""

    rows: list[Row]
    source: str
    """Where the lines come from: "this run", or since when they are stored."""
    study: str
    made_by: str = ""
    """The command with its options, where that was recorded."""

    @property
    def command(self) -> str:
        """The command that makes the table."""
        return self.made_by or f"persia-experiments {self.study}"


Lookup = Callable[[str], Table | None]
"""File name of a table -> the table."""


def read_rows(path: Path) -> list[Row]:
    """The lines of a CSV with a header. Raises OSError where it cannot be read."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(
    name: str, out: Path, stored: Path = STORED, pieces: Sequence[Study] = PIECES
) -> Table | None:
    """A table by its file name: of the report in ``out`` where its piece has run, else the stored
    one; None where there is neither."""
    # A fresh table wins; one without lines is none.
    owners = [piece for piece in pieces if name in piece.csv]
    for piece in owners:
        if valid_record(piece, out) is not None:
            rows = read_rows(folder_of(piece, out) / name)
            return Table(rows, "this run", piece.name) if rows else None

    # Else the stored one, with what the index says of it.
    if not (stored / name).is_file():
        return None
    study = owners[0].name if owners else Path(name).stem.replace("_", "-")
    rows = read_rows(stored / name)
    entry = _index(stored / INDEX).get(name)
    if not rows:
        return None
    if entry is None:
        return Table(rows, "stored", study)
    when = f"stored: {entry['date']}, commit {entry['commit']}"
    return Table(rows, when, study, entry.get("command", ""))


def store(
    pieces: Sequence[Study], out: Path, tables: Path = STORED, pictures: Path = PICTURES
) -> list[str]:
    """Copy what the pieces have left into the repository, with what made it; returns the names of
    the tables.

    Raises ValueError where there is no checkout to store into, or nothing to store.
    """
    # Into a checkout alone: a wheel has no results.
    if not tables.is_dir() or not pictures.is_dir():
        raise ValueError(f"store writes into {tables} and {pictures}: run it from a checkout")

    # Tables with a line in the index each, and pictures, of every piece that has run.
    index = _index(tables / INDEX)
    stored = []
    for piece in pieces:
        record = valid_record(piece, out)
        if record is None:
            continue
        for name in piece.csv:
            shutil.copyfile(folder_of(piece, out) / name, tables / name)
            index[name] = {
                "file": name,
                "command": command(piece.name, record.arguments),
                "date": record.day,
                "machine": record.machine,
                "commit": record.commit,
                "sha256": record.sha256[name],
            }
            stored.append(name)
        if piece.png:
            shutil.copyfile(folder_of(piece, out) / piece.png, pictures / piece.png)

    if not stored:
        raise ValueError(f"store found no finished piece in {out}: run it without --store first")
    write_csv(tables / INDEX, [index[name] for name in sorted(index)])
    return stored


def _index(path: Path) -> dict[str, Mapping[str, str]]:
    return {row["file"]: row for row in read_rows(path)} if path.is_file() else {}
