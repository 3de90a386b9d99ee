"""A signal asks a run to end: it finishes its step, writes itself down and says how to go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


ENOUGH = "enough"
"""Why a run ends that has stopped to learn: as at the end of its data."""


class Ending:
    """Whether a run was asked to end; `listening` hears signals, `ask` is for everybody else."""

    def __init__(self, *, quiet: bool = False) -> None:
        """``quiet``: a signal is answered by nothing, as whoever sent it tells the user."""
        self._quiet = quiet
        self.why: str | None = None
        """The name of the signal; None as long as nobody asked."""

    def __bool__(self) -> bool:
        return self.why is not None

    def ask(self, why: str) -> None:
        """Let the run end at its next step."""
        self.why = self.why or why

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While a run trains: the first SIGTERM, SIGINT or SIGUSR1 asks it to end.

        A second Ctrl-C ends it at once. Signals that were ignored before stay so. Outside the main
        thread nothing is heard.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> Any:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self:
            self.ask(signal.Signals(number).name)
            # Not print: the signal may have come in the middle of one.
            text = f"\n{self.why}: ends the step and writes a checkpoint; Ctrl-C ends at once\n"
            os.write(2, b"" if self._quiet else text.encode())


class NotKept(Exception):
    """A trained model that was to be kept and is lost: a checkpoint could not be written."""


class Interrupted(Exception):
    """A run that was asked to end has written itself down; its text says how to go on."""
