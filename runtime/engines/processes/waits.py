"""What the threads of a process wait for, since when: told where a server is gone or stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.engines.processes.peers import clock


class Waits:
    """One sentence for each thread that waits; the innermost, where a wait contains another."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, float]] = {}  # by thread

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """The calling thread waits, as ``text`` says."""
        key = threading.get_ident()
        outer = self._found.get(key)
        self._found[key] = text, time.monotonic()
        try:
            yield
        finally:
            if outer is None:
                self._found.pop(key, None)
            else:
                self._found[key] = outer

    def told(self) -> str:
        """All of them with the time of day since when, to be put behind a sentence; "" if none."""
        now = time.monotonic()
        found = [f"{text} since {clock(now - s)}" for text, s in list(self._found.values())]
        return f"; {'; '.join(sorted(found))}" if found else ""
