"""SimPy's environment with a loop of its own: the same events in the same order, for less.

SimPy's events ask two things of their environment: `schedule`, and what time it is. Here what
happens at one instant is one entry of the queue: a list, in the order of scheduling, as ties are
broken in SimPy. Most instants of a run are shared by many ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from heapq import heappop, heappush
from math import inf
from operator import length_hint
from typing import Any

import simpy
from simpy.events import NORMAL

Process = Generator["simpy.Event | float", Any, None]
"""What happens one after the other: it yields events to wait for, or seconds to pass."""


class NothingLeftError(RuntimeError):
    """No event is scheduled any more and the awaited one has not happened."""


class Running:
    """A process at work: it goes on when what it has yielded has happened. What it raises ends the
    run."""

    __slots__ = ("_clock", "_ended", "_send")

    def __init__(self, clock: Clock, process: Process) -> None:
        self._clock = clock
        self._send = process.send
        self._ended: simpy.Event | None = None

    @property
    def ended(self) -> simpy.Event:
        """An event that happens when it ends; to be asked for before."""
        self._ended = self._ended or self._clock.event()
        return self._ended

    def resume(self, _: simpy.Event | None = None) -> None:
        """Let it run until it waits for something."""
        try:
            while isinstance(awaited := self._send(None), simpy.Event):
                if awaited.callbacks is not None:  # it has not happened yet
                    awaited.callbacks.append(self.resume)
                    return
        except StopIteration:
            if self._ended is not None:
                self._ended.succeed()
            return
        if awaited < 0:
            raise ValueError(f"Negative delay {awaited}")
        self._clock.schedule(self, NORMAL, awaited)


class Clock(simpy.Environment):
    """Simulated time and what is to happen."""

    now: float = 0.0  # a plain attribute: SimPy's property is a call
    """Simulated seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        """Events that were given to it until now."""
        self._instants: list[float] = []
        self._due: dict[float, list[simpy.Event | Running]] = {0.0: []}
        self._left = iter(self._due[0.0])  # of the present instant; it grows meanwhile
        self._starting: list[Running] = []

    def schedule(
        self, event: simpy.Event | Running, priority: int = NORMAL, delay: float = 0
    ) -> None:
        """Let an event happen, or a process go on, after so many seconds (inf: never)."""
        self.events += 1
        time_s = self.now + delay
        due = self._due.get(time_s)
        if due is None:
            if time_s < inf:
                self._due[time_s] = [event]
                heappush(self._instants, time_s)
        else:
            due.append(event)

    def process(self, process: Process) -> Running:  # type: ignore[override]
        """Start a process, when the present one waits."""
        running = Running(self, process)
        self._starting.append(running)
        return running

    def peek(self) -> float:
        """When the next event happens; infinite if none is left."""
        if length_hint(self._left):
            return self.now
        return self._instants[0] if self._instants else inf

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
        # It is over when the end's callbacks are called, as those of any event.
        over: list[simpy.Event] = []
        end.callbacks.append(over.append)
        self._start()
        starting = self._starting
        instants = self._instants

        # All that happens at this instant, in the order in which it was scheduled.
        while not over:
            for event in self._left:
                if isinstance(event, Running):
                    event.resume()
                else:
                    callbacks = event.callbacks
                    event.callbacks = None  # type: ignore[assignment]  # SimPy's mark
                    for callback in callbacks:
                        callback(event)
                if starting:
                    self._start()

                # The awaited event has happened: what is left of this instant waits for the next
                # call.
                if over:
                    self._due[self.now] = left = list(self._left)  # nothing that has happened
                    self._left = iter(left)
                    return

            # On to the next instant.
            del self._due[self.now]
            if not instants:
                raise NothingLeftError("no scheduled events left")
            self.now = heappop(instants)
            self._left = iter(self._due[self.now])

    def _start(self) -> None:
        for running in self._starting:  # which may start others
            running.resume()
        self._starting.clear()
