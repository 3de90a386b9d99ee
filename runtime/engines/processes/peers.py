"""Who comes in, who is there, since when nobody has heard of them, and who waits for what."""

from __future__ import annotations

import errno
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from runtime.engines.processes.channel import Channel, connect
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    unpack_json,
)
from runtime.stop import PeerError, Silence, Stop

STUCK_S = 20.0
"""A process that has sent no sign of life for this long is stuck."""
BEATS_EVERY_S = 1.0
START_WITHIN_S = 60.0
"""A process that was just started loads Python first."""
FIRST_WORD_WITHIN_S = 10.0


# Who comes in.


def serve_all(door: socket.socket, serve: Callable[[Channel], None]) -> None:
    """``serve`` each process of this user that connects, in a thread of its own, until the socket
    is closed; another user is not even heard."""
    while True:
        try:
            connection, _ = door.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):
                return
            time.sleep(0.1)  # no descriptor is free: whoever is connected is served all the same
            continue
        channel = Channel(connection)
        if channel.is_own_user():
            threading.Thread(target=serve, args=(channel,), daemon=True).start()
        else:
            channel.close()


def greeting(channel: Channel, secret: str) -> tuple[Message, dict[str, Any]]:
    """The first message of who has connected, and what it says: it knows the secret of the run.

    Raises BadMessageError for whatever else it is, and when it does not come in time.
    """
    silence = Silence()

    def in_time() -> None:
        if silence.look() > FIRST_WORD_WITHIN_S:
            raise BadMessageError(f"no first word within {FIRST_WORD_WITHIN_S:.0f} s")

    message, _ = channel.receive(in_time)
    if message.kind is not MessageKind.HELLO:
        raise BadMessageError(f"the first message is {message.kind.name}, not HELLO")
    try:
        said = unpack_json(message.body)
        known = hmac.compare_digest(str(said.get("secret", "")).encode(), secret.encode())
    except BadMessageError:
        raise
    except Exception as error:
        raise BadMessageError(f"the first message cannot be read: {error}") from None
    if not known:
        raise BadMessageError("the first message does not know the secret of this run")
    channel.takes_arrays = True
    return message, said


def come_in(
    name: str, server: str, hello: Mapping[str, Any], rank: int = -1, remedy: str = ""
) -> Channel:
    """A connection to who listens there, and the first word. Raises PeerError, which names the
    ``server``, and PeerGoneError."""
    try:
        channel = connect(name, START_WITHIN_S)
    except OSError as error:
        why = error.strerror or error
        raise PeerError(f"{server} cannot be reached: {why}{remedy}") from None
    if not channel.is_own_user():
        channel.close()
        raise PeerError(f"{server} is another user's; start the run again")
    channel.takes_arrays = True
    channel.send(Message(MessageKind.HELLO, rank, body=pack_json(hello)))
    return channel


def until(seconds: float, who: str) -> Callable[[], None]:
    """Raises TimeoutError when it is called again and again for longer than that."""
    silence = Silence()

    def goes_on() -> None:
        if silence.look() > seconds:
            raise TimeoutError(f"{who} has not answered for {seconds:.0f} s")

    return goes_on


# Who is there.


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
