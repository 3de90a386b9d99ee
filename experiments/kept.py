"""Finished points of a study as JSON lines, so that a second run computes only what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    """Rows by label. A line that a crash cut short is computed again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                    self._rows[record["label"]] = record["row"]
                except (json.JSONDecodeError, KeyError, TypeError):
                    continue

    def __contains__(self, label: str) -> bool:
        return label in self._rows

    def row(self, label: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of this label: the kept one, or the one computed now, which is then kept."""
        if label not in self._rows:
            self._rows[label] = compute()
            with self._path.open("a") as file:
                file.write(json.dumps({"label": label, "row": self._rows[label]}) + "\n")
        return self._rows[label]
