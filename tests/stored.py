"""`python -m tests.stored` brings docs/results/index.csv up to date with the tables beside it.

`experiments paper --store` writes the index with all it knows; a table that came another way gets
the day of the commit that stored it, and says that nothing more was recorded.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from experiments.catalogue import PIECES
from experiments.paper.record import COLUMNS, INDEX, STORED, read_rows, sha256
from experiments.tables import write_csv
from tests.tree import ROOT

UNKNOWN = "not recorded"


def index() -> list[dict[str, str]]:
    """A line for each stored table, those that are unchanged as they are."""
    path = STORED / INDEX
    known = {row["file"]: row for row in read_rows(path)} if path.is_file() else {}
    lines = []
    for table in sorted(STORED.glob("*.csv")):
        if table.name == INDEX:
            continue
        own = known.get(table.name)
        if own is None or own["sha256"] != sha256(table):
            about = (table.name, _command(table.name), _day(table), UNKNOWN, UNKNOWN, sha256(table))
            own = dict(zip(COLUMNS, about, strict=True))
        lines.append(own)
    return lines


def _command(name: str) -> str:
    from experiments.__main__ import STUDIES

    owners = [piece.name for piece in PIECES if name in piece.csv]
    stems = [s for s in STUDIES if name.startswith(s.replace("-", "_"))]
    study = owners[0] if owners else max(stems, key=len)
    return f"persia-experiments {study}"


def _day(path: Path) -> str:
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", str(path)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return f"by {told}" if told else UNKNOWN


if __name__ == "__main__":
    write_csv(STORED / INDEX, index())
