"""Listening and connecting; who is there, how long nobody has heard of them, who waits for what."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from runtime.hosts.wire.channel import RESUMED_WITHIN_S, Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine, nothing_to_check
from runtime.hosts.wire.messages import (
    BadMessageError,
    Message,
    MessageKind,
    pack_json,
    unpack_json,
)
from runtime.hosts.wire.tls import TLS, TlsSocket, proof
from runtime.stop import PeerError, Silence, Stop

STUCK_S = RESUMED_WITHIN_S
"""A process that has sent no sign of life for this long is stuck."""
_FEW_A_CORE = 4
_MOST_CROWDED = 6.0
BEATS_EVERY_S = 1.0
START_WITHIN_S = 60.0
"""A process that was just started loads Python first."""
CONNECTS_WITHIN_S = 5.0
"""The kernel itself answers who connects, however busy the process is that listens."""
FIRST_WORD_WITHIN_S = 10.0
REPORTED_AFTER_S = 10.0
"""An address that has not answered for so long is named on the screen while it is tried again."""
NEVER_ADMITTED = -1
"""Messages received by who has never been let in."""


def crowding(processes: int) -> float:
    """How much longer than `STUCK_S` a sign of life may take where so many processes share the
    cores that this one may use, or so many of anybody wait for those of the host as now: 1 up to
    four a core, 6 (two minutes) at most.

    16 ranks and 64 servers on two cores were taken for stuck after 20 s, and were none.
    """
    of_run = processes / len(os.sched_getaffinity(0))
    try:
        of_all = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:  # a container may hide it
        of_all = 0.0
    return min(max(of_run, of_all, _FEW_A_CORE) / _FEW_A_CORE, _MOST_CROWDED)


def at_port(host: str, port: int) -> str:
    """HOST:PORT, in brackets where the host is an IPv6 address.

    >>> at_port("10.0.0.1", 7800), at_port("fd78::2", 0)
    ('10.0.0.1:7800', '[fd78::2]:0')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(name: str) -> tuple[str, int]:
    """The two parts of HOST:PORT.

    >>> host_and_port("10.0.0.1:7800"), host_and_port("[fd78::2]:0")
    (('10.0.0.1', 7800), ('fd78::2', 0))
    """
    host, _, port = name.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def listen(name: str, ports: Iterable[int] = ()) -> tuple[socket.socket, str]:
    """A listening socket, and its name as `connect` takes it: an abstract one of this host (it
    starts with a zero byte, and leaves no file behind), or HOST:PORT, where port 0 is any, or the
    first of ``ports`` that is free, with `TLS` before it if it is encrypted. Raises OSError."""
    # An abstract Unix socket of this host.
    if name.startswith("\0"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(name)
        sock.listen(128)
        return sock, name

    # TCP: the first port of the range that is free.
    host, port = host_and_port(name.removeprefix(TLS))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in list(ports) if ports and not port else [port]:
        try:
            sock = socket.create_server((host, candidate), family=family, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or candidate == port:
                raise
        else:
            tls = TLS if name.startswith(TLS) else ""
            return sock, f"{tls}{at_port(host, sock.getsockname()[1])}"
    raise OSError(errno.EADDRINUSE, f"all ports of the range are taken at {host}")


def open_channel(name: str, within_s: float) -> Channel:
    """A connection to who listens there, before any handshake of ours. Raises OSError."""
    # On this host: a socket whose name is abstract.
    if name.startswith("\0"):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(within_s)
            local.connect(name)
        except BaseException:
            local.close()
            raise
        return Channel(local)

    # Over a network: TCP, in which TLS shakes hands where the name says so.
    host, port = host_and_port(name.removeprefix(TLS))
    try:
        sock = socket.create_connection((host, port), min(within_s, CONNECTS_WITHIN_S))
    except TimeoutError:
        at = at_port(host, port)
        raise TimeoutError(f"no answer from {at}: a firewall or a cut cable drops it") from None
    if not name.startswith(TLS):
        return Channel(sock)
    sock.settimeout(min(within_s, RESUMED_WITHIN_S))
    try:
        return Channel(TlsSocket(sock))
    except TimeoutError:
        raise TimeoutError("something listens there, and shakes no hands for TLS") from None


def connect(
    name: str,
    server: str,
    secret: str,
    hello: Mapping[str, Any],
    rank: int = -1,
    remedy: str = "",
    awaited_s: float = 0.0,
    check: Callable[[], None] = nothing_to_check,
) -> Channel:
    """A channel to who listens there, and perhaps for so long is about to. Raises PeerError, which
    names the ``server``, PeerGoneError, and what ``check`` raises, which is called again and again
    meanwhile. The ``secret`` itself does not travel."""
    silence = Silence()
    started_s = time.monotonic()
    hello = {**hello, "connection": secrets.token_hex(16)}
    shake_hands = partial(_shake_hands, name, server, secret, hello, rank)
    tries = 0
    is_reported = False
    while True:
        check()
        tries += 1
        try:
            channel, _ = shake_hands(NEVER_ADMITTED, START_WITHIN_S, check)
            channel.authenticated(shake_hands)
            return channel
        except PeerGoneError:
            # It was cut in the middle of the handshake: by the network, or because one side
            # encrypts.
            if name.startswith("\0") or silence.look() > RESUMED_WITHIN_S:
                raise
            if not name.startswith(TLS) and _is_encrypted(name):
                raise PeerError(
                    f"{server} encrypts what travels, and this side does not; {_BOTH}"
                ) from None
        except BadMessageError as error:
            # Something else listens there.
            what = f"{server}: what listens there is none of persia-runtime: {error}"
            raise PeerError(f"{what}{remedy}") from None
        except OSError as error:
            # It was not reached. A network may drop packets for a while, and cut the first
            # handshake as any other one; a process that starts refuses until it listens.
            if isinstance(error, PeerError):
                raise
            is_cut = isinstance(error, TimeoutError | ssl.SSLEOFError)
            is_refused = isinstance(error, ConnectionRefusedError)
            patience_s = RESUMED_WITHIN_S if is_cut else awaited_s if is_refused else 0.0
            waited_s = time.monotonic() - started_s
            if is_cut and waited_s >= REPORTED_AFTER_S and not is_reported:
                is_reported = True
                warning = f"warning: {server}: {error}; tried {tries} times in {waited_s:.0f} s"
                print(f"{warning}, for {patience_s:.0f} s", file=sys.stderr, flush=True)
            if waited_s >= patience_s:
                reason = error.strerror or error
                if isinstance(error, ssl.SSLError):
                    reason = f"{reason}; {_BOTH}"
                    remedy = ""
                raise PeerError(f"{server} cannot be reached: {reason}{remedy}") from None
        time.sleep(0.1)


_BOTH = "say --no-tls on both sides, or on none"


def _is_encrypted(name: str) -> bool:
    """Whether who listens there closes a connection in plain because it shakes hands first."""
    try:
        open_channel(f"{TLS}{name}", CONNECTS_WITHIN_S).close()
    except OSError:
        return False
    return True


def _shake_hands(
    name: str,
    server: str,
    secret: str,
    hello: Mapping[str, Any],
    rank: int,
    received: int,
    within_s: float = 5.0,
    check: Callable[[], None] = nothing_to_check,
) -> tuple[Channel, int]:
    """A connection to who listens there, and how many messages were received there over the one
    before. Raises PeerError when it is refused in a sentence, OSError, and as ``check``."""
    channel = open_channel(name, within_s)
    try:
        # On one host the first message is all: nobody listens but the other end.
        if not channel.connection.is_same_user():
            raise PeerError(f"{server} is another user's; start the run again")
        if channel.connection.shares_memory:
            body = pack_json({**hello, "proof": proof(secret, "client")})
            channel.send(Message(MessageKind.HELLO, rank, body=body))
            return channel, 0

        # Between hosts: HELLO with a nonce, then CHALLENGE with the other end's.
        nonce = secrets.token_hex(16)
        fingerprint = channel.connection.fingerprint()
        body = pack_json({**hello, "received": received, "nonce": nonce})
        channel.send(Message(MessageKind.HELLO, rank, body=body))
        in_time = deadline(within_s, server, check)
        challenge = _reply(channel, server, in_time)
        theirs = str(challenge.get("nonce"))
        channel.session = f"{nonce} {theirs}"

        # PROOF that this side knows the secret, then ACCEPTED with a proof of the other one.
        ours = proof(secret, "client", fingerprint, theirs)
        channel.send(Message(MessageKind.PROOF, body=pack_json({"proof": ours})))
        accepted = _reply(channel, server, in_time)
        expected = proof(secret, "server", fingerprint, nonce)
        if not hmac.compare_digest(str(accepted.get("proof", "")).encode(), expected.encode()):
            raise PeerError(f"{server} does not know the secret of this run, or is not the one")
        return channel, int(accepted["received"])
    except BaseException:
        channel.close()
        raise


def _reply(channel: Channel, server: str, in_time: Callable[[], None]) -> dict[str, Any]:
    """The payload of its reply. Raises PeerError when it refuses, and as ``in_time``."""
    message, _ = channel.receive(in_time)
    payload = unpack_json(message.body)
    if message.kind is MessageKind.FAILED:
        raise PeerError(f"{server} lets nobody in: {payload.get('sentence')}")
    return payload


def deadline(
    seconds: float, who: str, check: Callable[[], None] = nothing_to_check
) -> Callable[[], None]:
    """A check that raises TimeoutError when it is called again and again for longer than that, and
    what ``check`` raises."""
    silence = Silence()

    def in_time() -> None:
        if silence.look() > seconds:
            raise TimeoutError(f"{who} has not answered for {seconds:.0f} s")
        check()

    return in_time


def accept_handshake(channel: Channel, secret: str) -> Coroutine[tuple[Message, dict[str, Any]]]:
    """The first message of who has connected, and its payload: it knows the secret of the run.

    Raises BadMessageError for whatever else it is, and when it does not come in time.
    """
    silence = Silence()

    def in_time() -> None:
        if silence.look() > FIRST_WORD_WITHIN_S:
            raise BadMessageError(f"no first word within {FIRST_WORD_WITHIN_S:.0f} s")

    # HELLO; on one host the proof of the secret is in it.
    message, _ = yield from channel.receiving(in_time)
    if message.kind is not MessageKind.HELLO:
        raise BadMessageError(f"the first message is {message.kind.name}, not HELLO")
    hello = unpack_json(message.body)
    proving = hello
    nonce = ""

    # Between hosts it covers a nonce that is nonce for this connection.
    if not channel.connection.shares_memory:
        nonce = secrets.token_hex(16)
        channel.session = f"{hello.get('nonce')} {nonce}"
        channel.send(Message(MessageKind.CHALLENGE, body=pack_json({"nonce": nonce})))
        reply, _ = yield from channel.receiving(in_time)
        if reply.kind is not MessageKind.PROOF:
            raise BadMessageError(f"the second message is {reply.kind.name}, not PROOF")
        proving = unpack_json(reply.body)

    # What a stranger proves is compared in constant time.
    channel.check = nothing_to_check
    expected = proof(secret, "client", channel.connection.fingerprint(), nonce)
    given = str(proving.get("proof", "")).encode(errors="replace")
    if not hmac.compare_digest(given, expected.encode()):
        raise BadMessageError("the first message does not know the secret of this run")
    return message, hello


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
        """How long the peers may be silent."""
        return self._peers.patience_s

    def nobody_works(self) -> bool:
        """All here and in every process that uses this server wait, for longer than patience."""
        all_idle = all(peer.idle for peer in list(self._peers.values()))
        return super().nobody_works() and all_idle


class Peers(dict[str, Peer]):
    """The processes that use one server, by the names that they give themselves."""

    def __init__(self, patience_s: float = STUCK_S, processes: int = 1) -> None:
        """``patience_s`` where nothing crowds the cores, which ``processes`` of the run share."""
        super().__init__()
        self._patience_s = patience_s
        self._processes = processes

    @property
    def patience_s(self) -> float:
        """For how long one may be silent, as busy as this host is now."""
        return self._patience_s * crowding(self._processes)

    def beat(self, client: str, idle: bool) -> None:
        """A sign of life."""
        if peer := self.get(client):
            peer.silence.heard()
            peer.idle = idle

    def stuck(self) -> str | None:
        """A sentence about a process that is alive for the kernel and for nobody else."""
        for peer in list(self.values()):
            if (silent_s := peer.silence.look()) > self.patience_s:
                return (
                    f"{peer.ranks} (pid {peer.pid}) has given no sign of life for"
                    f" {silent_s:.0f} s, since {clock(silent_s)}: it is stopped or stuck"
                )
        return None

    def serve_heartbeat(
        self, channel: Channel, client: str, stop: Callable[[], Stop]
    ) -> Coroutine[None]:
        """The connection of one for signs of life; each is answered by what has ended the run,
        ``stop`` being its stop. Also by its silence, of which every other one's signs remind."""

        def check_others() -> None:
            stuck = self.stuck()
            if stuck and not stop():
                stop().set(PeerError(stuck))

        while True:
            message, _ = yield from channel.receiving(check_others)
            if message.kind is MessageKind.DISCONNECT:
                return
            if message.kind is not MessageKind.PING:
                raise BadMessageError(f"a {message.kind.name} is no sign of life")
            self.beat(client, bool(message.number))
            check_others()
            error = stop().error
            status = {"failed": f"{error}" if isinstance(error, PeerError) else None}
            channel.send(Message(MessageKind.PONG, body=pack_json(status)))


class Waits:
    """What the threads of a process wait for, since when: a sentence for each thread that does; the
    innermost, where a wait contains another."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[str, float]] = {}  # by thread

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """The calling thread waits, as ``text`` says."""
        key = threading.get_ident()
        outer = self._waits.get(key)
        self._waits[key] = text, time.monotonic()
        try:
            yield
        finally:
            if outer is None:
                self._waits.pop(key, None)
            else:
                self._waits[key] = outer

    def summary(self) -> str:
        """All of them with the time of day since when, to be put behind a sentence; "" if none."""
        now = time.monotonic()
        waits = [f"{text} since {clock(now - s)}" for text, s in list(self._waits.values())]
        return f"; {'; '.join(sorted(waits))}" if waits else ""


def clock(ago_s: float) -> str:
    """The time of day some seconds ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - ago_s))
