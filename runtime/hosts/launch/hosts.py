"""Embedding servers, workers and loaders on other hosts, which `persia-runtime serve` starts there.

For each of them a run keeps one connection to the host's `ProcessHost`. It carries `HostCalls`:
start, start again, how it ended, as `ServerProcesses` does it there. The process ends with that
connection. Rows travel over other ones.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.command_line import read_options
from persia_sim.base.rules import Refused
from persia_sim.base.schema import check_fields, parse
from runtime.config.train import HOST_PORT, HOST_PORT_RULE
from runtime.data.errors import DataError, regular_file
from runtime.hosts.launch.process_config import CONFIGS, AnyConfig
from runtime.hosts.launch.processes import NAMES, Address, ServerProcesses, role_of
from runtime.hosts.wire.calls import Method, Payload, R, answer, call, close_channel
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.connection import PeerGoneError
from runtime.hosts.wire.coroutines import Coroutine, nothing_to_check
from runtime.hosts.wire.listener import WORKERS, Listener
from runtime.hosts.wire.messages import BadMessageError, Message, MessageKind
from runtime.hosts.wire.peers import (
    BEATS_EVERY_S,
    START_WITHIN_S,
    STUCK_S,
    connect,
    deadline,
    listen,
)
from runtime.hosts.wire.tls import TLS, named, sealed, unsealed
from runtime.stop import PeerError

STARTING_AT_ONCE_ON_A_HOST = WORKERS
"""Processes that a host starts at a time: each takes a thread of its listener until it is ready."""
LEAST_SECRET = 16
MOST_SECRET = 4096


def read_secret(file: Path) -> str:
    """The word that a run and the hosts of its servers share. Raises DataError."""
    # Who else may read or change the file knows the secret, and so may run code through it.
    regular_file(file)
    about = file.stat()
    if about.st_uid != os.geteuid():
        copy = f"install -m 600 {file} COPY"
        raise DataError(
            f"{file} belongs to another user (uid {about.st_uid}), who may change it; copy it to a"
            f" file of yours: {copy}"
        )
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise DataError(f"{file} is readable by others; make it yours alone: chmod 600 {file}")
    if about.st_size > MOST_SECRET:
        raise DataError(f"{file} has {about.st_size:,} bytes, a secret {MOST_SECRET:,} at most")

    # A short secret can be guessed.
    try:
        secret = file.read_text("utf-8").strip()
    except UnicodeDecodeError:
        raise DataError(
            f"{file} is not text in UTF-8; make another: openssl rand -hex 32"
        ) from None
    if len(secret) < LEAST_SECRET:
        raise DataError(
            f"{file} has {len(secret)} characters, a secret {LEAST_SECRET} at least;"
            f" make one: openssl rand -hex 32 > {file}"
        )
    return secret


def warn_of_plain() -> None:
    """Say on the screen what --no-tls means."""
    warning = (
        "warning: --no-tls: ids, rows and gradients travel in plain, with checksums; use a network"
        " that you trust"
    )
    print(warning, file=sys.stderr, flush=True)


class HostCalls(ABC):
    """The calls of a run to a host; each connection is about one process."""

    @abstractmethod
    def start(self, role: str, config: np.ndarray) -> Payload:
        """Start it; both its ``config`` and the address that is returned are sealed."""

    @abstractmethod
    def restart(self, **changes: Any) -> None:
        """Start it anew after its death, with these changes to its config."""

    @abstractmethod
    def how_it_ended(self) -> Payload:
        """Words for what became of it."""


class HostedProcess(HostCalls):
    """The one process that a connection to this host is about."""

    def __init__(
        self, at: str, secret: str, session: str, ports: range, certificate: Path | None
    ) -> None:
        """``at``: the address at which it is to listen, on any port or one of these; ``session``:
        of the connection, for which secrets are sealed."""
        self._at = at
        self._secret = secret
        self._session = session
        self._ports = ports
        self._certificate = certificate
        self._processes: ServerProcesses | None = None

    def start(self, role: str, config: np.ndarray) -> Payload:
        """Start it, once."""
        if self._processes is not None or role not in CONFIGS:
            raise BadMessageError("a host starts one server, worker or loader for each connection")
        # Secrets of processes travel both ways, and the connection may be plain.
        about = f"config of {role} {self._session}"
        document = json.loads(unsealed(config.tobytes(), self._secret, about))
        parsed = parse(CONFIGS[role], document, f"the {role}")
        self._processes = ServerProcesses([parsed], self._at, self._ports, self._certificate)
        return {"address": self._processes.address.sealed(self._secret, self._session)}

    def restart(self, **changes: Any) -> None:
        """Start it anew, at the same address."""
        self._started().restart(0, **changes)

    def how_it_ended(self) -> Payload:
        """Words for what became of it."""
        return {"how": self._started().how_it_ended(0)}

    def close(self) -> None:
        """End it, if it was started."""
        if self._processes is not None:
            self._processes.close()

    def _started(self) -> ServerProcesses:
        if self._processes is None:
            raise BadMessageError("nothing was started over this connection")
        return self._processes


class ProcessHost:
    """Starts servers, workers and loaders on this host for whoever knows the secret, until it is
    closed."""

    def __init__(
        self, at: str, secret: str, *, tls: bool | Path = True, ports: range = range(0)
    ) -> None:
        """Listen at HOST:PORT, with processes on any port or one of these; encrypted (``tls``),
        by the certificate of a file or by one that is made, but on the loopback device. Raises
        OSError, and ValueError where ``tls`` cannot be had."""
        sock, name = listen(named(at, tls=bool(tls)))
        self.name = name.removeprefix(TLS)
        self._at = name.rpartition(":")[0]
        self._secret = secret
        self._ports = ports
        self._certificate = tls if isinstance(tls, Path) else None
        who = "the host of embedding servers"
        tls = name.startswith(TLS) and tls
        self._listener = Listener(sock, secret, self._converse, who, tls=tls)

    def serve(self) -> None:
        """Return when the host is closed."""
        self._listener.serve_all()

    def close(self) -> None:
        """No new servers; those that run end."""
        self._listener.close()

    def _converse(self, channel: Channel, hello: Message, payload: Payload) -> Coroutine[None]:
        """Serve one process of one run, until the run ends its connection."""
        process = HostedProcess(
            self._at, self._secret, channel.session, self._ports, self._certificate
        )
        try:
            while True:
                message, segment = yield from channel.receiving()
                if message.kind is MessageKind.DISCONNECT:
                    return
                answer(channel, message, segment, HostCalls, process)
        finally:
            process.close()


class HostedProcesses:
    """The embedding servers, workers or loaders of a run on the hosts at these addresses; used as
    `ServerProcesses`."""

    def __init__(
        self,
        configs: Sequence[AnyConfig],
        at: Sequence[str],
        secret: str,
        *,
        tls: bool = True,
    ) -> None:
        """Start all of them, in turn on each host, and wait until they listen."""
        # What runs where: hosts take their turns.
        self._role = role_of(configs[0])
        self._who = NAMES[self._role]
        if not tls and self._role == "server":  # once is enough
            warn_of_plain()
        self._at = [at[k % len(at)] for k in range(len(configs))]
        self._tls = tls
        self._calling = [threading.Lock() for _ in configs]
        self._channels: dict[int, Channel] = {}
        self._closing = threading.Event()

        # All hosts start at once, a few processes each; if one fails, the others end.
        try:
            at_once = min(len(configs), STARTING_AT_ONCE_ON_A_HOST * len(set(at)))
            with ThreadPoolExecutor(at_once) as pool:
                start = partial(self._start, secret)
                addresses: list[Address] = list(pool.map(start, range(len(configs)), configs))
        except BaseException:
            self.close()
            raise

        # One address of all, and a thread that notices when one ends.
        names = tuple(address.names[0] for address in addresses)
        secrets = tuple(address.secrets[0] for address in addresses)
        self.address = Address(names, secrets)
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def restart(self, shard: int, **changes: Any) -> None:
        """Start one that has died anew, on its host, at the same address."""
        self._call(shard, HostCalls.restart, **changes)

    def how_it_ended(self, shard: int) -> str:
        """Words for what became of one."""
        try:
            return str(self._call(shard, HostCalls.how_it_ended, STUCK_S)["how"])
        except PeerError:
            return f"has gone with its host {self._at[shard]}"

    def close(self) -> None:
        """End them all."""
        self._closing.set()
        for channel in self._channels.values():
            close_channel(channel)

    def _watch(self) -> None:
        """Connections on which nothing is asked are made again, too: a host ends the server of a
        run that does not come back."""
        while not self._closing.wait(BEATS_EVERY_S):
            for shard, channel in self._channels.items():
                with self._calling[shard], suppress(OSError):
                    if channel.connection.is_broken():
                        channel.await_reconnection(nothing_to_check)

    def _start(self, secret: str, shard: int, config: AnyConfig) -> Address:
        """Connect to the host of one process and have it started there."""
        host = f"the host of {self._who} {shard} at {self._at[shard]}"
        remedy = "; start `persia-runtime serve` there first"
        try:
            name = named(self._at[shard], tls=self._tls)
            channel = connect(name, host, secret, {}, remedy=remedy)
            self._channels[shard] = channel
        except PeerGoneError:
            raise PeerError(
                f"{host} closes every connection at its first word: is what listens there"
                " `persia-runtime serve` of this version?"
            ) from None
        about = f"config of {self._role} {channel.session}"
        text = sealed(json.dumps(asdict(config), default=str).encode(), secret, about)
        document = np.frombuffer(text, np.uint8)
        result = self._call(shard, HostCalls.start, role=self._role, config=document)
        return Address.unsealed(str(result.get("address")), secret, channel.session)

    def _call(
        self,
        shard: int,
        method: Method[..., R],
        within_s: float = 2 * START_WITHIN_S,
        **arguments: Any,
    ) -> R:
        """The result of a call to the host of one process."""
        at = self._at[shard]
        channel = self._channels[shard]
        in_time = deadline(within_s, f"the host at {at}")
        try:
            with self._calling[shard]:
                return call(channel, method, in_time, at, **arguments)
        except PeerGoneError:
            raise PeerError(
                f"the host at {at} has closed the connection of {self._who} {shard}"
            ) from None
        except TimeoutError as error:
            channel.close()  # what comes later answers no call of ours
            raise PeerError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Start embedding servers, workers and loaders on this host for runs of other hosts, until
    Ctrl-C.

    A run says where: `train --executor concurrent --servers 2 --servers-at HOST:PORT ...
    --servers-secret FILE`. What travels is encrypted (TLS 1.3), but on the loopback device.
    """

    secret: Path
    """File, as secret.txt, with a secret of 16 characters at least, readable by you alone; the run
    has the same."""
    listen: str = "127.0.0.1:7800"
    """HOST:PORT; the address of the network that the ranks come from, and any free port if it is 0.
    Servers listen at the same address, on ports of their own. An IPv6 address in brackets."""
    ports: str = ""
    """FIRST-LAST: the ports on which servers, workers and loaders listen here, as 7801-7899; empty:
    any free ones."""
    tls: bool = True
    """Encrypt what travels; the run must say the same."""
    certificate: Path | None = None
    """A PEM file of yours with a certificate, those that signed it, and its key, by which what
    listens here encrypts; none: each process makes one. Example: host.pem."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not HOST_PORT.fullmatch(self.listen):
            raise Refused("listen", f"{HOST_PORT_RULE}, got {self.listen!r}")
        if self.ports and not self.port_range():
            rule = "must be FIRST-LAST, ports from 1 to 65535, the first not above the last"
            raise Refused("ports", f"{rule}, got {self.ports!r}")
        if self.certificate is not None and not self.tls:
            raise Refused("certificate", "encrypts, and --no-tls does not; say one of them")
        if self.listen.rpartition(":")[0] in ("0", "0.0.0.0", "[::]"):
            rule = "is every address of this host, and a run must be told one that leads to it; got"
            raise Refused("listen", f"{rule} {self.listen!r}: name that (ip address shows all)")

    def port_range(self) -> range:
        """The ports as numbers; empty where any will do, or they are none."""
        first, _, last = self.ports.partition("-")
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            return range(0)
        if not 1 <= int(first) <= int(last) <= 65535:
            return range(0)
        return range(int(first), int(last) + 1)


def run(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C or SIGTERM; what runs on servers of this host then ends."""
    options = read_options(Serve, arguments, "persia-runtime serve")
    if not options.tls:
        warn_of_plain()
    secret = read_secret(options.secret)
    try:
        tls = options.tls and (options.certificate or True)
        host = ProcessHost(options.listen, secret, tls=tls, ports=options.port_range())
    except OSError as error:
        raise ValueError(f"--listen {options.listen}: {_why_not(error)}") from None
    signal.signal(signal.SIGTERM, lambda number, frame: host.close())
    print(f"ready for embedding servers at {host.name}; Ctrl-C ends it, and them", flush=True)
    try:
        host.serve()
    except KeyboardInterrupt:
        host.close()


_WHY_NOT = {
    errno.EADDRINUSE: "another program listens there already; name another port, or 0 for any",
    errno.EADDRNOTAVAIL: "that is no address of this host; `ip address` shows those that are",
    errno.EACCES: "ports below 1024 are for root; name another one",
}


def _why_not(error: OSError) -> str:
    """Why nobody can listen at an address."""
    if (error.errno or 0) < 0:  # of the look-up of a name
        return "no host of that name is known here; name an address"
    return _WHY_NOT.get(error.errno or 0, error.strerror or str(error))
