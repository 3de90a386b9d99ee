"""One bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAR_AFTER_S = 1.0
"""Runs shorter than this show no progress."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, after a second; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm  # only a terminal needs it

    with tqdm(total=total, unit=" pushes", delay=BAR_AFTER_S, leave=False) as bar:
        yield bar.update
