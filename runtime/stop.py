"""How a run ends: its threads by the first failure, by Ctrl-C, or by noticing a deadlock; all of it
when a signal asks for it: it finishes its step, writes itself down and says how to go on."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

PATIENCE_S = 20.0
"""How long everybody may wait while nobody works, before that is called a deadlock."""
LONGEST_LOOK_S = 2.0
"""Who looks for signs of life looks more often than this, unless he was suspended himself."""


class RunStopped(Exception):
    """Another thread failed, or the user interrupted; this thread only goes home."""


class PeerError(ConnectionError):
    """Another process of the run has died, is stuck, or was asked for something else; the sentence
    says which, who waited for it, and since when."""


class Unfinished(PeerError):
    """A run that was under way has lost others, and has not come back by itself."""


class Silence:
    """How long a peer has given no sign of life, as it passes for one who looks again and again.

    A run that is suspended as a whole (Ctrl-Z, a frozen machine) wakes up with everybody's signs of
    life in the past, so of the time between two looks no more than ``LONGEST_LOOK_S`` counts: who
    slept himself forgives, and who is awake and busy waits a little longer.
    """

    def __init__(self) -> None:
        self.heard()

    def heard(self) -> None:
        """A sign of life has come."""
        self._looked_s = time.monotonic()
        self._silent_s = 0.0

    def look(self) -> float:
        """Seconds of silence."""
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        return self._silent_s


class Stop:
    """Set once, by whoever fails first; every wait of the run looks at it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.error: BaseException | None = None
        self._on_stop: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._working = self._elsewhere = 0
        self._busy_until_s = self._looked_s = time.monotonic()

    @property
    def patience_s(self) -> float:
        """How long all may wait before that is called a deadlock."""
        return PATIENCE_S

    def __bool__(self) -> bool:
        return self._event.is_set()

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Have ``wake``, a method, called when the run stops, so that a wait can end at once.

        Its object is not kept alive: rows go when their store goes, not when garbage is collected.
        """
        with self._lock:
            living = [method for method in self._on_stop if method() is not None]
            self._on_stop = [*living, weakref.WeakMethod(wake)]

    def set(self, error: BaseException | None) -> None:
        """Stop the run; the first error is the one that is told."""
        with self._lock:
            if self._event.is_set():
                return
            self.error = error
            self._event.set()
        for method in self._on_stop:
            wake = method()
            if wake is not None:
                wake()

    def check(self) -> None:
        """Raise RunStopped after `set`."""
        if self._event.is_set():
            raise RunStopped

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around what the thread does that tells the user: in place of RunStopped why it stopped,
        which it may meet between two legs, in an evaluation or a checkpoint."""
        try:
            yield
        except RunStopped:
            if self.error is None:
                raise
            raise self.error from None

    @contextmanager
    def working(self, *, elsewhere: bool = False) -> Iterator[None]:
        """Around work that may take long: computing, travelling, evaluating. Not around waiting,
        but for another process (``elsewhere``), which knows better whether anybody works."""
        here = not elsewhere
        with self._lock:
            self._working = self._working + here
            self._elsewhere = self._elsewhere + elsewhere
        try:
            yield
        finally:
            with self._lock:
                self._working = self._working - here
                self._elsewhere = self._elsewhere - elsewhere
                self._busy_until_s = max(self._busy_until_s, time.monotonic())

    def waiting_elsewhere(self) -> AbstractContextManager[None]:
        """Around a wait for another process."""
        return self.working(elsewhere=True)

    def busy_until(self, instant_s: float) -> None:
        """Something is on its way until then (`time.monotonic`): nobody is stuck before."""
        with self._lock:
            self._busy_until_s = max(self._busy_until_s, instant_s)

    def sleep(self, seconds: float) -> None:
        """Wait as a message travels; RunStopped as soon as the run stops."""
        self.busy_until(time.monotonic() + seconds)
        if self._event.wait(seconds):
            raise RunStopped

    def nobody_works(self) -> bool:
        """Whether all threads have waited for longer than patience allows, and for each other."""
        return not self._elsewhere and self.only_waits()

    def only_waits(self) -> bool:
        """Whether all threads have waited for so long, for each other or for other processes."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s > LONGEST_LOOK_S:  # suspended, as `Silence` has it
                self._busy_until_s = max(self._busy_until_s, now_s)
            self._looked_s = now_s
            return not self._working and now_s - self._busy_until_s > self.patience_s


class Turns(threading.Condition):
    """A lock whose waits end with the run; at a server, how a request waits for its turn: its
    thread does."""

    def wait_until(self, holds: Callable[[], bool], stop: Stop, who: Callable[[], str]) -> None:
        """Under the lock. Raises RunStopped when the run stops, RuntimeError with the words of
        ``who`` when nobody works and nothing changes."""

        def is_over() -> bool:
            stop.check()
            return holds()

        while not self.wait_for(is_over, timeout=1.0):
            if stop.nobody_works():
                raise RuntimeError(f"deadlock: {who()}")

    def wake(self) -> None:
        """Whoever waits looks again: the run has stopped."""
        with self:
            self.notify_all()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
HELD_UP_S = 15.0
"""Seconds within which a signal ends what it is to end at once. A call of torch may hold back what
hears it for longer, an import may lose what that raises, and torchrun kills after 30 s."""
ENOUGH = "enough"
"""Why a run ends that has stopped to learn: as at the end of its data."""


class Ending:
    """Whether a run was asked to end; `listening` hears signals, `ask` is for everybody else."""

    def __init__(self, *, quiet: bool = False, at_once: bool = False) -> None:
        """``quiet``: a signal is answered by nothing, as whoever sent it tells the user;
        ``at_once``: as the attribute."""
        self._quiet = quiet
        self.why: str | None = None
        """The name of the signal; None as long as nobody asked."""
        self.at_once = at_once
        """Whether there is no step to end and nothing to write down: what hears a signal then ends
        where it is, as by Ctrl-C."""
        self.leg_ends_at_s = math.inf
        """When the leg that is under way is to end (`time.monotonic`): a checkpoint is due."""
        self.is_trained = False
        """Whether nothing is left but to judge the model and to write down what it came to."""
        self.on_leaving: Callable[[str], None] = lambda by: None
        """Told the signal's name before a process ends that is held up (`watched`)."""

    def __bool__(self) -> bool:
        return self.why is not None

    def ends_leg(self) -> bool:
        """Whether no further batch is begun before the next checkpoint."""
        return self.why is not None or time.monotonic() >= self.leg_ends_at_s

    def ask(self, why: str) -> None:
        """Let the run end at its next step."""
        self.why = self.why or why

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first SIGTERM, SIGINT or SIGUSR1 asks the run to end.

        A second Ctrl-C ends it at once, and so does the first signal where the run is not under
        way. Signals that were ignored before stay so. Outside the main thread nothing is heard.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # Blocked where Ray started this process, which holds a Ctrl-C back from all of its own.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A process that a signal is to end at once ends although its main thread does not within
        `HELD_UP_S`. Outside the main thread nothing is watched."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Python writes each signal into the pipe as it comes, whatever the main thread does.
        signals, come = os.pipe()
        os.set_blocking(come, False)
        before = signal.set_wakeup_fd(come, warn_on_full_buffer=False)
        is_over = threading.Event()

        def watch() -> None:
            for byte in iter(lambda: os.read(signals, 1), b""):
                is_to_end = byte[0] in SIGNALS and self.at_once
                if is_to_end and not is_over.wait(HELD_UP_S) and self.at_once:
                    self._leave(signal.Signals(byte[0]))
            os.close(signals)

        watcher = threading.Thread(target=watch, name="signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            signal.set_wakeup_fd(before)
            os.close(come)
            watcher.join()  # it reads the end of the pipe

    def _leave(self, number: signal.Signals) -> None:
        """End the process, whose main thread is held up; nothing is under way."""
        text = f"\n{number.name}: ended, though a call or an import has not come to its end\n"
        os.write(2, text.encode())
        self.on_leaving(number.name)
        os._exit(BY_HAND if number == signal.SIGINT else UNFINISHED)

    def _hear(self, number: int, frame: FrameType | None) -> Any:
        name = signal.Signals(number).name
        is_first = not self
        self.ask(name)  # kept whatever is raised: an import may lose that
        if number == signal.SIGINT and (self.at_once or not is_first):
            raise KeyboardInterrupt
        if self.at_once:
            raise Terminated(by=name)
        if is_first:
            # Not print: the signal may have come in the middle of one.
            does = "ends the step and writes a checkpoint"
            if self.is_trained:
                does = "all is trained; ends when it is judged and written down"
            text = f"\n{self.why}: {does}; Ctrl-C ends at once\n"
            os.write(2, b"" if self._quiet else text.encode())


MOST_RESTARTS = 8
"""Times that a run goes back to its last checkpoint by itself, where torchrun does not do it."""
LONGEST_PAUSE_S = 60.0
"""Between two of them; all eight together leave a host three minutes to start."""


def pause_before(restart: int) -> float:
    """Seconds to wait before the first, second ... restart: what is lost may be on its way back.

    >>> [pause_before(n) for n in range(1, 9)]
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    """
    return min(2.0 ** (restart - 1), LONGEST_PAUSE_S)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 where a run is not under way: it ends where it is, as by Ctrl-C, and may
    be started again."""

    def __init__(self, told: str = "", by: str = signal.SIGTERM.name) -> None:
        """``by``: the name of the signal."""
        super().__init__(told)
        self.by = by


class StoreError(OSError):
    """A store that does not answer within its bound, or fails again and again; another time it may
    answer, so that the same command goes on."""


class NotStored(Exception):
    """What a run came to and is lost: its results or a checkpoint could not be written."""


UNFINISHED = os.EX_TEMPFAIL
"""75: how the process of a run ends that is not finished, and with which the same command goes on.
Whoever counts 0 as success starts it again."""
BY_HAND = 128 + signal.SIGINT
"""130, of a command that somebody has ended by Ctrl-C."""


class Interrupted(Exception):
    """A run that was asked to end has written itself down; its text says how to go on."""

    def __init__(self, told: str = "", by: str | None = None) -> None:
        """``by``: the name of the signal, or who else has asked."""
        super().__init__(told)
        self.by = by

    @property
    def status(self) -> int:
        """The exit code of its process."""
        return BY_HAND if self.by == signal.SIGINT.name else UNFINISHED
