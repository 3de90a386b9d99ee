"""Finished points of a study as JSON lines, so that a second run computes only what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    """Results by label, in a file that grows by a line each.

    A label must name everything that decides its result. A line that a crash cut short is left out,
    so that its point is computed again; so is one that somebody else wrote. One writer at a time:
    see `folders.sole_writer`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, Any] = {}
        self._is_cut = False
        if path.is_file():
            text = path.read_text(errors="replace")
            self._is_cut = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                try:
                    record = json.loads(line)
                    self._rows[record["label"]] = record["row"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    continue

    def __contains__(self, label: str) -> bool:
        return label in self._rows

    def __getitem__(self, label: str) -> Any:
        return self._rows[label]

    def add(self, label: str, row: Any) -> None:
        """Keep what JSON can hold; it is on disk when this returns."""
        self._rows[label] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"label": label, "row": row})
        with self._path.open("a") as file:
            file.write(f"\n{line}\n" if self._is_cut else f"{line}\n")
        self._is_cut = False

    def row(self, label: str, compute: Callable[[], Any]) -> Any:
        """What is kept under this label, or else what is computed now, which is then kept."""
        if label not in self._rows:
            self.add(label, compute())
        return self._rows[label]
