"""Who is connected to a server, since when nobody has heard of them, and who waits for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.stop import Silence, Stop

STUCK_S = 20.0
"""A process that has sent no sign of life for this long is stuck."""
BEATS_EVERY_S = 1.0


@dataclass(slots=True)
class Peer:
    """A process that uses a server."""

    pid: int
    ranks: str
    """Which ranks live in it, in words."""
    silence: Silence = field(default_factory=Silence)
    idle: bool = False
    """Whether it says that all its threads wait, and for others than a server of this run."""


class ServerStop(Stop):
    """The stop of a server process: whether nobody works is a question to all its peers."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers

    @property
    def patience_s(self) -> float:
        """As the peers' own."""
        return self._peers.patience_s

    def nobody_works(self) -> bool:
        """All here and in every process that uses this server wait, for longer than patience."""
        return super().nobody_works() and self._peers.all_idle()


class Peers:
    """The processes that use one server."""

    def __init__(self, patience_s: float = STUCK_S) -> None:
        self.patience_s = patience_s
        self._found: dict[str, Peer] = {}
        self._lock = threading.Lock()

    def add(self, client: str, pid: int, ranks: str) -> None:
        """A process has connected for signs of life."""
        with self._lock:
            self._found[client] = Peer(pid, ranks)

    def remove(self, client: str) -> None:
        """It has said goodbye, or is gone."""
        with self._lock:
            self._found.pop(client, None)

    def heard(self, client: str, idle: bool) -> None:
        """A sign of life."""
        with self._lock:
            if client in self._found:
                self._found[client].silence.heard()
                self._found[client].idle = idle

    def all_idle(self) -> bool:
        """Whether every one of them said that it only waits."""
        with self._lock:
            return all(peer.idle for peer in self._found.values())

    def stuck(self) -> str | None:
        """A sentence about a process that is alive for the kernel and for nobody else."""
        with self._lock:
            for peer in self._found.values():
                silent_s = peer.silence.look()
                if silent_s > self.patience_s:
                    return (
                        f"{peer.ranks} (pid {peer.pid}) has given no sign of life for"
                        f" {silent_s:.0f} s, since {clock(silent_s)}: it is stopped or stuck"
                    )
        return None


class Waits:
    """What the threads of a process wait for, since when: a sentence for each thread that does; the
    innermost, where a wait contains another."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, float]] = {}  # by thread

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """The calling thread waits, as ``text`` says."""
        key = threading.get_ident()
        outer = self._found.get(key)
        self._found[key] = text, time.monotonic()
        try:
            yield
        finally:
            if outer is None:
                self._found.pop(key, None)
            else:
                self._found[key] = outer

    def told(self) -> str:
        """All of them with the time of day since when, to be put behind a sentence; "" if none."""
        now = time.monotonic()
        found = [f"{text} since {clock(now - s)}" for text, s in list(self._found.values())]
        return f"; {'; '.join(sorted(found))}" if found else ""


def clock(ago_s: float) -> str:
    """The time of day some seconds ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))
