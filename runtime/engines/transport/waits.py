"""How a connection waits: as a coroutine, of which one thread serves many, or in a thread's own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

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
