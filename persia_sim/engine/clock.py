"""SimPy's environment with a loop of its own: the same events in the same order, for less.

SimPy's events and processes ask two things of their environment: `schedule`, and what time it is.
Both are here, with the loop written out where SimPy calls a function for each event. Ties are
broken as in SimPy, by priority and then by order of scheduling.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from heapq import heappop, heappush
from math import inf
from typing import Any

import simpy
from simpy.events import NORMAL

Process = Generator[simpy.Event, Any, None]
"""What happens one after the other: it yields events to wait for."""


class NothingLeftError(RuntimeError):
    """No event is scheduled any more and the awaited one has not happened."""


class Clock(simpy.Environment):
    """Simulated time and what is to happen."""

    now: float = 0.0  # a plain attribute: SimPy's property is a call
    """Simulated seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        """Events that were given to it until now."""
        self._due: list[tuple[float, int, int, simpy.Event]] = []

    def schedule(self, event: simpy.Event, priority: int = NORMAL, delay: float = 0) -> None:
        """Let an event happen after so many seconds."""
        self.events = number = self.events + 1
        heappush(self._due, (self.now + delay, priority, number, event))

    def peek(self) -> float:
        """When the next event happens; infinite if none is left."""
        return self._due[0][0] if self._due else inf

    def run_until(self, end: simpy.Event) -> None:
        """Let everything happen until this event has. Raises what a process has raised, or
        `NothingLeftError`. Nothing searches for reference cycles meanwhile: a run makes none, and
        its instants and buffers are many."""
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run_until(end)
        finally:
            if collects:
                gc.enable()

    def _run_until(self, end: simpy.Event) -> None:
        over: list[simpy.Event] = []
        end.callbacks.append(over.append)
        due = self._due
        while not over:
            if not due:
                raise NothingLeftError("no scheduled events left")
            self.now, _, _, event = heappop(due)
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # as SimPy marks what has happened
            for callback in callbacks:
                callback(event)
            if not event.ok and not event.defused:
                raise event.value  # type: ignore[misc]  # what a process has raised
