"""SimPy's environment with its hot paths cut short: the same events in the same order, for less.

A process may yield seconds instead of a timeout and sleeps for so long, without an event of its
own. One that nobody waits for ends without an event, too, `run_until` handles events in one loop,
and scheduling is written out where SimPy calls from function to function. Ties are broken as in
SimPy, by priority and then by order of scheduling.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import simpy
from simpy.events import NORMAL, Initialize

Process = Generator[simpy.Event | float, Any, None]
"""What happens one after the other: it yields events to wait for, or seconds to sleep."""


class NothingLeftError(RuntimeError):
    """No event is scheduled any more and the awaited one has not happened."""


class Clock(simpy.Environment):
    """Simulated time and what is to happen."""

    now: float = 0.0  # a plain attribute: SimPy's property is a call
    """Simulated seconds."""
    process: Callable[[Process], simpy.Process]  # type: ignore[assignment]  # SimPy's take no naps
    """Start a process."""

    def __init__(self) -> None:
        super().__init__()
        self._given = count()
        self._eid = self._given
        self._asked = 0
        # What happens at this very instant; those that a heap would carry to its root and back.
        self._at_once: deque[tuple[float, int, int, simpy.Event]] = deque()
        # Bound once: SimPy makes a new method for every event otherwise.
        vars(self).update(
            timeout=partial(_Timeout, self),
            event=partial(_Event, self),
            process=partial(_Process, self),
        )

    @property
    def events(self) -> int:
        """Events that were given to it until now."""
        self._asked += 1  # a number is taken to read the counter
        return next(self._given) - self._asked + 1

    def peek(self) -> float:
        """When the next event happens; infinite if none is left."""
        return self.now if self._at_once else super().peek()

    def run_until(self, end: simpy.Event) -> None:
        """Let everything happen until this event has. Raises what a process has raised, or
        `NothingLeftError`."""
        with _without_collection():
            self._run_until(end)

    def _run_until(self, end: simpy.Event) -> None:
        over: list[simpy.Event] = []
        end.callbacks.append(over.append)
        queue, at_once = self._queue, self._at_once
        while not over:
            if at_once and not (queue and queue[0] < at_once[0]):
                event = at_once.popleft()[3]
            elif queue:
                now, _, _, event = heappop(queue)
                self._now = self.now = now
            else:
                raise NothingLeftError("no scheduled events left")
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # as SimPy marks what has happened
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value


@contextmanager
def _without_collection() -> Iterator[None]:
    """No search for reference cycles: a run makes none, and its instants and buffers are many."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Event(simpy.Event):
    def __init__(self, env: Clock) -> None:
        self.env = env
        self.callbacks = []

    def succeed(self, value: Any = None) -> simpy.Event:
        self._ok = True
        self._value = value
        env: Any = self.env
        env._at_once.append((env.now, NORMAL, next(env._eid), self))
        return self


class _Timeout(simpy.Timeout):
    def __init__(self, env: Clock, delay: float) -> None:
        if delay < 0:
            raise ValueError(f"Negative delay {delay}")
        self.env = env
        self.callbacks = []
        self._value = None
        self._delay = delay
        self._ok = True
        heappush(env._queue, (env.now + delay, NORMAL, next(env._eid), self))


class _Nap:
    """Stands in the queue for a process that sleeps, each time the same one."""

    __slots__ = ("callbacks",)
    _ok, _value = True, None
    callbacks: list[Callable[[Any], None]] | None


class _Process(simpy.Process):
    def __init__(self, env: Clock, generator: Process) -> None:
        self.env = env
        self.callbacks = []
        self._generator: Generator[Any, Any, None] = generator
        self._nap = _Nap()
        self._target = Initialize(env, self)

    def _resume(self, event: simpy.Event) -> None:
        """Go on with what was awaited, as long as that has happened."""
        try:
            while True:
                if event._ok:
                    event = self._generator.send(event._value)
                else:
                    event.defused = True
                    event = self._generator.throw(event._value)
                if isinstance(event, (float, int)):
                    self._sleep(event)
                    return
                if event.callbacks is not None:
                    event.callbacks.append(self._resume)
                    return
        except StopIteration as end:
            self._ok, self._value = True, end.value
            if self.callbacks:
                self.env.schedule(self)
            else:
                self.callbacks = None  # type: ignore[assignment]  # has happened; nobody waits
        except BaseException as error:
            self._ok, self._value = False, error
            self.env.schedule(self)

    def _sleep(self, delay: float) -> None:
        if delay < 0:
            raise ValueError(f"Negative delay {delay}")
        env: Any = self.env
        nap = self._nap
        nap.callbacks = [self._resume]
        heappush(env._queue, (env.now + delay, NORMAL, next(env._eid), nap))
