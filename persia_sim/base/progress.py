"""How far a command has come: a bar on a terminal; in a file or a notebook a line now and then."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINE_EVERY_S = 20.0
"""Seconds between two lines at first; a command that has taken long says it more seldom."""
LONGER = 1.25
"""A line comes when so many times the seconds of the one before have passed: 30 in eight hours."""


class Progress(tqdm):  # type: ignore[misc]  # tqdm has no types
    """tqdm's bar with its options, which says how far it is without a terminal, too."""

    def __init__(self, *items: Any, **options: Any) -> None:
        self._says_lines = not sys.stderr.isatty()
        self._next_line_s = LINE_EVERY_S
        if self._says_lines:
            options["leave"] = False  # tqdm ends a bar that stays with an empty line
        super().__init__(*items, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show it, as often as tqdm asks for; a line only where it is time for one."""
        if not self._says_lines:
            return bool(super().display(msg, pos))
        elapsed_s = self.format_dict["elapsed"]
        if elapsed_s >= self._next_line_s and msg is None:
            self._next_line_s = max(elapsed_s + LINE_EVERY_S, LONGER * elapsed_s)
            print(self, file=sys.stderr, flush=True)
        return False

    def clear(self, *where: Any, **options: Any) -> None:
        """Make room for a sentence; a line that was said stays."""
        if not self._says_lines:
            super().clear(*where, **options)
