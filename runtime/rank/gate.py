"""Where a lookup waits in the concurrent executor: for the window, and for a permit."""

from __future__ import annotations

import threading

from persia_sim.words.window import Watermarks
from runtime.stop import Stop, wait_for


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
            return inside and (self._permits is None or self._in_flight[rank] < self._permits)

        def who() -> str:
            closed = [self._marks.closed_steps(r) for r in range(len(self._in_flight))]
            return (
                f"the lookup of rank {rank}, step {step} waits at tau={self._tau},"
                f" permits={self._permits} for pushes; steps closed per rank: {closed}"
            )

        with self._changed:
            wait_for(self._changed, may_start, self._stop, who)
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
