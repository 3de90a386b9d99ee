"""How long each stage of each (rank, step) took: the `timeline` profile of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from persia_sim.words.chrome import Span


class SpanRecorder:
    """Collects spans from any number of threads; costs next to nothing when not enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._zero_s = time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def span(self, track: str, stage: str, rank: int, step: int) -> Iterator[None]:
        """Time the body as one stage on one track of the rank."""
        if not self._enabled:
            yield
            return
        start_s = time.perf_counter() - self._zero_s
        try:
            yield
        finally:
            end_s = time.perf_counter() - self._zero_s
            self.spans.append(Span(rank, track, stage, step, start_s, end_s))
