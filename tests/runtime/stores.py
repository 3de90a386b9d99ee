"""A store for tests: fsspec's, in memory or at a URL, that fails now and then, hangs, or dies."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("put_file", "get_file", "info", "find", "rm", "ukey")


class Killed(BaseException):
    """The process that uses the store is dead: nothing that it would do next is done."""


class FaultyStore:
    """A file system of fsspec of which a call fails, or is not answered, or is the last one."""

    def __init__(self, system: Any, seed: int = 0) -> None:
        self._system = system
        self._draw = random.Random(seed)
        self.fails_one_in: int | None = None
        self.hangs = threading.Event()
        """As long as it is set, no call is answered."""
        self.dies_at: int | None = None
        """At its call of this number, counted from 1, which is done by half; None: it lives."""
        self.calls = 0
        self.failed = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._system, name)
        return self._guarded(name, found) if name in CALLS else found

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **more: Any) -> Any:
            self.calls += 1
            if self.dies_at is not None and self.calls >= self.dies_at:
                if self.calls == self.dies_at and name == "put_file":
                    content = Path(arguments[0]).read_bytes()
                    self._system.pipe_file(arguments[1], content[: len(content) // 2])
                raise Killed
            while self.hangs.is_set():
                time.sleep(0.01)
            if self.fails_one_in and self._draw.randrange(self.fails_one_in) == 0:
                self.failed[name] += 1
                raise ConnectionResetError("the store has hung up")
            return call(*arguments, **more)

        return guarded
