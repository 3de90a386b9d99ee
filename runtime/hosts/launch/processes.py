"""Processes of a run on this host: started, found, watched and ended by the one who launches it.

`ServerProcesses` is the launcher's side, for servers, workers and loaders alike; `inherited` is the
side of the process that was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from runtime.hosts.launch.process_config import CONFIGS, AnyConfig
from runtime.hosts.wire.listener import Listener
from runtime.hosts.wire.messages import SECRET_BYTES, error_document, error_from, pack_json
from runtime.hosts.wire.peers import START_WITHIN_S, listen
from runtime.hosts.wire.tls import TLS, sealed, unsealed
from runtime.process import die_with_parent, enter_process
from runtime.stop import PeerError

STARTING_AT_ONCE = max(4, os.cpu_count() or 1)
"""Processes that load Python at a time: of a hundred on a few cores none would be ready in time."""
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Sent to the whole group: the launcher ends the run in good order and then what it has started."""
_ROOT = Path(__file__).parents[3]
_ROOMS = {"server": "rows", "worker": "pooling", "loader": "loading"}
NAMES = {"server": "embedding server", "worker": "embedding worker", "loader": "loader"}


@dataclass(frozen=True, slots=True)
class Address:
    """How a process of this user reaches what listens for it."""

    names: tuple[str, ...]
    """The name of each socket, as `peers.connect` takes it."""
    secrets: tuple[str, ...]
    """What a client of each must know."""
    pids: tuple[int, ...] = ()
    """The processes as they were first started, where they are of this host."""

    def publish(self, open_files: list[IO[str]]) -> str:
        """Write it where only processes of this user can read it, as long as the file that goes
        into ``open_files`` is open. Returns the place, which others may know."""
        file = os.fdopen(os.memfd_create("address", os.MFD_CLOEXEC), "w")
        file.write(json.dumps(asdict(self)))
        file.flush()
        open_files.append(file)
        return f"/proc/{os.getpid()}/fd/{file.fileno()}"

    def sealed(self, secret: str, about: str) -> str:
        """The address for processes of other hosts, as `tls.sealed` seals it."""
        return sealed(json.dumps(asdict(self)).encode(), secret, f"address of {about}").hex()

    @classmethod
    def unsealed(cls, text: str, secret: str, about: str) -> Address:
        """What `sealed` gave; raises PeerError where it was given another secret."""
        try:
            return cls._read(unsealed(bytes.fromhex(text), secret, f"address of {about}").decode())
        except ValueError:
            remedy = "give all the same --servers-secret"
            raise PeerError(f"the ranks have other secrets; {remedy}") from None

    @classmethod
    def _read(cls, text: str) -> Address:
        return cls(**{name: tuple(values) for name, values in json.loads(text).items()})

    @classmethod
    def read_from(cls, place: str) -> Address:
        """What another process of this user has published; raises PeerError for anybody else's."""
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PeerError(f"an address of the run cannot be read: {error}") from None
        with os.fdopen(descriptor) as file:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                raise PeerError(f"an address of the run, at {place}, is not of this user's run")
            return cls._read(file.read())


def role_of(config: AnyConfig) -> str:
    """The role of the process that the config is of."""
    return next(role for role, kind in CONFIGS.items() if isinstance(config, kind))


def path_of_modules() -> str:
    """PYTHONPATH of a process that is to find these sources, and the user's modules."""
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


class ServerProcesses:
    """Embedding servers, workers or loaders on this host, each of which listens. They end with this
    process, however it ends."""

    def __init__(
        self,
        configs: Sequence[AnyConfig],
        host: str = "",
        ports: range = range(0),
        certificate: Path | None = None,
    ) -> None:
        """Start one for each config: for this host's processes, or over TCP at the address
        ``host``, on any port or one of ``ports``, encrypted by the ``certificate`` of a file or
        their own. All have said that they are ready. Raises what one cannot start for: ValueError,
        MemoryError, RuntimeError, PeerError."""
        role = role_of(configs[0])
        if not hasattr(os, "memfd_create"):
            raise ValueError(
                f"{role}s as processes need Linux, whose memory files they share; use --{role}s 0"
            )

        # What every one of them is told: a secret, and how long it lives.
        secret = secrets.token_hex(SECRET_BYTES)
        # The kernel kills a process with the *thread* that started it.
        of_main = threading.current_thread() is threading.main_thread()
        tls = host.startswith(TLS) and (certificate or True)
        common = {"secret": secret, "dies_with_parent": of_main, "tls": tls}
        self._role = role
        self._ports = ports
        self._configs = [asdict(one) | common for one in configs]

        # Each has a name, a process, and a pipe by which it notices our end.
        unix = f"\0persia-testbed-{secrets.token_hex(16)}-{role}-"
        self._names = [f"{host}:0" if host else f"{unix}{k}" for k in range(len(configs))]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(configs)
        self._pipes: list[socket.socket | None] = [None] * len(configs)
        self._starting = threading.Lock()
        self._end = weakref.finalize(self, _end_all, self._starting, self._processes, self._pipes)

        # A few start at a time: the next one when the first of these is ready.
        try:
            for k in range(len(configs)):
                if k >= STARTING_AT_ONCE:
                    self._wait_until_ready(k - STARTING_AT_ONCE)
                self._spawn(k)
            for k in range(max(0, len(configs) - STARTING_AT_ONCE), len(configs)):
                self._wait_until_ready(k)
        except BaseException:
            self.close()
            raise
        self.address = Address(tuple(self._names), (secret,) * len(configs), tuple(self.pids))

    @property
    def pids(self) -> list[int]:
        """The processes that were started, in their order."""
        return [process.pid for process in self._processes if process is not None]

    def how_it_ended(self, k: int, within_s: float = 5.0) -> str:
        """Say what became of a process: "was killed by SIGKILL", ..."""
        process = self._processes[k]
        if process is None:
            return "has been ended"
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            return "has closed its connection, and is alive"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def restart(self, k: int, **changes: Any) -> None:
        """Start one anew, at the same address, when the old one has died; its config changes so. It
        holds nothing, and is ready when this returns. Raises PeerError where all are ended."""
        # Whichever thread does this may end before the run: the pipe alone tells of our end.
        config = self._configs[k]
        number = config["incarnation"] + 1
        config |= {**changes, "dies_with_parent": False, "incarnation": number}
        with self._starting:  # not while, or after, all are ended
            old = self._processes[k]
            if not self._end.alive or old is None:
                raise PeerError(f"{self._name(k)} is not started again: the run is over")
            old.kill()  # nobody could reach it; two of one shard never take the same pushes
            old.wait()
            self._spawn(k)
        self._wait_until_ready(k)

    def close(self) -> None:
        """End them all, and wait for it."""
        self._end()

    def _name(self, k: int) -> str:
        return f"{NAMES[self._role]} {k}"

    def _spawn(self, k: int) -> None:
        """The process alone has its socket, so that who connects after its death is refused."""
        # What it inherits: its socket, its config, its end of the pipe.
        listening, self._names[k] = listen(self._names[k], self._ports)
        ours, theirs = socket.socketpair()
        text = os.memfd_create(f"{self._role}-config", os.MFD_CLOEXEC)
        try:
            os.write(text, json.dumps(self._configs[k], default=str).encode())
            os.lseek(text, 0, os.SEEK_SET)
            inherited = (listening.fileno(), text, theirs.fileno())
            module = f"runtime.hosts.{_ROOMS[self._role]}.{self._role}_process"

            # What is sent to the whole group is not for it, also before it can say so.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
            try:
                self._processes[k] = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *map(str, inherited)],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path_of_modules()},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._pipes[k] = ours
        finally:
            listening.close()
            theirs.close()
            os.close(text)

    def _wait_until_ready(self, k: int) -> None:
        # A process says once that it is ready, or why it is not.
        pipe = self._pipes[k]
        name = self._name(k)
        assert pipe is not None
        pipe.settimeout(START_WITHIN_S)
        try:
            report = pipe.recv(1 << 16)
        except TimeoutError:
            raise PeerError(
                f"{name} was not ready within {START_WITHIN_S:.0f} s: the machine is too busy, or"
                " reads its Python too slowly; start again"
            ) from None

        # It ended without a word: the system has killed it, most likely for memory.
        if not report:
            raise PeerError(
                f"{name} {self.how_it_ended(k)} before it was ready; start again, with fewer"
                f" --{self._role}s if memory was short"
            )
        error = json.loads(report)
        if error:
            raise error_from(error)


def _end_all(
    starting: threading.Lock,
    processes: list[subprocess.Popen[bytes] | None],
    pipes: list[socket.socket | None],
) -> None:
    """Closing the pipe is how a process hears that it is over; a stuck one is killed."""
    with starting:
        for closing in pipes:
            if closing is not None:
                closing.close()
    ends_s = time.monotonic() + 2.0
    for k, process in enumerate(processes):
        if process is None:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends_s - time.monotonic()))
        if process.returncode is None:
            process.kill()
            process.wait()
        processes[k] = None


# The process that was started.


def inherited() -> tuple[socket.socket, str, socket.socket]:
    """What this process was given: a socket that listens, its config as JSON, and a pipe to its
    launcher, on which it may say that it is ready.

    It ends when that pipe does, and when the kernel says that the thread that started it has ended:
    so never later than its launcher, however that dies.
    """
    listening, document, launcher = (int(text) for text in sys.argv[1:4])
    with os.fdopen(document) as file:
        text = file.read()
    if json.loads(text)["dies_with_parent"]:
        die_with_parent(signal.SIGKILL)  # also while it is stopped
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # blocked since before we began
    pipe = socket.socket(fileno=launcher)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    return socket.socket(fileno=listening), text, pipe


def serve(listener: Callable[[socket.socket, str], Listener]) -> None:
    """Open what was asked for, say that it is ready, or why not, and serve until the end."""
    enter_process()
    sock, text, pipe = inherited()
    try:
        opened = listener(sock, text)
    except Exception as error:
        return pipe.sendall(pack_json(error_document(error)))
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone: this process, too, ends
        pipe.sendall(b"{}")
    opened.serve_all()


def _end_with(pipe: socket.socket) -> None:
    """The launcher never writes: what comes is its end."""
    while pipe.recv(1):
        pass
    os._exit(0)
