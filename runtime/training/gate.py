"""Where the concurrent executor waits: the window, the permits, and the end of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia_sim.window import Watermarks

PATIENCE_S = 120.0
"""A longer wait is a deadlock of ours, not slowness; the error names who waits for whom."""


class RunStopped(Exception):
    """Another thread failed, or the user interrupted; this thread only goes home."""


class Stop:
    """Set once, by whoever fails first; every wait of the run looks at it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None
        self._on_stop: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return self._event.is_set()

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when the run stops, so that a wait can end at once."""
        self._on_stop.append(wake)

    def set(self, error: BaseException | None) -> None:
        """Stop the run; the first error is the one that is told."""
        if not self._event.is_set():
            self.error = error
            self._event.set()
            for wake in self._on_stop:
                wake()

    def check(self) -> None:
        """Raise RunStopped after `set`."""
        if self._event.is_set():
            raise RunStopped


class Gate:
    """Lets a lookup start when the window and the rank's permits allow it."""

    def __init__(
        self, ranks: int, tau: int | None, own_only: bool, permits: int | None, stop: Stop
    ) -> None:
        self._marks = Watermarks(ranks)
        self._tau, self._own_only, self._permits = tau, own_only, permits
        self._in_flight = [0] * ranks
        self._changed = threading.Condition()
        self._stop = stop
        stop.on_stop(self._wake)

    def enter(self, rank: int, step: int) -> None:
        """Wait until (rank, step) may look up its rows, and count it in flight."""

        def may_start() -> bool:
            inside = self._marks.may_start(rank, step, self._tau, self._own_only)
            free = self._permits is None or self._in_flight[rank] < self._permits
            return bool(self._stop) or (inside and free)

        with self._changed:
            if not self._changed.wait_for(may_start, timeout=PATIENCE_S):
                raise RuntimeError(
                    f"deadlock: lookup of rank {rank}, step {step} waited {PATIENCE_S:.0f} s at"
                    f" tau={self._tau}, permits={self._permits}; steps closed per rank:"
                    f" {[self._marks.closed_steps(r) for r in range(len(self._in_flight))]}"
                )
            self._stop.check()
            self._in_flight[rank] += 1

    def close(self, rank: int, step: int) -> None:
        """The push of (rank, step) is applied or lost: give the permit back, move the window."""
        with self._changed:
            self._in_flight[rank] -= 1
            self._marks.close(rank, step)
            self._changed.notify_all()

    def finish(self, rank: int, steps: int) -> None:
        """The rank has ``steps`` steps and no more."""
        with self._changed:
            self._marks.finish(rank, steps)
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
