"""`python docs/tools/stored_index.py COMMAND TABLE ...` writes what made these stored tables
into the index beside them: the command, this day, machine and commit. Run it where they were made.
Without arguments it says which tables are new or changed."""

from __future__ import annotations

import csv
import hashlib
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.paper.record import STORED, Row, read_rows
from persia_sim.base.files import atomic_write
from runtime.run.folder import environment

INDEX = "index.csv"
COLUMNS = ("file", "command", "date", "machine", "commit", "sha256")


def changed(folder: Path) -> list[str]:
    """Names of the tables whose line is not there, or has another checksum."""
    known = {row["file"]: row["sha256"] for row in read_rows(folder / INDEX)}
    tables = sorted(path.name for path in folder.glob("*.csv") if path.name != INDEX)
    return [name for name in tables if known.get(name) != _sha256(folder / name)]


def index(folder: Path, command: str, names: Sequence[str]) -> list[Row]:
    """The lines with those of the named tables written anew; other lines stay as they are, but for
    tables that are gone."""
    lines: dict[str, Mapping[str, str]] = {row["file"]: row for row in read_rows(folder / INDEX)}
    about = environment()
    files = " and changed files" if about["modified"] else ""
    for name in names:
        lines[name] = {
            "file": name,
            "command": command,
            "date": str(about["started"])[:10],
            "machine": f"{about['cpu']}, {about['cores']} cores",
            "commit": f"{str(about['commit'])[:10]}{files}",
            "sha256": _sha256(folder / name),
        }
    return [dict(lines[name]) for name in sorted(lines) if (folder / name).is_file()]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"name the command, and tables that it made: {', '.join(changed(STORED))}")
    rows = index(STORED, sys.argv[1], sys.argv[2:])
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(STORED / INDEX) as file:
        file.write(text.getvalue().encode())
