"""A bounded queue between two threads of a rank; what is in it may still be on its way."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from runtime.stop import Stop, wait_for

T = TypeVar("T")


class Pipe(Generic[T]):
    """First in, first out; an item can be taken ``delay_s`` after it was put.

    Delays run side by side, as messages on a network do: that is what lets a window of tau steps
    hide latency (law 15). Every wait ends when the run stops.
    """

    def __init__(self, name: str, capacity: int, stop: Stop) -> None:
        self._name, self._capacity, self._stop = name, capacity, stop
        self._items: deque[tuple[float, T]] = deque()
        self._changed = threading.Condition()
        stop.on_stop(self._wake)

    def wait_for_room(self) -> None:
        """Return when an item can be put without waiting (by the only thread that puts)."""
        with self._changed:
            wait_for(
                self._changed,
                lambda: len(self._items) < self._capacity,
                self._stop,
                lambda: f"{self._name} waits for room among {self._capacity} batches",
            )

    def put(self, item: T, delay_s: float = 0.0) -> None:
        """Add an item, once there is room; it arrives ``delay_s`` later."""
        self.wait_for_room()
        arrives_s = time.monotonic() + delay_s
        self._stop.busy_until(arrives_s)
        with self._changed:
            self._items.append((arrives_s, item))
            self._changed.notify_all()

    def get(self) -> T:
        """Take the oldest item, once it has arrived."""
        with self._changed:
            wait_for(
                self._changed,
                lambda: bool(self._items),
                self._stop,
                lambda: f"{self._name} waits for a batch to come",
            )
            arrives_s = self._items[0][0]
        left_s = arrives_s - time.monotonic()
        if left_s > 0:
            self._stop.sleep(left_s)
        with self._changed:
            _, item = self._items.popleft()
            self._changed.notify_all()
        return item

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
