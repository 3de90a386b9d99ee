"""Who comes in, who is there, since when nobody has heard of them, and who waits for what."""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runtime.engines.processes.calls import tell
from runtime.engines.processes.channel import (
    RESUMED_WITHIN_S,
    Channel,
    PeerGoneError,
    connect,
)
from runtime.engines.processes.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    unpack_json,
)
from runtime.engines.processes.tls import Certificate, proof
from runtime.stop import PeerError, Silence, Stop

STUCK_S = RESUMED_WITHIN_S
"""A process that has sent no sign of life for this long is stuck."""
BEATS_EVERY_S = 1.0
START_WITHIN_S = 60.0
"""A process that was just started loads Python first."""
FIRST_WORD_WITHIN_S = 10.0
NOT_YET = -1
"""Messages received by who has never been let in."""


# Who comes in.


class Listener:
    """Lets in whoever knows the secret, each in a thread of its own. One whose connection broke
    comes again under the name of that connection, and goes on in the thread that it had."""

    def __init__(
        self,
        sock: socket.socket,
        secret: str,
        serve: Callable[[Channel, Message, dict[str, Any]], None],
        who: str,
        *,
        tls: bool = False,
    ) -> None:
        """``serve`` is given a connection, its first message and what that says, and returns when
        all is said; ``who`` listens, in words. Raises ValueError where ``tls`` cannot be had."""
        self._socket, self._secret, self._serve, self._who = sock, secret, serve, who
        self._certificate = Certificate() if tls else None
        self._known: dict[str, Channel] = {}
        self._lock = threading.Lock()

    def serve_all(self) -> None:
        """Until the socket is closed. Another user of this host is not even heard."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(0.1)  # no descriptor is free: who is connected is served all the same
                continue
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Nobody else comes in."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for somebody
        self._socket.close()

    def _hear(self, sock: socket.socket) -> None:
        """Whatever is wrong with a stranger ends its connection, and nothing else."""
        try:
            tls = self._certificate is not None
            channel = Channel(sock, tls=tls, certificate=self._certificate)
        except OSError:  # it has gone before a word
            return sock.close()
        if not channel.is_own_user():
            return channel.close()
        said: dict[str, Any] = {}
        is_new = True
        try:
            message, said = _greeting(channel, self._secret)
            name = str(said.get("connection", id(channel)))
            is_new = self._is_new(channel, name, int(said.get("received", NOT_YET)))
            if is_new:
                try:
                    self._serve(channel, message, said)
                finally:
                    self._known.pop(name)
        except BadMessageError as error:
            who = f"{said['ranks']} (pid {said['pid']})" if "ranks" in said else channel.who()
            sentence = f"{self._who}: closed a connection of {who}: {error}"
            print(sentence, file=sys.stderr, flush=True)
            tell(channel, error)
        except OSError:
            pass  # it has gone
        finally:
            if is_new:
                channel.close()

    def _is_new(self, channel: Channel, name: str, received: int) -> bool:
        """If not, the channel of that name goes on over this connection."""

        def accept(received: int) -> None:
            if not channel.shares_memory:
                told = {"received": received, "proof": _proof(self._secret, "server", channel)}
                body = pack_json(told)
                channel.send(Message(MessageKind.ACCEPTED, body=body), within_s=1.0)

        with self._lock:
            known = self._known.get(name)
            if known is None:
                if received != NOT_YET:
                    raise BadMessageError("this process has never had the connection that broke")
                accept(0)
                channel.know()
                self._known[name] = channel
        if known is not None:
            known.resume(channel, max(received, 0), accept)
        return known is None


def _greeting(channel: Channel, secret: str) -> tuple[Message, dict[str, Any]]:
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
        right = _proof(secret, "client", channel)
        known = hmac.compare_digest(str(said.get("proof", "")).encode(), right.encode())
    except BadMessageError:
        raise
    except Exception as error:
        raise BadMessageError(f"the first message cannot be read: {error}") from None
    if not known:
        raise BadMessageError("the first message does not know the secret of this run")
    return message, said


def _proof(secret: str, side: str, channel: Channel) -> str:
    return proof(secret, side, channel.fingerprint())


def come_in(
    name: str,
    server: str,
    secret: str,
    hello: Mapping[str, Any],
    rank: int = -1,
    remedy: str = "",
    awaited_s: float = 0.0,
) -> Channel:
    """A channel to who listens there, and perhaps for so long is about to. Raises PeerError, which
    names the ``server``, and PeerGoneError. The ``secret`` itself does not travel."""
    silence, refused_s = Silence(), time.monotonic() + awaited_s
    hello = {**hello, "connection": secrets.token_hex(16)}
    greet = partial(_greet, name, server, secret, hello, rank)
    while True:
        try:
            channel, _ = greet(NOT_YET, START_WITHIN_S)
            channel.know(greet)
            return channel
        except PeerGoneError:  # in the middle of the greeting
            if name.startswith("\0") or silence.look() > RESUMED_WITHIN_S:
                raise
        except OSError as error:
            if isinstance(error, PeerError):
                raise
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > refused_s:
                why = error.strerror or error
                if isinstance(error, ssl.SSLError):
                    why = f"{why}; say --no-tls on both sides, or on none"
                raise PeerError(f"{server} cannot be reached: {why}{remedy}") from None
        time.sleep(0.1)


def _greet(
    name: str,
    server: str,
    secret: str,
    hello: Mapping[str, Any],
    rank: int,
    received: int,
    within_s: float = 5.0,
) -> tuple[Channel, int]:
    """A connection to who listens there, and how many messages were received there over the one
    before. Raises PeerError when it is refused in a sentence, OSError."""
    channel = connect(name, within_s)
    try:
        if not channel.is_own_user():
            raise PeerError(f"{server} is another user's; start the run again")
        known = {"received": received, "proof": _proof(secret, "client", channel)}
        body = pack_json({**hello, **known})
        channel.send(Message(MessageKind.HELLO, rank, body=body))
        if channel.shares_memory:
            return channel, 0
        message, _ = channel.receive(until(within_s, server))
        said = unpack_json(message.body)
        if message.kind is MessageKind.FAILED:
            raise PeerError(f"{server} lets nobody in: {said.get('sentence')}")
        right = _proof(secret, "server", channel)
        if not hmac.compare_digest(str(said.get("proof", "")).encode(), right.encode()):
            raise PeerError(f"{server} does not know the secret of this run, or is not the one")
        return channel, int(said["received"])
    except BaseException:
        channel.close()
        raise


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
