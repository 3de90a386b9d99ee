"""How a connection waits: as a coroutine, of which one thread serves many, or in a thread of its
own; and how a request does that comes too early."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from runtime.stop import Stop, Turns

T = TypeVar("T")


def goes_on_always() -> None:
    """Of a wait that nothing ends but what it waits for."""


class Wait(NamedTuple):
    """What a coroutine waits for, if not for its next bytes."""

    holds: Callable[[], bool]
    """Cheap, and of any thread."""
    goes_on: Callable[[], None] = goes_on_always
    """Called again and again meanwhile; what it raises is raised in the coroutine."""


Steps = Generator[Wait | None, None, T]
"""A coroutine; None: it waits for its next bytes."""


def driven(steps: Steps[T], goes_on: Callable[[], None]) -> T:
    """The same in the thread that calls: every step waits for the network a while."""
    try:
        while True:
            next(steps)
            goes_on()
    except StopIteration as ended:
        found: T = ended.value
        return found


class LaterError(Exception):
    """A request comes too early: nothing was done for it, and it can be tried again."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait


class LoopTurns(Turns):
    """No thread waits for its turn: a request that comes too early, or while a client holds the
    server, is tried again."""

    is_held = False
    is_news = False
    """Whether what requests wait for may hold since somebody looked."""

    def __enter__(self) -> bool:
        self.acquire()
        if self.is_held:
            self.release()
            raise LaterError(Wait(lambda: not self.is_held))
        return True

    @contextmanager
    def passed(self, still_held: Callable[[], bool]) -> Iterator[None]:
        """Around what the client asks for that holds the server."""
        self.acquire()
        self.is_held = False
        try:
            yield
        finally:
            self.is_held, self.is_news = still_held(), True
            self.release()

    def wait_until(self, holds: Callable[[], bool], stop: Stop, who: Callable[[], str]) -> None:
        """Raises LaterError where a thread would wait."""
        stop.check()
        if holds():
            return
        began_s = time.monotonic()

        def goes_on() -> None:
            if time.monotonic() - began_s > 1.0 and stop.nobody_works():
                raise RuntimeError(f"deadlock: {who()}")

        raise LaterError(Wait(lambda: bool(stop) or holds(), goes_on))

    def notify_all(self) -> None:
        """Whoever waits is looked at after this step of a connection."""
        self.is_news = True

    wake = notify_all


def patiently(answer: Callable[[], None]) -> Steps[None]:
    """Try it until it is not too early any more."""
    while True:
        try:
            return answer()
        except LaterError as later:
            wait = later.wait
        yield wait
