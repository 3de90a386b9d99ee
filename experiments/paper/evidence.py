"""The tables that claims are judged by: of this report where a piece has run, else those stored."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.paper.pieces import PIECES, Piece
from experiments.paper.record import folder_of, kept

STORED = Path(__file__).resolve().parents[2] / "docs" / "results"
"""Of a checkout."""
INDEX = "index.csv"
"""Beside the stored tables: what made each of them."""

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """The lines of a CSV, and where it lies."""

    rows: list[Row]
    source: str
    """For a reader: "this run", or since when it is stored."""
    study: str
    made_by: str = ""
    """The command with its options, where that was recorded."""

    @property
    def command(self) -> str:
        """What makes it."""
        return self.made_by or f"python -m experiments {self.study}"


Lookup = Callable[[str], Table | None]
"""File name of a table -> the table."""


def read_rows(path: Path) -> list[Row]:
    """The lines of a CSV with a header. Raises OSError where it cannot be read."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(
    name: str, out: Path, stored: Path = STORED, pieces: Sequence[Piece] = PIECES
) -> Table | None:
    """A table by its file name; None where it lies neither in ``out`` nor among those stored."""
    owners = [piece for piece in pieces if name in piece.csv]
    for piece in owners:
        if kept(piece, out) is not None:
            rows = read_rows(folder_of(piece, out) / name)
            return Table(rows, "this run", piece.study) if rows else None
    if (stored / name).is_file():
        study = owners[0].study if owners else Path(name).stem.replace("_", "-")
        rows = read_rows(stored / name)
        when, made_by = _origin(name, stored)
        return Table(rows, when, study, made_by) if rows else None
    return None


def _origin(name: str, stored: Path) -> tuple[str, str]:
    """What the index says of a stored table's run: when, and by which command."""
    path = stored / INDEX
    lines = read_rows(path) if path.is_file() else []
    own = next((line for line in lines if line["file"] == name), None)
    if own is None:
        return "stored", ""
    return f"stored: {own['date']}, commit {own['commit']}", own.get("command", "")
