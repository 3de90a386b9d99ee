"""Keeps the tables and pictures of a report in the repository, with what made each of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.paper.evidence import INDEX, STORED, read_rows
from experiments.paper.pieces import Piece
from experiments.paper.record import command, folder_of, kept
from experiments.tables import write_csv

PICTURES = STORED.parents[1] / "paper_figs" / "out"
COLUMNS = ("file", "command", "date", "machine", "commit", "sha256")


def store(
    pieces: Sequence[Piece], out: Path, tables: Path = STORED, pictures: Path = PICTURES
) -> list[str]:
    """Copy what the pieces have left; returns the names of the tables.

    Raises ValueError where there is no checkout to store into, or nothing to store.
    """
    if not tables.is_dir() or not pictures.is_dir():
        raise ValueError(f"store writes into {tables} and {pictures}: run it from a checkout")
    index = _index(tables / INDEX)
    stored = []
    for piece in pieces:
        record = kept(piece, out)
        if record is None:
            continue
        for name in piece.csv:
            shutil.copyfile(folder_of(piece, out) / name, tables / name)
            about = (command(piece.study, record.arguments), record.day, record.machine,
                     record.commit, record.sha256[name])  # fmt: skip
            index[name] = dict(zip(COLUMNS, (name, *about), strict=True))
            stored.append(name)
        if piece.png:
            shutil.copyfile(folder_of(piece, out) / piece.png, pictures / piece.png)
    if not stored:
        raise ValueError(f"store found no finished piece in {out}: run it without --store first")
    write_csv(tables / INDEX, [index[name] for name in sorted(index)])
    return stored


def _index(path: Path) -> dict[str, Mapping[str, str]]:
    return {row["file"]: row for row in read_rows(path)} if path.is_file() else {}
