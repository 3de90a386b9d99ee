"""The buffers of one NN worker, as counters and queues, and who waits for what."""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import simpy


class Waiter(IntEnum):
    """A process of a rank that may have to wait."""

    LOADER = 0
    LOOKUP = 1
    COPY_IN = 2
    TRAIN = 3
    COPY_OUT = 4
    PUSH = 5

    @property
    def told(self) -> str:
        """As a deadlock's message says it."""
        return self.name.lower().replace("_", " ")


class Rank:
    """Counters say how many batches have passed a point; a batch is known by its step."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.loaded = 0  # batches delivered by loaders
        self.early: set[int] = set()  # delivered before an earlier one
        self.looked_up = 0  # lookups started
        self.rows_here: set[int] = set()  # looked up, not yet handed on
        self.handed_on = 0  # in step order
        self.copied_in = 0  # copies to the GPU started
        self.on_gpu = 0
        self.trained = 0  # taken by the training loop
        self.returned = 0  # pushes known to be applied
        self.backward: deque[int] = deque()
        self.to_push: deque[int] = deque()
        self.stall_s = 0.0  # the replica is locked by a round of averaging
        self.reasons: dict[Waiter, str] = {}
        self._asleep: list[list[simpy.Event]] = [[] for _ in Waiter]
        self._loaders: dict[int, simpy.Event] = {}  # asleep, by batch

    def wait(self, who: Waiter, why: str, batch: int = 0) -> simpy.Event:
        """An event that `wake` fires; the reason is kept for the message of a deadlock.

        ``batch`` tells loaders apart, which wait for room for one batch each.
        """
        self.reasons[who] = why
        event = self._env.event()
        if who is Waiter.LOADER:
            self._loaders[batch] = event
        else:
            self._asleep[who].append(event)
        return event

    def wake(self, who: Waiter) -> None:
        """Let one waiting process of this kind look again."""
        waiting = self._asleep[who]
        if waiting:
            waiting.pop(0).succeed()

    def wake_loader(self, batch: int) -> None:
        """Let the loader of this batch look again."""
        waiting = self._loaders.pop(batch, None)
        if waiting is not None:
            waiting.succeed()

    def is_waiting(self, who: Waiter) -> bool:
        """Whether a process of this kind sleeps until `wake`."""
        return bool(self._asleep[who])
