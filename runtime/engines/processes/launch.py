"""Server processes: started, found, watched and ended by the one who launches a run."""

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from runtime.engines.processes.channel import listen
from runtime.engines.processes.messages import SECRET_BYTES, error_from
from runtime.engines.processes.server_config import ServerConfig
from runtime.stop import PeerError

START_WITHIN_S = 60.0
NOT_FOR_SERVERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Sent to the whole group: the launcher ends the run in good order and then its servers."""
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Address:
    """How a process of this host reaches the servers."""

    names: tuple[str, ...]
    """Of each server's socket, as `channel.connect` takes it."""
    secrets: tuple[str, ...]
    """What a client must know, of each server."""

    def leave(self, kept: list[IO[str]]) -> str:
        """Write it where only processes of this user can read it, as long as the file that goes
        into ``kept`` is open. Returns the place, which others may know."""
        note = os.fdopen(os.memfd_create("embedding-servers", os.MFD_CLOEXEC), "w")
        note.write(json.dumps({"names": self.names, "secrets": self.secrets}))
        note.flush()
        kept.append(note)
        return f"/proc/{os.getpid()}/fd/{note.fileno()}"

    @classmethod
    def found_at(cls, place: str) -> Address:
        """What another process of this user has left; raises PeerError for anybody else's."""
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PeerError(f"the servers' address cannot be read: {error}") from None
        with os.fdopen(descriptor) as note:
            about = os.fstat(descriptor)
            if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode):
                raise PeerError(f"the servers' address at {place} is not of this user's run")
            found = json.load(note)
        return cls(tuple(found["names"]), tuple(found["secrets"]))


class ServerProcesses:
    """Embedding servers on this host. They end with this process, however it ends."""

    def __init__(self, configs: Sequence[ServerConfig], host: str = "") -> None:
        """Start all of them and wait until they listen: for this host's processes, or over TCP at
        the address ``host``.

        Raises what a server cannot start for: ValueError, MemoryError, RuntimeError.
        """
        if not hasattr(os, "memfd_create"):
            raise ValueError(
                "servers as processes need Linux, whose memory files they share; use --servers 0"
            )
        secret = secrets.token_hex(SECRET_BYTES)
        # The kernel kills a server with the *thread* that started it.
        of_main = threading.current_thread() is threading.main_thread()
        self._configs = [replace(c, secret=secret, dies_with_parent=of_main) for c in configs]
        token = secrets.token_hex(16)
        unix = f"\0persia-testbed-{token}-"
        doors = [listen(f"{host}:0" if host else f"{unix}{c.shard}") for c in configs]
        self.address = Address(tuple(name for _, name in doors), (secret,) * len(configs))
        self._doors = [door for door, _ in doors]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(configs)
        self._pipes: list[socket.socket | None] = [None] * len(configs)
        self._notes: list[IO[str]] = []
        self._starting = threading.Lock()
        self._end = weakref.finalize(
            self, _end_all, self._starting, self._doors, self._processes, self._pipes, self._notes
        )
        try:
            for k in range(len(configs)):
                self._spawn(k)
            for k in range(len(configs)):
                self._wait_until_ready(k)
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the servers, by shard."""
        return [process.pid for process in self._processes if process is not None]

    def leave_address(self) -> str:
        """The place of the address, for other processes of this user."""
        return self.address.leave(self._notes)

    def restart(self, shard: int, *, awaits_rows: bool = False) -> None:
        """Start a server anew, at the same address, when the old one has died.

        It is empty; with ``awaits_rows`` it lets no rank in before its rows are back.
        """
        # Whichever thread does this may end before the run: the pipe alone tells of our end.
        fresh = replace(self._configs[shard], awaits_rows=awaits_rows, dies_with_parent=False)
        self._configs[shard] = fresh
        with self._starting:  # not while, or after, all are ended
            if not self._end.alive:
                raise PeerError(f"embedding server {shard} is not started again: the run is over")
            self._spawn(shard)
        self._wait_until_ready(shard)

    def how_it_ended(self, shard: int, within_s: float = 5.0) -> str:
        """Words for what became of a server's process: "was killed by SIGKILL", ..."""
        process = self._processes[shard]
        if process is None:
            return "has been ended"
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            return "has closed its connection, and is alive"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def close(self) -> None:
        """End them all, and wait for it."""
        self._end()

    def _spawn(self, shard: int) -> None:
        ours, theirs = socket.socketpair()
        text = os.memfd_create("embedding-server-config", os.MFD_CLOEXEC)
        try:
            os.write(text, self._configs[shard].to_json().encode())
            os.lseek(text, 0, os.SEEK_SET)
            inherited = (self._doors[shard].fileno(), text, theirs.fileno())
            path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
            # What is sent to the whole group is not for a server, also before it can say so.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_SERVERS)
            try:
                self._processes[shard] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "runtime.engines.processes.server_process",
                     *map(str, inherited)],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path},
                )  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._pipes[shard] = ours
        finally:
            theirs.close()
            os.close(text)

    def _wait_until_ready(self, shard: int) -> None:
        pipe = self._pipes[shard]
        assert pipe is not None
        pipe.settimeout(START_WITHIN_S)
        try:
            said = pipe.recv(1 << 16)
        except TimeoutError:
            raise PeerError(
                f"embedding server {shard} was not ready within {START_WITHIN_S:.0f} s: the machine"
                " is too busy, or reads its Python too slowly; start again"
            ) from None
        if not said:
            raise PeerError(
                f"embedding server {shard} {self.how_it_ended(shard)} before it was ready; start"
                " again, with fewer --servers if memory was short"
            )
        error = json.loads(said)
        if error:
            raise error_from(error)


def _end_all(
    starting: threading.Lock,
    doors: list[socket.socket],
    processes: list[subprocess.Popen[bytes] | None],
    pipes: list[socket.socket | None],
    notes: list[IO[str]],
) -> None:
    """Closing the pipe is how a server hears that it is over; a stuck one is killed."""
    with starting:
        for closing in (*pipes, *doors, *notes):
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
