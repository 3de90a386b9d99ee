"""Coroutines of an event loop that several threads drive, and the futures that they await.

The words are those of asyncio. A `Coroutine` here is a generator: it yields a `Future` where an
`async def` would await one, and None where it would await its next bytes. One thread takes many of
them a step further each (`Listener`), or a thread of its own runs one to its end
(`run_until_complete`). A request that comes too early raises `NotReady` with the future to await,
and is called again (`retry_until_ready`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from runtime.stop import Stop, Turns

T = TypeVar("T")


def nothing_to_check() -> None:
    """The check of a wait that nothing ends but what it waits for."""


class Future(NamedTuple):
    """A condition that a coroutine awaits, where it does not await its next bytes."""

    done: Callable[[], bool]
    """Whether it holds; cheap, and may be called by any thread."""
    check: Callable[[], None] = nothing_to_check
    """Called again and again meanwhile; what it raises is raised in the coroutine."""


Coroutine = Generator[Future | None, None, T]
"""A generator that is suspended at each `yield`: of a future, or of None for its next bytes."""


def run_until_complete(coroutine: Coroutine[T], check: Callable[[], None]) -> T:
    """Run a coroutine in the thread that calls, as asyncio's function of this name does.

    Every step waits for the network a while, then ``check`` is called, which may raise.
    """
    try:
        while True:
            next(coroutine)
            check()
    except StopIteration as returned:
        result: T = returned.value
        return result


class NotReady(Exception):
    """A request comes too early: nothing was done for it, and it can be tried again."""

    def __init__(self, future: Future) -> None:
        self.future = future


def retry_until_ready(request: Callable[[], None]) -> Coroutine[None]:
    """Call a request; as long as it is not ready, await its future and call it again."""
    while True:
        try:
            return request()
        except NotReady as not_ready:
            future = not_ready.future
        yield future


class LoopCondition(Turns):
    """A condition variable whose waits suspend a coroutine, not a thread (`asyncio.Condition`).

    A request that comes too early, or while a client holds the server, raises NotReady.
    """

    is_held = False
    """Whether a client holds the server: then every request has to wait."""
    is_notified = False
    """Whether what requests wait for may hold since the event loop looked."""

    def __enter__(self) -> bool:
        self.acquire()
        if self.is_held:
            self.release()
            raise NotReady(Future(lambda: not self.is_held))
        return True

    @contextmanager
    def released(self, is_still_held: Callable[[], bool]) -> Iterator[None]:
        """Around a request of the client that holds the server: it alone is let through."""
        self.acquire()
        self.is_held = False
        try:
            yield
        finally:
            self.is_held = is_still_held()
            self.is_notified = True
            self.release()

    def wait_until(self, holds: Callable[[], bool], stop: Stop, who: Callable[[], str]) -> None:
        """Return if ``holds`` does; raise NotReady where a thread would wait."""
        stop.check()
        if holds():
            return
        started_s = time.monotonic()

        def check() -> None:
            if time.monotonic() - started_s > 1.0 and stop.nobody_works():
                raise RuntimeError(f"deadlock: {who()}")

        raise NotReady(Future(lambda: bool(stop) or holds(), check))

    def notify_all(self) -> None:
        """Have the loop look at all futures after this step of a coroutine."""
        self.is_notified = True

    wake = notify_all
