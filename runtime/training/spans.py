"""How long each stage of each (rank, step) took: the `timeline` profile of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from persia_sim.vocabulary import Stage


class Span(NamedTuple):
    """One stage of one (rank, step)."""

    stage: Stage
    rank: int
    step: int
    start_s: float
    end_s: float


class SpanRecorder:
    """Collects spans from any number of threads; costs nothing when not enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._zero_s = time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def span(self, stage: Stage, rank: int, step: int) -> Iterator[None]:
        """Time the body."""
        if not self._enabled:
            yield
            return
        start_s = time.perf_counter() - self._zero_s
        try:
            yield
        finally:
            end_s = time.perf_counter() - self._zero_s
            self.spans.append(Span(stage, rank, step, start_s, end_s))
