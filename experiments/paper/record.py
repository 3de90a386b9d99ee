"""The stored tables: where they lie, and how one is read."""

from __future__ import annotations

import csv
from pathlib import Path

STORED = Path(__file__).resolve().parents[2] / "docs" / "results"
"""Folder of the stored tables, of a checkout."""

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    """The lines of a CSV with a header. Raises OSError where it cannot be read."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
