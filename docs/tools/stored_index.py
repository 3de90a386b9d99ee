"""`python docs/tools/stored_index.py [COMMAND]` brings docs/results/index.csv up to date with the
tables beside it: those that are new or changed get the command that made them, and this day,
machine and commit. Run it where they were made."""

from __future__ import annotations

import csv
import hashlib
import io
import sys
from pathlib import Path

from experiments.catalogue import STUDIES
from experiments.paper.record import STORED, read_rows
from persia_sim.base.files import atomic_write
from runtime.run.folder import environment

INDEX = STORED / "index.csv"
COLUMNS = ("file", "command", "date", "machine", "commit", "sha256")


def index(command: str) -> list[dict[str, str]]:
    """A line for each stored table, those that are unchanged as they are."""
    known = {row["file"]: row for row in read_rows(INDEX)}
    about = environment()
    changed = " and changed files" if about["modified"] else ""
    made = {
        "date": str(about["started"])[:10],
        "machine": f"{about['cpu']}, {about['cores']} cores",
        "commit": f"{str(about['commit'])[:10]}{changed}",
    }
    lines = []
    for table in sorted(set(STORED.glob("*.csv")) - {INDEX}):
        sha256 = hashlib.sha256(table.read_bytes()).hexdigest()
        line = known.get(table.name)
        if line is None or line["sha256"] != sha256:
            by = command or f"persia-experiments {_study(table)}"
            line = {"file": table.name, "command": by, **made, "sha256": sha256}
        lines.append(line)
    return lines


def _study(table: Path) -> str:
    """The study that the table is called after. Raises ValueError where there is none."""
    names = [name for name in STUDIES if table.stem.startswith(name.replace("-", "_"))]
    if not names:
        raise ValueError(f"no study is called as {table.name}; name the command that made it")
    return max(names, key=len)


if __name__ == "__main__":
    lines = index(" ".join(sys.argv[1:]))
    with atomic_write(INDEX) as file:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        file.write(text.getvalue().encode())
