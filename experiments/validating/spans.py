"""Spans of a run with the CPU time of their threads, and the rows' own work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.rank.spans import SpanRecorder


class TimedSpan(NamedTuple):
    """One stage of one (rank, step), by the clock and by its thread's CPU clock."""

    rank: int
    stage: str
    step: int
    thread: int
    start_s: float
    end_s: float
    cpu_start_s: float
    cpu_end_s: float

    @property
    def wall_s(self) -> float:
        """By the clock."""
        return self.end_s - self.start_s

    @property
    def cpu_s(self) -> float:
        """Of a core."""
        return self.cpu_end_s - self.cpu_start_s


class TimedSpans(SpanRecorder):
    """Notes every span with CPU times."""

    def __init__(self) -> None:
        super().__init__(enabled=True)
        self.timed: list[TimedSpan] = []

    @contextmanager
    def span(self, track: str, stage: str, rank: int, step: int) -> Iterator[None]:
        """As the recorder's."""
        start_s, cpu_start_s = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            cpu_end_s, end_s = time.thread_time(), time.perf_counter()
            thread = threading.get_ident()
            self.timed.append(
                TimedSpan(rank, stage, step, thread, start_s, end_s, cpu_start_s, cpu_end_s)
            )


class Work(NamedTuple):
    """One piece of work on rows."""

    step: int
    wall_s: float
    cpu_s: float


@dataclass(slots=True)
class RowWork:
    """The rows' own work, by the step that it belongs to; of all ranks and shards."""

    read: list[Work] = field(default_factory=list)
    refresh: list[Work] = field(default_factory=list)
    update: list[Work] = field(default_factory=list)

    def means_s(self, first: int, batches: int) -> tuple[dict[str, float], dict[str, float]]:
        """Wall and CPU seconds a batch of the steps >= ``first``, of which there are so many."""
        names = ("read", "refresh", "update")
        kept = {name: [w for w in getattr(self, name) if w.step >= first] for name in names}
        return (
            {name: sum(w.wall_s for w in own) / batches for name, own in kept.items()},
            {name: sum(w.cpu_s for w in own) / batches for name, own in kept.items()},
        )


class TimedRows:
    """The rows of a shard; how long the server's own work on them takes is noted."""

    def __init__(self, rows: Any, work: RowWork) -> None:
        self._rows, self._work = rows, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def read(self, handle: Any, create: bool, batch_step: int) -> None:
        """As the rows'."""
        _timed(self._work.read, handle.step, self._rows.read, handle, create, batch_step)

    def refresh(self, handle: Any, batch_step: int) -> Any:
        """As the rows'."""
        return _timed(self._work.refresh, handle.step, self._rows.refresh, handle, batch_step)

    def update(self, pushes: Any, update: int, step: int, *told: Any) -> Any:
        """As the rows'; the step of an update is counted from 1."""
        return _timed(self._work.update, step - 1, self._rows.update, pushes, update, step, *told)


class TimedCalls:
    """A store whose rows are elsewhere; a call for rows is noted as their reading."""

    def __init__(self, store: Any, work: RowWork) -> None:
        self._store, self._work = store, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def look_up(self, handle: Any) -> None:
        """As the store's."""
        _timed(self._work.read, handle.step, self._store.look_up, handle)


def _timed(notes: list[Work], step: int, work: Callable[..., Any], *told: Any) -> Any:
    began_s, cpu_began_s = time.perf_counter(), time.thread_time()
    found = work(*told)
    cpu_s = time.thread_time() - cpu_began_s
    notes.append(Work(step, time.perf_counter() - began_s, cpu_s))
    return found
